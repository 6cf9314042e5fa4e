//! What a checkpoint is on disk: headers, positioned reads, the staged writer, `config.json` and sidecars.
//!
//! Reading: [`Checkpoint::open`] checks a folder or a file by its headers alone, one [`Reader`] per worker then reads
//! ranges of it. Writing: [`check_destination`] and [`check_space`] before the first byte, then [`Staging`] builds the
//! new checkpoint beside its destination, [`OutFile`]s taking tiles from any thread, and renames it in one step.

mod config;
mod destination;
mod header;
mod index;
mod outfile;
mod reader;
mod shards;
mod sidecars;
mod source;
mod staging;
#[cfg(test)]
mod testing;

pub use config::Config;
pub use destination::{check_destination, check_space, free_bytes, TOOL_MARK};
pub use header::{encode_header, open_regular, read_header, writer_order, Header, Metadata, TensorEntry, HEADER_LIMIT};
pub use outfile::OutFile;
pub use reader::Reader;
pub use sidecars::{Sidecar, CONFIG as CONFIG_FILE, DENSE_REPORT as DENSE_REPORT_FILE, REPORT as REPORT_FILE};
pub use source::{Checkpoint, SourceFile, SourceTensor};
pub use staging::Staging;
