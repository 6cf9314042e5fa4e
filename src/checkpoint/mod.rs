//! What a checkpoint is on disk: headers, positioned reads, the staged writer, `config.json` and sidecars.

mod config;
mod destination;
mod header;
mod index;
mod reader;
mod shards;
mod sidecars;
mod source;
mod staging;
#[cfg(test)]
mod testing;

pub use config::Config;
pub use destination::{check_destination, check_space, free_bytes, TOOL_MARK};
pub use header::{encode_header, read_header, writer_order, Header, Metadata, TensorEntry, HEADER_LIMIT};
pub use reader::Reader;
pub use sidecars::{Sidecar, CONFIG as CONFIG_FILE, REPORT as REPORT_FILE};
pub use source::{Checkpoint, SourceFile, SourceTensor};
pub use staging::{OutFile, Staging};
