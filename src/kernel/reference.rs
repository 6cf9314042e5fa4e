//! The obvious code: one weight at a time, one line per operation, never optimised. Every fast variant is tested equal
//! to it, and it is what [`Level::Scalar`](super::Level::Scalar) runs.

use half::{bf16, f16};

use super::int4::Tile;
use super::layout::NibbleOrder;
use crate::tensor::{ErrorSums, Fault, Float, GroupCounts};

/// The smallest symmetric scale, and the smallest range of an asymmetric group.
pub const FLOOR: f32 = 1e-9;

/// Weight `index` of little-endian `src`, widened exactly.
pub fn weight(dtype: Float, src: &[u8], index: usize) -> f32 {
    match dtype {
        Float::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|i| src[4 * index + i])),
        Float::F16 => f16::from_le_bytes([src[2 * index], src[2 * index + 1]]).to_f32(),
        Float::Bf16 => bf16::from_le_bytes([src[2 * index], src[2 * index + 1]]).to_f32(),
    }
}

/// Stores `value` as weight `index` of `dst`, rounded half to even.
pub(super) fn set_weight(dtype: Float, dst: &mut [u8], index: usize, value: f32) {
    match dtype {
        Float::F32 => dst[4 * index..][..4].copy_from_slice(&value.to_le_bytes()),
        Float::F16 => dst[2 * index..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        Float::Bf16 => dst[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
    }
}

/// Code `column` of a row of words: 8 to a word, lowest nibble first.
fn code(row: &[u32], column: usize) -> u32 {
    row[column / 8] >> (4 * (column % 8)) & 15
}

/// Sums of one row: 16 accumulators, column `c` in number `c % 16`, folded by halves at the end of the row.
#[derive(Default)]
struct RowSums {
    signal: [f64; 16],
    noise: [f64; 16],
}

impl RowSums {
    fn add(&mut self, column: usize, weight: f32, dequantized: f32) {
        let error = weight - dequantized;
        self.signal[column % 16] += f64::from(weight) * f64::from(weight);
        self.noise[column % 16] += f64::from(error) * f64::from(error);
    }

    fn total(self) -> ErrorSums {
        ErrorSums {
            signal: fold(self.signal),
            noise: fold(self.noise),
        }
    }
}

/// The sum of 16 lanes in the order that all levels share: lane `i` + lane `i + 8`, then `+ 4`, `+ 2`, `+ 1`.
pub fn fold(mut lanes: [f64; 16]) -> f64 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// See [`int4::encode`](super::int4::encode).
pub fn encode(
    dtype: Float,
    src: &[u8],
    k: usize,
    group: usize,
    asym: bool,
    out: Tile<'_>,
) -> Result<GroupCounts, Fault> {
    let elements = src.len() / dtype.size();
    if let Some(element) = (0..elements).find(|&i| !weight(dtype, src, i).is_finite()) {
        return Err(Fault::NonFinite { element });
    }
    let mut counts = GroupCounts::default();
    for row in 0..out.sums.len() {
        let mut sums = RowSums::default();
        for g in 0..k / group {
            let first = row * k + g * group;
            let weights = (first..first + group).map(|i| weight(dtype, src, i));
            let (scale, zero);
            if asym {
                let mx = weights.clone().fold(0.0, f32::max);
                let mn = weights.clone().fold(0.0, f32::min);
                scale = (mx - mn).max(FLOOR) / 15.0;
                zero = (-mn / scale).round_ties_even().clamp(0.0, 15.0);
            } else {
                let amax = weights.clone().map(f32::abs).fold(0.0, f32::max);
                scale = (amax / 8.0).max(FLOOR);
                zero = 8.0;
            }
            let stored = f16::from_f32(scale);
            if stored.is_infinite() {
                return Err(Fault::ScaleOverflow { element: first });
            }
            if weights.clone().all(|w| w == 0.0) {
                counts.zero += 1;
            } else if stored == f16::ZERO {
                counts.underflowed += 1;
            }
            out.scales[first / group] = stored.to_bits();
            out.zeros[first / group] = zero as u8;
            for (i, w) in (first..).zip(weights) {
                let code = ((w / scale).round_ties_even() + zero).clamp(0.0, 15.0);
                let word = &mut out.words[i / 8];
                let shift = 4 * (i % 8);
                *word = *word & !(15 << shift) | (code as u32) << shift;
                sums.add(i - row * k, w, (code - zero) * stored.to_f32());
            }
        }
        out.sums[row] = sums.total();
    }
    Ok(counts)
}

/// See [`int4::measure`](super::int4::measure).
#[allow(clippy::too_many_arguments)] // one tile: its weights, its codes, and the shape that both share
pub fn measure(
    dtype: Float,
    src: &[u8],
    k: usize,
    group: usize,
    words: &[u32],
    scales: &[u16],
    zeros: &[u8],
    sums: &mut [ErrorSums],
) {
    for (row, out) in sums.iter_mut().enumerate() {
        let mut sums = RowSums::default();
        for column in 0..k {
            let dequantized = dequantize(words, scales, zeros, k, group, row, column);
            sums.add(column, weight(dtype, src, row * k + column), dequantized);
        }
        *out = sums.total();
    }
}

/// See [`int4::decode`](super::int4::decode).
pub fn decode(words: &[u32], scales: &[u16], zeros: &[u8], k: usize, group: usize, dtype: Float, dst: &mut [u8]) {
    for row in 0..dst.len() / (k * dtype.size()).max(1) {
        for column in 0..k {
            let dequantized = dequantize(words, scales, zeros, k, group, row, column);
            set_weight(dtype, dst, row * k + column, dequantized);
        }
    }
}

/// `(code - zero point) * scale`, exact in f32: 5 bits times 11.
fn dequantize(words: &[u32], scales: &[u16], zeros: &[u8], k: usize, group: usize, row: usize, column: usize) -> f32 {
    let code = code(&words[row * (k / 8)..], column);
    let g = row * (k / group) + column / group;
    (code as i32 - i32::from(zeros[g])) as f32 * f16::from_bits(scales[g]).to_f32()
}

/// See [`layout::transpose`](super::layout::transpose).
pub fn transpose<T: Copy>(src: &[T], rows: usize, cols: usize, dst: &mut [T], stride: usize) {
    for r in 0..rows {
        for c in 0..cols {
            dst[c * stride + r] = src[r * cols + c];
        }
    }
}

/// See [`layout::untranspose`](super::layout::untranspose).
pub fn untranspose<T: Copy>(src: &[T], stride: usize, rows: usize, cols: usize, dst: &mut [T]) {
    for r in 0..rows {
        for c in 0..cols {
            dst[r * cols + c] = src[c * stride + r];
        }
    }
}

/// See [`layout::awq_pack`](super::layout::awq_pack).
pub fn awq_pack(words: &[u32], rows: usize, k: usize, dst: &mut [u32], stride: usize) {
    for column in 0..k {
        for block in 0..rows / 8 {
            let nibbles = NibbleOrder::Awq
                .offsets()
                .map(|r| code(&words[(8 * block + r) * (k / 8)..], column));
            dst[column * stride + block] = join(nibbles);
        }
    }
}

/// See [`layout::awq_unpack`](super::layout::awq_unpack).
pub fn awq_unpack(src: &[u32], stride: usize, rows: usize, k: usize, words: &mut [u32]) {
    for (nibble, offset) in NibbleOrder::Awq.offsets().into_iter().enumerate() {
        for row in (offset..rows).step_by(8) {
            for column in (0..k).step_by(8) {
                let codes = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| src[(column + i) * stride + row / 8] >> (4 * nibble) & 15);
                words[(row * k + column) / 8] = join(codes);
            }
        }
    }
}

/// 8 nibbles as a word, the first lowest.
pub fn join(nibbles: [u32; 8]) -> u32 {
    nibbles.iter().rev().fold(0, |word, nibble| word << 4 | nibble)
}
