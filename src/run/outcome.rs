//! What a run tells: its report, and where a fault lies.

use super::task::{ModuleState, TensorState};
use super::Run;
use crate::checkpoint::{Reader, DENSE_REPORT_FILE, REPORT_FILE};
use crate::error::Error;
use crate::plan::{Module, Work};
use crate::report::{self, DenseReport, DenseSummary, Report, TensorReport};
use crate::scheme::QType;
use crate::tensor::{Fault, Float};
use serde_json::Value;
use std::collections::BTreeMap;

impl Run<'_> {
    /// Names the tensor, row and column (or group) of a fault, counted in the source's own tensor.
    pub(super) fn fault(&self, reader: &mut Reader, module: &Module, fault: Fault) -> Error {
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
                    QType::Int4 => ("float16", 65504.0),
                    QType::Uint(_) => (shape.dtype.torch_name(), float_max(shape.dtype)),
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

    pub(super) fn summary(&self) -> DenseSummary {
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
            files: self.plan.written(DENSE_REPORT_FILE),
            bytes: self.plan.weight_bytes(),
        }
    }

    pub(super) fn report(&self, modules: &[ModuleState]) -> Report {
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
            files: plan.written(REPORT_FILE),
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
