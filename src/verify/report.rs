//! What the report says, against what is stored and, where it is given, the source.

use super::check::{module_of, Check, Stack, HEAD};
use super::Outcome;
use crate::checkpoint::{REPORT_FILE, TOOL_MARK};
use crate::plan::{fused_set, is_embedding};
use crate::report::{self, Report, TensorReport};
use crate::tensor::Float;
use serde_json::{json, Value};
use std::collections::{BTreeMap, BTreeSet};

impl Check<'_> {
    /// All that the report says but hashes and SNRs, which take the bytes.
    pub fn against_report(&self, outcome: &mut Outcome) {
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
        let mut named: BTreeSet<&str> = BTreeSet::new();
        for tensor in &report.per_tensor {
            let module = module_of(&tensor.name);
            if !named.insert(module) {
                outcome.find(&tensor.name, "is in the report twice");
            }
            if let Some(stack) = stored.get(module) {
                self.entry(tensor, stack, outcome);
                if self.source.is_none() {
                    self.possible_source(report, tensor, &stored, outcome);
                }
            }
        }
        for stack in &self.stacks {
            if !named.contains(stack.module.name.as_str()) {
                outcome.find(&stack.module.name, "is quantized here and not in the report");
            }
        }
        self.report_dense(report, outcome);
        self.report_totals(report, outcome);
    }

    /// One quantized weight: its figures, and with the source where it comes from.
    fn entry(&self, tensor: &TensorReport, stack: &Stack, outcome: &mut Outcome) {
        let shape = &stack.module.shape;
        let size = [shape.rows, shape.columns];
        if tensor.shape != size || tensor.group != shape.group {
            let what = format!(
                "is {size:?} in groups of {}, the report says {:?} in groups of {}",
                shape.group, tensor.shape, tensor.group
            );
            outcome.find(&tensor.name, what);
        }
        let name = stack.report_name();
        let stored: u64 = stack.module.tensors.iter().map(|tensor| tensor.len).sum();
        let mut facts = vec![
            ("name", json!(tensor.name), json!(name)),
            ("bytes_out", json!(tensor.bytes_out), json!(stored)),
        ];
        match Float::from_torch_name(&tensor.dtype) {
            Some(dtype) => {
                let dense = shape.elements() as u64 * dtype.size() as u64;
                facts.push(("bytes_in", json!(tensor.bytes_in), json!(dense)));
            }
            None => {
                let what = format!("the report says dtype {:?}, which is never quantized", tensor.dtype);
                outcome.find(&name, what);
            }
        }
        if let (Some(source), Some(origin)) = (self.source, &stack.origin) {
            let from = &source.tensors[origin.tensor];
            let dtype = Float::from_dtype(from.dtype).map(Float::torch_name);
            facts.push(("source", json!(tensor.source), json!(from.name)));
            facts.push(("first_row", json!(tensor.first_row), json!(origin.first_row)));
            facts.push(("dtype", json!(tensor.dtype), json!(dtype)));
        }
        for (key, said, is) in facts {
            if said != is {
                outcome.find(&name, format!("the report says {key} {said}, and it should be {is}"));
            }
        }
    }

    /// Without the source: whether the weight can come from where the report says. Dequantizing obeys it.
    fn possible_source(
        &self,
        report: &Report,
        tensor: &TensorReport,
        stored: &BTreeMap<&str, &Stack>,
        outcome: &mut Outcome,
    ) {
        let module = module_of(&tensor.name);
        let from = module_of(&tensor.source);
        let is_weight = tensor.source.len() > from.len();
        let set = fused_set(module);
        let tied = || module == HEAD && is_embedding(from) && self.has_weight(from, stored);
        let first_row = match &set {
            Some(set) if is_weight && from == set.whole => {
                let before = set.parts.iter().take_while(|part| *part != module);
                before
                    .filter_map(|part| Some(stored.get(part.as_str())?.module.shape.rows))
                    .sum()
            }
            _ if is_weight && (from == module || tied()) => 0,
            _ => {
                let what = format!("the report says source {:?}, which it cannot be", tensor.source);
                outcome.find(&tensor.name, what);
                return;
            }
        };
        if tensor.first_row != first_row {
            let what = format!(
                "the report says first_row {}, and it should be {first_row}",
                tensor.first_row
            );
            outcome.find(&tensor.name, what);
        }
        // The parts of one projection were cut from it together or not at all.
        for part in set.iter().flat_map(|set| &set.parts) {
            let whole = set.as_ref().map(|set| set.whole.as_str()).unwrap_or_default();
            let other = report.per_tensor.iter().find(|other| module_of(&other.name) == part);
            let other_fused = other.is_some_and(|other| module_of(&other.source) == whole);
            if (from == whole) != other_fused && (from == whole || other.is_some()) {
                let there = other.map_or("is not in it", |other| other.source.as_str());
                let what = format!("the report says source {:?}, for {part} {there}", tensor.source);
                outcome.find(&tensor.name, what);
            }
            if let Some(other) = other.filter(|other| other_fused && from == whole && other.dtype != tensor.dtype) {
                let what = format!("the report says dtype {}, for {part} {}", tensor.dtype, other.dtype);
                outcome.find(&tensor.name, what);
            }
        }
    }

    fn has_weight(&self, module: &str, stored: &BTreeMap<&str, &Stack>) -> bool {
        stored.contains_key(module) || self.checkpoint.tensor(&format!("{module}.weight")).is_some()
    }

    /// The report's list of dense tensors and those that are here.
    fn report_dense(&self, report: &Report, outcome: &mut Outcome) {
        let here: BTreeSet<&str> = self.dense.iter().map(|(tensor, _)| tensor.name.as_str()).collect();
        let mut listed = BTreeSet::new();
        for dense in &report.dense {
            if !listed.insert(dense.name.as_str()) {
                outcome.find(&dense.name, "is twice in the report's list of dense tensors");
            }
        }
        for name in listed.difference(&here) {
            outcome.find(name, "is in the report's list of dense tensors and not dense here");
        }
        for name in here.difference(&listed) {
            outcome.find(name, "is dense here and not in the report's list of dense tensors");
        }
    }

    /// What the report says of the whole, against its own tensors and what config.json names.
    fn report_totals(&self, report: &Report, outcome: &mut Outcome) {
        let (mean, min) = report::summarise(report.per_tensor.iter().map(|tensor| tensor.snr_db));
        // Counts that were tampered with may be of any size.
        let sum = |count: fn(&TensorReport) -> u64| report.per_tensor.iter().map(count).fold(0, u64::saturating_add);
        let (zero, underflowed) = (
            sum(|tensor| tensor.zero_groups),
            sum(|tensor| tensor.underflowed_groups),
        );
        let has = |test: &dyn Fn(&str) -> bool| json!(self.stacks.iter().any(|stack| test(&stack.module.name)));
        let scheme = self.scheme.scheme.as_ref();
        let totals = [
            ("group", json!(report.group), json!(self.scheme.group)),
            ("qtype", json!(report.qtype), json!(scheme.qtype().to_string())),
            ("layout", json!(report.layout), json!(scheme.layout())),
            ("symmetric", json!(report.symmetric), json!(scheme.symmetric())),
            ("tensors", json!(report.tensors), json!(report.per_tensor.len())),
            ("snr_db_mean", json!(report.snr_db_mean), json!(mean)),
            ("snr_db_min", json!(report.snr_db_min), json!(min)),
            ("zero_groups", json!(report.zero_groups), json!(zero)),
            (
                "underflowed_groups",
                json!(report.underflowed_groups),
                json!(underflowed),
            ),
            (
                "quantized_embedding",
                json!(report.quantized_embedding),
                has(&is_embedding),
            ),
            (
                "quantized_lm_head",
                json!(report.quantized_lm_head),
                has(&|name| name == HEAD),
            ),
        ];
        let mut differs = |key: &str, said: Value, is: Value| {
            outcome.find(REPORT_FILE, format!("{key} is {said}, and should be {is}"));
        };
        for (key, said, is) in totals {
            if said != is {
                differs(key, said, is);
            }
        }
        let coverage = self.coverage(report);
        if !close(report.coverage, coverage) {
            differs("coverage", json!(report.coverage), json!(coverage));
        }
        let bits: Vec<f64> = self.bits_per_weight(report);
        if let (Some(first), false) = (
            bits.first(),
            bits.iter().any(|bits| close(report.bits_per_weight, *bits)),
        ) {
            differs("bits_per_weight", json!(report.bits_per_weight), json!(first));
        }
        if !report.tool.starts_with(TOOL_MARK) {
            let what = format!("tool is {:?}, and should begin with {TOOL_MARK:?}", report.tool);
            outcome.find(REPORT_FILE, what);
        }
    }

    /// Share of the weights that are quantized. A tied head is a copy, so its weights do not count again.
    fn coverage(&self, report: &Report) -> f64 {
        let head = format!("{HEAD}.weight");
        let copied = match self.source {
            Some(source) => source.tensor(&head).is_none(),
            None => report
                .per_tensor
                .iter()
                .any(|tensor| tensor.name == HEAD && tensor.source != head),
        };
        let own = self
            .stacks
            .iter()
            .filter(|stack| !(copied && stack.module.name == HEAD));
        let quantized: usize = own.map(|stack| stack.module.shape.elements()).sum();
        let float = self
            .dense
            .iter()
            .filter(|(tensor, _)| Float::from_dtype(tensor.dtype).is_some());
        let dense: usize = float.map(|(tensor, _)| tensor.shape.iter().product::<usize>()).sum();
        quantized as f64 / ((quantized + dense) as f64).max(1.0)
    }

    /// What the scheme stores per weight. The report gives that of the source's first module: without the source it may
    /// be any of them.
    fn bits_per_weight(&self, report: &Report) -> Vec<f64> {
        let of = |dtype| self.scheme.scheme.bits_per_weight(self.scheme.group, dtype);
        if self.source.is_some() {
            let placed = self.stacks.iter().filter_map(|stack| Some((stack, stack.origin?)));
            let first = placed.min_by_key(|(_, origin)| (origin.tensor, origin.first_row));
            return first
                .map(|(stack, _)| of(stack.module.shape.dtype))
                .into_iter()
                .collect();
        }
        let dtypes = report
            .per_tensor
            .iter()
            .filter_map(|tensor| Float::from_torch_name(&tensor.dtype));
        dtypes.map(of).collect()
    }
}

/// Equal but for what printing and parsing may have lost.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 4.0 * f64::EPSILON * b.abs()
}
