//! The files of a checkpoint that are not its weights: tokenizers, templates, code, licences.

use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::shards;
use crate::error::{Error, Result};

/// Edited by a run, not copied.
pub const CONFIG: &str = "config.json";
/// Written by a run; says that a folder is this tool's.
pub const REPORT: &str = "quantization_report.json";

/// What a run that makes a checkpoint dense writes instead.
pub const DENSE_REPORT: &str = "dequantization_report.json";

/// Folders of tools, not of the checkpoint.
pub(super) const SKIPPED_FOLDERS: [&str; 2] = [".git", ".cache"];

/// Weights in other formats, by extension.
const OTHER_WEIGHTS: [&str; 11] = [
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "h5",
    "msgpack",
    "onnx",
    "onnx_data",
    "ot",
    "tflite",
];

/// One file to copy as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sidecar {
    /// Below the source folder, and below the destination.
    pub relative: PathBuf,
    pub from: PathBuf,
    /// Bytes when it was listed.
    pub len: u64,
}

/// Every sidecar below `folder`, sorted by the bytes of its relative path. `is_shard` says which files an index names.
pub(super) fn list(
    folder: &Path,
    is_shard: impl Fn(&Path) -> bool,
    warnings: &mut Vec<String>,
) -> Result<Vec<Sidecar>> {
    let mut walk = Walk {
        is_shard,
        warnings,
        found: Vec::new(),
        above: Vec::new(),
    };
    let root = std::fs::metadata(folder).map_err(Error::io(folder, "opening"))?;
    walk.folder(folder, Path::new(""), &root)?;
    let mut found = walk.found;
    found.sort_by(|a, b| a.relative.as_os_str().as_bytes().cmp(b.relative.as_os_str().as_bytes()));
    Ok(found)
}

struct Walk<'a, F> {
    is_shard: F,
    warnings: &'a mut Vec<String>,
    found: Vec<Sidecar>,
    /// Device and inode of the folders on the way here: a symlink to one of them is a loop.
    above: Vec<(u64, u64)>,
}

impl<F: Fn(&Path) -> bool> Walk<'_, F> {
    fn folder(&mut self, path: &Path, relative: &Path, metadata: &Metadata) -> Result<()> {
        let id = (metadata.dev(), metadata.ino());
        if self.above.contains(&id) {
            self.skip(path, "a symlink to a folder that it is in");
            return Ok(());
        }
        self.above.push(id);
        let entries = std::fs::read_dir(path).map_err(Error::io(path, "listing"))?;
        let mut names = entries
            .map(|entry| entry.map(|e| e.file_name()))
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(Error::io(path, "listing"))?;
        // Sorted here too, so that warnings come in the same order everywhere.
        names.sort();
        for name in names {
            self.entry(&path.join(&name), &relative.join(&name))?;
        }
        self.above.pop();
        Ok(())
    }

    fn entry(&mut self, path: &Path, relative: &Path) -> Result<()> {
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                self.skip(path, "a symlink to nothing");
                return Ok(());
            }
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                self.skip(path, "a symlink to itself");
                return Ok(());
            }
            Err(e) => return Err(Error::io(path, "opening")(e)),
        };
        if metadata.is_dir() {
            if !SKIPPED_FOLDERS.iter().any(|name| relative.ends_with(name)) {
                self.folder(path, relative, &metadata)?;
            }
        } else if !metadata.is_file() {
            self.skip(path, "not a regular file");
        } else if !is_excluded(relative) && !(self.is_shard)(relative) {
            self.found.push(Sidecar {
                relative: relative.to_path_buf(),
                from: path.to_path_buf(),
                len: metadata.len(),
            });
        }
        Ok(())
    }

    fn skip(&mut self, path: &Path, why: &str) {
        self.warnings.push(format!("{}: not copied: {why}", path.display()));
    }
}

/// Weights, indexes, and the two files that a run writes anew.
fn is_excluded(relative: &Path) -> bool {
    // A name that is not UTF-8 keeps its ASCII suffix in the lossy form.
    let name = relative.file_name().unwrap_or_default().to_string_lossy();
    let at_top = relative.components().count() == 1;
    // An index is NAME.EXTENSION.index.json or, of a variant, NAME.EXTENSION.index.VARIANT.json.
    let indexed = name.strip_suffix(".json").and_then(|name| {
        let (weights, _) = name
            .split_once(".index.")
            .or_else(|| Some((name.strip_suffix(".index")?, "")))?;
        Some(weights)
    });
    let has_extension =
        |name: &str, extension: &str| name.rsplit_once('.').is_some_and(|(_, found)| found == extension);
    OTHER_WEIGHTS
        .iter()
        .any(|extension| has_extension(indexed.unwrap_or(&name), extension))
        || indexed.is_some_and(|weights| weights.ends_with(shards::EXTENSION))
        || at_top
            && ([CONFIG, REPORT, DENSE_REPORT].iter().any(|known| name == *known) || name.ends_with(shards::EXTENSION))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_names() {
        for name in [
            "config.json",
            "quantization_report.json",
            "model.safetensors",
            ".hidden.safetensors",
            "model.safetensors.index.json",
            "unet/model.safetensors.index.json",
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "pytorch_model.bin.index.json",
            "onnx/model.onnx_data",
            "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
            "pytorch_model.bin.index.fp16.json",
        ] {
            assert!(is_excluded(Path::new(name)), "{name}");
        }
        for name in [
            "sub/config.json",
            "sub/quantization_report.json",
            "sub/model.safetensors",
            "model.SAFETENSORS",
            "index.json",
            "vocab.index.json",
            "tokenizer.model",
            "bin",
            ".gitattributes",
        ] {
            assert!(!is_excluded(Path::new(name)), "{name}");
        }
    }
}
