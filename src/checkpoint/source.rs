//! A checkpoint that is read: its files, tensors, config and sidecars, from headers alone.

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::config::Config;
use super::header::{read_header, Header, Metadata};
use super::index;
use super::shards::{check_numbers, natural_order, stem_of, Numbered, EXTENSION};
use super::sidecars::{self, Sidecar};
use crate::error::{Error, Result};
use crate::tensor::Dtype;

/// The stem where the files' names do not agree on one.
const DEFAULT_STEM: &str = "model";

/// One safetensors file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    pub path: PathBuf,
    /// Relative to the root, as an index writes it.
    pub name: String,
    /// Bytes of the whole file when its header was read.
    pub len: u64,
    /// When it was last written to, as of then.
    pub modified: SystemTime,
    /// Bytes before the data section.
    pub data_start: u64,
    pub metadata: Metadata,
}

/// One tensor of a checkpoint, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A checkpoint whose headers were read and agree with each other and with the index, if there is one.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// The folder, or the one file.
    pub root: PathBuf,
    pub is_folder: bool,
    /// What the files are named after: `model`, `diffusion_pytorch_model`, ..
    pub stem: String,
    /// In natural order: shard 2 before shard 10.
    pub files: Vec<SourceFile>,
    /// In the order of the files, then of the offsets.
    pub tensors: Vec<SourceTensor>,
    /// Of all files; where they differ, the first file's value.
    pub metadata: Metadata,
    /// `None` where there is no `config.json`, and for a single file.
    pub config: Option<Config>,
    /// Whether an index names the files.
    pub indexed: bool,
    /// Whether that index gives the tensors' bytes in all, right or wrong.
    pub index_has_size: bool,
    /// Files to copy as they are, sorted by path. None for a single file.
    pub sidecars: Vec<Sidecar>,
    /// What the user should know although nothing is wrong, one line each.
    pub warnings: Vec<String>,
    by_name: HashMap<String, usize>,
}

impl Checkpoint {
    /// Reads every header of a folder or of one `.safetensors` file, and no weights.
    ///
    /// # Errors
    /// See "files and folders", "safetensors headers" and "config.json" of [`Error`].
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let kind = std::fs::metadata(path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => Error::MissingSource {
                path: path.to_path_buf(),
            },
            _ => Error::io(path, "opening")(source),
        })?;
        if kind.is_dir() {
            open_folder(path)
        } else {
            open_file(path)
        }
    }

    /// Puts files and their headers together; config and sidecars are left empty.
    ///
    /// # Errors
    /// [`Error::DuplicateTensor`].
    pub fn new(root: PathBuf, stem: String, files: Vec<(PathBuf, String, Header)>) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint {
            root,
            is_folder: false,
            stem,
            files: Vec::with_capacity(files.len()),
            tensors: Vec::new(),
            metadata: Metadata::default(),
            config: None,
            sidecars: Vec::new(),
            indexed: false,
            index_has_size: false,
            warnings: Vec::new(),
            by_name: HashMap::new(),
        };
        for (file, (path, name, header)) in files.into_iter().enumerate() {
            checkpoint.files.push(SourceFile {
                path,
                name,
                len: header.file_len,
                modified: header.modified,
                data_start: header.data_start,
                metadata: header.metadata,
            });
            for entry in header.tensors {
                if let Some(first) = checkpoint.by_name.insert(entry.name.clone(), checkpoint.tensors.len()) {
                    return Err(Error::DuplicateTensor {
                        tensor: entry.name,
                        first: checkpoint.files[checkpoint.tensors[first].file].path.clone(),
                        second: checkpoint.files[file].path.clone(),
                    });
                }
                checkpoint.tensors.push(SourceTensor {
                    name: entry.name,
                    dtype: entry.dtype,
                    shape: entry.shape,
                    file,
                    offset: header.data_start + entry.begin,
                    len: entry.end - entry.begin,
                });
            }
        }
        for file in &checkpoint.files {
            for (key, value) in file.metadata.iter() {
                if checkpoint.metadata.get(key).is_none() {
                    checkpoint.metadata.insert(key, value);
                }
            }
        }
        Ok(checkpoint)
    }

    /// Whether the files are as they were when their headers were read. Not by inode: some file systems number a file
    /// anew, and one that was replaced has another length or time.
    ///
    /// # Errors
    /// [`Error::SourceChanged`], [`Error::SourceRewritten`], [`Error::Io`].
    pub fn check_unchanged(&self) -> Result<()> {
        for file in &self.files {
            let path = || file.path.clone();
            let now = std::fs::metadata(&file.path).map_err(Error::io(&file.path, "looking at it again"))?;
            if now.len() != file.len {
                return Err(Error::SourceChanged {
                    path: path(),
                    before: file.len,
                    now: now.len(),
                });
            }
            let modified = now.modified().map_err(Error::io(&file.path, "reading its time"))?;
            if modified != file.modified {
                return Err(Error::SourceRewritten { path: path() });
            }
        }
        Ok(())
    }

    /// Where a tensor is in [`Checkpoint::tensors`].
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }
}

fn open_file(path: &Path) -> Result<Checkpoint> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if !name.ends_with(EXTENSION) {
        return Err(Error::NotACheckpoint {
            path: path.to_path_buf(),
        });
    }
    if let Some(shard) = Numbered::parse(&name).filter(|shard| shard.total > 1) {
        let folder = path
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        return Err(Error::ShardAlone {
            path: path.to_path_buf(),
            number: shard.number,
            total: shard.total,
            folder: folder.to_path_buf(),
        });
    }
    let header = read_header(path)?;
    Checkpoint::new(
        path.to_path_buf(),
        stem_of(&name).to_string(),
        vec![(path.to_path_buf(), name, header)],
    )
}

fn open_folder(folder: &Path) -> Result<Checkpoint> {
    let top = list_names(folder)?;
    let weights: Vec<&String> = top
        .iter()
        .filter(|n| n.ends_with(EXTENSION) && !n.starts_with('.'))
        .collect();
    let index = index::find(folder, &top)?;
    let mut warnings = Vec::new();

    let (stem, names) = match &index {
        Some(index) => {
            let names = index.shards.iter().map(|(name, _)| name.clone()).collect();
            (index.stem.clone(), names)
        }
        None => {
            let mut names: Vec<String> = weights.iter().map(|name| name.to_string()).collect();
            names.sort_by(|a, b| natural_order(a, b));
            check_numbers(folder, &names)?;
            let stems: HashSet<&str> = names.iter().map(|name| stem_of(name)).collect();
            let stem = match stems.len() {
                1 => stem_of(&names[0]),
                _ => DEFAULT_STEM,
            };
            (stem.to_string(), names)
        }
    };
    if names.is_empty() {
        return Err(Error::NoSafetensors {
            path: folder.to_path_buf(),
        });
    }

    let mut files = Vec::with_capacity(names.len());
    for (i, name) in names.iter().enumerate() {
        let path = folder.join(name);
        if let Some(index) = &index {
            index.check_present(&path, name)?;
        }
        let header = read_header(&path)?;
        if let Some(index) = &index {
            index.check_tensors(name, &index.shards[i].1, &header)?;
        }
        files.push((path, name.clone(), header));
    }
    // After the shards, whose tensors say more of what is wrong with the index than a file's name.
    for (index, name) in index
        .iter()
        .flat_map(|index| weights.iter().map(move |name| (index, name)))
    {
        if !index.names(name) {
            index.check_stranger(name)?;
            let (path, index) = (folder.join(name), index.path.display());
            warnings.push(format!("{}: skipped, since {index} does not name it", path.display()));
        }
    }
    let mut checkpoint = Checkpoint::new(folder.to_path_buf(), stem, files)?;
    checkpoint.indexed = index.is_some();
    checkpoint.index_has_size = index.as_ref().is_some_and(|index| index.total_size.is_some());
    if let Some(index) = &index {
        let total = checkpoint
            .tensors
            .iter()
            .fold(0u64, |sum, tensor| sum.saturating_add(tensor.len));
        warnings.extend(index.total_size_warning(total));
    }
    checkpoint.is_folder = true;
    if top.iter().any(|name| name == sidecars::CONFIG) {
        checkpoint.config = Some(Config::read(&folder.join(sidecars::CONFIG))?);
    }
    let is_shard = |relative: &Path| names.iter().any(|name| Path::new(name) == relative);
    checkpoint.sidecars = sidecars::list(folder, is_shard, &mut warnings)?;
    checkpoint.warnings = warnings;
    Ok(checkpoint)
}

/// Names directly in the folder, sorted. A weight whose name is not UTF-8 is not found under the name made of it here:
/// an error, where leaving the name out would lose its tensors in silence.
fn list_names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder, "listing"))? {
        let entry = entry.map_err(Error::io(folder, "listing"))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
