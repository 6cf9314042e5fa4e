//! The obvious code for [`uintx`](super::uintx) and [`shards`](super::shards): one weight at a time, one line per
//! operation, never optimised.

use half::{bf16, f16};

use super::reference::{fold, set_weight, weight};
use super::shards::Shard;
use super::uintx::{Stored, Tile, SMALLEST_SCALE};
use crate::tensor::{ErrorSums, Fault, Float, GroupCounts};

/// `x` rounded half to even to the dtype.
pub fn round(dtype: Float, x: f32) -> f32 {
    match dtype {
        Float::F32 => x,
        Float::F16 => f16::from_f32(x).to_f32(),
        Float::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// 16 accumulators, weight `i` of a group in number `i % 16`, folded by halves at the end of the slice.
#[derive(Default)]
struct Sums {
    signal: [f64; 16],
    noise: [f64; 16],
}

impl Sums {
    fn add(&mut self, i: usize, weight: f32, dequantized: f32) {
        let error = weight - dequantized;
        self.signal[i % 16] += f64::from(weight) * f64::from(weight);
        self.noise[i % 16] += f64::from(error) * f64::from(error);
    }

    fn total(self) -> ErrorSums {
        ErrorSums {
            signal: fold(self.signal),
            noise: fold(self.noise),
        }
    }
}

/// What a group's range gives; all values are of the weights' dtype.
pub struct Grid {
    pub scale: f32,
    pub zero: f32,
    pub reciprocal: f32,
}

impl Grid {
    /// `None` where the range overflows the dtype. `mn <= 0 <= mx`.
    pub fn new(dtype: Float, bits: u8, mn: f32, mx: f32) -> Option<Grid> {
        let top = f32::from((1u8 << bits) - 1);
        let range = round(dtype, mx - mn);
        let scale = round(dtype, range / top).max(SMALLEST_SCALE);
        let zero = (0.0 - round(dtype, mn / scale).round_ties_even()).clamp(0.0, top);
        let reciprocal = round(dtype, 1.0 / scale);
        range.is_finite().then_some(Grid {
            scale,
            zero,
            reciprocal,
        })
    }

    /// NaN, which is 0 times an infinite reciprocal, becomes 0.
    pub fn code(&self, dtype: Float, bits: u8, w: f32) -> u8 {
        let top = f32::from((1u8 << bits) - 1);
        let steps = round(dtype, w * self.reciprocal).round_ties_even();
        round(dtype, steps + self.zero).clamp(0.0, top) as u8
    }
}

/// `(code - zp) * scale`, each in the dtype.
pub fn dequantize(dtype: Float, code: u8, zero: u8, scale: f32) -> f32 {
    let steps = round(dtype, f32::from(code) - f32::from(zero));
    round(dtype, steps * scale)
}

/// See [`uintx::encode`](super::uintx::encode).
pub fn encode(
    dtype: Float,
    bits: u8,
    group: usize,
    src: &[u8],
    out: Tile<'_>,
) -> Result<(ErrorSums, GroupCounts), Fault> {
    let elements = out.codes.len();
    if let Some(element) = (0..elements).find(|&i| !weight(dtype, src, i).is_finite()) {
        return Err(Fault::NonFinite { element });
    }
    let mut counts = GroupCounts::default();
    let mut sums = Sums::default();
    for g in 0..out.zeros.len() {
        let first = g * group;
        let weights = (first..first + group).map(|i| weight(dtype, src, i));
        let mx = weights.clone().fold(0.0, f32::max);
        let mn = weights.clone().fold(0.0, f32::min);
        let grid = Grid::new(dtype, bits, mn, mx).ok_or(Fault::ScaleOverflow { element: first })?;
        set_weight(dtype, out.scales, g, grid.scale);
        out.zeros[g] = grid.zero as u8;
        counts.zero += u64::from(mx == 0.0 && mn == 0.0);
        for (i, w) in weights.enumerate() {
            let code = grid.code(dtype, bits, w);
            out.codes[first + i] = code;
            sums.add(i, w, dequantize(dtype, code, out.zeros[g], grid.scale));
        }
    }
    Ok((sums.total(), counts))
}

/// See [`uintx::measure`](super::uintx::measure).
pub fn measure(dtype: Float, group: usize, src: &[u8], stored: Stored<'_>) -> ErrorSums {
    let mut sums = Sums::default();
    for (i, &code) in stored.codes.iter().enumerate() {
        let scale = weight(dtype, stored.scales, i / group);
        let dequantized = dequantize(dtype, code, stored.zeros[i / group], scale);
        sums.add(i % group, weight(dtype, src, i), dequantized);
    }
    sums.total()
}

/// See [`uintx::decode`](super::uintx::decode).
pub fn decode(dtype: Float, group: usize, stored: Stored<'_>, to: Float, dst: &mut [u8]) {
    for (i, &code) in stored.codes.iter().enumerate() {
        let scale = weight(dtype, stored.scales, i / group);
        set_weight(to, dst, i, dequantize(dtype, code, stored.zeros[i / group], scale));
    }
}

/// See [`shards::pack`](super::shards::pack).
pub fn pack(shard: Shard, codes: &[u8], starts: &[usize], out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        let fields = starts.iter().map(|start| codes[start + i] >> shard.low & shard.mask());
        *byte = fields.rev().fold(0, |byte, field| byte << (shard.bits % 8) | field);
    }
}

/// See [`shards::unpack`](super::shards::unpack).
pub fn unpack(shard: Shard, src: &[u8], codes: &mut [u8], starts: &[usize]) {
    for (j, start) in starts.iter().enumerate() {
        for (i, byte) in src.iter().enumerate() {
            let code = &mut codes[start + i];
            let kept = if shard.low == 0 { 0 } else { *code };
            *code = kept | (byte >> (shard.bits * j as u32) & shard.mask()) << shard.low;
        }
    }
}
