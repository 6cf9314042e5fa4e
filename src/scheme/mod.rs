//! What a quantized tensor is on disk: names, shapes, tiles and config of each layout, behind one trait and one registry.
//!
//! A scheme is pure description plus a walk over one tile: it reads through [`Weights`] or [`Stored`], calls kernels,
//! and leaves bytes in a [`TileBuffers`] with the places where they belong. It opens no file and starts no thread.
//!
//! | file | layout |
//! |---|---|
//! | `int4` | the walk that the three int4 layouts share |
//! | `gptq` | `qweight`, `qzeros`, `scales`, `g_idx` |
//! | `awq` | `qweight`, `qzeros`, `scales`, codes along N |
//! | `compressed_tensors` | `weight_packed`, `weight_scale`, `weight_shape`, `weight_zero_point` |
//! | `wide` | int4 whose scales another tool stored as BF16 |
//! | `uintx` | `uintx_packed`, `uintx_scale`, `uintx_zero_point` |
//! | `buffer` | cache-line aligned scratch memory |
//! | `registry` | which scheme a request or a config names |

mod awq;
mod buffer;
mod compressed_tensors;
mod gptq;
mod int4;
mod registry;
mod uintx;
mod wide;

pub use buffer::Buffer;
pub use registry::{recognise, select, QType, Recognised, Request, ALL_LAYOUTS};

use crate::checkpoint::Metadata;
use crate::error::Error;
use crate::kernel::Level;
use crate::tensor::{Dtype, ErrorSums, Fault, Float, GroupCounts};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

/// The shape of one weight to quantize: `[rows, columns]` = `[out_features, in_features]`, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub rows: usize,
    pub columns: usize,
    /// Neighbours along the columns that share a scale.
    pub group: usize,
    /// Of the dense weight.
    pub dtype: Float,
}

impl Shape {
    /// G: groups in one row.
    pub fn groups(&self) -> usize {
        self.columns / self.group
    }

    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Bytes of one dense row.
    pub fn row_bytes(&self) -> usize {
        self.columns * self.dtype.size()
    }

    /// Bytes of the dense weight.
    pub fn dense_bytes(&self) -> u64 {
        (self.elements() * self.dtype.size()) as u64
    }
}

/// One stored tensor of a module; its full name is `module.suffix`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputSpec {
    pub suffix: &'static str,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl OutputSpec {
    pub fn new(suffix: &'static str, dtype: Dtype, shape: Vec<usize>) -> Self {
        Self { suffix, dtype, shape }
    }

    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }
}

/// A part of a module that one worker handles whole; what its bounds count (rows, elements of a segment) is the scheme's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub begin: usize,
    pub end: usize,
    /// Of the dense weight, for progress.
    pub source_bytes: u64,
}

/// Bytes of a tile buffer and where they belong: `count` runs of `width` bytes, `stride` apart, from `offset` of the
/// output tensor; in the buffer the runs follow each other from `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub output: usize,
    pub from: usize,
    pub offset: u64,
    pub width: usize,
    pub count: usize,
    pub stride: u64,
}

impl Piece {
    /// One unbroken run.
    pub fn run(output: usize, from: usize, offset: u64, width: usize) -> Self {
        Self {
            output,
            from,
            offset,
            width,
            count: 1,
            stride: 0,
        }
    }

    /// `count` runs; joined into one where they touch.
    pub fn strided(output: usize, offset: u64, width: usize, count: usize, stride: u64) -> Self {
        if width as u64 == stride {
            Self::run(output, 0, offset, width * count)
        } else {
            Self {
                output,
                from: 0,
                offset,
                width,
                count,
                stride,
            }
        }
    }

    pub fn bytes(&self) -> usize {
        self.width * self.count
    }
}

/// A worker's scratch: one buffer per output, the pieces that lie in them, and room for the walk itself.
#[derive(Default)]
pub struct TileBuffers {
    pub outputs: Vec<Buffer>,
    pub pieces: Vec<Piece>,
    pub scratch: Scratch,
}

/// Buffers that the walks reuse from tile to tile.
#[derive(Default)]
pub struct Scratch {
    pub source: Buffer,
    pub words: Buffer,
    pub scales: Buffer,
    pub zeros: Buffer,
    pub sums: Vec<ErrorSums>,
}

/// What one tile came to.
#[derive(Clone, Debug, Default)]
pub struct TileStats {
    /// Sums of consecutive blocks whose bounds depend on the module's shape alone, so that folding them in order gives
    /// the same SNR for every tile size and thread count.
    pub blocks: Vec<ErrorSums>,
    /// Index of the first of `blocks` in the module.
    pub first_block: usize,
    pub counts: GroupCounts,
}

/// What one stored tile came to: as when it was encoded, and what is wrong with it.
#[derive(Debug, Default)]
pub struct Measured {
    pub stats: TileStats,
    pub faults: Vec<StoredFault>,
}

/// Why a tile could not be done. `Fault` counts elements from the module's first weight.
#[derive(Debug)]
pub enum TileError {
    Fault(Fault),
    Other(Error),
}

impl From<Error> for TileError {
    fn from(error: Error) -> Self {
        TileError::Other(error)
    }
}

/// Reads the dense weight: `offset` in bytes from the module's first weight.
pub trait Weights {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Error>;
}

/// Reads a module's stored tensors: `offset` in bytes from the start of output number `output`.
pub trait Stored {
    fn read(&mut self, output: usize, offset: u64, into: &mut [u8]) -> Result<(), Error>;
}

/// Reads a piece's runs into `into`, one after the other.
pub fn read_piece(stored: &mut dyn Stored, piece: &Piece, into: &mut [u8]) -> Result<(), Error> {
    for (run, chunk) in into[piece.from..piece.from + piece.bytes()]
        .chunks_exact_mut(piece.width.max(1))
        .enumerate()
    {
        stored.read(piece.output, piece.offset + run as u64 * piece.stride, chunk)?;
    }
    Ok(())
}

/// What a scheme needs to know of the whole plan to write its config.
pub struct ConfigContext<'a> {
    /// Names of the quantized modules, in the source's order.
    pub quantized: &'a [String],
    /// Names of the linear modules that stay dense.
    pub dense_linears: &'a [String],
    /// Whether some of them would be quantized by a reader that knows the model, if it were not told.
    pub partly_dense: bool,
    pub lm_head: bool,
}

/// A group that spans a row, however long the row is.
pub const WHOLE_ROW: usize = 0;

/// What vLLM makes of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vllm {
    /// It does not know it, and its users know that.
    Unknown,
    /// It loads it, as others do: a shape that it cannot load is worth a warning.
    OneOfMany,
    /// The layout is written for it: a shape that it cannot load stays dense.
    Target,
    /// What it refuses, and the way out.
    Refuses(&'static str),
}

/// What is wrong with a stored module, for `--verify`: the output's suffix and a sentence.
#[derive(Debug, PartialEq, Eq)]
pub struct StoredFault {
    pub suffix: &'static str,
    pub what: String,
}

/// One layout, with its settings bound (symmetric or not, bits, ..).
pub trait Scheme: Send + Sync {
    /// `int4`, `uint3`, ..
    fn qtype(&self) -> QType;

    /// As on the command line: `gptq`, ..; for uintN `uintx`.
    fn layout(&self) -> &'static str;

    fn symmetric(&self) -> bool;

    /// The tensors of one module, in the scheme's own order.
    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec>;

    /// Stored bits per weight, scales and zero points included, as the report gives it.
    fn bits_per_weight(&self, group: usize, dtype: Float) -> f64;

    /// Why this layout cannot hold the weight, or nothing.
    fn refuse(&self, shape: &Shape) -> Option<String>;

    /// Cuts a module so that a tile's outputs take about `budget` bytes.
    fn tiles(&self, shape: &Shape, budget: usize) -> Vec<Tile>;

    /// How many blocks of sums [`TileStats`] has for the whole module.
    fn blocks(&self, shape: &Shape) -> usize;

    /// Reads, encodes and packs a tile; the bytes and their places are left in `out`.
    fn encode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        weights: &mut dyn Weights,
        out: &mut TileBuffers,
    ) -> Result<TileStats, TileError>;

    /// Checks a tile's stored constants, scales and zero points, and with `weights` sums the error of what is stored.
    fn measure(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        weights: Option<&mut dyn Weights>,
        out: &mut TileBuffers,
    ) -> Result<Measured, Error>;

    /// Decodes a tile to `dtype`; the bytes are left in `out.outputs[0]`, their places (in the dense weight) in `out.pieces`.
    /// Gives what is wrong with the stored values, as [`Scheme::measure`] does: with a fault, the decoded ones are too.
    fn decode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        dtype: Float,
        out: &mut TileBuffers,
    ) -> Result<Vec<StoredFault>, Error>;

    /// The `quantization_config` of config.json.
    fn config(&self, group: usize, context: &ConfigContext) -> Value;

    /// The key of [`Scheme::file_metadata`], for a checkpoint that is made dense again.
    fn metadata_key(&self) -> Option<&'static str> {
        None
    }

    /// Entries for the `__metadata__` of a file that holds `modules`.
    fn file_metadata(&self, _modules: &[(&str, Float)]) -> Option<(String, String)> {
        None
    }

    /// What a file's `__metadata__` says of its modules: the dtype of the dense weight, or a contradiction. Empty where
    /// the layout keeps nothing there.
    fn stored_dtypes(&self, _metadata: &Metadata) -> BTreeMap<String, Result<Float, String>> {
        BTreeMap::new()
    }

    /// Whether a file whose source has no `format` in its `__metadata__` gets the one that transformers expects.
    fn writes_format(&self) -> bool {
        true
    }

    /// The dense shape behind stored tensors, given each output's dtype and shape (`None` where it is missing), for
    /// `--verify` and `--dequantize`.
    fn dense_shape(
        &self,
        outputs: &[Option<(Dtype, &[usize])>],
        group: usize,
        fallback: Float,
    ) -> Result<Shape, StoredFault>;

    /// The suffixes of [`Scheme::outputs`], in order; the first names the module.
    fn suffixes(&self) -> &'static [&'static str];

    /// What vLLM makes of it.
    fn vllm(&self) -> Vllm {
        Vllm::Unknown
    }

    /// Whether transformers ignores a quantized lm_head of this layout and initialises a fresh one.
    fn fresh_head_in_transformers(&self) -> bool {
        false
    }

    /// Whether naming the module `dense` in the config makes a reader take `quantized` for dense too.
    fn hides(&self, _dense: &str, _quantized: &str) -> bool {
        false
    }
}

/// Even tiles over `rows` that are multiples of `step` and hold at most about `most` rows.
fn row_tiles(shape: &Shape, step: usize, most: usize) -> Vec<Tile> {
    let most = most.max(step) / step * step;
    let count = shape.rows.div_ceil(most).max(1);
    let each = shape.rows.div_ceil(count).div_ceil(step) * step;
    (0..shape.rows)
        .step_by(each.max(1))
        .map(|begin| {
            let end = (begin + each).min(shape.rows);
            Tile {
                begin,
                end,
                source_bytes: ((end - begin) * shape.row_bytes()) as u64,
            }
        })
        .collect()
}

/// Rows cut into runs of at most `step`.
fn row_steps(rows: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(step).map(move |row| row..(row + step).min(end))
}
