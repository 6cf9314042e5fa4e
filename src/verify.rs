//! Proves what was written: decodes the stored bytes by a path of its own and compares with the report, the config and,
//! where it is given, the source. Never writes.

use crate::checkpoint::{Checkpoint, Reader, SourceTensor, REPORT_FILE};
use crate::error::{Error, Result};
use crate::plan::{
    find_modules, is_packed, module_metadata, origin, stored_config, stored_scheme, ModuleMetadata, Origin,
    PackedModule, SourceRange,
};
use crate::pool::{self, Watch};
use crate::report::{self, Report, TensorReport};
use crate::run::{ModuleWeights, Settings, COPY_STEP};
use crate::scheme::{Measured, Recognised, Stored, StoredFault, Tile, TileBuffers, TileStats, Weights};
use crate::tensor::{ErrorSums, Float};
use serde::Serialize;
use serde_json::{json, Map, Value};
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
    outcome.folder(&checkpoint, report.as_ref());
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
    /// What the files say of each other. Where this tool wrote them, nothing may be odd about them.
    fn folder(&mut self, checkpoint: &Checkpoint, report: Option<&Report>) {
        for warning in &checkpoint.warnings {
            match report {
                Some(_) => self.find(checkpoint.root.display(), warning),
                None => self.notes.push(warning.clone()),
            }
        }
        if checkpoint.files.len() > 1 && !checkpoint.indexed {
            let index = format!("{}.safetensors.index.json", checkpoint.stem);
            self.find(
                index,
                format!("is missing, and {} files need it", checkpoint.files.len()),
            );
        }
    }

    fn find(&mut self, subject: impl ToString, what: impl ToString) {
        self.findings.push(Finding {
            subject: subject.to_string(),
            what: what.to_string(),
        });
    }
}

/// The report, if the folder has one; one that cannot be read is a finding.
fn read_report(dst: &Path, outcome: &mut Outcome) -> Result<Option<Report>> {
    match Report::read(&dst.join(REPORT_FILE)) {
        Ok(Some(report)) => return Ok(Some(report)),
        Ok(None) => {
            let note = format!("no {REPORT_FILE}: hashes and reported SNRs are not checked");
            outcome.notes.push(note);
        }
        Err(error @ Error::BadJson { .. }) => outcome.find(REPORT_FILE, error),
        Err(error) => return Err(error),
    }
    Ok(None)
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

/// A complete packed module and the weights that it was made from.
struct Stack<'a> {
    module: PackedModule<'a>,
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

    /// The dtypes that the files' metadata gives the modules, compared with the source's and the report's.
    fn metadata(&self, source: impl Fn(&str) -> Option<Float>, outcome: &mut Outcome) -> BTreeMap<String, Float> {
        let ModuleMetadata { dtypes, faults } = module_metadata(self.checkpoint, self.scheme.scheme.as_ref());
        for (module, what) in faults {
            outcome.find(module, what);
        }
        let reported = self.report.iter().flat_map(|report| &report.per_tensor);
        let reported: BTreeMap<&str, Float> = reported
            .filter_map(|tensor| Some((module_of(&tensor.name), Float::from_torch_name(&tensor.dtype)?)))
            .collect();
        for (module, said) in &dtypes {
            let others = [
                ("the report", reported.get(module.as_str()).copied()),
                ("the source", source(module)),
            ];
            for (who, dtype) in others {
                if let Some(dtype) = dtype.filter(|dtype| dtype != said) {
                    let (said, dtype) = (said.torch_name(), dtype.torch_name());
                    outcome.find(module, format!("its file's metadata says dtype {said}, {who} {dtype}"));
                }
            }
        }
        dtypes
    }

    /// Sorts tensors into modules and dense ones, each complete, and finds where they come from.
    fn structure(&mut self, outcome: &mut Outcome) -> Result<()> {
        outcome.tensors = self.checkpoint.tensors.len();
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut covered: HashMap<usize, usize> = HashMap::new();
        let reported = self.report.iter().flat_map(|report| &report.per_tensor);
        let reported = reported.map(|tensor| module_of(&tensor.name).to_string());
        // A source whose fused rows cannot be told is an error where the module is looked at again below.
        let dtype_of = |name: &str| {
            self.origin_of(&format!("{name}.weight"))
                .ok()
                .flatten()
                .map(|found| found.1)
        };
        let metadata = self.metadata(&dtype_of, outcome);
        let modules = find_modules(self.checkpoint, &self.scheme, reported, |name| {
            let said = metadata.get(name).copied();
            dtype_of(name).or(said).unwrap_or(Float::Bf16)
        });
        for (name, module) in modules {
            let weight = format!("{name}.weight");
            if self.checkpoint.tensor(&weight).is_some() {
                outcome.find(&weight, "is there beside the packed tensors of the same module");
            }
            for suffix in self.scheme.scheme.suffixes() {
                used.extend(
                    self.checkpoint
                        .tensor(&format!("{name}.{suffix}"))
                        .map(|tensor| tensor.name.as_str()),
                );
            }
            let from = self.origin(&weight, outcome)?;
            if let Some((origin, ..)) = from {
                *covered.entry(origin.tensor).or_default() += origin.rows;
            }
            let module = match module {
                Ok(module) => module,
                Err(fault) => {
                    outcome.find(format!("{name}.{}", fault.suffix), fault.what);
                    continue;
                }
            };
            let source = from.map(|(.., range)| range);
            if let Some((origin, _, range)) = from {
                let shape = module.shape;
                if range.len != shape.dense_bytes() || origin.rows != shape.rows {
                    let what = format!(
                        "decodes to [{}, {}], the source has {} rows in {} bytes",
                        shape.rows, shape.columns, origin.rows, range.len
                    );
                    outcome.find(&name, what);
                    continue;
                }
            }
            self.stacks.push(Stack { module, source });
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
        let tied = self
            .checkpoint
            .config
            .as_ref()
            .and_then(|config| config.bool("tie_word_embeddings"));
        if tied == Some(true) && self.stacks.iter().any(|stack| stack.module.name == "lm_head") {
            outcome.find(
                "config.json",
                "tie_word_embeddings is true, so readers would not load the quantized lm_head",
            );
        }
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

    /// Where the source keeps the values of tensor `name`; a tensor that it does not have is a finding.
    fn origin(&self, name: &str, outcome: &mut Outcome) -> Result<Option<(Origin, Float, SourceRange)>> {
        let found = self.origin_of(name)?;
        if found.is_none() && self.source.is_some() {
            outcome.find(name, "is not in the source");
        }
        Ok(found)
    }

    fn origin_of(&self, name: &str) -> Result<Option<(Origin, Float, SourceRange)>> {
        let Some(source) = self.source else { return Ok(None) };
        let Some(found) = origin(source, name)? else {
            return Ok(None);
        };
        let tensor = &source.tensors[found.tensor];
        let dtype = Float::from_dtype(tensor.dtype).unwrap_or(Float::Bf16);
        Ok(Some((found, dtype, rows_of(tensor, &found))))
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
        Some(rows_of(source, &from))
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
        let stored: BTreeMap<&str, &Stack> = self
            .stacks
            .iter()
            .map(|stack| (stack.module.name.as_str(), stack))
            .collect();
        for tensor in &report.per_tensor {
            if let Some(stack) = stored.get(module_of(&tensor.name)) {
                let shape = [stack.module.shape.rows, stack.module.shape.columns];
                if tensor.shape != shape || tensor.group != stack.module.shape.group {
                    let what = format!(
                        "is {shape:?} in groups of {}, the report says {:?} in groups of {}",
                        stack.module.shape.group, tensor.shape, tensor.group
                    );
                    outcome.find(&tensor.name, what);
                }
            }
        }
        for stack in &self.stacks {
            if !report
                .per_tensor
                .iter()
                .any(|tensor| module_of(&tensor.name) == stack.module.name)
            {
                outcome.find(&stack.module.name, "is quantized here and not in the report");
            }
        }
        self.report_totals(report, stored.contains_key("lm_head"), outcome);
    }

    /// What the report says of the whole, against its own tensors and what config.json names.
    fn report_totals(&self, report: &Report, has_head: bool, outcome: &mut Outcome) {
        let (mean, min) = report::summarise(report.per_tensor.iter().map(|tensor| tensor.snr_db));
        let sum = |count: fn(&TensorReport) -> u64| report.per_tensor.iter().map(count).sum::<u64>();
        let scheme = self.scheme.scheme.as_ref();
        let totals = [
            ("group", json!(report.group), json!(self.scheme.group)),
            ("qtype", json!(report.qtype), json!(scheme.qtype().to_string())),
            ("layout", json!(report.layout), json!(scheme.layout())),
            ("symmetric", json!(report.symmetric), json!(scheme.symmetric())),
            ("tensors", json!(report.tensors), json!(report.per_tensor.len())),
            ("snr_db_mean", json!(report.snr_db_mean), json!(mean)),
            ("snr_db_min", json!(report.snr_db_min), json!(min)),
            (
                "zero_groups",
                json!(report.zero_groups),
                json!(sum(|tensor| tensor.zero_groups)),
            ),
            (
                "underflowed_groups",
                json!(report.underflowed_groups),
                json!(sum(|tensor| tensor.underflowed_groups)),
            ),
            ("quantized_lm_head", json!(report.quantized_lm_head), json!(has_head)),
        ];
        for (key, said, is) in totals {
            if said != is {
                outcome.find(REPORT_FILE, format!("{key} is {said}, and should be {is}"));
            }
        }
    }

    /// Reads every stored byte: decodes, hashes, compares.
    fn bytes(&mut self, settings: &Settings, watch: &dyn Watch, outcome: &mut Outcome) -> Result<()> {
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
            let name = if stack.module.name == "lm_head" {
                stack.module.name.clone()
            } else {
                format!("{}.weight", stack.module.name)
            };
            if let Some(&said) = reported.get(stack.module.name.as_str()) {
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

/// The bytes of some rows of a source tensor.
fn rows_of(tensor: &SourceTensor, origin: &Origin) -> SourceRange {
    let row = tensor.len / tensor.shape.first().copied().unwrap_or(1).max(1) as u64;
    SourceRange {
        file: tensor.file,
        offset: tensor.offset + row * origin.first_row as u64,
        len: row * origin.rows as u64,
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
