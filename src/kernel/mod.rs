//! Arithmetic on slices: no paths, files, threads or allocation.
//!
//! Each operation takes a [`Level`] and gives the same bits at every one of them: [`reference`] is the obvious scalar
//! code, and the fast variants are one generic algorithm over [`lanes`], compiled once per instruction set. Tests run
//! one table of shapes and values through all levels that the CPU has.
//!
//! | module | what it holds |
//! |---|---|
//! | [`int4`] | weights <-> 4-bit codes, scales and zero points, and the sums behind an SNR |
//! | [`layout`] | the orders in which checkpoints store codes, scales and zero points |
//! | [`uintx`] | weights <-> codes of 2 to 7 bits as torchao 0.10.0 makes them, and the sums behind an SNR |
//! | [`shards`] | codes <-> bit shards, the order in which ai-toolkit packs them |
//! | [`lanes`] | 16 `f32` at a time, for each instruction set |
//! | [`reference`], [`uintx_reference`] | what all of the above must equal |

pub mod int4;
pub mod lanes;
pub mod layout;
pub mod level;
pub mod reference;
pub mod shards;
pub mod uintx;
pub mod uintx_reference;

pub use level::Level;
