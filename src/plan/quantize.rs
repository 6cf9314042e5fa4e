//! The plan of a quantizing run: what the judge made of every source tensor is given its outputs.

use super::judge::{Judge, Judged};
use super::layout::place;
use super::origin::part_name;
use super::readers;
use super::recognise::is_packed;
use super::rules::{is_always_dense, is_embedding, Fused, HEAD};
use super::*;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::scheme::{select, ConfigContext, Request as SchemeRequest};
use crate::tensor::Float;
use std::collections::{HashMap, HashSet};

/// Plans the quantization of `source`.
///
/// # Errors
/// A request that the source or the layout cannot fulfil; nothing has been written then.
pub fn plan(request: &Request, source: &Checkpoint) -> Result<Plan> {
    refuse_quantized(source)?;
    check_uintx(request)?;
    let group = request.group.unwrap_or(request.qtype.default_group());
    let scheme = select(&SchemeRequest {
        qtype: request.qtype,
        layout: request.layout,
        asym: request.asym,
        group,
    })?;
    let judged = Judge::new(request, source, scheme.as_ref(), group)?.judge()?;
    assemble(request, source, scheme, group, judged)
}

/// # Errors
/// [`Error::BadRequest`] for options of int4 with uintN, and of uintN with int4.
fn check_uintx(request: &Request) -> Result<()> {
    let refuse = |option: &str, why: &str| Err(Error::BadRequest(format!("{option} with {}: {why}", request.qtype)));
    match request.qtype {
        QType::Uint(_) if request.quantize_lm_head => refuse(
            "--quantize-lm-head",
            "a head of its own is quantized as every other linear is",
        ),
        QType::Uint(_) if request.quantize_embedding => {
            refuse("--quantize-embedding", "ai-toolkit quantizes linears alone")
        }
        QType::Int4 if request.adapter.is_some() => refuse(
            "--ara",
            "accuracy-recovery adapters are trained on uintN bases; add --qtype uint2 .. uint7",
        ),
        _ => Ok(()),
    }
}

/// # Errors
/// [`Error::AlreadyQuantized`] with what shows it.
fn refuse_quantized(source: &Checkpoint) -> Result<()> {
    let evidence = if source
        .config
        .as_ref()
        .is_some_and(|config| config.object("quantization_config").is_some())
    {
        Some("config.json has quantization_config".to_string())
    } else {
        source
            .tensors
            .iter()
            .find(|tensor| is_packed(&tensor.name))
            .map(|tensor| format!("it holds {}", tensor.name))
    };
    evidence.map_or(Ok(()), |evidence| {
        Err(Error::AlreadyQuantized {
            path: source.root.clone(),
            evidence,
        })
    })
}

/// Turns the judgement into items with placed outputs.
fn assemble(
    request: &Request,
    source: &Checkpoint,
    scheme: Box<dyn Scheme>,
    group: usize,
    judged: Judged,
) -> Result<Plan> {
    let mut build = Build {
        source,
        scheme: scheme.as_ref(),
        items: Vec::new(),
        tensors: Vec::new(),
    };
    let mut modules: HashMap<usize, Vec<Module>> = HashMap::new();
    for candidate in judged.candidates {
        modules.entry(candidate.tensor).or_default().push(candidate.module);
    }
    let mut weights_quantized = 0;
    let mut quantized_lm_head = false;
    let mut quantized = Vec::new();
    for (at, tensor) in source.tensors.iter().enumerate() {
        for module in modules.remove(&at).unwrap_or_default() {
            let copy_of_table = module.name == HEAD && module.tensor != "lm_head.weight";
            weights_quantized += if copy_of_table {
                0
            } else {
                module.shape.elements() as u64
            };
            quantized_lm_head |= module.name == HEAD;
            quantized.push(module.name.clone());
            build.encode(module);
        }
        match (judged.reasons.get(&at), judged.cuts.get(&at)) {
            (Some(reason), Some((table, rows))) => build.copy_parts(at, table, rows, reason),
            (Some(reason), None) => build.copy(at, tensor.name.clone(), tensor.shape.clone(), 0, tensor.len, reason),
            (None, _) => {}
        }
    }
    let Build { items, mut tensors, .. } = build;
    check_names(source, &tensors, &items)?;
    let placed = place(&source.stem, &items, &mut tensors, request.max_shard_size, |members| {
        let mut metadata = source.metadata.clone();
        // What transformers and safetensors' own writer put there; some readers refuse a file without it.
        if scheme.writes_format() && metadata.get("format").is_none() {
            metadata.insert("format", "pt");
        }
        let held: Vec<(&str, Float)> = members
            .iter()
            .filter_map(|item| match &item.work {
                Work::Encode(module) => Some((module.name.as_str(), module.shape.dtype)),
                _ => None,
            })
            .collect();
        if let Some((key, value)) = scheme.file_metadata(&held) {
            metadata.insert(key, value);
        }
        metadata
    })?;
    let dense_linears: Vec<String> = dense_linears(source, &items);
    let mut warnings: Vec<String> = source.warnings.iter().cloned().chain(judged.warnings).collect();
    warnings.extend(readers::warnings(scheme.as_ref(), group, &quantized, &dense_linears));
    let mut config = source.config.clone().unwrap_or_default();
    let context = ConfigContext {
        quantized: &quantized,
        dense_linears: &dense_linears,
        partly_dense: dense_linears.iter().any(|name| !is_always_dense(name)),
        lm_head: quantized_lm_head,
    };
    if quantized_lm_head {
        config.set_everywhere("tie_word_embeddings", false);
    }
    config.set("quantization_config", scheme.config(group, &context));
    Ok(Plan {
        group,
        files: placed.files,
        index: placed.index,
        config: Some(config),
        sidecars: source.sidecars.clone(),
        quantized_embedding: judged.quantized_embedding,
        quantized_lm_head,
        warnings,
        source_bytes: items.iter().map(|item| item.work.bytes_in()).sum(),
        weights: float_elements(source),
        weights_quantized,
        scheme,
        items,
        tensors,
    })
}

fn float_elements(source: &Checkpoint) -> u64 {
    let float = source
        .tensors
        .iter()
        .filter(|tensor| Float::from_dtype(tensor.dtype).is_some());
    float.map(|tensor| tensor.shape.iter().product::<usize>() as u64).sum()
}

/// Modules with a 2-D float weight that the output keeps dense, embeddings aside.
fn dense_linears(source: &Checkpoint, items: &[Item]) -> Vec<String> {
    let copied = items.iter().filter_map(|item| match &item.work {
        Work::Copy(dense) => dense.name.strip_suffix(".weight").map(|name| (name, dense)),
        _ => None,
    });
    copied
        .filter(|(name, dense)| {
            let tensor = source.tensor(&dense.name);
            !is_embedding(name) && tensor.is_some_and(|t| t.shape.len() == 2 && Float::from_dtype(t.dtype).is_some())
        })
        .map(|(name, _)| name.to_string())
        .collect()
}

/// # Errors
/// [`Error::NameTaken`] where two outputs would have one name.
pub(super) fn check_names(source: &Checkpoint, tensors: &[OutputTensor], items: &[Item]) -> Result<()> {
    let mut seen = HashSet::new();
    for item in items {
        for tensor in &tensors[item.outputs.clone()] {
            if !seen.insert(tensor.name.as_str()) {
                let module = match &item.work {
                    Work::Encode(module) => module.name.clone(),
                    Work::Copy(dense) => dense.name.clone(),
                    Work::Decode(decode) => decode
                        .parts
                        .iter()
                        .map(|part| part.name.as_str())
                        .collect::<Vec<_>>()
                        .join(", "),
                };
                return Err(Error::NameTaken {
                    path: source.root.clone(),
                    tensor: tensor.name.clone(),
                    module,
                });
            }
        }
    }
    Ok(())
}

struct Build<'a> {
    source: &'a Checkpoint,
    scheme: &'a dyn Scheme,
    items: Vec<Item>,
    tensors: Vec<OutputTensor>,
}

impl Build<'_> {
    fn push(&mut self, work: Work, outputs: Vec<OutputTensor>) {
        let begin = self.tensors.len();
        self.tensors.extend(outputs);
        self.items.push(Item {
            work,
            outputs: begin..self.tensors.len(),
        });
    }

    fn encode(&mut self, module: Module) {
        let specs = self.scheme.outputs(&module.shape);
        let outputs = specs
            .into_iter()
            .map(|spec| {
                let (name, len) = (format!("{}.{}", module.name, spec.suffix), spec.bytes());
                OutputTensor::new(name, spec.dtype, spec.shape, len)
            })
            .collect();
        self.push(Work::Encode(module), outputs);
    }

    fn copy(&mut self, at: usize, name: String, shape: Vec<usize>, skip: u64, len: u64, reason: &str) {
        let tensor = &self.source.tensors[at];
        let parts = vec![SourceRange {
            file: tensor.file,
            offset: tensor.offset + skip,
            len,
        }];
        let output = OutputTensor::new(name.clone(), tensor.dtype, shape, len);
        self.push(
            Work::Copy(Dense {
                name,
                reason: reason.to_string(),
                parts,
            }),
            vec![output],
        );
    }

    /// Rows of a fused tensor under the names of its parts.
    fn copy_parts(&mut self, at: usize, table: &Fused, rows: &[usize; 3], reason: &str) {
        let tensor = &self.source.tensors[at];
        let (module, suffix) = tensor.name.rsplit_once('.').unwrap_or((&tensor.name, ""));
        let all = tensor.shape.first().copied().unwrap_or(0).max(1) as u64;
        let mut first = 0;
        for (part, &count) in table.parts.iter().zip(rows) {
            let mut shape = tensor.shape.clone();
            shape[0] = count;
            let name = format!("{}.{suffix}", part_name(module, table, part));
            let (skip, len) = (tensor.len / all * first, tensor.len / all * count as u64);
            self.copy(at, name, shape, skip, len, reason);
            first += count as u64;
        }
    }
}
