//! `--ara`: the modules that an accuracy-recovery adapter was trained on, read from the names of its tensors.

use super::rules_uintx::bare;
use crate::checkpoint::{read_header, Checkpoint};
use crate::error::{Error, Result};
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// Ends of a module's name in an adapter's keys.
const MARKS: &[&str] = &[".lora_", ".lokr_w1"];

/// What mangled names may have before them.
const MANGLED_PREFIXES: &[&str] = &["transformer_", "diffusion_model_", "lora_unet_", "lora_transformer_"];

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
        let mut modules = BTreeSet::new();
        for key in keys {
            match module_of(key) {
                Some("") => {
                    let why = format!("--ara {}: the key {key:?} has no module's name", path.display());
                    return Err(Error::BadRequest(why));
                }
                Some(module) => _ = modules.insert(module.to_string()),
                None => {}
            }
        }
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
        let mangled: Vec<String> = all.iter().map(|name| mangle(bare(name))).collect();
        let mut found = HashSet::new();
        for module in &self.modules {
            let exact = all.iter().find(|name| **name == module.as_str());
            let stripped = || all.iter().find(|name| bare(name) == bare(module));
            let alike = || {
                let whole = mangle(module);
                let wanted = |name: &String| {
                    let rest = |prefix: &&str| whole.strip_prefix(*prefix) == Some(name);
                    *name == whole || MANGLED_PREFIXES.iter().any(rest)
                };
                mangled.iter().position(wanted).map(|at| &all[at])
            };
            let Some(name) = exact.or_else(stripped).or_else(alike) else {
                let (adapter, source) = (self.path.display(), source.root.display());
                let what = format!("--ara {adapter}: it names {module}, and {source} has no {module}.weight");
                return Err(Error::BadRequest(what));
            };
            found.insert(*name);
        }
        Ok(found)
    }
}

/// As LyCORIS and kohya's tools write names, and as ai-toolkit does inside a run.
fn mangle(name: &str) -> String {
    name.replace("$$", ".").replace('.', "_")
}

/// The module that a key names: what is before `.lora_` or `.lokr_w1`, less the prefixes of tools.
fn module_of(key: &str) -> Option<&str> {
    let end = MARKS.iter().find_map(|mark| key.find(mark))?;
    let name = &key[..end];
    let name = name.strip_prefix("lycoris_").unwrap_or(name);
    let prefix = ["transformer.", "diffusion_model."].into_iter();
    Some(
        prefix
            .filter_map(|prefix| name.strip_prefix(prefix))
            .next()
            .unwrap_or(name),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_their_module() {
        for (key, module) in [
            ("blocks.0.attn.to_q.lora_A.weight", Some("blocks.0.attn.to_q")),
            ("transformer.blocks.0.ff.lora_down.weight", Some("blocks.0.ff")),
            (
                "transformer.transformer_blocks.0.ff.lora_up.weight",
                Some("transformer_blocks.0.ff"),
            ),
            ("diffusion_model.blocks.0.ff.lokr_w1", Some("blocks.0.ff")),
            ("lycoris_blocks_0_ff.lokr_w1_a", Some("blocks_0_ff")),
            ("lycoris_transformer.blocks.0.ff.lokr_w1", Some("blocks.0.ff")),
            ("blocks.0.ff.lokr_w2", None),
            ("blocks.0.ff.alpha", None),
        ] {
            assert_eq!(module_of(key), module, "{key}");
        }
    }
}
