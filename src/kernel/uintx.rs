//! uint2 .. uint7: codes, scales and zero points of groups along K as torchao 0.10.0's `UIntXWeightOnlyConfig` makes
//! them on a CPU, and the sums behind their SNR.
//!
//! The arithmetic runs in the weight's own dtype: after each operation the f32 result is rounded to it, half to even.
//!
//! | step | operands -> result |
//! |---|---|
//! | mn, mx | group minimum and maximum, each extended to 0 |
//! | scale | (mx - mn) rounded; / (2^b - 1) rounded; at least 2^-23 |
//! | zp | clamp(0 - round(rounded(mn / scale)), 0, 2^b - 1) |
//! | recip | 1 / scale rounded; in f16 it can be infinite |
//! | code | clamp(rounded(round(rounded(w * recip)) + zp), 0, 2^b - 1); NaN, which is 0 * inf, becomes 0 |
//! | dequantized | (code - zp) * scale, each rounded |
//!
//! A slice holds whole groups, one after the other; rows do not matter.

use std::marker::PhantomData;

use super::lanes::{dispatch, with_weight, Job, Lanes, Weight};
use super::{reference, uintx_reference, Level};
use crate::tensor::{ErrorSums, Fault, Float, GroupCounts};

/// The smallest scale: f32's epsilon, exact in all three dtypes.
pub const SMALLEST_SCALE: f32 = f32::EPSILON;

/// Where [`encode`] writes.
#[derive(Debug)]
pub struct Tile<'a> {
    /// One byte per weight.
    pub codes: &'a mut [u8],
    /// One per group, little-endian in the weights' dtype.
    pub scales: &'a mut [u8],
    /// One per group.
    pub zeros: &'a mut [u8],
}

/// What [`encode`] wrote, or what a checkpoint holds.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [u8],
    pub zeros: &'a [u8],
}

/// Quantizes `src`, whole groups of little-endian weights at any alignment, to codes of `bits` bits.
///
/// The sums are sum w^2 and sum (w - deq)^2, where the difference is rounded to f32 and its square is exact in f64.
/// Weight `i` of a group is added to accumulator `i % 16` of 16, which run through the whole slice and are folded at its
/// end as [`reference::fold`] does, so that the bits do not depend on the level.
///
/// # Errors
///
/// [`Fault::NonFinite`] at the first NaN or infinite weight; else [`Fault::ScaleOverflow`] at the first group whose
/// range overflows the dtype. What `out` then holds is unspecified.
///
/// # Panics
///
/// If the lengths of the slices do not fit each other, or `bits` is not 2 to 7.
pub fn encode(
    level: Level,
    dtype: Float,
    bits: u8,
    group: usize,
    src: &[u8],
    out: Tile<'_>,
) -> Result<(ErrorSums, GroupCounts), Fault> {
    assert!((2..=7).contains(&bits), "codes of {bits} bits");
    check(
        dtype,
        group,
        src.len(),
        [out.codes.len(), out.scales.len(), out.zeros.len()],
    );
    if level == Level::Scalar {
        return uintx_reference::encode(dtype, bits, group, src, out);
    }
    with_weight!(dtype, W => dispatch(level, Encode::<W> { bits, group, src, out, dtype: PhantomData }))
}

/// The sums that [`encode`] gives, from `src` and what is stored.
///
/// # Panics
///
/// If the lengths of the slices do not fit each other.
pub fn measure(level: Level, dtype: Float, group: usize, src: &[u8], stored: Stored<'_>) -> ErrorSums {
    check(dtype, group, src.len(), stored.lengths());
    if level == Level::Scalar {
        return uintx_reference::measure(dtype, group, src, stored);
    }
    with_weight!(dtype, W => dispatch(level, Measure::<W> { group, src, stored, dtype: PhantomData }))
}

/// Writes `(code - zp) * scale`, computed in `dtype`, to `dst` as `to`, little-endian.
///
/// # Panics
///
/// If the lengths of the slices do not fit each other.
pub fn decode(level: Level, dtype: Float, group: usize, stored: Stored<'_>, to: Float, dst: &mut [u8]) {
    check(dtype, group, stored.codes.len() * dtype.size(), stored.lengths());
    assert_eq!(dst.len(), stored.codes.len() * to.size(), "one weight per code");
    if level == Level::Scalar {
        return uintx_reference::decode(dtype, group, stored, to, dst);
    }
    with_weight!(dtype, W => with_weight!(to, To => {
        dispatch(level, Decode::<W, To> { group, stored, dst, dtypes: PhantomData })
    }))
}

fn check(dtype: Float, group: usize, src: usize, [codes, scales, zeros]: [usize; 3]) {
    assert_eq!(src, codes * dtype.size(), "one code per weight");
    assert_eq!(codes, zeros * group, "whole groups of {group}");
    assert_eq!(scales, zeros * dtype.size(), "one scale per group");
}

impl Stored<'_> {
    fn lengths(&self) -> [usize; 3] {
        [self.codes.len(), self.scales.len(), self.zeros.len()]
    }

    #[inline(always)]
    fn grid<L: Lanes, W: Weight>(&self, l: L, index: usize) -> Dequantizer<L> {
        let scale = reference::weight(W::FLOAT, self.scales, index);
        Dequantizer {
            scale: l.splat(scale),
            zero: l.splat_i(u32::from(self.zeros[index])),
        }
    }
}

/// 1.5 * 2^23. Adding it rounds a float of magnitude below 2^22 half to even to an integer, which is then the low bits
/// of the sum, in two's complement.
const BIAS: f32 = 12_582_912.0;

/// Groups whose scales and zero points are computed at a time, one in each lane.
const BATCH: usize = 16;

/// Stands for an infinite reciprocal: it takes the smallest f16, 2^-24, beyond the largest, and leaves 0 at 0.
const BEYOND: f32 = (1u64 << 41) as f32;

/// Scales and zero points of a batch of groups.
struct Batch {
    /// Bits of f32.
    scales: [u32; BATCH],
    zeros: [u32; BATCH],
    reciprocals: [u32; BATCH],
    /// `zeros`, but 0 where the reciprocal is infinite: there a positive weight gets the largest code, and a negative
    /// one or 0 (0 * inf is NaN) gets 0.
    shifts: [u32; BATCH],
    /// 0 where all weights are.
    ranges: [u32; BATCH],
    finite: bool,
}

impl Batch {
    #[inline(always)]
    fn new<L: Lanes, W: Weight>(l: L, (mn, mx): (L::F, L::F), top: u32) -> Batch {
        let (none, largest) = (l.splat_i(0), l.splat_i(top));
        let range = round::<L, W>(l, l.sub(mx, mn));
        let scale = l.bits(round::<L, W>(l, l.div(range, l.splat(top as f32))));
        // Neither is negative, so that their bits are ordered as they are.
        let scale = l.from_bits(l.max_i32(scale, l.splat_i(SMALLEST_SCALE.to_bits())));
        let steps = l.sub_i(
            l.bits(l.add(round::<L, W>(l, l.div(mn, scale)), l.splat(BIAS))),
            l.splat_i(BIAS.to_bits()),
        );
        let zero = l.min_i32(l.max_i32(l.sub_i(none, steps), none), largest);
        let reciprocal = round::<L, W>(l, l.div(l.splat(1.0), scale));
        // All ones in the lanes where the subtraction is negative.
        let infinite = l.sub_i(none, l.shr::<31>(l.sub_i(l.splat_i(F32_LARGEST), l.bits(reciprocal))));
        let mut batch = Batch {
            scales: [0; BATCH],
            zeros: [0; BATCH],
            reciprocals: [0; BATCH],
            shifts: [0; BATCH],
            ranges: [0; BATCH],
            finite: l.largest_u32(l.and(l.bits(range), l.splat_i(0x7fff_ffff))) <= F32_LARGEST,
        };
        l.store(l.bits(scale), &mut batch.scales);
        l.store(zero, &mut batch.zeros);
        l.store(l.bits(range), &mut batch.ranges);
        let stand_in = l.splat_i(BEYOND.to_bits());
        l.store(l.select(infinite, stand_in, l.bits(reciprocal)), &mut batch.reciprocals);
        l.store(l.select(infinite, none, zero), &mut batch.shifts);
        batch
    }
}

/// `x` rounded half to even to the dtype.
#[inline(always)]
fn round<L: Lanes, W: Weight>(l: L, x: L::F) -> L::F {
    W::round(l, (x, x)).0
}

/// Bits of the largest finite f32.
const F32_LARGEST: u32 = 0x7f7f_ffff;

/// `(mn, mx)` of up to 16 groups, one in each lane, extended to 0; with a NaN or infinite weight their difference is not
/// finite.
#[inline(always)]
fn ranges<L: Lanes, W: Weight>(l: L, src: &[u8], group: usize) -> (L::F, L::F) {
    let none = l.splat_i(0);
    let (mut positive, mut negative) = ([none; BATCH], [none; BATCH]);
    for (i, weights) in src.chunks_exact(group * W::SIZE).enumerate() {
        let chunks = weights.chunks_exact(W::CHUNK);
        let rest = chunks.remainder();
        let mut acc = (none, none);
        for chunk in chunks {
            acc = W::raise_both(l, acc, chunk);
        }
        if !rest.is_empty() {
            acc = W::raise_both(l, acc, &padded(rest));
        }
        (positive[i], negative[i]) = acc;
    }
    let mx = W::largest(l, l.transpose(positive));
    let smallest = W::largest(l, l.transpose(negative));
    // Without a negative weight the largest pattern is a positive one's.
    let mn = l.and(smallest, l.sub_i(none, l.shr::<31>(smallest)));
    (l.from_bits(mn), l.from_bits(mx))
}

/// The last weights of a group, fewer than 32, with zeros after them. (Sized for f32.)
#[inline(always)]
fn padded(weights: &[u8]) -> [u8; 128] {
    let mut chunk = [0; 128];
    chunk[..weights.len()].copy_from_slice(weights);
    chunk
}

/// The last codes of a group, fewer than 32, with zeros after them.
#[inline(always)]
fn padded_codes(codes: &[u8]) -> [u8; 32] {
    let mut chunk = [0; 32];
    chunk[..codes.len()].copy_from_slice(codes);
    chunk
}

/// All ones in the `(even, odd)` lanes of the first `len` of 32 weights.
#[inline(always)]
fn first<L: Lanes>(l: L, len: usize) -> (L::I, L::I) {
    let mask = |odd: usize| l.load(&std::array::from_fn(|i| if 2 * i + odd < len { u32::MAX } else { 0 }));
    (mask(0), mask(1))
}

/// Accumulators of a slice: weights at even and at odd offsets in their group.
struct Sums<L: Lanes> {
    signal: (L::D, L::D),
    noise: (L::D, L::D),
}

impl<L: Lanes> Sums<L> {
    #[inline(always)]
    fn new(l: L) -> Self {
        let zero = l.zero_d();
        Sums {
            signal: (zero, zero),
            noise: (zero, zero),
        }
    }

    /// Adds 32 weights and their dequantized values. Zeros in unused lanes change nothing.
    #[inline(always)]
    fn add(&mut self, l: L, weights: (L::F, L::F), dequantized: (L::F, L::F)) {
        self.signal = (
            l.add_squares(self.signal.0, weights.0),
            l.add_squares(self.signal.1, weights.1),
        );
        self.noise = (
            l.add_squares(self.noise.0, l.sub(weights.0, dequantized.0)),
            l.add_squares(self.noise.1, l.sub(weights.1, dequantized.1)),
        );
    }

    #[inline(always)]
    fn total(&self, l: L) -> ErrorSums {
        let fold = |(even, odd): (L::D, L::D)| {
            let (even, odd) = (l.to_array_d(even), l.to_array_d(odd));
            reference::fold(std::array::from_fn(
                |i| if i % 2 == 0 { even[i / 2] } else { odd[i / 2] },
            ))
        };
        ErrorSums {
            signal: fold(self.signal),
            noise: fold(self.noise),
        }
    }
}

/// A group's scale and zero point, in all lanes.
#[derive(Clone, Copy)]
struct Dequantizer<L: Lanes> {
    scale: L::F,
    zero: L::I,
}

impl<L: Lanes> Dequantizer<L> {
    /// `(code - zp) * scale` rounded to `W`; `code - zp` is exact in every dtype.
    #[inline(always)]
    fn values<W: Weight>(&self, l: L, codes: (L::I, L::I)) -> (L::F, L::F) {
        let (even, odd) = (l.sub_i(codes.0, self.zero), l.sub_i(codes.1, self.zero));
        W::round(l, (l.mul(l.to_f32(even), self.scale), l.mul(l.to_f32(odd), self.scale)))
    }
}

/// A group's way from weights to codes, in all lanes.
#[derive(Clone, Copy)]
struct Quantizer<L: Lanes> {
    reciprocal: L::F,
    /// What makes a biased integer a code: the bits of `BIAS` less the zero point.
    shift: L::I,
    largest: L::I,
}

impl<L: Lanes> Quantizer<L> {
    /// The codes of 32 weights. Infinite quotients have bits beyond the largest or, with their sign, below the smallest
    /// code. `code + zp` needs no rounding: below 2^8 integers are exact, and beyond they are clamped.
    #[inline(always)]
    fn codes<W: Weight>(&self, l: L, weights: (L::F, L::F)) -> (L::I, L::I) {
        let steps = W::round(
            l,
            (l.mul(weights.0, self.reciprocal), l.mul(weights.1, self.reciprocal)),
        );
        (self.code(l, steps.0), self.code(l, steps.1))
    }

    #[inline(always)]
    fn code(&self, l: L, steps: L::F) -> L::I {
        let code = l.sub_i(l.bits(l.add(steps, l.splat(BIAS))), self.shift);
        l.min_i32(l.max_i32(code, l.splat_i(0)), self.largest)
    }
}

struct Encode<'a, W> {
    bits: u8,
    group: usize,
    src: &'a [u8],
    out: Tile<'a>,
    dtype: PhantomData<W>,
}

impl<W: Weight> Job for Encode<'_, W> {
    type Output = Result<(ErrorSums, GroupCounts), Fault>;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Self::Output {
        let Encode {
            bits, group, src, out, ..
        } = self;
        let top = (1u32 << bits) - 1;
        let (mut counts, mut sums) = (GroupCounts::default(), Sums::new(l));
        let groups = out.zeros.len();
        for begin in (0..groups).step_by(BATCH) {
            let held = BATCH.min(groups - begin);
            let weights = &src[begin * group * W::SIZE..(begin + held) * group * W::SIZE];
            let batch = Batch::new::<L, W>(l, ranges::<L, W>(l, weights, group), top);
            if !batch.finite {
                return Err(diagnose(W::FLOAT, bits, group, src));
            }
            for i in 0..held {
                let g = begin + i;
                counts.zero += u64::from(batch.ranges[i] == 0);
                reference::set_weight(W::FLOAT, out.scales, g, f32::from_bits(batch.scales[i]));
                out.zeros[g] = batch.zeros[i] as u8;
                let quantizer = Quantizer {
                    reciprocal: l.splat(f32::from_bits(batch.reciprocals[i])),
                    shift: l.splat_i(BIAS.to_bits() - batch.shifts[i]),
                    largest: l.splat_i(top),
                };
                let dequantizer = Dequantizer {
                    scale: l.splat(f32::from_bits(batch.scales[i])),
                    zero: l.splat_i(batch.zeros[i]),
                };
                let chunks = weights[i * group * W::SIZE..][..group * W::SIZE].chunks_exact(W::CHUNK);
                let rest = chunks.remainder();
                let (whole, last) = out.codes[g * group..][..group].as_chunks_mut::<32>();
                for (chunk, out) in chunks.zip(whole) {
                    let weights = W::load(l, chunk);
                    let codes = quantizer.codes::<W>(l, weights);
                    *out = l.pair_bytes(codes.0, codes.1);
                    sums.add(l, weights, dequantizer.values::<W>(l, codes));
                }
                if !rest.is_empty() {
                    let weights = W::load(l, &padded(rest));
                    let codes = quantizer.codes::<W>(l, weights);
                    last.copy_from_slice(&l.pair_bytes(codes.0, codes.1)[..last.len()]);
                    let values = dequantizer.values::<W>(l, codes);
                    sums.add(l, weights, only(l, values, first(l, last.len())));
                }
            }
        }
        Ok((sums.total(l), counts))
    }
}

/// `values` where `mask` is set, else 0.
#[inline(always)]
fn only<L: Lanes>(l: L, values: (L::F, L::F), mask: (L::I, L::I)) -> (L::F, L::F) {
    let keep = |value, mask| l.from_bits(l.and(l.bits(value), mask));
    (keep(values.0, mask.0), keep(values.1, mask.1))
}

/// Names the fault of a slice in which some group's range is not finite. A weight that is not finite comes first.
#[cold]
fn diagnose(dtype: Float, bits: u8, group: usize, src: &[u8]) -> Fault {
    let elements = src.len() / dtype.size();
    let weight = |i| reference::weight(dtype, src, i);
    if let Some(element) = (0..elements).find(|&i| !weight(i).is_finite()) {
        return Fault::NonFinite { element };
    }
    let overflows = |&start: &usize| {
        let weights = (start..start + group).map(weight);
        let (mn, mx) = (weights.clone().fold(0.0, f32::min), weights.fold(0.0, f32::max));
        uintx_reference::Grid::new(dtype, bits, mn, mx).is_none()
    };
    let element = (0..elements).step_by(group).find(overflows).unwrap_or(0);
    Fault::ScaleOverflow { element }
}

struct Measure<'a, W> {
    group: usize,
    src: &'a [u8],
    stored: Stored<'a>,
    dtype: PhantomData<W>,
}

impl<W: Weight> Job for Measure<'_, W> {
    type Output = ErrorSums;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> ErrorSums {
        let Measure { group, src, stored, .. } = self;
        let mut sums = Sums::new(l);
        for g in 0..stored.zeros.len() {
            let grid = stored.grid::<L, W>(l, g);
            let chunks = src[g * group * W::SIZE..][..group * W::SIZE].chunks_exact(W::CHUNK);
            let rest = chunks.remainder();
            let (whole, last) = stored.codes[g * group..][..group].as_chunks::<32>();
            for (chunk, codes) in chunks.zip(whole) {
                let values = grid.values::<W>(l, l.unpair_bytes(codes));
                sums.add(l, W::load(l, chunk), values);
            }
            if !rest.is_empty() {
                let values = grid.values::<W>(l, l.unpair_bytes(&padded_codes(last)));
                let values = only(l, values, first(l, last.len()));
                sums.add(l, W::load(l, &padded(rest)), values);
            }
        }
        sums.total(l)
    }
}

struct Decode<'a, W, T> {
    group: usize,
    stored: Stored<'a>,
    dst: &'a mut [u8],
    dtypes: PhantomData<(W, T)>,
}

impl<W: Weight, T: Weight> Job for Decode<'_, W, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Decode { group, stored, dst, .. } = self;
        for g in 0..stored.zeros.len() {
            let grid = stored.grid::<L, W>(l, g);
            let mut chunks = dst[g * group * T::SIZE..][..group * T::SIZE].chunks_exact_mut(T::CHUNK);
            let (whole, last) = stored.codes[g * group..][..group].as_chunks::<32>();
            for (codes, chunk) in whole.iter().zip(&mut chunks) {
                let (even, odd) = grid.values::<W>(l, l.unpair_bytes(codes));
                T::store(l, even, odd, chunk);
            }
            let rest = chunks.into_remainder();
            if !rest.is_empty() {
                let (even, odd) = grid.values::<W>(l, l.unpair_bytes(&padded_codes(last)));
                let mut chunk = [0; 128];
                T::store(l, even, odd, &mut chunk);
                rest.copy_from_slice(&chunk[..rest.len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
