//! Carries a [`Plan`] out: tiles are read, encoded and written at their offsets by a pool; then the report is folded,
//! everything is synced, and one rename puts the folder at its place.

mod flush;
mod outcome;
mod task;

use crate::checkpoint::{
    check_space, Checkpoint, OutFile, Reader, Staging, CONFIG_FILE, DENSE_REPORT_FILE, REPORT_FILE,
};
use crate::error::{Error, Result};
use crate::kernel::Level;
use crate::plan::{Item, Module, Packed, Plan, SourceRange, Work};
use crate::pool::{self, Watch};
use crate::report::{self, DenseSummary, Report};
use crate::scheme::{Stored, Tile, TileBuffers, TileError, Weights};
use crate::tensor::Float;
use flush::{flush_ranges, Flush, FLUSH_STEP};
use serde::Serialize;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use task::{tasks, ModuleState, Task, TensorState};
use twox_hash::XxHash3_128;

/// How a run goes; none of it changes a byte of the output.
#[derive(Clone, Debug)]
pub struct Settings {
    pub threads: usize,
    pub level: Level,
    /// Bytes of packed output held in memory, over all threads.
    pub budget: usize,
    pub overwrite: bool,
}

impl Settings {
    /// What a run uses where nothing is asked for.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            level: Level::detect(),
            budget: (TILE_BYTES * threads).min(MOST_BYTES),
            overwrite: false,
        }
    }

    /// One worker's share, but never so little that strided writes become small.
    pub fn tile_budget(&self) -> usize {
        (self.budget / self.threads.max(1)).max(2 << 20)
    }
}

/// A worker's tile: the runs of one that is part of a tensor are then 32 KiB or more, up to in_features of 4096.
const TILE_BYTES: usize = 16 << 20;

/// The tiles of many workers.
const MOST_BYTES: usize = 128 << 20;

/// Dense bytes read, hashed and written at a time: they stay in a core's second-level cache.
pub(crate) const COPY_STEP: usize = 512 << 10;

struct Run<'a> {
    plan: &'a Plan,
    source: &'a Checkpoint,
    settings: &'a Settings,
    watch: &'a dyn Watch,
    files: Vec<Arc<OutFile>>,
    tensors: Vec<TensorState>,
    flush: Flush,
    /// Whether the report has a hash of each stored tensor.
    hashed: bool,
}

struct Worker<'a> {
    reader: Reader<'a>,
    buffers: TileBuffers,
    chunk: Vec<u8>,
}

/// Quantizes as planned into the folder `dst`.
///
/// # Errors
/// Any input or I/O error; then nothing is at `dst` that was not there before.
pub fn quantize(
    plan: &Plan,
    source: &Checkpoint,
    dst: &Path,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<Report> {
    execute(plan, source, dst, settings, watch, REPORT_FILE, |run, modules| {
        run.report(modules)
    })
}

/// Decodes as planned into the folder `dst`.
///
/// # Errors
/// As [`quantize`].
pub fn dequantize(
    plan: &Plan,
    source: &Checkpoint,
    dst: &Path,
    settings: &Settings,
    watch: &dyn Watch,
) -> Result<DenseSummary> {
    execute(plan, source, dst, settings, watch, DENSE_REPORT_FILE, |run, _| {
        run.summary()
    })
}

/// Does the plan's work in a staging folder, writes the report that `report` makes of it, and commits.
fn execute<R: Serialize>(
    plan: &Plan,
    source: &Checkpoint,
    dst: &Path,
    settings: &Settings,
    watch: &dyn Watch,
    report_file: &str,
    report: impl FnOnce(&Run, &[ModuleState]) -> R,
) -> Result<R> {
    let staging = Staging::create(dst, settings.overwrite)?;
    check_space(dst, plan.disk_bytes())?;
    let files = plan.files.iter().map(|file| {
        let out = staging.create_file(&file.name, file.len)?;
        out.write_all_at(&file.header, 0)?;
        Ok(out)
    });
    let files = files.collect::<Result<Vec<_>>>()?;
    let modules: Vec<ModuleState> = plan
        .items
        .iter()
        .map(|item| match &item.work {
            Work::Encode(module) => plan.scheme.blocks(&module.shape),
            Work::Copy(_) | Work::Decode(_) => 0,
        })
        .map(|blocks| ModuleState {
            sums: Mutex::default(),
            blocks,
        })
        .collect();
    let tasks = tasks(plan, &modules, settings);
    let mut writers = vec![0; plan.tensors.len()];
    for task in &tasks {
        task.item().outputs.clone().for_each(|tensor| writers[tensor] += 1);
    }
    let tensors = writers
        .into_iter()
        .map(|writers| TensorState {
            remaining: AtomicUsize::new(writers),
            hash: OnceLock::new(),
        })
        .collect();
    let (flush, ranges) = Flush::channel();
    let run = Run {
        plan,
        source,
        settings,
        watch,
        files,
        tensors,
        flush,
        hashed: report_file == REPORT_FILE,
    };
    let worker = || Worker {
        reader: Reader::new(&source.files),
        buffers: TileBuffers::default(),
        chunk: Vec::new(),
    };
    let report = std::thread::scope(|scope| {
        // Where no thread is to be had, the flush before the rename does all.
        let _ = std::thread::Builder::new().spawn_scoped(scope, || flush_ranges(ranges));
        pool::run(settings.threads, &tasks, watch, worker, |worker, task| {
            run.task(worker, task)
        })
        // The flusher ends when the run, which holds the other end of its channel, is gone.
        .map(|()| report(&{ run }, &modules))
    })?;
    for sidecar in &plan.sidecars {
        staging.copy_sidecar(sidecar)?;
    }
    if let Some((name, bytes)) = &plan.index {
        staging.write_file(name, bytes)?;
    }
    if let Some(config) = &plan.config {
        staging.write_file(CONFIG_FILE, &config.to_bytes())?;
    }
    staging.write_file(report_file, &report::to_bytes(&report))?;
    if watch.cancelled() {
        return Err(Error::Interrupted);
    }
    source.check_unchanged()?;
    staging.commit()?;
    Ok(report)
}

/// A packed module's tensors, read from their ranges of the source files.
struct PackedReader<'r, 'f, 'a> {
    reader: &'r mut Reader<'f>,
    stored: &'a [SourceRange],
}

impl Stored for PackedReader<'_, '_, '_> {
    fn read(&mut self, output: usize, offset: u64, into: &mut [u8]) -> Result<()> {
        let range = self.stored[output];
        self.reader.read_exact_at(range.file, range.offset + offset, into)
    }
}

/// The dense weight of a module, read from its range of a source file.
pub(crate) struct ModuleWeights<'r, 'f> {
    pub reader: &'r mut Reader<'f>,
    pub source: SourceRange,
}

impl Weights for ModuleWeights<'_, '_> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.reader
            .read_exact_at(self.source.file, self.source.offset + offset, into)
    }
}

impl Run<'_> {
    fn task(&self, worker: &mut Worker, task: &Task) -> Result<()> {
        match task {
            Task::Encode {
                item,
                module,
                tile,
                state,
            } => self.encode(worker, item, module, tile, state),
            Task::Copy { item, source, base } => self.copy(worker, item, *source, *base),
            Task::Decode {
                item,
                part,
                dtype,
                tile,
                base,
            } => self.decode(worker, item, part, *dtype, tile, *base),
        }
    }

    fn encode(
        &self,
        worker: &mut Worker,
        item: &Item,
        module: &Module,
        tile: &Tile,
        state: &ModuleState,
    ) -> Result<()> {
        let mut weights = ModuleWeights {
            reader: &mut worker.reader,
            source: module.source,
        };
        let scheme = self.plan.scheme.as_ref();
        let encoded = scheme.encode(
            self.settings.level,
            &module.shape,
            tile,
            &mut weights,
            &mut worker.buffers,
        );
        match encoded {
            Ok(stats) => state.add(stats),
            Err(TileError::Fault(fault)) => return Err(self.fault(&mut worker.reader, module, fault)),
            Err(TileError::Other(error)) => return Err(error),
        }
        self.write_tile(worker, item, 0)?;
        self.watch.advance(tile.source_bytes);
        Ok(())
    }

    fn decode(
        &self,
        worker: &mut Worker,
        item: &Item,
        part: &Packed,
        dtype: Float,
        tile: &Tile,
        base: u64,
    ) -> Result<()> {
        let mut stored = PackedReader {
            reader: &mut worker.reader,
            stored: &part.stored,
        };
        let scheme = self.plan.scheme.as_ref();
        let faults = scheme.decode(
            self.settings.level,
            &part.shape,
            tile,
            &mut stored,
            dtype,
            &mut worker.buffers,
        )?;
        if let Some(fault) = faults.into_iter().next() {
            return Err(Error::BadPacked {
                path: self.source.root.clone(),
                tensor: format!("{}.{}", part.name, fault.suffix),
                what: fault.what,
            });
        }
        self.write_tile(worker, item, base)?;
        self.watch.advance(tile.source_bytes);
        Ok(())
    }

    /// Writes a tile's pieces, `base` bytes further into their tensors, and hashes those that are whole tensors.
    fn write_tile(&self, worker: &mut Worker, item: &Item, base: u64) -> Result<()> {
        for piece in &worker.buffers.pieces {
            let at = item.outputs.start + piece.output;
            let tensor = &self.plan.tensors[at];
            let bytes = &worker.buffers.outputs[piece.output].bytes()[piece.from..piece.from + piece.bytes()];
            let begin = tensor.offset + base + piece.offset;
            for (run, chunk) in bytes.chunks(piece.width.max(1)).enumerate() {
                self.files[tensor.shard].write_all_at(chunk, begin + run as u64 * piece.stride)?;
            }
            if self.hashed && bytes.len() as u64 == tensor.len {
                self.tensors[at].hash.get_or_init(|| XxHash3_128::oneshot(bytes));
            }
        }
        item.outputs
            .clone()
            .try_for_each(|at| self.finished(at, &mut worker.chunk, false))
    }

    fn copy(&self, worker: &mut Worker, item: &Item, source: SourceRange, base: u64) -> Result<()> {
        let at = item.outputs.start;
        let tensor = &self.plan.tensors[at];
        let whole = source.len == tensor.len;
        let mut hasher = XxHash3_128::new();
        let mut offset = 0;
        while offset < source.len {
            let step = (source.len - offset).min(COPY_STEP as u64) as usize;
            worker.chunk.resize(COPY_STEP, 0);
            let chunk = &mut worker.chunk[..step];
            worker
                .reader
                .read_exact_at(source.file, source.offset + offset, chunk)?;
            self.files[tensor.shard].write_all_at(chunk, tensor.offset + base + offset)?;
            if whole && self.hashed {
                hasher.write(chunk);
            }
            self.watch.advance(step as u64);
            offset += step as u64;
            if whole && (offset.is_multiple_of(FLUSH_STEP) || offset == source.len) {
                let begin = (offset - 1) / FLUSH_STEP * FLUSH_STEP;
                self.flush
                    .send(&self.files[tensor.shard], tensor.offset + base + begin, offset - begin);
            }
        }
        if whole && self.hashed {
            self.tensors[at].hash.get_or_init(|| hasher.finish_128());
        }
        self.finished(at, &mut worker.chunk, whole)
    }

    /// Notes that one more task has written its part of a tensor. The last one hashes it, by reading it back where the
    /// parts were not in order, and sends it to the disk unless that was done.
    fn finished(&self, at: usize, chunk: &mut Vec<u8>, sent: bool) -> Result<()> {
        let (state, tensor) = (&self.tensors[at], &self.plan.tensors[at]);
        if state.remaining.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(());
        }
        let file = &self.files[tensor.shard];
        if self.hashed && state.hash.get().is_none() {
            let mut hasher = XxHash3_128::new();
            chunk.resize(COPY_STEP, 0);
            let mut offset = 0;
            while offset < tensor.len {
                let step = (tensor.len - offset).min(COPY_STEP as u64) as usize;
                file.read_exact_at(&mut chunk[..step], tensor.offset + offset)?;
                hasher.write(&chunk[..step]);
                offset += step as u64;
            }
            state.hash.get_or_init(|| hasher.finish_128());
        }
        if !sent {
            self.flush.send(file, tensor.offset, tensor.len);
        }
        Ok(())
    }
}
