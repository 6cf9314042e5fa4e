//! What named readers cannot load: why a weight stays dense in a layout that is written for vLLM, and what the user is
//! warned of. From the sources of vLLM 0.32 (its CPU kernel for packed int4, its padded vocabulary) and transformers 5.24.

use super::rules::{is_embedding, HEAD};
use super::Module;
use crate::scheme::{Scheme, Vllm};

/// Groups that vLLM loads.
const VLLM_GROUPS: [usize; 3] = [32, 64, 128];

/// Why vLLM cannot load a module, or nothing. `layer_rows`: of its fused set together, which vLLM stacks into one layer.
pub(super) fn vllm_refuses(module: &Module, layer_rows: usize) -> Option<String> {
    let (rows, columns) = (module.shape.rows, module.shape.columns);
    if !columns.is_multiple_of(32) {
        return Some(format!(
            "in_features {columns} is not divisible by 32, which vLLM needs"
        ));
    }
    if module.name == HEAD && !rows.is_multiple_of(64) {
        // vLLM pads the vocabulary to a multiple of 64, and packed tensors are not padded.
        return Some(format!(
            "its vocabulary of {rows} is not divisible by 64, which vLLM needs"
        ));
    }
    if !rows.is_multiple_of(8) {
        return Some(format!("out_features {rows} is not divisible by 8, which vLLM needs"));
    }
    if !layer_rows.is_multiple_of(32) {
        let whole = if layer_rows == rows { "" } else { " of its fused set" };
        return Some(format!(
            "out_features {layer_rows}{whole} is not divisible by 32, which vLLM needs"
        ));
    }
    None
}

/// One warning for the modules that vLLM cannot load of a layout that others load too.
pub(super) fn unloadable_warning(refused: &[(&Module, String)]) -> Option<String> {
    let (first, why) = refused.first()?;
    let count = match refused.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    Some(format!(
        "vLLM cannot load {}{count}: {why}; --exclude leaves a module dense",
        first.name
    ))
}

/// What the user should know of a checkpoint of `scheme` with these quantized modules and dense linears.
pub(super) fn warnings(scheme: &dyn Scheme, group: usize, quantized: &[String], dense: &[String]) -> Vec<String> {
    let mut warnings = Vec::new();
    match scheme.vllm() {
        Vllm::Unknown => return warnings,
        Vllm::Refuses(what) => warnings.push(format!("vLLM refuses {what}")),
        Vllm::OneOfMany | Vllm::Target => {
            if !VLLM_GROUPS.contains(&group) {
                warnings.push(format!(
                    "vLLM does not load groups of {group}; --group 32, 64 or 128 it does"
                ));
            }
            warnings.extend(quantized.iter().find(|name| is_embedding(name)).map(|name| {
                format!("vLLM cannot load a quantized embedding ({name}); without --quantize-embedding it stays dense")
            }));
        }
    }
    if scheme.fresh_head_in_transformers() && quantized.iter().any(|name| name == HEAD) {
        warnings.push(
            "transformers ignores a quantized lm_head and initialises a fresh one, so its output is noise; without \
             --quantize-lm-head the head stays dense"
                .to_string(),
        );
    }
    let hidden = quantized.iter().find_map(|name| {
        let dense = dense.iter().find(|dense| scheme.hides(dense, name))?;
        Some(format!(
            "vLLM matches the names of dense modules by parts: {dense} makes it take {name} for dense too; --exclude \
             {name:?}, or use --layout compressed-tensors"
        ))
    });
    warnings.extend(hidden);
    warnings
}
