//! The plan of a dequantizing run: packed modules become dense weights under their original names; parts of a
//! projection that was fused in the source are put together again.

use super::layout::place;
use super::quantize::check_names;
use super::rules::FUSED;
use super::*;
use crate::checkpoint::{Checkpoint, SourceTensor, REPORT_FILE};
use crate::error::{Error, Result};
use crate::report::Report;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Plans the decoding of a packed checkpoint. `dtype`: of the decoded weights; without it the one that they had.
///
/// # Errors
/// [`Error::NotQuantized`] and [`Error::BadPacked`] where the source is not a complete packed checkpoint.
pub fn plan_dequantize(source: &Checkpoint, dtype: Option<Float>, max_shard_size: u64) -> Result<Plan> {
    let not_quantized = |why: String| Error::NotQuantized {
        path: source.root.clone(),
        why,
    };
    let Some(quantization) = stored_config(source)? else {
        return Err(not_quantized("config.json has no quantization_config".to_string()));
    };
    let recognised = stored_scheme(source, &quantization).map_err(|why| Error::UnknownLayout {
        path: source.root.clone(),
        why,
    })?;
    let report = Report::read(&source.root.join(REPORT_FILE))?;
    let original = Original::new(source, report.as_ref());
    let metadata = module_metadata(source, recognised.scheme.as_ref());
    if let Some((tensor, what)) = metadata.faults.into_iter().next() {
        let path = source.root.clone();
        return Err(Error::BadPacked { path, tensor, what });
    }
    let dtype_of = |name: &str| {
        metadata
            .dtypes
            .get(name)
            .copied()
            .unwrap_or_else(|| original.dtype(name))
    };
    let mut modules = HashMap::new();
    for (name, found) in find_modules(source, &recognised, std::iter::empty(), dtype_of) {
        let bad = |fault: crate::scheme::StoredFault| Error::BadPacked {
            path: source.root.clone(),
            tensor: format!("{name}.{}", fault.suffix),
            what: fault.what,
        };
        let module = found.map_err(bad)?;
        modules.insert(name, module);
    }
    if modules.is_empty() {
        return Err(not_quantized(
            "it holds no packed tensors of the layout that config.json names".to_string(),
        ));
    }
    let mut build = Build {
        source,
        modules: &modules,
        original: &original,
        dtype,
        items: vec![],
        tensors: vec![],
    };
    build.all()?;
    let Build { items, mut tensors, .. } = build;
    check_names(source, &tensors, &items)?;
    let mut metadata = source.metadata.clone();
    if let Some(key) = recognised.scheme.metadata_key() {
        metadata.remove(key);
    }
    let placed = place(&source.stem, &items, &mut tensors, max_shard_size, |_| metadata.clone())?;
    let mut config = source.config.clone().unwrap_or_default();
    config.remove("quantization_config");
    for key in ["torch_dtype", "dtype"] {
        if let (Some(dtype), Some(Value::String(_))) = (dtype, config.get(key)) {
            config.set(key, dtype.torch_name());
        }
    }
    let weights = modules.values().map(|module| module.shape.elements() as u64).sum();
    Ok(Plan {
        group: recognised.group,
        scheme: recognised.scheme,
        files: placed.files,
        index: placed.index,
        // A folder that had none before it was quantized has none now.
        config: (!config.is_empty()).then_some(config),
        sidecars: source.sidecars.clone(),
        quantized_embedding: false,
        quantized_lm_head: false,
        warnings: source.warnings.clone(),
        source_bytes: items.iter().map(|item| item.work.bytes_in()).sum(),
        weights,
        weights_quantized: weights,
        items,
        tensors,
    })
}

/// What is known of the checkpoint before it was quantized.
struct Original {
    /// By module: the dense weight's dtype, and the source's tensor that it was (part of).
    modules: BTreeMap<String, (Option<Float>, String)>,
    /// For modules that no report speaks of.
    dtype: Float,
    /// Whether a checkpoint without a report has fused projections by its config.
    fused: bool,
}

impl Original {
    fn new(source: &Checkpoint, report: Option<&Report>) -> Self {
        let entries = report.iter().flat_map(|report| &report.per_tensor);
        let modules = entries
            .map(|entry| {
                let name = entry.name.strip_suffix(".weight").unwrap_or(&entry.name).to_string();
                (name, (Float::from_torch_name(&entry.dtype), entry.source.clone()))
            })
            .collect();
        let config = source.config.as_ref();
        let named = |key| {
            config
                .and_then(|config| config.text(key))
                .and_then(Float::from_torch_name)
        };
        let stored = || source.tensors.iter().filter(|tensor| tensor.name.ends_with(".weight"));
        let kept = || stored().find_map(|tensor| Float::from_dtype(tensor.dtype));
        let dtype = named("torch_dtype")
            .or_else(|| named("dtype"))
            .or_else(kept)
            .unwrap_or(Float::Bf16);
        let model_type = config.and_then(|config| config.text("model_type")).unwrap_or_default();
        Self {
            modules,
            dtype,
            fused: report.is_none() && model_type.starts_with("spark"),
        }
    }

    fn dtype(&self, module: &str) -> Float {
        self.modules
            .get(module)
            .and_then(|(dtype, _)| *dtype)
            .unwrap_or(self.dtype)
    }

    /// Whether `part` was cut from the fused projection `whole`.
    fn was_fused(&self, part: &str, whole: &str) -> bool {
        match self.modules.get(part) {
            Some((_, tensor)) => tensor.strip_suffix(".weight") == Some(whole),
            None => self.fused,
        }
    }
}

struct Build<'a> {
    source: &'a Checkpoint,
    modules: &'a HashMap<String, PackedModule<'a>>,
    original: &'a Original,
    dtype: Option<Float>,
    items: Vec<Item>,
    tensors: Vec<OutputTensor>,
}

impl<'a> Build<'a> {
    /// Items in the order in which the source first mentions them.
    fn all(&mut self) -> Result<()> {
        let packed: HashMap<&str, &str> = self
            .modules
            .values()
            .flat_map(|module| {
                module
                    .tensors
                    .iter()
                    .map(|tensor| (tensor.name.as_str(), module.name.as_str()))
            })
            .collect();
        let mut done: HashSet<String> = HashSet::new();
        for tensor in &self.source.tensors {
            match packed.get(tensor.name.as_str()) {
                Some(module) => self.module(module, &mut done),
                None => self.dense(tensor, &mut done),
            }
        }
        Ok(())
    }

    fn module(&mut self, name: &str, done: &mut HashSet<String>) {
        if done.contains(name) {
            return;
        }
        let (weight, parts) = match self.fused_set(name) {
            Some((whole, parts)) => (whole, parts),
            None => (name.to_string(), vec![name.to_string()]),
        };
        let parts: Vec<&PackedModule> = parts.iter().filter_map(|part| self.modules.get(part)).collect();
        done.extend(parts.iter().map(|part| part.name.clone()));
        let Some(first) = parts.first() else { return };
        let dtype = self.dtype.unwrap_or(first.shape.dtype);
        let shape = vec![parts.iter().map(|part| part.shape.rows).sum(), first.shape.columns];
        let len = (shape[0] * shape[1] * dtype.size()) as u64;
        let parts = parts
            .into_iter()
            .map(|part| Packed {
                name: part.name.clone(),
                shape: part.shape,
                stored: part.tensors.iter().map(|tensor| whole_range(tensor)).collect(),
            })
            .collect();
        let output = OutputTensor::new(format!("{weight}.weight"), dtype.dtype(), shape, len);
        self.push(Work::Decode(Decode { dtype, parts }), output);
    }

    /// The fused projection that `name` was cut from and all its parts, if all are here as packed modules of one width.
    fn fused_set(&self, name: &str) -> Option<(String, Vec<String>)> {
        let (parent, last) = name.rsplit_once('.')?;
        let table = FUSED.iter().find(|table| table.parts.contains(&last))?;
        let whole = format!("{parent}.{}", table.suffix.rsplit('.').next()?);
        let parts: Vec<String> = table.parts.iter().map(|part| format!("{parent}.{part}")).collect();
        let columns = self.modules.get(name)?.shape.columns;
        let all = parts.iter().all(|part| {
            self.original.was_fused(part, &whole)
                && self
                    .modules
                    .get(part)
                    .is_some_and(|module| module.shape.columns == columns)
        });
        all.then_some((whole, parts))
    }

    fn dense(&mut self, tensor: &'a SourceTensor, done: &mut HashSet<String>) {
        if done.contains(&tensor.name) {
            return;
        }
        let (module, suffix) = tensor.name.rsplit_once('.').unwrap_or((&tensor.name, ""));
        let fused = self.fused_set(module).and_then(|(whole, parts)| {
            let parts: Option<Vec<_>> = parts
                .iter()
                .map(|part| self.source.tensor(&format!("{part}.{suffix}")))
                .collect();
            let parts = parts?;
            let alike = parts.iter().all(|part| {
                part.dtype == tensor.dtype && !part.shape.is_empty() && part.shape[1..] == parts[0].shape[1..]
            });
            alike.then(|| (format!("{whole}.{suffix}"), parts))
        });
        let (name, parts) = fused.unwrap_or_else(|| (tensor.name.clone(), vec![tensor]));
        done.extend(parts.iter().map(|part| part.name.clone()));
        let shape = match parts.as_slice() {
            [whole] => whole.shape.clone(),
            parts => {
                let mut shape = parts[0].shape.clone();
                shape[0] = parts.iter().map(|part| part.shape[0]).sum();
                shape
            }
        };
        let len = parts.iter().map(|part| part.len).sum();
        let parts = parts.into_iter().map(whole_range).collect();
        let output = OutputTensor::new(name.clone(), tensor.dtype, shape, len);
        self.push(
            Work::Copy(Dense {
                name,
                reason: "dense already".to_string(),
                parts,
            }),
            output,
        );
    }

    fn push(&mut self, work: Work, output: OutputTensor) {
        let begin = self.tensors.len();
        self.tensors.push(output);
        self.items.push(Item {
            work,
            outputs: begin..begin + 1,
        });
    }
}

fn whole_range(tensor: &SourceTensor) -> SourceRange {
    SourceRange {
        file: tensor.file,
        offset: tensor.offset,
        len: tensor.len,
    }
}
