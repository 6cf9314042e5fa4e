//! The packed modules of a checkpoint, by the suffixes of its scheme.

use crate::checkpoint::{Checkpoint, SourceTensor};
use crate::scheme::{Recognised, Shape, StoredFault};
use crate::tensor::Float;
use std::collections::{BTreeMap, BTreeSet};

/// A complete packed module.
pub struct PackedModule<'a> {
    pub name: String,
    pub shape: Shape,
    /// In the order of [`Scheme::outputs`](crate::scheme::Scheme::outputs).
    pub tensors: Vec<&'a SourceTensor>,
}

/// Every module that has packed tensors, and those of `expected` that must, with what is wrong with it where something
/// is. `dtype_of` gives the dtype of a module's dense weight where the stored tensors do not tell.
pub fn find_modules<'a>(
    checkpoint: &'a Checkpoint,
    recognised: &Recognised,
    expected: impl Iterator<Item = String>,
    dtype_of: impl Fn(&str) -> Float,
) -> Vec<(String, Result<PackedModule<'a>, StoredFault>)> {
    let scheme = recognised.scheme.as_ref();
    let suffixes = scheme.suffixes();
    // Per module: how many of the suffixes it has, and whether the first, which names it, is among them.
    let mut counts: BTreeMap<&str, (usize, bool)> = BTreeMap::new();
    for tensor in &checkpoint.tensors {
        let Some((module, suffix)) = tensor.name.rsplit_once('.') else {
            continue;
        };
        if let Some(at) = suffixes.iter().position(|known| *known == suffix) {
            let entry = counts.entry(module).or_default();
            entry.0 += 1;
            entry.1 |= at == 0;
        }
    }
    let stored = counts.into_iter().filter(|(_, (count, first))| *first || *count > 1);
    let names: BTreeSet<String> = stored.map(|(name, _)| name.to_string()).chain(expected).collect();
    let module = |name: &str| {
        let tensors: Vec<Option<&SourceTensor>> = suffixes
            .iter()
            .map(|suffix| checkpoint.tensor(&format!("{name}.{suffix}")))
            .collect();
        let found: Vec<_> = tensors
            .iter()
            .map(|tensor| tensor.map(|tensor| (tensor.dtype, tensor.shape.as_slice())))
            .collect();
        let shape = scheme.dense_shape(&found, recognised.group, dtype_of(name))?;
        Ok(PackedModule {
            name: name.to_string(),
            shape,
            tensors: tensors.into_iter().flatten().collect(),
        })
    };
    names
        .into_iter()
        .map(|name| {
            let found = module(&name);
            (name, found)
        })
        .collect()
}
