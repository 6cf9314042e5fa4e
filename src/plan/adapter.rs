//! `--ara`: the modules that an accuracy-recovery adapter was trained on, read from the names of its tensors.

use super::rules_uintx::bare;
use crate::checkpoint::{read_header, Checkpoint};
use crate::error::{Error, Result};
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// Ends of a module's name in an adapter's keys.
const MARKS: &[&str] = &[".lora_", ".lokr_w1"];

/// An adapter and the modules that it names.
#[derive(Clone, Debug)]
pub struct Adapter {
    path: PathBuf,
    modules: BTreeSet<String>,
}

impl Adapter {
    /// Reads the header of an adapter, and no weights.
    ///
    /// # Errors
    /// A file that is not safetensors, or has no key of a LoRA or LoKr.
    pub fn open(path: &Path) -> Result<Adapter> {
        let header = read_header(path)?;
        Adapter::new(path, header.tensors.iter().map(|tensor| tensor.name.as_str()))
    }

    fn new<'a>(path: &Path, keys: impl Iterator<Item = &'a str>) -> Result<Adapter> {
        let modules: BTreeSet<String> = keys.filter_map(module_of).map(str::to_string).collect();
        if modules.is_empty() {
            let path = path.display();
            let why = "no key of a LoRA or LoKr in it (.lora_.. or .lokr_w1), so it names no module";
            return Err(Error::BadRequest(format!("--ara {path}: {why}")));
        }
        let path = path.to_path_buf();
        Ok(Adapter { path, modules })
    }

    /// The modules of `source` that the adapter names.
    ///
    /// A name is taken as it is; else without the prefix that either side may have before it; else with `_` for `.`, as
    /// LyCORIS and kohya's tools write names.
    ///
    /// # Errors
    /// [`Error::BadRequest`] with the first module that the source lacks.
    pub(super) fn modules_of<'a>(&self, source: &'a Checkpoint) -> Result<HashSet<&'a str>> {
        let all: Vec<&str> = source
            .tensors
            .iter()
            .filter_map(|tensor| tensor.name.strip_suffix(".weight"))
            .collect();
        let mangle = |name: &str| bare(name).replace(['.', '$'], "_");
        let mangled: Vec<String> = all.iter().map(|name| mangle(name)).collect();
        let mut found = HashSet::new();
        for module in &self.modules {
            let exact = all.iter().find(|name| **name == module.as_str());
            let bare = || all.iter().find(|name| bare(name) == bare_of(module));
            let alike = || {
                let wanted = mangle(&module.replace("$$", "."));
                all.iter()
                    .zip(&mangled)
                    .find(|(_, name)| **name == wanted)
                    .map(|(name, _)| name)
            };
            let Some(name) = exact.or_else(bare).or_else(alike) else {
                let (adapter, source) = (self.path.display(), source.root.display());
                let what = format!("--ara {adapter}: it names {module}, and {source} has no {module}.weight");
                return Err(Error::BadRequest(what));
            };
            found.insert(*name);
        }
        Ok(found)
    }
}

fn bare_of(module: &str) -> &str {
    bare(module)
}

/// The module that a key names: what is before `.lora_` or `.lokr_w1`, less prefixes of tools.
fn module_of(key: &str) -> Option<&str> {
    let end = MARKS.iter().find_map(|mark| key.find(mark))?;
    let name = &key[..end];
    let name = name.strip_prefix("lycoris_").unwrap_or(name);
    let mangled = ["transformer_", "transformer$$", "diffusion_model_"];
    let name = mangled
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix).filter(|rest| !rest.starts_with("blocks")))
        .unwrap_or(name);
    Some(bare(name))
}
