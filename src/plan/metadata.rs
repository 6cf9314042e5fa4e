//! What the files of a packed checkpoint say of their modules in `__metadata__`, for layouts that keep something there.

use crate::checkpoint::Checkpoint;
use crate::scheme::Scheme;
use crate::tensor::Float;
use std::collections::{BTreeMap, BTreeSet};

/// Dtypes of dense weights by module, and the contradictions: a module and a sentence.
#[derive(Default)]
pub struct ModuleMetadata {
    pub dtypes: BTreeMap<String, Float>,
    pub faults: Vec<(String, String)>,
}

/// Reads the metadata of every file and compares it with the tensors that the file holds.
pub fn module_metadata(checkpoint: &Checkpoint, scheme: &dyn Scheme) -> ModuleMetadata {
    let mut found = ModuleMetadata::default();
    let (Some(key), Some(first)) = (scheme.metadata_key(), scheme.suffixes().first()) else {
        return found;
    };
    for (index, file) in checkpoint.files.iter().enumerate() {
        let stored = scheme.stored_dtypes(&file.metadata);
        let held = checkpoint.tensors.iter().filter(|tensor| tensor.file == index);
        let modules: BTreeSet<&str> = held
            .filter_map(|tensor| tensor.name.strip_suffix(first)?.strip_suffix('.'))
            .collect();
        for module in modules.iter().filter(|module| !stored.contains_key(**module)) {
            let what = format!("{key} of {} does not name it", file.name);
            found.faults.push((module.to_string(), what));
        }
        for (module, dtype) in stored {
            if !modules.contains(module.as_str()) {
                let what = format!("{key} of {} names it, and the file does not hold it", file.name);
                found.faults.push((module, what));
                continue;
            }
            match dtype {
                Ok(dtype) => drop(found.dtypes.insert(module, dtype)),
                Err(what) => found.faults.push((module, what)),
            }
        }
    }
    found
}
