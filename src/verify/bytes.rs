//! Bytes: every stored tensor is decoded, hashed and compared, by a pool.

use super::check::Check;
use super::{Finding, Outcome};
use crate::checkpoint::{Reader, SourceTensor};
use crate::error::Result;
use crate::plan::SourceRange;
use crate::pool::{self, Watch};
use crate::run::{ModuleWeights, Settings, COPY_STEP};
use crate::scheme::{Measured, Stored, StoredFault, Tile, TileBuffers, TileStats, Weights};
use crate::tensor::ErrorSums;
use std::sync::Mutex;
use twox_hash::XxHash3_128;

impl Check<'_> {
    /// Reads every stored byte: decodes, hashes, compares.
    pub fn bytes(&mut self, settings: &Settings, watch: &dyn Watch, outcome: &mut Outcome) -> Result<()> {
        let scheme = self.scheme.scheme.as_ref();
        self.sums = self.stacks.iter().map(|_| Mutex::default()).collect();
        let mut tasks = Vec::new();
        for (at, stack) in self.stacks.iter().enumerate() {
            let tiles = scheme.tiles(&stack.module.shape, settings.tile_budget());
            if tiles.len() > 1 {
                tasks.extend(stack.module.tensors.iter().map(|tensor| Task::Hash { tensor }));
            }
            let whole = tiles.len() == 1;
            tasks.extend(tiles.into_iter().map(|tile| Task::Measure { at, tile, whole }));
        }
        tasks.extend(
            self.dense
                .iter()
                .map(|(tensor, range)| Task::Compare { tensor, range: *range }),
        );
        let found = Found {
            findings: Mutex::default(),
            hashed: Mutex::default(),
        };
        let worker = || Worker {
            stored: Reader::new(&self.checkpoint.files),
            source: self.source.map(|source| Reader::new(&source.files)),
            buffers: TileBuffers::default(),
            chunks: [vec![0; COPY_STEP], vec![0; COPY_STEP]],
        };
        pool::run(settings.threads, &tasks, watch, worker, |worker, task| match task {
            Task::Measure { at, tile, whole } => self.measure(worker, *at, (tile, *whole), settings, watch, &found),
            Task::Hash { tensor } => self.compare(worker, tensor, None, watch, &found),
            Task::Compare { tensor, range } => self.compare(worker, tensor, *range, watch, &found),
        })?;
        let findings = found
            .findings
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        outcome.findings.extend(findings);
        outcome.hashed = found
            .hashed
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        outcome.compared = self.dense.iter().filter(|(_, range)| range.is_some()).count();
        Ok(())
    }

    fn measure(
        &self,
        worker: &mut Worker,
        at: usize,
        (tile, whole): (&Tile, bool),
        settings: &Settings,
        watch: &dyn Watch,
        found: &Found,
    ) -> Result<()> {
        let stack = &self.stacks[at];
        let mut stored = StackReader {
            reader: &mut worker.stored,
            tensors: &stack.module.tensors,
        };
        let mut weights = match (&mut worker.source, stack.source) {
            (Some(reader), Some(source)) => Some(ModuleWeights { reader, source }),
            _ => None,
        };
        let weights = weights.as_mut().map(|weights| weights as &mut dyn Weights);
        let (scheme, buffers) = (self.scheme.scheme.as_ref(), &mut worker.buffers);
        let shape = &stack.module.shape;
        let Measured { stats, faults } = scheme.measure(settings.level, shape, tile, &mut stored, weights, buffers)?;
        for StoredFault { suffix, what } in faults {
            found.find(format!("{}.{suffix}", stack.module.name), what);
        }
        for piece in &worker.buffers.pieces {
            let bytes = &worker.buffers.outputs[piece.output].bytes()[piece.from..piece.from + piece.bytes()];
            let tensor = stack.module.tensors[piece.output];
            // A tensor in several pieces is hashed by a task of its own.
            if bytes.len() as u64 == tensor.len && whole {
                self.check_hash(tensor, XxHash3_128::oneshot(bytes), found);
            }
        }
        self.add(at, stats);
        watch.advance(tile.source_bytes);
        Ok(())
    }

    fn add(&self, at: usize, stats: TileStats) {
        let mut sums = self.sums[at].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        sums.resize(
            self.scheme.scheme.blocks(&self.stacks[at].module.shape),
            ErrorSums::default(),
        );
        sums[stats.first_block..][..stats.blocks.len()].copy_from_slice(&stats.blocks);
    }

    /// Hashes a tensor and compares it with `range` of the source.
    fn compare(
        &self,
        worker: &mut Worker,
        tensor: &SourceTensor,
        range: Option<SourceRange>,
        watch: &dyn Watch,
        found: &Found,
    ) -> Result<()> {
        let mut hasher = XxHash3_128::new();
        let [here, there] = &mut worker.chunks;
        let mut differs = None;
        let mut offset = 0;
        while offset < tensor.len {
            let step = (tensor.len - offset).min(COPY_STEP as u64) as usize;
            worker
                .stored
                .read_exact_at(tensor.file, tensor.offset + offset, &mut here[..step])?;
            if self.report.is_some() {
                hasher.write(&here[..step]);
            }
            if let (Some(range), Some(reader), None) = (range, &mut worker.source, differs) {
                reader.read_exact_at(range.file, range.offset + offset, &mut there[..step])?;
                if here[..step] != there[..step] {
                    let at = here.iter().zip(there.iter()).position(|(a, b)| a != b).unwrap_or(0);
                    differs = Some(offset + at as u64);
                }
                watch.advance(step as u64);
            }
            offset += step as u64;
        }
        if let Some(byte) = differs {
            found.find(
                &tensor.name,
                format!("differs from the source, first at byte {byte} of {}", tensor.len),
            );
        }
        self.check_hash(tensor, hasher.finish_128(), found);
        Ok(())
    }

    fn check_hash(&self, tensor: &SourceTensor, hash: u128, found: &Found) {
        let Some(said) = self.report.and_then(|report| report.xxh3_128.get(&tensor.name)) else {
            return;
        };
        *found.hashed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
        let is = format!("{hash:032x}");
        if *said != is {
            found.find(&tensor.name, format!("its bytes hash to {is}, the report says {said}"));
        }
    }
}

enum Task<'a> {
    Measure {
        at: usize,
        tile: Tile,
        /// Of the module.
        whole: bool,
    },
    Hash {
        tensor: &'a SourceTensor,
    },
    Compare {
        tensor: &'a SourceTensor,
        range: Option<SourceRange>,
    },
}

/// What workers find.
struct Found {
    findings: Mutex<Vec<Finding>>,
    hashed: Mutex<usize>,
}

impl Found {
    fn find(&self, subject: impl ToString, what: impl ToString) {
        let finding = Finding {
            subject: subject.to_string(),
            what: what.to_string(),
        };
        self.findings
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .push(finding);
    }
}

struct Worker<'a> {
    stored: Reader<'a>,
    source: Option<Reader<'a>>,
    buffers: TileBuffers,
    chunks: [Vec<u8>; 2],
}

/// A module's stored tensors.
struct StackReader<'r, 'f, 'a> {
    reader: &'r mut Reader<'f>,
    tensors: &'r [&'a SourceTensor],
}

impl Stored for StackReader<'_, '_, '_> {
    fn read(&mut self, output: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        let tensor = self.tensors[output];
        self.reader.read_exact_at(tensor.file, tensor.offset + offset, into)
    }
}
