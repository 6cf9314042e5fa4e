//! What a checkpoint is on disk: headers, positioned reads, the staged writer, `config.json` and sidecars.

mod config;
mod header;

pub use config::Config;
pub use header::{encode_header, read_header, writer_order, Header, Metadata, TensorEntry, HEADER_LIMIT};
