//! Turns a dense safetensors checkpoint into a packed low-bit one, on a CPU, without PyTorch.
//!
//! A module imports only from those below it (`tests/layering.rs` checks it):
//!
//! | module | what it holds |
//! |---|---|
//! | `main.rs`, `cli`, `progress`, `signals` | text in, text out; exit codes; Ctrl-C |
//! | [`run`], [`verify`] | carry a plan out; decode what was written and compare |
//! | [`pool`] | workers over an ordered list of tasks |
//! | [`plan`] | request + headers -> [`plan::Plan`], a pure value: rules, fused splits, shards, offsets |
//! | [`report`] | `quantization_report.json` |
//! | [`scheme`] | what a quantized tensor is on disk: names, shapes, tiles, config; one registry |
//! | [`checkpoint`] | headers, positioned reads, the staged writer, config.json, sidecars |
//! | [`kernel`] | arithmetic on slices: no paths, files, threads or allocation |
//! | [`tensor`], [`error`] | the words that all the others share |
//!
//! One tensor's way: headers -> rules choose a scheme -> a fused split is three row ranges of one tensor, no copy ->
//! the scheme names its outputs and their sizes -> offsets are fixed and headers written -> tiles of rows are read,
//! encoded and written at their offsets by a pool -> sums are folded in order into the report -> fsync, rename.

pub mod checkpoint;
pub mod cli;
pub mod error;
pub mod kernel;
pub mod plan;
pub mod pool;
pub mod progress;
pub mod report;
pub mod run;
pub mod scheme;
pub mod signals;
pub mod tensor;
pub mod verify;
