//! One variant per way an input can be wrong. Each message names the file, the tensor and both numbers, and the way out
//! where there is one.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    // --- files and folders
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        path: PathBuf,
        doing: &'static str,
        source: std::io::Error,
    },
    #[error("{}: no such file or folder", path.display())]
    MissingSource { path: PathBuf },
    #[error("{}: not a folder and not a .safetensors file", path.display())]
    NotACheckpoint { path: PathBuf },
    #[error("{}: no .safetensors file in this folder", path.display())]
    NoSafetensors { path: PathBuf },
    #[error("{}: {kind}, not a regular file", path.display())]
    NotAFile { path: PathBuf, kind: &'static str },
    #[error("{}: shard {number} of {total}; give --src its folder, {}", path.display(), folder.display())]
    ShardAlone {
        path: PathBuf,
        number: u64,
        total: u64,
        folder: PathBuf,
    },
    #[error("{}: the index names shard {shard}, which is not there", index.display())]
    MissingShard { index: PathBuf, shard: String },
    #[error("{}: shard {number} of {total} of {stem} is missing (the names of its neighbours say there are {total})", folder.display())]
    MissingNumberedShard {
        folder: PathBuf,
        stem: String,
        number: u64,
        total: u64,
    },
    #[error("{}: more than one *.safetensors.index.json ({first} and {second}); keep one", folder.display())]
    TwoIndexes {
        folder: PathBuf,
        first: String,
        second: String,
    },
    #[error("{}: not a usable index: {why}", path.display())]
    BadIndex { path: PathBuf, why: String },
    #[error("{}: the index path {shard:?} leaves the folder", index.display())]
    IndexLeavesFolder { index: PathBuf, shard: String },
    #[error("{}: the index places {tensor} in {shard}, which does not hold it", index.display())]
    IndexedTensorMissing {
        index: PathBuf,
        tensor: String,
        shard: String,
    },
    #[error("{}: {shard} holds {tensor}, which the index does not name", index.display())]
    TensorNotIndexed {
        index: PathBuf,
        tensor: String,
        shard: String,
    },
    #[error("{}: shard {shard} belongs to this checkpoint by its name, but the index does not name it", index.display())]
    ShardNotIndexed { index: PathBuf, shard: String },

    // --- safetensors headers
    #[error("{}: {len} bytes, too short for the 8 of a header length", path.display())]
    FileTooShort { path: PathBuf, len: u64 },
    #[error("{}: the header claims {header} bytes, the file has {file} in all (truncated or not safetensors)", path.display())]
    HeaderTooLong { path: PathBuf, header: u64, file: u64 },
    #[error("{}: {len} bytes of a Git LFS pointer, not the weights; `git lfs pull` fetches them", path.display())]
    LfsPointer { path: PathBuf, len: u64 },
    #[error("{}: the header claims {header} bytes, more than the format's limit of {limit}", path.display())]
    HeaderOverLimit { path: PathBuf, header: u64, limit: u64 },
    #[error("{}: the header is not valid: {why}", path.display())]
    BadHeader { path: PathBuf, why: String },
    #[error("{}: {tensor} appears twice in the header", path.display())]
    DuplicateInHeader { path: PathBuf, tensor: String },
    #[error("{tensor} is in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        tensor: String,
        first: PathBuf,
        second: PathBuf,
    },
    #[error("{}: {tensor}: its offsets span {span} bytes, its dtype and shape need {need}", path.display())]
    SizeMismatch {
        path: PathBuf,
        tensor: String,
        span: u64,
        need: u64,
    },
    #[error("{}: {tensor}: shape {shape:?} is larger than can be addressed", path.display())]
    ShapeOverflow {
        path: PathBuf,
        tensor: String,
        shape: Vec<usize>,
    },
    #[error("{}: {tensor}: shape {shape:?} of {dtype} is {bits} bits, not whole bytes", path.display())]
    PartialByte {
        path: PathBuf,
        tensor: String,
        dtype: String,
        shape: Vec<usize>,
        bits: u64,
    },
    #[error("{}: {tensor}: ends at byte {end} before it begins at {begin}", path.display())]
    OffsetsReversed {
        path: PathBuf,
        tensor: String,
        begin: u64,
        end: u64,
    },
    #[error("{}: {tensor}: begins at byte {begin}, where the data before it ends at {expected} (a gap)", path.display())]
    Gap {
        path: PathBuf,
        tensor: String,
        begin: u64,
        expected: u64,
    },
    #[error("{}: {tensor}: begins at byte {begin}, inside the tensor before it, which ends at {expected} (an overlap)", path.display())]
    Overlap {
        path: PathBuf,
        tensor: String,
        begin: u64,
        expected: u64,
    },
    #[error("{}: {tensor}: ends at byte {end} of the data, the file holds {have} (truncated)", path.display())]
    Truncated {
        path: PathBuf,
        tensor: String,
        end: u64,
        have: u64,
    },
    #[error("{}: the tensors end at byte {end} of the data, the file holds {have} (trailing bytes)", path.display())]
    TrailingBytes { path: PathBuf, end: u64, have: u64 },
    #[error("{}: was {before} bytes when it was first looked at and is {now} now; something is writing to it", path.display())]
    SourceChanged { path: PathBuf, before: u64, now: u64 },
    #[error("{}: was written to while the run read it; nothing was written to --dst", path.display())]
    SourceRewritten { path: PathBuf },

    // --- config.json and other JSON
    #[error("{}: not valid JSON: {why}", path.display())]
    BadJson { path: PathBuf, why: String },
    #[error("{}: not a JSON object", path.display())]
    NotAnObject { path: PathBuf },
    #[error("{}: {tensor}: splitting it needs {key} in config.json{}", path.display(), hint.as_deref().map(|h| format!(" ({h})")).unwrap_or_default())]
    ConfigKeyMissing {
        path: PathBuf,
        tensor: String,
        key: &'static str,
        hint: Option<String>,
    },
    #[error("{}: {tensor}: {key} is {value}, not a count that a model can have; --fused-qkv keep leaves it whole", path.display())]
    ConfigKeyNoCount {
        path: PathBuf,
        tensor: String,
        key: &'static str,
        value: String,
    },
    #[error("{}: {tensor}: {rows} rows, but config.json says q {q} + k {kv} + v {kv} = {total}; --fused-qkv keep leaves it whole", path.display())]
    FusedRows {
        path: PathBuf,
        tensor: String,
        rows: usize,
        q: u64,
        kv: u64,
        total: u64,
    },

    // --- the request
    #[error("--group {group}: {why}")]
    BadGroup { group: usize, why: &'static str },
    #[error("{0}")]
    BadRequest(String),
    #[error("--{option} {pattern:?} matches no module of this checkpoint")]
    PatternMatchesNothing { option: &'static str, pattern: String },
    #[error("{}: already quantized ({evidence}); --dequantize makes it dense", path.display())]
    AlreadyQuantized { path: PathBuf, evidence: String },
    #[error("{}: not quantized ({why}); nothing to decode", path.display())]
    NotQuantized { path: PathBuf, why: String },
    #[error("{}: quantized in a way that this tool does not read: {why}", path.display())]
    UnknownLayout { path: PathBuf, why: String },
    #[error("{}: {tensor} {what}", path.display())]
    BadPacked {
        path: PathBuf,
        tensor: String,
        what: String,
    },
    #[error("{}: nothing to quantize: {why}", path.display())]
    NothingToQuantize { path: PathBuf, why: String },
    #[error("--quantize-lm-head: this checkpoint has no lm_head.weight and no embedding that it could be tied to")]
    NoHead,
    #[error("--quantize-embedding: this checkpoint has no embedding table that is known by name")]
    NoEmbedding,
    #[error("{}: {tensor}: the source has a tensor of this name already, and the output needs it for {module}", path.display())]
    NameTaken {
        path: PathBuf,
        tensor: String,
        module: String,
    },
    #[error("{file}: its header would have {header} bytes, more than the format's limit of {limit}; a smaller --max-shard-size makes more files")]
    OutputHeaderOverLimit { file: String, header: u64, limit: u64 },

    // --- the destination
    #[error("{}: not empty; --overwrite replaces a checkpoint that this tool wrote", path.display())]
    DestinationNotEmpty { path: PathBuf },
    #[error("{}: --overwrite replaces only a checkpoint that this tool wrote, and this folder holds {found}", path.display())]
    NotOurs { path: PathBuf, found: String },
    #[error("{}: a file; --dst is a folder", path.display())]
    DestinationIsFile { path: PathBuf },
    #[error("{}: a mount point, which cannot be replaced in one step; give a new folder inside it", path.display())]
    DestinationIsMount { path: PathBuf },
    #[error("{}: --dst is the source {} or inside it", path.display(), src.display())]
    DestinationInSource { path: PathBuf, src: PathBuf },
    #[error("{}: --src is inside --dst {}, which --overwrite would replace", src.display(), path.display())]
    SourceInDestination { path: PathBuf, src: PathBuf },
    #[error("{}: {needed} bytes are needed and {free} are free", path.display())]
    DiskTooSmall { path: PathBuf, needed: u64, free: u64 },
    #[error("{}: {written} of its {len} bytes were written; this is a fault of the tool", path.display())]
    IncompleteOutput { path: PathBuf, written: u64, len: u64 },
    #[error("{}: removed or changed by something else before the run was done; nothing was written to --dst", path.display())]
    OutputVanished { path: PathBuf },
    #[error("interrupted; nothing was written to --dst")]
    Interrupted,

    // --- weights
    #[error("{}: {tensor}: {value} at row {row}, column {column}; {way_out}", path.display())]
    NonFinite {
        path: PathBuf,
        tensor: String,
        row: usize,
        column: usize,
        value: String,
        way_out: String,
    },
    #[error("{}: {tensor}: row {row}, group {group}: its scale overflows {dtype} (largest {limit}); {way_out}", path.display())]
    ScaleOverflow {
        path: PathBuf,
        tensor: String,
        row: usize,
        group: usize,
        dtype: &'static str,
        limit: f32,
        way_out: String,
    },
}

impl Error {
    /// Whether the error says that a checkpoint is wrong in itself, rather than absent or unreadable.
    pub fn is_about_contents(&self) -> bool {
        !matches!(
            self,
            Error::Io { .. } | Error::MissingSource { .. } | Error::NotACheckpoint { .. } | Error::NoSafetensors { .. }
        )
    }

    /// Whether a file could not be opened because nothing is there.
    pub fn is_absence(&self) -> bool {
        let absent = |error: &std::io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory);
        matches!(self, Error::Io { source, .. } if absent(source))
    }

    /// Attaches the path and what was being done to an I/O error.
    pub fn io<'a>(path: &'a Path, doing: &'static str) -> impl FnOnce(std::io::Error) -> Error + 'a {
        move |source| Error::Io {
            path: path.to_path_buf(),
            doing,
            source,
        }
    }
}
