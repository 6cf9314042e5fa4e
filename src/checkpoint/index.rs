//! `*.safetensors.index.json`: which shard holds which tensor. Shards and index must agree both ways.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::header::{open_regular, Header, Pairs};
use super::shards::{natural_order, stem_of, EXTENSION};
use crate::error::{Error, Result};

const SUFFIX: &str = ".safetensors.index.json";

/// An index that was read; nothing was compared with the shards yet.
#[derive(Debug)]
pub(super) struct Index {
    pub path: PathBuf,
    /// Its own name without [`SUFFIX`].
    pub stem: String,
    /// Each shard's path below the folder and its tensors; in natural order of the paths.
    pub shards: Vec<(String, HashSet<String>)>,
    pub total_size: Option<Value>,
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: Pairs<String>,
    #[serde(default)]
    metadata: Value,
}

/// The one index among the names in `folder`, or `None`.
pub(super) fn find(folder: &Path, names: &[String]) -> Result<Option<Index>> {
    let mut found = names
        .iter()
        .filter(|name| name.ends_with(SUFFIX) && !name.starts_with('.'));
    match (found.next(), found.next()) {
        (None, _) => Ok(None),
        (Some(name), None) => Index::read(folder, name).map(Some),
        (Some(first), Some(second)) => Err(Error::TwoIndexes {
            folder: folder.to_path_buf(),
            first: first.clone(),
            second: second.clone(),
        }),
    }
}

impl Index {
    fn read(folder: &Path, name: &str) -> Result<Index> {
        let path = folder.join(name);
        let bad = |why: String| Error::BadIndex {
            path: path.clone(),
            why,
        };
        let mut bytes = Vec::new();
        open_regular(&path)?
            .0
            .read_to_end(&mut bytes)
            .map_err(Error::io(&path, "reading"))?;
        let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
        let json: IndexJson = serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;

        let mut shards: HashMap<String, HashSet<String>> = HashMap::new();
        for (tensor, shard) in json.weight_map.0 {
            match shards.get_mut(&shard) {
                Some(tensors) => _ = tensors.insert(tensor),
                None => _ = shards.insert(shard, HashSet::from([tensor])),
            }
        }
        if shards.is_empty() {
            return Err(bad("its weight_map is empty".into()));
        }
        let mut normal: HashMap<String, HashSet<String>> = HashMap::new();
        for (shard, tensors) in shards {
            if !shard.ends_with(EXTENSION) {
                return Err(bad(format!("{shard:?} is not a {EXTENSION} file")));
            }
            let Some(name) = below_folder(&shard) else {
                return Err(Error::IndexLeavesFolder { index: path, shard });
            };
            normal.entry(name).or_default().extend(tensors);
        }
        let mut shards: Vec<_> = normal.into_iter().collect();
        shards.sort_by(|a, b| natural_order(&a.0, &b.0));
        Ok(Index {
            stem: name.strip_suffix(SUFFIX).unwrap_or(name).to_string(),
            shards,
            total_size: json.metadata.get("total_size").cloned(),
            path,
        })
    }

    pub fn names(&self, shard: &str) -> bool {
        self.shards.iter().any(|(name, _)| name == shard)
    }

    /// A weight file beside the index that it does not name: wrong if its name says that it belongs to this checkpoint.
    pub fn check_stranger(&self, name: &str) -> Result<()> {
        let stem = stem_of(name);
        if stem == self.stem || self.shards.iter().any(|(shard, _)| stem_of(shard) == stem) {
            return Err(Error::ShardNotIndexed {
                index: self.path.clone(),
                shard: name.to_string(),
            });
        }
        Ok(())
    }

    pub fn check_present(&self, path: &Path, shard: &str) -> Result<()> {
        match std::fs::metadata(path) {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Err(Error::MissingShard {
                index: self.path.clone(),
                shard: shard.to_string(),
            }),
            Err(e) => Err(Error::io(path, "opening")(e)),
            Ok(_) => Ok(()),
        }
    }

    /// The tensors of one shard are those that the index places in it.
    pub fn check_tensors(&self, shard: &str, tensors: &HashSet<String>, header: &Header) -> Result<()> {
        if let Some(extra) = header.tensors.iter().find(|tensor| !tensors.contains(&tensor.name)) {
            return Err(Error::TensorNotIndexed {
                index: self.path.clone(),
                tensor: extra.name.clone(),
                shard: shard.to_string(),
            });
        }
        let held: HashSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        // The least name, so that the message does not depend on a hash.
        match tensors.iter().filter(|name| !held.contains(name.as_str())).min() {
            Some(missing) => Err(Error::IndexedTensorMissing {
                index: self.path.clone(),
                tensor: missing.clone(),
                shard: shard.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// A warning where `metadata.total_size` is not the bytes of the tensors: often so in the wild, and read by nobody.
    pub fn total_size_warning(&self, bytes: u64) -> Option<String> {
        let stated = self.total_size.as_ref()?;
        let same = stated.as_u64() == Some(bytes) || stated.as_f64() == Some(bytes as f64);
        (!same).then(|| {
            format!(
                "{}: total_size is {stated}, the tensors have {bytes} bytes",
                self.path.display()
            )
        })
    }
}

/// The path without `.` components; `None` where it is absolute, empty or has `..`.
fn below_folder(shard: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in Path::new(shard).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_folder() {
        assert_eq!(
            below_folder("./a//b/./c.safetensors").as_deref(),
            Some("a/b/c.safetensors")
        );
        for shard in [
            "../x.safetensors",
            "a/../../x.safetensors",
            "/x.safetensors",
            "..",
            ".",
            "",
        ] {
            assert_eq!(below_folder(shard), None, "{shard}");
        }
    }
}
