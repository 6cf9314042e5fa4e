//! Proves what was written: decodes the stored bytes by a path of its own and compares with the report, the config and,
//! where it is given, the source. Never writes.

use crate::checkpoint::{Checkpoint, Reader, SourceTensor};
use crate::error::{Error, Result};
use crate::plan::{is_packed, origin, stored_config, stored_scheme, Origin, SourceRange};
use crate::pool::{self, Watch};
use crate::report::{self, Report};
use crate::run::{ModuleWeights, Settings, COPY_STEP};
use crate::scheme::{Recognised, Shape, Stored, StoredFault, Tile, TileBuffers, TileStats, Weights};
use crate::tensor::{ErrorSums, Float};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Mutex;
use twox_hash::XxHash3_128;

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// The tensor, module or file.
    pub subject: String,
    pub what: String,
}

/// What `--verify` came to.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Empty: all is as it should be.
    pub findings: Vec<Finding>,
    /// Quantized modules looked at.
    pub modules: usize,
    /// Stored tensors looked at.
    pub tensors: usize,
    /// Tensors whose bytes were hashed and compared with the report's.
    pub hashed: usize,
    /// Dense tensors compared with the source byte by byte.
    pub compared: usize,
    /// Recomputed from stored bytes and the source, in dB; by the report's names.
    pub snr_db: BTreeMap<String, Option<f64>>,
    pub snr_db_mean: Option<f64>,
    pub snr_db_min: Option<f64>,
    /// Checks that could not be made, and why.
    pub notes: Vec<String>,
}

/// What to compare with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Against<'a> {
    pub src: Option<&'a Path>,
    /// Every module's SNR must reach it, in dB. Needs `src`.
    pub min_snr: Option<f64>,
}

/// Verifies the checkpoint at `dst`.
///
/// # Errors
/// What keeps the check from being made: no checkpoint at `dst`, an unreadable file, a bad source. A fault of the
/// checkpoint itself is a [`Finding`].
pub fn verify(dst: &Path, against: Against, settings: &Settings, watch: &dyn Watch) -> Result<Outcome> {
    let source = against.src.map(Checkpoint::open).transpose()?;
    let mut outcome = Outcome::default();
    let checkpoint = match Checkpoint::open(dst) {
        Ok(checkpoint) => checkpoint,
        Err(error) if error.is_about_contents() => {
            outcome.find(dst.display(), error);
            return Ok(outcome);
        }
        Err(error) => return Err(error),
    };
    let report = read_report(dst, &mut outcome)?;
    let Some(recognised) = recognised(&checkpoint, report.as_ref(), &mut outcome)? else {
        return Ok(outcome);
    };
    let mut check = Check::new(&checkpoint, source.as_ref(), report.as_ref(), recognised);
    check.structure(&mut outcome)?;
    check.against_report(&mut outcome);
    check.bytes(settings, watch, &mut outcome)?;
    check.figures(against.min_snr, &mut outcome);
    outcome.findings.sort();
    outcome.findings.dedup();
    Ok(outcome)
}

impl Outcome {
    fn find(&mut self, subject: impl ToString, what: impl ToString) {
        self.findings.push(Finding {
            subject: subject.to_string(),
            what: what.to_string(),
        });
    }
}

/// The report, if the folder has one; one that cannot be read is a finding.
fn read_report(dst: &Path, outcome: &mut Outcome) -> Result<Option<Report>> {
    let path = dst.join(report::FILE_NAME);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            outcome
                .notes
                .push("no quantization_report.json: hashes and reported SNRs are not checked".to_string());
            return Ok(None);
        }
        Err(error) => return Err(Error::io(&path, "reading")(error)),
    };
    match serde_json::from_slice(&bytes) {
        Ok(report) => Ok(Some(report)),
        Err(error) => {
            outcome.find(report::FILE_NAME, format!("not a report of this tool: {error}"));
            Ok(None)
        }
    }
}

/// The scheme that the checkpoint names, its config checked against the report's copy of it.
fn recognised(checkpoint: &Checkpoint, report: Option<&Report>, outcome: &mut Outcome) -> Result<Option<Recognised>> {
    let path = || checkpoint.root.clone();
    let Some(config) = stored_config(checkpoint)? else {
        if report.is_none() {
            let why = "config.json has no quantization_config".to_string();
            return Err(Error::NotQuantized { path: path(), why });
        }
        outcome.find("config.json", "has no quantization_config");
        return Ok(None);
    };
    if let Some(report) = report {
        compare_configs(&config, &report.quantization_config, outcome);
    }
    match stored_scheme(checkpoint, &config) {
        Ok(recognised) => Ok(Some(recognised)),
        // Of another tool, so it is no fault of the checkpoint.
        Err(why) if report.is_none() => Err(Error::UnknownLayout { path: path(), why }),
        Err(why) => {
            outcome.find("config.json", format!("quantization_config: {why}"));
            Ok(None)
        }
    }
}

fn compare_configs(config: &Map<String, Value>, reported: &Map<String, Value>, outcome: &mut Outcome) {
    let keys: BTreeSet<&String> = config.keys().chain(reported.keys()).collect();
    for key in keys {
        let (here, there) = (config.get(key), reported.get(key));
        if here != there {
            let text = |value: Option<&Value>| value.map_or("absent".to_string(), Value::to_string);
            let what = format!(
                "quantization_config.{key} is {}, the report says {}",
                text(here),
                text(there)
            );
            outcome.find("config.json", what);
        }
    }
}

/// A complete quantized module.
struct Stack<'a> {
    name: String,
    shape: Shape,
    /// In the scheme's order.
    tensors: Vec<&'a SourceTensor>,
    source: Option<SourceRange>,
}

struct Check<'a> {
    checkpoint: &'a Checkpoint,
    source: Option<&'a Checkpoint>,
    report: Option<&'a Report>,
    scheme: Recognised,
    stacks: Vec<Stack<'a>>,
    /// With the bytes of the source they must equal.
    dense: Vec<(&'a SourceTensor, Option<SourceRange>)>,
    sums: Vec<Mutex<Vec<ErrorSums>>>,
}

impl<'a> Check<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        source: Option<&'a Checkpoint>,
        report: Option<&'a Report>,
        scheme: Recognised,
    ) -> Self {
        Self {
            checkpoint,
            source,
            report,
            scheme,
            stacks: Vec::new(),
            dense: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Sorts tensors into modules and dense ones, each complete, and finds where they come from.
    fn structure(&mut self, outcome: &mut Outcome) -> Result<()> {
        outcome.tensors = self.checkpoint.tensors.len();
        let suffixes = self.scheme.scheme.suffixes();
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut covered: HashMap<usize, usize> = HashMap::new();
        for name in self.module_names() {
            let weight = format!("{name}.weight");
            if self.checkpoint.tensor(&weight).is_some() {
                outcome.find(&weight, "is there beside the packed tensors of the same module");
            }
            let tensors: Vec<Option<&SourceTensor>> = suffixes
                .iter()
                .map(|suffix| self.checkpoint.tensor(&format!("{name}.{suffix}")))
                .collect();
            used.extend(tensors.iter().flatten().map(|tensor| tensor.name.as_str()));
            let from = self.origin(&weight, outcome)?;
            let dtype = from.map_or(Float::Bf16, |(_, dtype, _)| dtype);
            let stored: Vec<_> = tensors
                .iter()
                .map(|tensor| tensor.map(|tensor| (tensor.dtype, tensor.shape.as_slice())))
                .collect();
            let shape = match self.scheme.scheme.dense_shape(&stored, self.scheme.group, dtype) {
                Ok(shape) => shape,
                Err(fault) => {
                    outcome.find(format!("{name}.{}", fault.suffix), fault.what);
                    continue;
                }
            };
            let source = match from {
                Some((origin, _, range)) => {
                    *covered.entry(origin.tensor).or_default() += origin.rows;
                    if range.len != shape.dense_bytes() || origin.rows != shape.rows {
                        let what = format!(
                            "decodes to [{}, {}], the source has {} rows in {} bytes",
                            shape.rows, shape.columns, origin.rows, range.len
                        );
                        outcome.find(&name, what);
                        continue;
                    }
                    Some(range)
                }
                None => None,
            };
            self.stacks.push(Stack {
                name,
                shape,
                tensors: tensors.into_iter().flatten().collect(),
                source,
            });
        }
        for tensor in &self.checkpoint.tensors {
            if used.contains(tensor.name.as_str()) {
                continue;
            }
            if is_packed(&tensor.name) {
                let layout = self.scheme.scheme.layout();
                outcome.find(
                    &tensor.name,
                    format!("has no place in a module of the config's {layout} layout"),
                );
                continue;
            }
            let range = match self.origin(&tensor.name, outcome)? {
                Some((origin, ..)) if tensor.name != "lm_head.weight" || self.source_has(&tensor.name) => {
                    *covered.entry(origin.tensor).or_default() += origin.rows;
                    self.dense_range(tensor, origin, outcome)
                }
                Some(_) => {
                    outcome.find(&tensor.name, "is not in the source");
                    None
                }
                None => None,
            };
            self.dense.push((tensor, range));
        }
        self.source_is_covered(&covered, outcome);
        outcome.modules = self.stacks.len();
        Ok(())
    }

    fn source_has(&self, name: &str) -> bool {
        self.source.is_some_and(|source| source.tensor(name).is_some())
    }

    /// Every source tensor must have gone somewhere.
    fn source_is_covered(&self, covered: &HashMap<usize, usize>, outcome: &mut Outcome) {
        for (at, tensor) in self.source.iter().flat_map(|source| source.tensors.iter().enumerate()) {
            let rows = tensor.shape.first().copied().unwrap_or(1);
            match covered.get(&at) {
                None => outcome.find(&tensor.name, "is in the source and missing here"),
                Some(&found) if found < rows => {
                    outcome.find(
                        &tensor.name,
                        format!("has {rows} rows in the source, {found} of them here"),
                    );
                }
                Some(_) => {}
            }
        }
    }

    /// Modules by what is stored and by what the report says was.
    fn module_names(&self) -> BTreeSet<String> {
        let suffixes = self.scheme.scheme.suffixes();
        let mut counts: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
        for tensor in &self.checkpoint.tensors {
            if let Some((module, suffix)) = tensor.name.rsplit_once('.') {
                if let Some(at) = suffixes.iter().position(|known| *known == suffix) {
                    let entry = counts.entry(module).or_default();
                    entry.0 += 1;
                    entry.1 |= at == 0;
                }
            }
        }
        let stored = counts.into_iter().filter(|(_, (count, first))| *first || *count > 1);
        let reported = self.report.iter().flat_map(|report| &report.per_tensor);
        stored
            .map(|(name, _)| name.to_string())
            .chain(reported.map(|tensor| module_of(&tensor.name).to_string()))
            .collect()
    }

    /// Where the source keeps the values of tensor `name`; a tensor that it does not have is a finding.
    fn origin(&self, name: &str, outcome: &mut Outcome) -> Result<Option<(Origin, Float, SourceRange)>> {
        let Some(source) = self.source else { return Ok(None) };
        let Some(found) = origin(source, name)? else {
            outcome.find(name, "is not in the source");
            return Ok(None);
        };
        let tensor = &source.tensors[found.tensor];
        let all = tensor.shape.first().copied().unwrap_or(1).max(1) as u64;
        let row = tensor.len / all;
        let range = SourceRange {
            file: tensor.file,
            offset: tensor.offset + row * found.first_row as u64,
            len: row * found.rows as u64,
        };
        Ok(Some((
            found,
            Float::from_dtype(tensor.dtype).unwrap_or(Float::Bf16),
            range,
        )))
    }

    fn dense_range(&self, tensor: &SourceTensor, from: Origin, outcome: &mut Outcome) -> Option<SourceRange> {
        let source = &self.source?.tensors[from.tensor];
        let mut shape = source.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = from.rows;
        }
        if source.dtype != tensor.dtype || shape != tensor.shape {
            let what = format!(
                "is {} {:?}, in the source {} {shape:?}",
                tensor.dtype, tensor.shape, source.dtype
            );
            outcome.find(&tensor.name, what);
            return None;
        }
        let row = source.len / source.shape.first().copied().unwrap_or(1).max(1) as u64;
        Some(SourceRange {
            file: source.file,
            offset: source.offset + row * from.first_row as u64,
            len: row * from.rows as u64,
        })
    }

    /// Names, shapes and totals that the report repeats.
    fn against_report(&self, outcome: &mut Outcome) {
        let Some(report) = self.report else { return };
        for name in report.xxh3_128.keys() {
            if self.checkpoint.tensor(name).is_none() {
                outcome.find(name, "is in the report and missing here");
            }
        }
        for tensor in &self.checkpoint.tensors {
            if !report.xxh3_128.contains_key(&tensor.name) {
                outcome.find(&tensor.name, "is here and not in the report");
            }
        }
        let stored: BTreeMap<&str, &Stack> = self.stacks.iter().map(|stack| (stack.name.as_str(), stack)).collect();
        for tensor in &report.per_tensor {
            if let Some(stack) = stored.get(module_of(&tensor.name)) {
                let shape = [stack.shape.rows, stack.shape.columns];
                if tensor.shape != shape || tensor.group != stack.shape.group {
                    let what = format!(
                        "is {shape:?} in groups of {}, the report says {:?} in groups of {}",
                        stack.shape.group, tensor.shape, tensor.group
                    );
                    outcome.find(&tensor.name, what);
                }
            }
        }
        for stack in &self.stacks {
            if !report
                .per_tensor
                .iter()
                .any(|tensor| module_of(&tensor.name) == stack.name)
            {
                outcome.find(&stack.name, "is quantized here and not in the report");
            }
        }
        let (mean, min) = report::summarise(report.per_tensor.iter().map(|tensor| tensor.snr_db));
        let totals = [
            ("snr_db_mean", report.snr_db_mean, mean),
            ("snr_db_min", report.snr_db_min, min),
        ];
        for (key, said, is) in totals {
            if said != is {
                outcome.find(
                    report::FILE_NAME,
                    format!("{key} is {said:?}, its own per_tensor makes it {is:?}"),
                );
            }
        }
        if report.tensors != report.per_tensor.len() {
            let what = format!(
                "tensors is {}, per_tensor has {}",
                report.tensors,
                report.per_tensor.len()
            );
            outcome.find(report::FILE_NAME, what);
        }
    }

    /// Reads every stored byte: decodes, hashes, compares.
    fn bytes(&mut self, settings: &Settings, watch: &dyn Watch, outcome: &mut Outcome) -> Result<()> {
        let scheme = self.scheme.scheme.as_ref();
        self.sums = self.stacks.iter().map(|_| Mutex::default()).collect();
        let mut tasks = Vec::new();
        for (at, stack) in self.stacks.iter().enumerate() {
            let tiles = scheme.tiles(&stack.shape, settings.tile_budget());
            if tiles.len() > 1 {
                tasks.extend(stack.tensors.iter().map(|tensor| Task::Hash { tensor }));
            }
            tasks.extend(tiles.into_iter().map(|tile| Task::Measure { at, tile }));
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
            Task::Measure { at, tile } => self.measure(worker, *at, tile, settings, watch, &found),
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
        tile: &Tile,
        settings: &Settings,
        watch: &dyn Watch,
        found: &Found,
    ) -> Result<()> {
        let stack = &self.stacks[at];
        let mut stored = StackReader {
            reader: &mut worker.stored,
            tensors: &stack.tensors,
        };
        let mut weights = match (&mut worker.source, stack.source) {
            (Some(reader), Some(source)) => Some(ModuleWeights { reader, source }),
            _ => None,
        };
        let weights = weights.as_mut().map(|weights| weights as &mut dyn Weights);
        let mut faults = Vec::new();
        let (scheme, buffers) = (self.scheme.scheme.as_ref(), &mut worker.buffers);
        let stats = scheme.measure(
            settings.level,
            &stack.shape,
            tile,
            &mut stored,
            weights,
            buffers,
            &mut faults,
        )?;
        for StoredFault { suffix, what } in faults {
            found.find(format!("{}.{suffix}", stack.name), what);
        }
        for piece in &worker.buffers.pieces {
            let bytes = &worker.buffers.outputs[piece.output].bytes()[piece.from..piece.from + piece.bytes()];
            let tensor = stack.tensors[piece.output];
            // A tensor in several pieces is hashed by a task of its own.
            if bytes.len() as u64 == tensor.len && tile.end - tile.begin == stack.shape.rows {
                self.check_hash(tensor, XxHash3_128::oneshot(bytes), found);
            }
        }
        self.add(at, stats);
        watch.advance(tile.source_bytes);
        Ok(())
    }

    fn add(&self, at: usize, stats: TileStats) {
        let mut sums = self.sums[at].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        sums.resize(self.scheme.scheme.blocks(&self.stacks[at].shape), ErrorSums::default());
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

    /// Folds the sums and compares the SNRs with the report's.
    fn figures(&self, min_snr: Option<f64>, outcome: &mut Outcome) {
        let reported: HashMap<&str, Option<f64>> = self
            .report
            .iter()
            .flat_map(|report| &report.per_tensor)
            .map(|t| (module_of(&t.name), t.snr_db))
            .collect();
        for (stack, sums) in self.stacks.iter().zip(&self.sums) {
            if stack.source.is_none() {
                continue;
            }
            let mut total = ErrorSums::default();
            sums.lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .iter()
                .for_each(|&block| total += block);
            let snr = report::snr_db(total);
            let text = |snr: Option<f64>| snr.map_or("without loss".to_string(), |snr| format!("{snr} dB"));
            let name = if stack.name == "lm_head" {
                stack.name.clone()
            } else {
                format!("{}.weight", stack.name)
            };
            if let Some(&said) = reported.get(stack.name.as_str()) {
                if said != snr {
                    let what = format!(
                        "its stored bytes have an SNR of {}, the report says {}",
                        text(snr),
                        text(said)
                    );
                    outcome.find(&name, what);
                }
            }
            if let (Some(least), Some(snr)) = (min_snr, snr) {
                if snr < least {
                    outcome.find(&name, format!("its SNR of {snr} dB is below --min-snr {least}"));
                }
            }
            outcome.snr_db.insert(name, snr);
        }
        (outcome.snr_db_mean, outcome.snr_db_min) = report::summarise(outcome.snr_db.values().copied());
    }
}

/// The module behind a name of the report: `x.weight` -> `x`, `lm_head` -> `lm_head`.
fn module_of(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

enum Task<'a> {
    Measure {
        at: usize,
        tile: Tile,
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
