//! What becomes of each source tensor: the tables of names, the request's patterns, the layout's shapes and the readers'
//! rules, in that order; a tensor that stays dense keeps the first reason.

use super::origin::{fused_rows, part_name};
use super::pattern::Patterns;
use super::readers;
use super::rules::{fused, int4_verdict, is_embedding, Fused, Verdict, HEAD};
use super::rules_uintx::{uintx_refuses, Family};
use super::*;
use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::error::{Error, Result};
use crate::scheme::Vllm;
use crate::tensor::Float;
use std::collections::{BTreeMap, HashMap, HashSet};

/// A module that could be quantized: some rows of a source tensor.
pub(super) struct Candidate {
    pub module: Module,
    /// In [`Checkpoint::tensors`].
    pub tensor: usize,
    set: Option<String>,
    /// Why it stays dense, if it does.
    reason: Option<String>,
}

/// What the judge came to.
pub(super) struct Judged {
    /// In the source's order.
    pub candidates: Vec<Candidate>,
    /// Per source tensor that no module takes: why.
    pub reasons: HashMap<usize, String>,
    /// Fused tensors (weights and biases) to be cut, with the rows of each part.
    pub cuts: HashMap<usize, (&'static Fused, [usize; 3])>,
    pub quantized_embedding: bool,
    pub warnings: Vec<String>,
}

pub(super) struct Judge<'a> {
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
    pub fn new(request: &'a Request, source: &'a Checkpoint, scheme: &'a dyn Scheme, group: usize) -> Result<Self> {
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

    pub fn judge(&self) -> Result<Judged> {
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
