//! Where an output tensor's values come from: the same name in the source, some rows of a fused projection, or for a
//! tied head the embedding table.

use super::rules::{fused, fused_by_part, is_embedding, Fused, HEAD};
use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::error::{Error, Result};

/// Rows of a source tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// In [`Checkpoint::tensors`].
    pub tensor: usize,
    pub first_row: usize,
    pub rows: usize,
}

/// The rows of `source` that become the tensor `name` (`...weight`, `...bias`, ..) of an output, or `None`.
///
/// # Errors
/// Where the rows of a fused projection cannot be told.
pub fn origin(source: &Checkpoint, name: &str) -> Result<Option<Origin>> {
    let whole = |at: usize| {
        let rows = source.tensors[at].shape.first().copied().unwrap_or(1);
        Some(Origin {
            tensor: at,
            first_row: 0,
            rows,
        })
    };
    if let Some(at) = source.position(name) {
        return Ok(whole(at));
    }
    let Some((module, suffix)) = name.rsplit_once('.') else {
        return Ok(None);
    };
    if let Some((table, part)) = fused_by_part(module) {
        let fused = format!("{}.{suffix}", whole_name(module, table, part));
        if let Some(at) = source.position(&fused) {
            let rows = fused_rows(source, &source.tensors[at])?;
            let first_row = rows[..part].iter().sum();
            return Ok(Some(Origin {
                tensor: at,
                first_row,
                rows: rows[part],
            }));
        }
    }
    if module == HEAD && suffix == "weight" {
        let table = |tensor: &SourceTensor| tensor.name.strip_suffix(".weight").is_some_and(is_embedding);
        return Ok(source.tensors.iter().position(table).and_then(whole));
    }
    Ok(None)
}

/// A fused projection and its parts in the order of their rows.
pub struct FusedSet {
    /// `model.layers.0.self_attn.q_k_v_proj`
    pub whole: String,
    pub parts: Vec<String>,
}

/// The fused projection that `module` is a part of where the source has it fused.
pub fn fused_set(module: &str) -> Option<FusedSet> {
    let (table, part) = fused_by_part(module)?;
    let whole = whole_name(module, table, part);
    let parts = table.parts.iter().map(|part| part_name(&whole, table, part)).collect();
    Some(FusedSet { whole, parts })
}

/// Rows of q, k and v in a fused weight or bias: q = num_attention_heads * head_dim, k = v = num_key_value_heads *
/// head_dim.
///
/// # Errors
/// [`Error::ConfigKeyMissing`], [`Error::ConfigKeyNoCount`]; [`Error::FusedRows`] where they do not add up to the tensor's rows.
pub(super) fn fused_rows(source: &Checkpoint, tensor: &SourceTensor) -> Result<[usize; 3]> {
    let missing = |key, hint: Option<String>| Error::ConfigKeyMissing {
        path: match &source.config {
            Some(config) => config.path.clone(),
            None => source.root.clone(),
        },
        tensor: tensor.name.clone(),
        key,
        hint,
    };
    let Some(config) = &source.config else {
        let hint = if source.is_folder {
            "the folder has none"
        } else {
            "give the folder as --src"
        };
        return Err(missing("num_attention_heads", Some(hint.to_string())));
    };
    // What is there and no count is not taken for absent. Three products of two counts below 2^31 are below 2^64.
    let count = |key| match (config.usize(key), config.shown(key)) {
        (Some(count), _) if count <= i32::MAX as usize => Ok(Some(count as u64)),
        (_, Some(value)) => Err(Error::ConfigKeyNoCount {
            path: config.path.clone(),
            tensor: tensor.name.clone(),
            key,
            value,
        }),
        (_, None) => Ok(None),
    };
    let needed = |key| count(key)?.ok_or_else(|| missing(key, None));
    let heads = needed("num_attention_heads")?;
    let kv_heads = count("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match count("head_dim")? {
        Some(dim) => dim,
        // As transformers derives it.
        None => needed("hidden_size")? / heads.max(1),
    };
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let total = q + 2 * kv;
    if total != rows as u64 {
        return Err(Error::FusedRows {
            path: config.path.clone(),
            tensor: tensor.name.clone(),
            rows,
            q,
            kv,
            total,
        });
    }
    // Neither is more than the rows.
    Ok([q as usize, kv as usize, kv as usize])
}

/// `model.layers.0.self_attn.q_k_v_proj` -> `model.layers.0.self_attn.q_proj`
pub(super) fn part_name(module: &str, table: &Fused, part: &str) -> String {
    let parent = module.rsplit_once('.').map_or("", |(parent, _)| parent);
    debug_assert!(fused(module).is_some_and(|found| found.suffix == table.suffix));
    format!("{parent}.{part}")
}

/// `model.layers.0.self_attn.q_proj` -> `model.layers.0.self_attn.q_k_v_proj`
fn whole_name(module: &str, table: &Fused, part: usize) -> String {
    let name = table.suffix.rsplit('.').next().unwrap_or(table.suffix);
    format!("{}{name}", &module[..module.len() - table.parts[part].len()])
}
