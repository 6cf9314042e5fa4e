//! What a checkpoint is on disk: headers, positioned reads, the staged writer, `config.json` and sidecars.

mod config;
mod header;
mod index;
mod reader;
mod shards;
mod sidecars;
mod source;

pub use config::Config;
pub use header::{encode_header, read_header, writer_order, Header, Metadata, TensorEntry, HEADER_LIMIT};
pub use reader::Reader;
pub use sidecars::Sidecar;
pub use source::{Checkpoint, SourceFile, SourceTensor};
