//! The plan of a quantizing run: every source tensor is named, judged by the tables, the layout and the request, and
//! given its outputs.

use super::layout::place;
use super::origin::{fused_rows, part_name};
use super::pattern::Patterns;
use super::readers;
use super::recognise::is_packed;
use super::rules::{fused, int4_verdict, is_always_dense, is_embedding, Fused, Verdict, HEAD};
use super::rules_uintx::{uintx_refuses, Family};
use super::*;
use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::error::{Error, Result};
use crate::scheme::{select, ConfigContext, Request as SchemeRequest, Vllm};
use crate::tensor::Float;
use std::collections::{BTreeMap, HashMap, HashSet};

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
        .is_some_and(|config| config.get("quantization_config").is_some())
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

/// A module that could be quantized: some rows of a source tensor.
struct Candidate {
    module: Module,
    /// In [`Checkpoint::tensors`].
    tensor: usize,
    set: Option<String>,
    /// Why it stays dense, if it does.
    reason: Option<String>,
}

/// What the judge came to.
struct Judged {
    /// In the source's order.
    candidates: Vec<Candidate>,
    /// Per source tensor that no module takes: why.
    reasons: HashMap<usize, String>,
    /// Fused tensors (weights and biases) to be cut, with the rows of each part.
    cuts: HashMap<usize, (&'static Fused, [usize; 3])>,
    quantized_embedding: bool,
    warnings: Vec<String>,
}

struct Judge<'a> {
    request: &'a Request,
    source: &'a Checkpoint,
    scheme: &'a dyn Scheme,
    group: usize,
    patterns: Patterns,
    layers: Option<usize>,
    family: Option<&'static Family>,
    /// Modules that the adapter names, where there is one.
    named: Option<HashSet<&'a str>>,
}

impl<'a> Judge<'a> {
    fn new(request: &'a Request, source: &'a Checkpoint, scheme: &'a dyn Scheme, group: usize) -> Result<Self> {
        let patterns = Patterns::new(&request.include, &request.exclude)?;
        let named = match &request.adapter {
            Some(adapter) => Some(adapter.modules_of(source)?),
            None => None,
        };
        let layers = source
            .config
            .as_ref()
            .and_then(|config| config.usize("num_hidden_layers"));
        Ok(Self {
            request,
            source,
            scheme,
            group,
            patterns,
            layers,
            family: Family::of(source),
            named,
        })
    }

    fn judge(&self) -> Result<Judged> {
        let warning = match self.request.qtype {
            QType::Uint(_) if self.group != QType::Uint(4).default_group() => Some(format!(
                "group {}: ai-toolkit reads uintN in groups of 64 alone, as torchao made them by default",
                self.group
            )),
            _ => None,
        };
        let mut judged = Judged {
            candidates: Vec::new(),
            reasons: HashMap::new(),
            cuts: HashMap::new(),
            quantized_embedding: false,
            warnings: warning.into_iter().collect(),
        };
        for (at, tensor) in self.source.tensors.iter().enumerate() {
            self.judge_tensor(at, tensor, &mut judged)?;
        }
        self.judge_head(&mut judged)?;
        self.patterns.check_used()?;
        if self.request.quantize_embedding && !judged.candidates.iter().any(|c| is_embedding(&c.module.name)) {
            return Err(Error::NoEmbedding);
        }
        leave_sets_dense(&mut judged);
        let unloadable = unloadable(&judged);
        match self.scheme.vllm() {
            Vllm::Target => {
                for (at, reason) in unloadable {
                    judged.candidates[at].reason = Some(reason);
                }
                // A member may break a rule that its set as a whole does not.
                leave_sets_dense(&mut judged);
            }
            Vllm::OneOfMany => {
                let named = |(at, why): (usize, String)| (&judged.candidates[at].module, why);
                let refused: Vec<_> = unloadable.into_iter().map(named).collect();
                judged.warnings.extend(readers::unloadable_warning(&refused));
            }
            Vllm::Unknown | Vllm::Refuses(_) => {}
        }
        self.settle(&mut judged);
        self.check_any(&judged)?;
        Ok(judged)
    }

    fn judge_tensor(&self, at: usize, tensor: &SourceTensor, judged: &mut Judged) -> Result<()> {
        let Some(name) = tensor.name.strip_suffix(".weight") else {
            judged.reasons.insert(at, "not a weight".to_string());
            return Ok(());
        };
        let dense = |reason: String, judged: &mut Judged| {
            judged.reasons.insert(at, reason);
            Ok(())
        };
        let Some(dtype) = Float::from_dtype(tensor.dtype) else {
            return dense(format!("{} weights are not quantized", tensor.dtype), judged);
        };
        let &[rows, columns] = tensor.shape.as_slice() else {
            return dense(format!("{} dimensions, not 2", tensor.shape.len()), judged);
        };
        let shape = Shape {
            rows,
            columns,
            group: self.group,
            dtype,
        };
        if let QType::Uint(_) = self.request.qtype {
            let reason = match &self.named {
                Some(named) if named.contains(name) => None,
                Some(_) => Some("not named by the adapter".to_string()),
                None => uintx_refuses(name, self.family),
            };
            if let Some(reason) = reason {
                self.patterns.refuse(&[name]);
                return dense(reason, judged);
            }
            self.propose(judged, at, name, &tensor.name, 0, shape, None, &[name]);
            return Ok(());
        }
        if name == HEAD || is_embedding(name) {
            let asked = if name == HEAD {
                self.request.quantize_lm_head
            } else {
                self.request.quantize_embedding
            };
            if !asked {
                let option = if name == HEAD {
                    "--quantize-lm-head"
                } else {
                    "--quantize-embedding"
                };
                self.patterns.refuse(&[name]);
                return dense(format!("only with {option}"), judged);
            }
            self.propose(judged, at, name, &tensor.name, 0, shape, None, &[name]);
            return Ok(());
        }
        match int4_verdict(name, self.layers) {
            Verdict::Dense { reason } => {
                self.patterns.refuse(&[name]);
                dense(reason, judged)
            }
            Verdict::Quantize { set } => {
                let Some(table) = fused(name).filter(|_| !self.request.keep_fused) else {
                    self.propose(judged, at, name, &tensor.name, 0, shape, set, &[name]);
                    return Ok(());
                };
                let cut = fused_rows(self.source, tensor)?;
                judged.cuts.insert(at, (table, cut));
                let bias = format!("{name}.bias");
                if let Some(at) = self.source.tensors.iter().position(|tensor| tensor.name == bias) {
                    judged
                        .cuts
                        .insert(at, (table, fused_rows(self.source, &self.source.tensors[at])?));
                }
                let mut first = 0;
                for (part, rows) in table.parts.iter().zip(cut) {
                    let part = part_name(name, table, part);
                    let shape = Shape { rows, ..shape };
                    let set = Some(name.to_string());
                    self.propose(judged, at, &part, &tensor.name, first, shape, set, &[&part, name]);
                    first += rows;
                }
                Ok(())
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn propose(
        &self,
        judged: &mut Judged,
        at: usize,
        name: &str,
        tensor: &str,
        first_row: usize,
        shape: Shape,
        set: Option<String>,
        known_as: &[&str],
    ) {
        let reason = self.patterns.refuse(known_as).or_else(|| self.scheme.refuse(&shape));
        let report_name = if name == HEAD {
            HEAD.to_string()
        } else {
            format!("{name}.weight")
        };
        let module = Module {
            name: name.to_string(),
            report_name,
            tensor: tensor.to_string(),
            first_row,
            shape,
            source: SourceRange {
                file: self.source.tensors[at].file,
                offset: self.source.tensors[at].offset + (first_row * shape.row_bytes()) as u64,
                len: shape.dense_bytes(),
            },
        };
        judged.candidates.push(Candidate {
            module,
            tensor: at,
            set,
            reason,
        });
    }

    /// A tied head becomes a quantized copy of the embedding.
    fn judge_head(&self, judged: &mut Judged) -> Result<()> {
        if !self.request.quantize_lm_head || self.source.tensor("lm_head.weight").is_some() {
            return Ok(());
        }
        let tied = self
            .source
            .config
            .as_ref()
            .and_then(|config| config.bool("tie_word_embeddings"))
            .unwrap_or(true);
        let table = self.source.tensors.iter().position(|tensor| {
            tensor.name.strip_suffix(".weight").is_some_and(is_embedding) && tensor.shape.len() == 2
        });
        let (true, Some(at)) = (tied, table) else {
            return Err(Error::NoHead);
        };
        let tensor = &self.source.tensors[at];
        let Some(dtype) = Float::from_dtype(tensor.dtype) else {
            return Err(Error::NoHead);
        };
        let shape = Shape {
            rows: tensor.shape[0],
            columns: tensor.shape[1],
            group: self.group,
            dtype,
        };
        self.propose(judged, at, HEAD, &tensor.name, 0, shape, None, &[HEAD]);
        Ok(())
    }

    /// Gives every tensor that ends up whole and dense its reason, and warns of what the user asked for in vain.
    fn settle(&self, judged: &mut Judged) {
        for candidate in judged.candidates.iter().filter(|candidate| candidate.reason.is_some()) {
            let reason = candidate.reason.clone().unwrap_or_default();
            let name = &candidate.module.name;
            if name == HEAD {
                judged
                    .warnings
                    .push(format!("--quantize-lm-head: the head stays dense: {reason}"));
            } else if is_embedding(name) {
                judged
                    .warnings
                    .push(format!("--quantize-embedding: {name} stays dense: {reason}"));
            }
            if !(name == HEAD && candidate.module.tensor != "lm_head.weight") {
                judged.reasons.entry(candidate.tensor).or_insert(reason);
            }
        }
        judged.quantized_embedding = judged
            .candidates
            .iter()
            .any(|c| c.reason.is_none() && is_embedding(&c.module.name));
        let (kept, dense): (Vec<_>, Vec<_>) = std::mem::take(&mut judged.candidates)
            .into_iter()
            .partition(|candidate| candidate.reason.is_none());
        // A fused projection that stays dense stays whole, its bias with it.
        for candidate in &dense {
            if judged.cuts.remove(&candidate.tensor).is_some() {
                let bias = candidate.module.tensor.replace(".weight", ".bias");
                if let Some(at) = self.source.tensors.iter().position(|tensor| tensor.name == bias) {
                    judged.cuts.remove(&at);
                }
            }
        }
        judged.candidates = kept;
    }

    fn check_any(&self, judged: &Judged) -> Result<()> {
        if !judged.candidates.is_empty() {
            return Ok(());
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        judged
            .reasons
            .values()
            .for_each(|reason| *counts.entry(reason).or_default() += 1);
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        let why = counts
            .iter()
            .take(4)
            .map(|(reason, count)| format!("{count} x {reason}"))
            .collect::<Vec<_>>();
        let why = if why.is_empty() {
            "it has no tensors".to_string()
        } else {
            why.join("; ")
        };
        Err(Error::NothingToQuantize {
            path: self.source.root.clone(),
            why,
        })
    }
}

/// Readers load a fused set all quantized or all dense, so one member that cannot be quantized keeps the others dense.
fn leave_sets_dense(judged: &mut Judged) {
    let mut broken: HashMap<String, String> = HashMap::new();
    for candidate in &judged.candidates {
        if let (Some(set), Some(reason)) = (&candidate.set, &candidate.reason) {
            let member = candidate.module.name.rsplit('.').next().unwrap_or_default();
            broken
                .entry(set.clone())
                .or_insert_with(|| format!("its fused set stays dense: {member}: {reason}"));
        }
    }
    for candidate in &mut judged.candidates {
        if candidate.reason.is_none() {
            candidate.reason = candidate.set.as_ref().and_then(|set| broken.get(set)).cloned();
        }
    }
}

/// What vLLM cannot load of what is to be quantized: indexes of candidates, and why.
fn unloadable(judged: &Judged) -> Vec<(usize, String)> {
    let quantized = || judged.candidates.iter().enumerate().filter(|(_, c)| c.reason.is_none());
    let mut rows: HashMap<String, usize> = HashMap::new();
    for (_, candidate) in quantized() {
        *rows.entry(layer_name(candidate)).or_default() += candidate.module.shape.rows;
    }
    quantized()
        .filter_map(|(at, c)| Some((at, readers::vllm_refuses(&c.module, rows[&layer_name(c)])?)))
        .collect()
}

/// The layer that readers build of a module: its fused set, or itself.
fn layer_name(candidate: &Candidate) -> String {
    let own = || candidate.module.name.clone();
    candidate.set.clone().unwrap_or_else(own)
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
    check_names(&tensors, &items)?;
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
    });
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
        config.set("tie_word_embeddings", false);
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
pub(super) fn check_names(tensors: &[OutputTensor], items: &[Item]) -> Result<()> {
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
