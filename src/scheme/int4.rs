//! The walk that every int4 layout shares: read rows, encode them into row-major codes, let the layout place them; and
//! back. A layout (`gptq`, ..) says only where codes, scales and zero points lie.

use super::*;
use crate::kernel::int4 as kernel;
use serde_json::Map;

/// Rows whose sums are folded together before they are kept. Part of the report's arithmetic: never depends on tiles.
const BLOCK_ROWS: usize = 16;

/// Tiles begin at multiples of this, so that packed words and blocks of sums are never shared between two of them and
/// runs of a strip are whole cache lines.
const TILE_STEP: usize = 64;

/// Dense bytes read and encoded at a time: with their codes they fit a core's second-level cache.
const STEP_BYTES: usize = 256 << 10;

/// Row-major codes of some rows: `words` `[rows, K/8]`, eight codes along K each, lowest nibble first; `scales`
/// `[rows, G]`, f16 bits; `zeros` `[rows, G]`, the zero point that is subtracted from a code.
pub(super) struct RowCodes<'a> {
    pub words: &'a [u32],
    pub scales: &'a [u16],
    pub zeros: &'a [u8],
}

/// As [`RowCodes`], to be filled.
pub(super) struct RowCodesMut<'a> {
    pub words: &'a mut [u32],
    pub scales: &'a mut [u16],
    pub zeros: &'a mut [u8],
}

/// Some rows of a tile: `tile` and `rows` count from the module's first row.
pub(super) struct Rows<'a> {
    pub shape: &'a Shape,
    pub tile: Range<usize>,
    pub rows: Range<usize>,
}

impl Rows<'_> {
    pub fn count(&self) -> usize {
        self.rows.len()
    }

    /// First row within the tile.
    pub fn first(&self) -> usize {
        self.rows.start - self.tile.start
    }
}

/// Where an int4 layout keeps codes, scales and zero points. The buffers of `outputs` hold a tile's pieces.
pub(super) trait Layout: Send + Sync {
    const NAME: &'static str;

    /// Rows packed together at least: what fills whole cache lines of the outputs. A multiple of [`BLOCK_ROWS`].
    const PACK_ROWS: usize;

    /// How many times the usual tile one holds, for a layout whose runs of a tile are narrow.
    const TILE_SHARE: usize = 1;

    /// Of [`Layout::outputs`], in order; the first names the module.
    fn suffixes(&self) -> &'static [&'static str];

    fn symmetric(&self) -> bool;

    /// Of the stored scales: F16 where this tool wrote them, F16 or BF16 where another did.
    fn scale_dtype(&self) -> Float;

    /// What vLLM makes of it.
    fn vllm(&self) -> Vllm;

    /// See [`Scheme::fresh_head_in_transformers`].
    fn fresh_head_in_transformers(&self) -> bool;

    /// See [`Scheme::hides`].
    fn hides(&self, _dense: &str, _quantized: &str) -> bool {
        false
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec>;

    /// Beyond what every int4 layout needs.
    fn refuse(&self, shape: &Shape) -> Option<String>;

    /// Where the rows of a tile lie; tensors that do not depend on weights belong to the tile that begins at row 0.
    fn pieces(&self, shape: &Shape, rows: &Range<usize>) -> Vec<Piece>;

    /// Fills the outputs that depend on the shape alone.
    fn constants(&self, shape: &Shape, outputs: &mut [Buffer]);

    /// Compares them with what was read.
    fn check_constants(&self, shape: &Shape, outputs: &[Buffer]) -> Option<StoredFault>;

    fn pack(&self, level: Level, at: &Rows, codes: RowCodes, outputs: &mut [Buffer]);
    fn unpack(&self, level: Level, at: &Rows, outputs: &[Buffer], codes: RowCodesMut);

    fn config(&self, group: usize, context: &ConfigContext) -> Map<String, Value>;

    /// Rows and columns behind the stored tensors.
    fn dense_size(&self, outputs: &[Option<(Dtype, &[usize])>]) -> Result<(usize, usize), StoredFault>;
}

/// The shape of the tensor that tells a module's size, where it is an I32 matrix; else what is wrong with it.
pub(super) fn packed_shape(
    stored: Option<(Dtype, &[usize])>,
    suffix: &'static str,
    layout: &str,
) -> Result<[usize; 2], StoredFault> {
    let what = match stored {
        Some((Dtype::I32, &[rows, columns])) => return Ok([rows, columns]),
        Some((dtype, shape)) => format!("is {dtype:?} {shape:?}, where the layout has I32 {layout}"),
        None => "is missing".into(),
    };
    Err(StoredFault { suffix, what })
}

/// `json!` of braces as the map that it is.
pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("json! of braces is an object"),
    }
}

/// An int4 scheme: the shared walk over one layout.
pub(super) struct Int4<L>(pub L);

impl<L: Layout> Int4<L> {
    /// Rows at a time: whole blocks of sums, about [`STEP_BYTES`] of dense weights.
    fn step(shape: &Shape) -> usize {
        (STEP_BYTES / shape.row_bytes().max(1) / BLOCK_ROWS * BLOCK_ROWS).max(BLOCK_ROWS)
    }

    /// Reads a tile's pieces, and gives what is wrong with those that depend on the shape alone.
    /// The rows of a tile that are packed or unpacked together.
    fn batches(shape: &Shape, tile: &Tile) -> impl Iterator<Item = Range<usize>> {
        row_steps(tile.begin..tile.end, Self::step(shape).max(L::PACK_ROWS))
    }

    /// The codes of some rows of a tile, in the given buffers.
    fn unpack<'a>(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        rows: Range<usize>,
        outputs: &[Buffer],
        (words, scales, zeros): (&'a mut Buffer, &'a mut Buffer, &'a mut Buffer),
    ) -> RowCodes<'a> {
        let words = words.take::<u32>(rows.len() * shape.columns / 8);
        let scales = scales.take::<u16>(rows.len() * shape.groups());
        let zeros = zeros.take::<u8>(rows.len() * shape.groups());
        let tile = tile.begin..tile.end;
        let at = Rows { shape, tile, rows };
        let codes = RowCodesMut { words, scales, zeros };
        self.0.unpack(level, &at, outputs, codes);
        RowCodes { words, scales, zeros }
    }

    fn load_pieces(
        &self,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        out: &mut TileBuffers,
    ) -> Result<Vec<StoredFault>, Error> {
        self.lay_out(shape, tile, out);
        for piece in &out.pieces {
            read_piece(stored, piece, out.outputs[piece.output].bytes_mut())?;
        }
        let first = tile.begin == 0;
        let fault = first.then(|| self.0.check_constants(shape, &out.outputs));
        Ok(fault.flatten().into_iter().collect())
    }

    /// Sizes the tile's buffers and notes where they belong.
    fn lay_out(&self, shape: &Shape, tile: &Tile, out: &mut TileBuffers) {
        out.pieces = self.0.pieces(shape, &(tile.begin..tile.end));
        out.outputs.resize_with(self.0.suffixes().len(), Buffer::default);
        for piece in &out.pieces {
            out.outputs[piece.output].resize(piece.from + piece.bytes());
        }
    }
}

/// Folds the sums of rows into blocks, in order.
fn fold_rows(sums: &[ErrorSums], blocks: &mut Vec<ErrorSums>) {
    for rows in sums.chunks(BLOCK_ROWS) {
        let mut block = ErrorSums::default();
        rows.iter().for_each(|&row| block += row);
        blocks.push(block);
    }
}

impl<L: Layout> Scheme for Int4<L> {
    fn qtype(&self) -> QType {
        QType::Int4
    }

    fn layout(&self) -> &'static str {
        L::NAME
    }

    fn symmetric(&self) -> bool {
        self.0.symmetric()
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        self.0.outputs(shape)
    }

    fn bits_per_weight(&self, group: usize, _dtype: Float) -> f64 {
        4.0 + (16.0 + 4.0) / group as f64
    }

    fn refuse(&self, shape: &Shape) -> Option<String> {
        if shape.columns == 0 || shape.rows == 0 {
            return Some(format!(
                "its shape [{}, {}] holds no weights",
                shape.rows, shape.columns
            ));
        }
        if !shape.columns.is_multiple_of(shape.group) {
            return Some(format!(
                "in_features {} is not divisible by the group of {}",
                shape.columns, shape.group
            ));
        }
        self.0.refuse(shape)
    }

    fn tiles(&self, shape: &Shape, budget: usize) -> Vec<Tile> {
        row_tiles(shape, TILE_STEP, budget * L::TILE_SHARE / (shape.columns / 2).max(1))
    }

    fn blocks(&self, shape: &Shape) -> usize {
        shape.rows.div_ceil(BLOCK_ROWS)
    }

    fn encode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        weights: &mut dyn Weights,
        out: &mut TileBuffers,
    ) -> Result<TileStats, TileError> {
        self.lay_out(shape, tile, out);
        let mut stats = TileStats {
            first_block: tile.begin / BLOCK_ROWS,
            ..TileStats::default()
        };
        let Scratch {
            source,
            words,
            scales,
            zeros,
            sums,
        } = &mut out.scratch;
        let (k, g) = (shape.columns, shape.groups());
        for batch in Self::batches(shape, tile) {
            let words = words.take::<u32>(batch.len() * k / 8);
            let scales = scales.take::<u16>(batch.len() * g);
            let zeros = zeros.take::<u8>(batch.len() * g);
            for rows in row_steps(batch.clone(), Self::step(shape)) {
                let source = source.take::<u8>(rows.len() * shape.row_bytes());
                weights.read((rows.start * shape.row_bytes()) as u64, source)?;
                sums.resize(rows.len(), ErrorSums::default());
                let at = rows.start - batch.start..rows.end - batch.start;
                let encoded = kernel::Tile {
                    words: &mut words[at.start * k / 8..at.end * k / 8],
                    scales: &mut scales[at.start * g..at.end * g],
                    zeros: &mut zeros[at.start * g..at.end * g],
                    sums,
                };
                let asym = !self.0.symmetric();
                let counts = kernel::encode(level, shape.dtype, source, k, shape.group, asym, encoded)
                    .map_err(|fault| TileError::Fault(fault.shifted(rows.start * k)))?;
                stats.counts += counts;
                fold_rows(sums, &mut stats.blocks);
            }
            let at = Rows {
                shape,
                tile: tile.begin..tile.end,
                rows: batch,
            };
            self.0
                .pack(level, &at, RowCodes { words, scales, zeros }, &mut out.outputs);
        }
        if tile.begin == 0 {
            self.0.constants(shape, &mut out.outputs);
        }
        Ok(stats)
    }

    fn measure(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        mut weights: Option<&mut dyn Weights>,
        out: &mut TileBuffers,
    ) -> Result<Measured, Error> {
        let mut faults = self.load_pieces(shape, tile, stored, out)?;
        let mut stats = TileStats {
            first_block: tile.begin / BLOCK_ROWS,
            ..TileStats::default()
        };
        let Scratch {
            source,
            words,
            scales,
            zeros,
            sums,
        } = &mut out.scratch;
        let (k, g) = (shape.columns, shape.groups());
        let measure = match self.0.scale_dtype() {
            Float::Bf16 => wide::measure,
            _ => kernel::measure,
        };
        for rows in Self::batches(shape, tile) {
            let batch = rows.clone();
            let codes = self.unpack(level, shape, tile, rows, &out.outputs, (words, scales, zeros));
            faults.extend(self.check_groups(shape, batch.start, codes.scales, codes.zeros));
            let Some(weights) = weights.as_deref_mut() else {
                continue;
            };
            for rows in row_steps(batch.clone(), Self::step(shape)) {
                let source = source.take::<u8>(rows.len() * shape.row_bytes());
                weights.read((rows.start * shape.row_bytes()) as u64, source)?;
                sums.resize(rows.len(), ErrorSums::default());
                let at = rows.start - batch.start..rows.end - batch.start;
                let words = &codes.words[at.start * k / 8..at.end * k / 8];
                let scales = &codes.scales[at.start * g..at.end * g];
                let zeros = &codes.zeros[at.start * g..at.end * g];
                measure(level, shape.dtype, source, k, shape.group, words, scales, zeros, sums);
                fold_rows(sums, &mut stats.blocks);
            }
        }
        Ok(Measured { stats, faults })
    }

    fn decode(
        &self,
        level: Level,
        shape: &Shape,
        tile: &Tile,
        stored: &mut dyn Stored,
        dtype: Float,
        out: &mut TileBuffers,
    ) -> Result<Vec<StoredFault>, Error> {
        let mut faults = self.load_pieces(shape, tile, stored, out)?;
        let mut dense = std::mem::take(&mut out.scratch.source);
        let row_bytes = shape.columns * dtype.size();
        let all = dense.take::<u8>((tile.end - tile.begin) * row_bytes);
        let Scratch {
            words, scales, zeros, ..
        } = &mut out.scratch;
        let decode = match self.0.scale_dtype() {
            Float::Bf16 => wide::decode,
            _ => kernel::decode,
        };
        for rows in Self::batches(shape, tile) {
            let into = (rows.start - tile.begin) * row_bytes..(rows.end - tile.begin) * row_bytes;
            let first = rows.start;
            let RowCodes { words, scales, zeros } =
                self.unpack(level, shape, tile, rows, &out.outputs, (words, scales, zeros));
            faults.extend(self.check_groups(shape, first, scales, zeros));
            let into = &mut all[into];
            decode(level, words, scales, zeros, shape.columns, shape.group, dtype, into);
        }
        // The dense rows become output 0, and its old buffer the scratch of the next tile.
        std::mem::swap(&mut out.outputs[0], &mut dense);
        out.scratch.source = dense;
        out.pieces = vec![Piece::run(
            0,
            0,
            (tile.begin * row_bytes) as u64,
            (tile.end - tile.begin) * row_bytes,
        )];
        Ok(faults)
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Value {
        Value::Object(self.0.config(group, context))
    }

    fn dense_shape(
        &self,
        outputs: &[Option<(Dtype, &[usize])>],
        group: usize,
        fallback: Float,
    ) -> Result<Shape, StoredFault> {
        let (rows, columns) = self.0.dense_size(outputs)?;
        let group = if group == WHOLE_ROW { columns } else { group };
        let shape = Shape {
            rows,
            columns,
            group: group.max(1),
            dtype: fallback,
        };
        if let Some(why) = self.refuse(&shape) {
            return Err(StoredFault {
                suffix: self.0.suffixes()[0],
                what: format!("decodes to [{rows}, {columns}], which cannot be: {why}"),
            });
        }
        for (expected, found) in self.outputs(&shape).iter().zip(outputs) {
            let Some((dtype, found)) = found else {
                return Err(StoredFault {
                    suffix: expected.suffix,
                    what: "is missing".into(),
                });
            };
            if *dtype != expected.dtype || *found != expected.shape {
                let what = format!(
                    "is {dtype:?} {found:?}, where the module's other tensors and the group of {group} make it {:?} {:?}",
                    expected.dtype, expected.shape
                );
                return Err(StoredFault {
                    suffix: expected.suffix,
                    what,
                });
            }
        }
        Ok(shape)
    }

    fn suffixes(&self) -> &'static [&'static str] {
        self.0.suffixes()
    }

    fn vllm(&self) -> Vllm {
        self.0.vllm()
    }

    fn fresh_head_in_transformers(&self) -> bool {
        self.0.fresh_head_in_transformers()
    }

    fn hides(&self, dense: &str, quantized: &str) -> bool {
        self.0.hides(dense, quantized)
    }
}

impl<L: Layout> Int4<L> {
    /// Scales finite and not negative; a symmetric grid's zero point is 8 everywhere.
    /// `first_row`: where the scales and zero points begin, for messages.
    fn check_groups(&self, shape: &Shape, first_row: usize, scales: &[u16], zeros: &[u8]) -> Option<StoredFault> {
        let groups = shape.groups();
        let place = |index: usize| format!("row {}, group {}", first_row + index / groups, index % groups);
        let wide = self.0.scale_dtype() == Float::Bf16;
        // All exponent bits set is infinite or NaN; the sign bit alone is -0, which no writer makes.
        let least_bad = if wide { 0x7f80 } else { 0x7c00 };
        if let Some(index) = scales.iter().position(|&bits| bits >= least_bad) {
            let bits = scales[index];
            let value = if wide {
                wide::scale(bits)
            } else {
                half::f16::from_bits(bits).to_f32()
            };
            return Some(StoredFault {
                suffix: self.0.suffixes()[self.scales_output()],
                what: format!("holds the scale {value} at {}", place(index)),
            });
        }
        if self.0.symmetric() {
            let index = zeros.iter().position(|&zero| zero != 8)?;
            let what = format!(
                "decodes to zero point {} at {}, but the config says symmetric, which is 8 everywhere",
                zeros[index],
                place(index)
            );
            return Some(StoredFault {
                suffix: self.0.suffixes()[self.zeros_output()],
                what,
            });
        }
        None
    }

    fn scales_output(&self) -> usize {
        self.0
            .suffixes()
            .iter()
            .position(|suffix| suffix.ends_with("scales") || suffix.ends_with("scale"))
            .unwrap_or(0)
    }

    fn zeros_output(&self) -> usize {
        self.0
            .suffixes()
            .iter()
            .position(|suffix| suffix.contains("zero"))
            .unwrap_or(0)
    }
}
