//! The header of one safetensors file: read without its data, checked whole, and written as the format's own writer does.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use safetensors::tensor::TensorInfo;
use serde::de::{DeserializeSeed, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};
use crate::tensor::Dtype;

/// The format's own limit on the JSON part, in bytes (`MAX_HEADER_SIZE` of the safetensors crate, which is private).
pub const HEADER_LIMIT: u64 = 100_000_000;

/// Bytes of the little-endian length before the JSON.
const LENGTH_BYTES: u64 = 8;

/// How a Git LFS pointer begins. As a header length it would be over the limit, so no file is taken for one wrongly.
const LFS_POINTER: [u8; LENGTH_BYTES as usize] = *b"version ";

const METADATA_KEY: &str = "__metadata__";

/// One tensor as a header states it. `begin` and `end` are bytes from the start of the data section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub begin: u64,
    pub end: u64,
}

/// A header that passed every check: its tensors tile the data section without gap or overlap, up to the last byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub metadata: Metadata,
    /// Sorted by `begin`.
    pub tensors: Vec<TensorEntry>,
    /// Bytes from the start of the file to the data section.
    pub data_start: u64,
    /// Bytes of the whole file.
    pub file_len: u64,
    /// When the file was last written to, as of before it was read.
    pub modified: SystemTime,
}

/// `__metadata__`: strings by name, in the order of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(Vec<(String, String)>);

impl Metadata {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.iter().find(|(k, _)| *k == key).map(|(_, value)| value)
    }

    /// Replaces the value of a key in its place, or appends it.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<String>) {
        let (key, value) = (key.into(), value.into());
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some(slot) => slot.1 = value,
            None => self.0.push((key, value)),
        }
    }

    pub fn remove(&mut self, key: &str) {
        self.0.retain(|(k, _)| k != key);
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        let mut metadata = Metadata::default();
        pairs.into_iter().for_each(|(k, v)| metadata.insert(k, v));
        metadata
    }
}

impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

/// Reads the length and the JSON of `path`, and nothing after them, and checks both against the file's length.
///
/// # Errors
/// One variant per way a file can be wrong: see the "safetensors headers" part of [`Error`].
pub fn read_header(path: &Path) -> Result<Header> {
    let (mut file, file_len) = open_regular(path)?;
    let modified = file
        .metadata()
        .and_then(|file| file.modified())
        .map_err(Error::io(path, "reading its time"))?;
    if file_len < LENGTH_BYTES {
        return Err(Error::FileTooShort {
            path: path.to_path_buf(),
            len: file_len,
        });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut length)
        .map_err(Error::io(path, "reading the header length"))?;
    if length == LFS_POINTER {
        return Err(Error::LfsPointer {
            path: path.to_path_buf(),
            len: file_len,
        });
    }
    let header = u64::from_le_bytes(length);
    if header > file_len - LENGTH_BYTES {
        return Err(Error::HeaderTooLong {
            path: path.to_path_buf(),
            header,
            file: file_len,
        });
    }
    if header > HEADER_LIMIT {
        return Err(Error::HeaderOverLimit {
            path: path.to_path_buf(),
            header,
            limit: HEADER_LIMIT,
        });
    }
    let mut json = vec![0; header as usize];
    file.read_exact(&mut json)
        .map_err(Error::io(path, "reading the header"))?;
    let (metadata, mut tensors) = parse(path, &json)?;

    let data_start = LENGTH_BYTES + header;
    tensors.iter().try_for_each(|tensor| check_size(path, tensor))?;
    // Empty tensors share their `begin` with a neighbour: by `end` they come first, where they fit.
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    check_layout(path, &tensors, file_len - data_start)?;
    Ok(Header {
        metadata,
        tensors,
        data_start,
        file_len,
        modified,
    })
}

/// Opens a regular file and returns its length in bytes; asks for its kind first, since opening a fifo would hang.
///
/// # Errors
/// [`Error::Io`], [`Error::NotAFile`].
pub fn open_regular(path: &Path) -> Result<(File, u64)> {
    use std::os::unix::fs::FileTypeExt;
    let kind = std::fs::metadata(path).map_err(Error::io(path, "opening"))?.file_type();
    if !kind.is_file() {
        let kind = match () {
            () if kind.is_dir() => "a folder",
            () if kind.is_fifo() => "a pipe",
            () if kind.is_socket() => "a socket",
            () => "a device",
        };
        return Err(Error::NotAFile {
            path: path.to_path_buf(),
            kind,
        });
    }
    let file = File::open(path).map_err(Error::io(path, "opening"))?;
    let len = file.metadata().map_err(Error::io(path, "reading its length"))?.len();
    Ok((file, len))
}

fn parse(path: &Path, json: &[u8]) -> Result<(Metadata, Vec<TensorEntry>)> {
    let bad = |why: String| Error::BadHeader {
        path: path.to_path_buf(),
        why,
    };
    let text = std::str::from_utf8(json).map_err(|e| bad(e.to_string()))?;
    if !text.starts_with('{') {
        return Err(bad("it does not begin with '{'".into()));
    }
    let raw: RawHeader = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    if let Some(tensor) = raw.twice {
        return Err(Error::DuplicateInHeader {
            path: path.to_path_buf(),
            tensor,
        });
    }
    Ok((raw.metadata, raw.tensors))
}

/// Offsets in order, and their span equal to what dtype and shape need.
fn check_size(path: &Path, tensor: &TensorEntry) -> Result<()> {
    let (path, name) = (path.to_path_buf(), tensor.name.clone());
    let TensorEntry { begin, end, .. } = *tensor;
    let Some(bits) = bits(tensor) else {
        return Err(Error::ShapeOverflow {
            path,
            tensor: name,
            shape: tensor.shape.clone(),
        });
    };
    if bits % 8 != 0 {
        return Err(Error::PartialByte {
            path,
            tensor: name,
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            bits,
        });
    }
    if end < begin {
        return Err(Error::OffsetsReversed {
            path,
            tensor: name,
            begin,
            end,
        });
    }
    if end - begin != bits / 8 {
        return Err(Error::SizeMismatch {
            path,
            tensor: name,
            span: end - begin,
            need: bits / 8,
        });
    }
    Ok(())
}

/// `None` where the product overflows, in the order in which the safetensors crate multiplies.
fn bits(tensor: &TensorEntry) -> Option<u64> {
    let elements = tensor
        .shape
        .iter()
        .try_fold(1u64, |n, &dim| n.checked_mul(dim as u64))?;
    elements.checked_mul(tensor.dtype.bitsize() as u64)
}

/// Sorted tensors that tile `have` bytes of data.
fn check_layout(path: &Path, tensors: &[TensorEntry], have: u64) -> Result<()> {
    let mut expected = 0;
    for tensor in tensors {
        let (path, name) = (path.to_path_buf(), tensor.name.clone());
        let TensorEntry { begin, end, .. } = *tensor;
        match begin.cmp(&expected) {
            Ordering::Greater => {
                return Err(Error::Gap {
                    path,
                    tensor: name,
                    begin,
                    expected,
                })
            }
            Ordering::Less => {
                return Err(Error::Overlap {
                    path,
                    tensor: name,
                    begin,
                    expected,
                })
            }
            Ordering::Equal => {}
        }
        if end > have {
            return Err(Error::Truncated {
                path,
                tensor: name,
                end,
                have,
            });
        }
        expected = end;
    }
    if expected != have {
        return Err(Error::TrailingBytes {
            path: path.to_path_buf(),
            end: expected,
            have,
        });
    }
    Ok(())
}

/// Length and JSON of a file, as the safetensors crate writes them: compact, `__metadata__` first (left out if empty),
/// the tensors in the order given, padded with spaces to a multiple of 8 bytes. The data section follows at its end.
pub fn encode_header(metadata: &Metadata, tensors: &[TensorEntry]) -> Vec<u8> {
    let mut out = vec![0; LENGTH_BYTES as usize];
    serde_json::to_writer(&mut out, &HeaderJson { metadata, tensors })
        .expect("strings and integers serialize, and a Vec takes them");
    out.resize(out.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let json_len = out.len() as u64 - LENGTH_BYTES;
    out[..LENGTH_BYTES as usize].copy_from_slice(&json_len.to_le_bytes());
    out
}

/// The order in which the safetensors crate lays tensors out: widest dtype first, then by name.
pub fn writer_order(a: (&Dtype, &str), b: (&Dtype, &str)) -> Ordering {
    b.0.cmp(a.0).then_with(|| a.1.cmp(b.1))
}

struct HeaderJson<'a> {
    metadata: &'a Metadata,
    tensors: &'a [TensorEntry],
}

impl Serialize for HeaderJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Info<'a> {
            dtype: Dtype,
            shape: &'a [usize],
            data_offsets: (u64, u64),
        }
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA_KEY, self.metadata)?;
        }
        for tensor in self.tensors {
            let info = Info {
                dtype: tensor.dtype,
                shape: &tensor.shape,
                data_offsets: (tensor.begin, tensor.end),
            };
            map.serialize_entry(&tensor.name, &info)?;
        }
        map.end()
    }
}

/// The JSON as it stands: a map type would keep the last of two equal keys in silence.
struct RawHeader {
    metadata: Metadata,
    tensors: Vec<TensorEntry>,
    /// The first key that appears a second time.
    twice: Option<String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut raw = RawHeader {
            metadata: Metadata::default(),
            tensors: Vec::new(),
            twice: None,
        };
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                raw.twice.get_or_insert_with(|| name.clone());
            }
            if name == METADATA_KEY {
                let pairs = map.next_value_seed(Named(&name, std::marker::PhantomData::<Option<Pairs<String>>>))?;
                raw.metadata = Metadata(pairs.map(|p| p.0).unwrap_or_default());
                continue;
            }
            let info = map.next_value_seed(Named(&name, std::marker::PhantomData::<TensorInfo>))?;
            raw.tensors.push(TensorEntry {
                name,
                dtype: info.dtype,
                shape: info.shape,
                begin: info.data_offsets.0 as u64,
                end: info.data_offsets.1 as u64,
            });
        }
        Ok(raw)
    }
}

/// Puts the key before what is wrong with its value.
struct Named<'a, T>(&'a str, std::marker::PhantomData<T>);

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Named<'_, T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        T::deserialize(deserializer).map_err(|e| serde::de::Error::custom(format_args!("{}: {e}", self.0)))
    }
}

/// A JSON object in the order of the file; a key that appears twice is an error.
#[derive(Debug)]
pub(super) struct Pairs<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor<V>(std::marker::PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for PairsVisitor<V> {
            type Value = Pairs<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<V>, A::Error> {
                let (mut pairs, mut seen) = (Vec::new(), HashSet::new());
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format_args!("{key:?} appears twice")));
                    }
                    let value = map.next_value_seed(Named(&key, std::marker::PhantomData))?;
                    pairs.push((key, value));
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_map(PairsVisitor(std::marker::PhantomData))
    }
}

#[cfg(test)]
mod tests;
