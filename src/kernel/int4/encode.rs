//! Weights to codes: ranges and parameters of 16 groups at a time, then the codes and sums of each.

use std::marker::PhantomData;

use super::{last_chunk, padded, spans, RowSums, Tile};
use crate::kernel::lanes::{Job, Lanes, Weight};
use crate::kernel::reference;
use crate::tensor::{Fault, Float, GroupCounts};

/// Weights `src`, `[rows, k]`, and where their codes go.
pub(super) struct Encode<'a, W, const ASYM: bool> {
    pub src: &'a [u8],
    pub k: usize,
    pub group: usize,
    pub out: Tile<'a>,
    pub dtype: PhantomData<W>,
}

impl<W: Weight, const ASYM: bool> Job for Encode<'_, W, ASYM> {
    type Output = Result<GroupCounts, Fault>;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> Self::Output {
        let Encode {
            src,
            k,
            group,
            out,
            dtype: _,
        } = self;
        let mut counts = GroupCounts::default();
        let mut sums = RowSums::new(l);
        // Fewer where groups are long, so that their second reading finds them in the first-level cache.
        let batch = (4096 / group).clamp(1, BATCH);
        let (groups, total) = (k / group, out.scales.len());
        for first in (0..total).step_by(batch) {
            let last = total.min(first + batch);
            let bytes = &src[first * group * W::SIZE..last * group * W::SIZE];
            let parameters = match Parameters::new::<L, W, ASYM>(l, bytes, group) {
                Ok(parameters) => parameters,
                Err(i) => return Err(diagnose(W::FLOAT, src, (first + i) * group)),
            };
            for (i, weights) in bytes.chunks_exact(group * W::SIZE).enumerate() {
                let index = first + i;
                out.scales[index] = parameters.f16[i] as u16;
                out.zeros[index] = parameters.zero[i] as u8;
                counts.zero += u64::from(parameters.range[i] == 0);
                counts.underflowed += u64::from(parameters.f16[i] == 0 && parameters.range[i] != 0);

                let grid = parameters.grid(l, i);
                let words = &mut out.words[index * group / 8..][..group / 8];
                if group.is_multiple_of(32) {
                    for (chunk, words) in weights.chunks_exact(W::CHUNK).zip(words.chunks_exact_mut(4)) {
                        put_words(grid.encode::<W>(l, chunk, &mut sums), words);
                    }
                } else {
                    for part in spans(index % groups * group, group) {
                        let mut all = [0; 4];
                        put_words(grid.encode::<W>(l, &padded::<W>(weights, part), &mut sums), &mut all);
                        let words = &mut words[part.first / 8..][..part.len / 8];
                        words.copy_from_slice(&all[part.skip / 8..][..words.len()]);
                    }
                }
                if (index + 1).is_multiple_of(groups) {
                    out.sums[index / groups] = sums.total(l);
                    sums = RowSums::new(l);
                }
            }
        }
        Ok(counts)
    }
}

const F16_INFINITY: u32 = 0x7c00;

/// Names the fault of a tile in which the scale of the group at `overflow` was found to overflow, or to come from a
/// weight that is not finite. Such weights anywhere in the tile come first.
#[cold]
fn diagnose(dtype: Float, src: &[u8], overflow: usize) -> Fault {
    let elements = src.len() / dtype.size();
    match (0..elements).find(|&i| !reference::weight(dtype, src, i).is_finite()) {
        Some(element) => Fault::NonFinite { element },
        None => Fault::ScaleOverflow { element: overflow },
    }
}

/// Groups whose parameters are computed together: one lane each. A group on its own would be a long chain from its
/// range to its first code, with nothing to do meanwhile.
const BATCH: usize = 16;

/// Parameters of a batch of groups, as bits.
struct Parameters {
    /// As codes are computed: f32.
    scale: [u32; BATCH],
    /// As it is stored: an f16, and its value.
    f16: [u32; BATCH],
    stored: [u32; BATCH],
    /// Integers.
    zero: [u32; BATCH],
    /// 0 in groups whose weights all are.
    range: [u32; BATCH],
}

impl Parameters {
    /// Parameters of up to 16 groups, all of `bytes`. `Err` holds the first group with a scale or a weight that is not
    /// finite.
    #[inline(always)]
    fn new<L: Lanes, W: Weight, const ASYM: bool>(l: L, bytes: &[u8], group: usize) -> Result<Self, usize> {
        let none = l.splat_i(0);
        let (mut positive, mut negative) = ([none; BATCH], [none; BATCH]);
        for (i, group) in bytes.chunks_exact(group * W::SIZE).enumerate() {
            if ASYM {
                (positive[i], negative[i]) = range_both::<L, W>(l, group);
            } else {
                positive[i] = range_abs::<L, W>(l, group);
            }
        }
        // A column for each group, so that one tree of maxima serves all.
        let positive = W::largest(l, l.transpose(positive));
        let negative = if ASYM {
            magnitude_of_negative(l, W::largest(l, l.transpose(negative)))
        } else {
            none
        };
        let floor = l.splat_i(reference::FLOOR.to_bits());
        let (scale, zero);
        // Floats that are not negative are ordered as their bits are.
        if ASYM {
            let range = l.add(l.from_bits(positive), l.from_bits(negative));
            scale = l.div(l.from_bits(l.max_i32(l.bits(range), floor)), l.splat(15.0));
            let biased = l.add(l.div(l.from_bits(negative), scale), l.splat(BIAS));
            zero = l.sub_i(l.bits(biased), l.splat_i(BIAS.to_bits()));
        } else {
            let eighth = l.div(l.from_bits(positive), l.splat(8.0));
            scale = l.from_bits(l.max_i32(l.bits(eighth), floor));
            zero = l.splat_i(8);
        }
        let f16 = l.narrow_f16(scale, l.splat(0.0));
        let range = l.max_i32(positive, negative);
        let none = [0; BATCH];
        let mut parameters = Parameters {
            scale: none,
            f16: none,
            stored: none,
            zero: none,
            range: none,
        };
        l.store(l.bits(scale), &mut parameters.scale);
        l.store(f16, &mut parameters.f16);
        l.store(l.bits(l.widen_f16(f16).0), &mut parameters.stored);
        l.store(zero, &mut parameters.zero);
        l.store(range, &mut parameters.range);
        if l.largest_u32(f16) >= F16_INFINITY || l.largest_u32(range) >= f32::INFINITY.to_bits() {
            let bad = |i: &usize| parameters.f16[*i] >= F16_INFINITY || parameters.range[*i] >= f32::INFINITY.to_bits();
            return Err((0..BATCH).find(bad).unwrap_or(0));
        }
        Ok(parameters)
    }

    #[inline(always)]
    fn grid<L: Lanes>(&self, l: L, i: usize) -> Grid<L> {
        Grid {
            scale: l.splat(f32::from_bits(self.scale[i])),
            stored: l.splat(f32::from_bits(self.stored[i])),
            top: l.splat_i(BIAS.to_bits() + 15 - self.zero[i]),
            zeros: l.splat_i(17 * self.zero[i]),
        }
    }
}

/// The magnitude of negative floats, 0 for others.
#[inline(always)]
fn magnitude_of_negative<L: Lanes>(l: L, x: L::I) -> L::I {
    let negative = l.sub_i(l.splat_i(0), l.shr::<31>(x));
    l.and(l.and(x, negative), l.splat_i(0x7fff_ffff))
}

/// See [`Weight::raise_abs`].
#[inline(always)]
fn range_abs<L: Lanes, W: Weight>(l: L, group: &[u8]) -> L::I {
    let chunks = group.chunks_exact(W::CHUNK);
    let rest = last_chunk::<W>(chunks.remainder());
    let mut acc = l.splat_i(0);
    for chunk in chunks {
        acc = W::raise_abs(l, acc, chunk);
    }
    match rest {
        Some(chunk) => W::raise_abs(l, acc, &chunk),
        None => acc,
    }
}

/// See [`Weight::raise_both`].
#[inline(always)]
fn range_both<L: Lanes, W: Weight>(l: L, group: &[u8]) -> (L::I, L::I) {
    let chunks = group.chunks_exact(W::CHUNK);
    let rest = last_chunk::<W>(chunks.remainder());
    let mut acc = (l.splat_i(0), l.splat_i(0));
    for chunk in chunks {
        acc = W::raise_both(l, acc, chunk);
    }
    match rest {
        Some(chunk) => W::raise_both(l, acc, &chunk),
        None => acc,
    }
}

/// One group's parameters, in all lanes.
#[derive(Clone, Copy)]
struct Grid<L: Lanes> {
    /// As codes are computed: f32.
    scale: L::F,
    /// As it is stored: an f16.
    stored: L::F,
    /// `BIAS + 15 - zp`: what stands for the largest code.
    top: L::I,
    /// `17 * zp`: turns two biased codes into a byte.
    zeros: L::I,
}

/// 1.5 * 2^23. Adding it rounds a float of magnitude below 2^22 half to even to an integer, which is then the low bits
/// of the sum, in two's complement; its own lowest byte is 0.
const BIAS: f32 = 12_582_912.0;

impl<L: Lanes> Grid<L> {
    /// `BIAS + code - zp`, as bits, and `w - deq`.
    ///
    /// Only the upper end needs a clamp. Symmetric: w >= -amax and scale >= amax / 8, which is exact above the floor,
    /// so w / scale >= -8. Asymmetric: division and rounding are monotone and odd, so with w >= mn the rounded
    /// quotient is at least -round(-mn / scale) = -zp; and zp needs no clamp either, as -mn <= fl(mx - mn) and thus
    /// -mn / scale <= 15 * (1 + 2^-22).
    #[inline(always)]
    fn code(&self, l: L, w: L::F) -> (L::I, L::F) {
        let bias = l.splat(BIAS);
        let biased = l.min_i32(l.bits(l.add(l.div(w, self.scale), bias)), self.top);
        let steps = l.sub(l.from_bits(biased), bias);
        (biased, l.sub_exact_product(w, steps, self.stored))
    }

    /// 32 codes of a chunk, a byte for two.
    #[inline(always)]
    fn encode<W: Weight>(&self, l: L, chunk: &[u8], sums: &mut RowSums<L>) -> [u8; 16] {
        let (even, odd) = W::load(l, chunk);
        let ((even_codes, even_errors), (odd_codes, odd_errors)) = (self.code(l, even), self.code(l, odd));
        sums.add(l, (even, odd), (even_errors, odd_errors));
        // Modulo 256: (even - zp) + 16 * (odd - zp) + 17 * zp.
        l.low_bytes(l.add_i(l.add_i(even_codes, l.shl::<4>(odd_codes)), self.zeros))
    }
}

/// `[u8; 16]` as 4 words.
#[inline(always)]
fn put_words(bytes: [u8; 16], words: &mut [u32]) {
    for (i, word) in words.iter_mut().enumerate() {
        *word = u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]);
    }
}
