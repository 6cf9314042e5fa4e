//! Carries a [`Plan`] out: tiles are read, encoded and written at their offsets by a pool; then the report is folded,
//! everything is synced, and one rename puts the folder at its place.

use crate::checkpoint::{
    check_space, Checkpoint, OutFile, Reader, Staging, CONFIG_FILE, DENSE_REPORT_FILE, REPORT_FILE,
};
use crate::error::{Error, Result};
use crate::kernel::Level;
use crate::plan::{Decode, Item, Module, Packed, Plan, SourceRange, Work};
use crate::pool::{self, Watch};
use crate::report::{self, DenseReport, DenseSummary, Report, TensorReport};
use crate::scheme::{Stored, Tile, TileBuffers, TileError, TileStats, Weights};
use crate::tensor::{ErrorSums, Fault, Float, GroupCounts};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
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
            budget: 32 << 20,
            overwrite: false,
        }
    }

    /// One worker's share, but never so little that strided writes become small.
    pub fn tile_budget(&self) -> usize {
        (self.budget / self.threads.max(1)).max(2 << 20)
    }
}

/// Dense bytes copied as one task, at least. A tensor that is one task is hashed on its way; a larger one is read back,
/// which costs less than leaving most threads idle while one copies.
const COPY_TASK: u64 = 64 << 20;

/// Dense bytes read, hashed and written at a time: they stay in a core's second-level cache.
pub(crate) const COPY_STEP: usize = 512 << 10;

/// A tensor of at least this many bytes goes to the disk as soon as it is written, while others are encoded.
const WRITEBACK_BYTES: u64 = 1 << 20;

enum Task<'a> {
    Encode {
        item: &'a Item,
        module: &'a Module,
        tile: Tile,
        state: &'a ModuleState,
    },
    /// `base`: where the range begins in the output tensor.
    Copy {
        item: &'a Item,
        source: SourceRange,
        base: u64,
    },
    /// `base`: where the part begins in the output tensor.
    Decode {
        item: &'a Item,
        part: &'a Packed,
        dtype: Float,
        tile: Tile,
        base: u64,
    },
}

impl Task<'_> {
    fn item(&self) -> &Item {
        let (Task::Encode { item, .. } | Task::Copy { item, .. } | Task::Decode { item, .. }) = self;
        item
    }
}

/// What the tiles of one module add up to.
struct ModuleState {
    sums: Mutex<(Vec<ErrorSums>, GroupCounts)>,
    blocks: usize,
}

impl ModuleState {
    fn add(&self, stats: TileStats) {
        let mut sums = self.sums.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        sums.0.resize(self.blocks, ErrorSums::default());
        sums.0[stats.first_block..][..stats.blocks.len()].copy_from_slice(&stats.blocks);
        sums.1 += stats.counts;
    }

    /// Blocks folded in order.
    fn total(&self) -> (ErrorSums, GroupCounts) {
        let sums = self.sums.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut total = ErrorSums::default();
        sums.0.iter().for_each(|&block| total += block);
        (total, sums.1)
    }
}

/// An output tensor on its way: how many tasks still write to it, and its hash when all have.
struct TensorState {
    remaining: AtomicUsize,
    hash: OnceLock<u128>,
}

struct Run<'a> {
    plan: &'a Plan,
    source: &'a Checkpoint,
    settings: &'a Settings,
    watch: &'a dyn Watch,
    files: Vec<Arc<OutFile>>,
    tensors: Vec<TensorState>,
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
    check_space(staging.path(), plan.output_bytes())?;
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
    let run = Run {
        plan,
        source,
        settings,
        watch,
        files,
        tensors,
    };
    let worker = || Worker {
        reader: Reader::new(&source.files),
        buffers: TileBuffers::default(),
        chunk: Vec::new(),
    };
    pool::run(settings.threads, &tasks, watch, worker, |worker, task| {
        run.task(worker, task)
    })?;

    let report = report(&run, &modules);
    drop(run);
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
    staging.commit()?;
    Ok(report)
}

fn tasks<'a>(plan: &'a Plan, modules: &'a [ModuleState], settings: &Settings) -> Vec<Task<'a>> {
    let budget = settings.tile_budget();
    let copy_task = COPY_TASK.max(plan.source_bytes / (2 * settings.threads as u64));
    let mut tasks = Vec::new();
    for (item, state) in plan.items.iter().zip(modules) {
        match &item.work {
            Work::Encode(module) => {
                let tiles = plan.scheme.tiles(&module.shape, budget);
                tasks.extend(tiles.into_iter().map(|tile| Task::Encode {
                    item,
                    module,
                    tile,
                    state,
                }));
            }
            Work::Copy(dense) => {
                let mut base = 0;
                for part in &dense.parts {
                    tasks.extend(copy_steps(part, copy_task).map(|source| {
                        let base = base + source.offset - part.offset;
                        Task::Copy { item, source, base }
                    }));
                    base += part.len;
                }
            }
            Work::Decode(Decode { dtype, parts }) => {
                let mut base = 0;
                for part in parts {
                    // The decoded tile, several times as large as the packed one, is what the budget must hold.
                    let packed: u64 = part.stored.iter().map(|range| range.len).sum();
                    let dense = (part.shape.elements() * dtype.size()) as u64;
                    let budget = (budget as u64 * packed / dense.max(1)) as usize;
                    let tiles = plan.scheme.tiles(&part.shape, budget);
                    let dtype = *dtype;
                    tasks.extend(tiles.into_iter().map(|tile| Task::Decode {
                        item,
                        part,
                        dtype,
                        tile,
                        base,
                    }));
                    base += dense;
                }
            }
        }
    }
    tasks
}

/// A range in steps of at most `most` bytes; an empty one is one step.
fn copy_steps(range: &SourceRange, most: u64) -> impl Iterator<Item = SourceRange> + '_ {
    (0..range.len.div_ceil(most).max(1)).map(move |at| {
        let begin = at * most;
        SourceRange {
            file: range.file,
            offset: range.offset + begin,
            len: most.min(range.len - begin),
        }
    })
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
            if bytes.len() as u64 == tensor.len {
                self.tensors[at].hash.get_or_init(|| XxHash3_128::oneshot(bytes));
            }
        }
        item.outputs
            .clone()
            .try_for_each(|at| self.finished(at, &mut worker.chunk))
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
            if whole {
                hasher.write(chunk);
            }
            self.watch.advance(step as u64);
            offset += step as u64;
        }
        if whole {
            self.tensors[at].hash.get_or_init(|| hasher.finish_128());
        }
        self.finished(at, &mut worker.chunk)
    }

    /// Notes that one more task has written its part of a tensor. The last one hashes it, by reading it back where the
    /// parts were not in order.
    fn finished(&self, at: usize, chunk: &mut Vec<u8>) -> Result<()> {
        let (state, tensor) = (&self.tensors[at], &self.plan.tensors[at]);
        if state.remaining.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(());
        }
        let file = &self.files[tensor.shard];
        if state.hash.get().is_none() {
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
        if tensor.len >= WRITEBACK_BYTES {
            file.start_writeback(tensor.offset, tensor.len);
        }
        Ok(())
    }

    /// Names the tensor, row and column (or group) of a fault, counted in the source's own tensor.
    fn fault(&self, reader: &mut Reader, module: &Module, fault: Fault) -> Error {
        let shape = &module.shape;
        let path = self.source.files[module.source.file].path.clone();
        let tensor = module.tensor.clone();
        let place = |element: usize| (module.first_row + element / shape.columns, element % shape.columns);
        match fault {
            Fault::NonFinite { element } => {
                let (row, column) = place(element);
                let mut bytes = [0; 4];
                let size = shape.dtype.size();
                let at = module.source.offset + (element * size) as u64;
                let value = match reader.read_exact_at(module.source.file, at, &mut bytes[..size]) {
                    Ok(()) => float_text(shape.dtype, bytes),
                    Err(error) => return error,
                };
                let way_out = format!("--exclude {:?} leaves it dense", module.name);
                Error::NonFinite {
                    path,
                    tensor,
                    row,
                    column,
                    value,
                    way_out,
                }
            }
            Fault::ScaleOverflow { element } => {
                let (row, column) = place(element);
                let (dtype, limit) = match self.plan.scheme.qtype() {
                    crate::scheme::QType::Int4 => ("float16", 65504.0),
                    crate::scheme::QType::Uint(_) => (shape.dtype.torch_name(), float_max(shape.dtype)),
                };
                let way_out = format!("--exclude {:?} leaves it dense", module.name);
                Error::ScaleOverflow {
                    path,
                    tensor,
                    row,
                    group: column / shape.group,
                    dtype,
                    limit,
                    way_out,
                }
            }
        }
    }

    fn hashes(&self) -> BTreeMap<String, String> {
        let hash = |state: &TensorState| format!("{:032x}", state.hash.get().copied().unwrap_or_default());
        self.plan
            .tensors
            .iter()
            .zip(&self.tensors)
            .map(|(tensor, state)| (tensor.name.clone(), hash(state)))
            .collect()
    }

    fn summary(&self) -> DenseSummary {
        let decoded = self
            .plan
            .items
            .iter()
            .filter(|item| matches!(item.work, Work::Decode(_)));
        DenseSummary {
            tool: report::tool_version(),
            qtype: self.plan.scheme.qtype().to_string(),
            layout: self.plan.scheme.layout().to_string(),
            group: self.plan.group,
            decoded: decoded
                .map(|item| self.plan.tensors[item.outputs.start].name.clone())
                .collect(),
            files: self.plan.files.len(),
            bytes: self.plan.weight_bytes(),
            xxh3_128: self.hashes(),
        }
    }

    fn report(&self, modules: &[ModuleState]) -> Report {
        let plan = self.plan;
        let mut per_tensor: Vec<TensorReport> = Vec::new();
        for (item, state) in plan.items.iter().zip(modules) {
            if let Work::Encode(module) = &item.work {
                let (sums, counts) = state.total();
                per_tensor.push(TensorReport {
                    name: module.report_name.clone(),
                    snr_db: report::snr_db(sums),
                    source: module.tensor.clone(),
                    first_row: module.first_row,
                    dtype: module.shape.dtype.torch_name().to_string(),
                    shape: [module.shape.rows, module.shape.columns],
                    group: module.shape.group,
                    bytes_in: module.source.len,
                    bytes_out: plan.tensors[item.outputs.clone()].iter().map(|tensor| tensor.len).sum(),
                    zero_groups: counts.zero,
                    underflowed_groups: counts.underflowed,
                });
            }
        }
        // The reference's order: by name, the head last.
        per_tensor.sort_by(|a, b| (a.name == "lm_head", &a.name).cmp(&(b.name == "lm_head", &b.name)));
        let (snr_db_mean, snr_db_min) = report::summarise(per_tensor.iter().map(|tensor| tensor.snr_db));
        let dtype = plan.modules().next().map_or(Float::Bf16, |module| module.shape.dtype);
        Report {
            group: plan.group,
            tensors: per_tensor.len(),
            snr_db_mean,
            snr_db_min,
            bits_per_weight: plan.scheme.bits_per_weight(plan.group, dtype),
            quantized_embedding: plan.quantized_embedding,
            quantized_lm_head: plan.quantized_lm_head,
            tool: report::tool_version(),
            qtype: plan.scheme.qtype().to_string(),
            layout: plan.scheme.layout().to_string(),
            symmetric: plan.scheme.symmetric(),
            zero_groups: per_tensor.iter().map(|tensor| tensor.zero_groups).sum(),
            underflowed_groups: per_tensor.iter().map(|tensor| tensor.underflowed_groups).sum(),
            coverage: plan.coverage(),
            quantization_config: match plan
                .config
                .as_ref()
                .and_then(|config| config.get("quantization_config"))
            {
                Some(Value::Object(config)) => config.clone(),
                _ => serde_json::Map::new(),
            },
            dense: plan
                .dense()
                .map(|dense| DenseReport {
                    name: dense.name.clone(),
                    reason: dense.reason.clone(),
                })
                .collect(),
            xxh3_128: self.hashes(),
            per_tensor,
        }
    }
}

fn float_text(dtype: Float, bytes: [u8; 4]) -> String {
    match dtype {
        Float::F32 => f32::from_le_bytes(bytes).to_string(),
        Float::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_string(),
        Float::Bf16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_string(),
    }
}

fn float_max(dtype: Float) -> f32 {
    match dtype {
        Float::F32 => f32::MAX,
        Float::F16 => half::f16::MAX.to_f32(),
        Float::Bf16 => half::bf16::MAX.to_f32(),
    }
}
