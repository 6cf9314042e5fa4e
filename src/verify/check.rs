//! Structure: modules complete, origins found; and the SNRs of what is stored.

use super::Outcome;
use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::error::Result;
use crate::plan::{
    find_modules, is_packed, module_metadata, origin, ModuleMetadata, Origin, PackedModule, SourceRange,
};
use crate::report::{self, Report};
use crate::scheme::Recognised;
use crate::tensor::{ErrorSums, Float};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;

pub(super) const HEAD: &str = "lm_head";

/// A complete packed module and the weights that it was made from.
pub(super) struct Stack<'a> {
    pub module: PackedModule<'a>,
    pub source: Option<SourceRange>,
    pub origin: Option<Origin>,
}

impl Stack<'_> {
    /// As a report names the module.
    pub fn report_name(&self) -> String {
        match self.module.name.as_str() {
            HEAD => HEAD.to_string(),
            name => format!("{name}.weight"),
        }
    }
}

pub(super) struct Check<'a> {
    pub checkpoint: &'a Checkpoint,
    pub source: Option<&'a Checkpoint>,
    pub report: Option<&'a Report>,
    pub scheme: Recognised,
    pub stacks: Vec<Stack<'a>>,
    /// With the bytes of the source they must equal.
    pub dense: Vec<(&'a SourceTensor, Option<SourceRange>)>,
    pub sums: Vec<Mutex<Vec<ErrorSums>>>,
}

impl<'a> Check<'a> {
    pub fn new(
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
    pub fn structure(&mut self, outcome: &mut Outcome) -> Result<()> {
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
        let metadata = self.metadata(dtype_of, outcome);
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
            let origin = from.map(|(origin, ..)| origin);
            self.stacks.push(Stack { module, source, origin });
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

    /// Folds the sums and compares the SNRs with the report's.
    pub fn figures(&self, min_snr: Option<f64>, outcome: &mut Outcome) {
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
            let name = stack.report_name();
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
pub(super) fn module_of(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}
