//! Round-to-nearest int4: codes, f16 scales and zero points of groups along K, and the sums behind their SNR.
//!
//! A tile is `rows` whole rows of a `[N, K]` weight. A group is `group` neighbours along K in one row; `G = k / group`.
//!
//! | | symmetric | asymmetric |
//! |---|---|---|
//! | range | amax = max abs | mx = max(max w, 0), mn = min(min w, 0) |
//! | scale | max(amax / 8, 1e-9) | max(mx - mn, 1e-9) / 15 |
//! | zero point | 8 | clamp(round(-mn / scale), 0, 15) |
//! | code | clamp(round(w / scale) + 8, 0, 15) | clamp(round(w / scale) + zp, 0, 15) |
//! | stored | scale rounded to f16 | scale rounded to f16, zp |
//!
//! All of it is f32 arithmetic in this order, rounded half to even. Codes come from the f32 scale; the sums are of what
//! is stored, the f16 scale. The formulas are those of GPTQ's round-to-nearest in PyTorch, with zero kept inside the
//! range of an asymmetric group.

use std::marker::PhantomData;

use super::lanes::{dispatch, Bf16, Job, Lanes, Weight, F16, F32};
use super::{reference, Level};
use crate::tensor::{ErrorSums, Fault, Float, GroupCounts};

/// Where [`encode`] writes a tile of `rows` rows.
#[derive(Debug)]
pub struct Tile<'a> {
    /// `[rows, k / 8]`: 8 codes along K, the lowest nibble first.
    pub words: &'a mut [u32],
    /// `[rows, G]`: bits of f16.
    pub scales: &'a mut [u16],
    /// `[rows, G]`: zero points; 8 in symmetric groups.
    pub zeros: &'a mut [u8],
    /// `[rows]`.
    pub sums: &'a mut [ErrorSums],
}

/// Quantizes the tile `src`, `[rows, k]` little-endian weights at any alignment.
///
/// Per row, `sums` holds sum w^2 and sum (w - deq)^2, where `deq = (code - zp) * scale` with the stored scale, the
/// difference is rounded to f32 and its square is exact in f64. Column `c` is added to accumulator `c % 16` of 16, and
/// these are folded as [`reference::fold`] does, so that the bits do not depend on the level.
///
/// # Errors
///
/// [`Fault::NonFinite`] at the first NaN or infinite weight; else [`Fault::ScaleOverflow`] at the first group whose
/// scale rounds to an infinite f16. What `out` then holds is unspecified.
///
/// # Panics
///
/// If the lengths of the slices do not fit each other, `group` is not a multiple of 8, or `k` not one of `group`.
pub fn encode(
    level: Level,
    dtype: Float,
    src: &[u8],
    k: usize,
    group: usize,
    asym: bool,
    out: Tile<'_>,
) -> Result<GroupCounts, Fault> {
    let rows = out.sums.len();
    check_shape(rows, k, group, [out.words.len(), out.scales.len(), out.zeros.len()]);
    assert_eq!(src.len(), rows * k * dtype.size(), "{rows} rows of {k} weights");
    if level == Level::Scalar {
        return reference::encode(dtype, src, k, group, asym, out);
    }
    match (dtype, asym) {
        (Float::F32, false) => dispatch(
            level,
            Encode::<F32, false> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
        (Float::F32, true) => dispatch(
            level,
            Encode::<F32, true> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
        (Float::F16, false) => dispatch(
            level,
            Encode::<F16, false> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
        (Float::F16, true) => dispatch(
            level,
            Encode::<F16, true> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
        (Float::Bf16, false) => dispatch(
            level,
            Encode::<Bf16, false> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
        (Float::Bf16, true) => dispatch(
            level,
            Encode::<Bf16, true> {
                src,
                k,
                group,
                out,
                dtype: PhantomData,
            },
        ),
    }
}

/// The sums that [`encode`] gives, from `src` and stored codes. Scales may be any f16, zero points 0 to 16.
///
/// # Panics
///
/// As [`encode`].
#[allow(clippy::too_many_arguments)] // one tile: its weights, its codes, and the shape that both share
pub fn measure(
    level: Level,
    dtype: Float,
    src: &[u8],
    k: usize,
    group: usize,
    words: &[u32],
    scales: &[u16],
    zeros: &[u8],
    sums: &mut [ErrorSums],
) {
    let rows = sums.len();
    check_shape(rows, k, group, [words.len(), scales.len(), zeros.len()]);
    assert_eq!(src.len(), rows * k * dtype.size(), "{rows} rows of {k} weights");
    if level == Level::Scalar {
        return reference::measure(dtype, src, k, group, words, scales, zeros, sums);
    }
    let stored = Stored {
        words,
        scales,
        zeros,
        k,
        group,
    };
    match dtype {
        Float::F32 => dispatch(
            level,
            Measure::<F32> {
                src,
                stored,
                sums,
                dtype: PhantomData,
            },
        ),
        Float::F16 => dispatch(
            level,
            Measure::<F16> {
                src,
                stored,
                sums,
                dtype: PhantomData,
            },
        ),
        Float::Bf16 => dispatch(
            level,
            Measure::<Bf16> {
                src,
                stored,
                sums,
                dtype: PhantomData,
            },
        ),
    }
}

/// Writes `(code - zp) * scale`, rounded half to even to `dtype`, to `dst`: `[rows, k]`, little-endian.
///
/// # Panics
///
/// As [`encode`].
#[allow(clippy::too_many_arguments)] // one tile: its codes, its shape, and where it goes
pub fn decode(
    level: Level,
    words: &[u32],
    scales: &[u16],
    zeros: &[u8],
    k: usize,
    group: usize,
    dtype: Float,
    dst: &mut [u8],
) {
    let rows = if k == 0 { 0 } else { dst.len() / (k * dtype.size()) };
    check_shape(rows, k, group, [words.len(), scales.len(), zeros.len()]);
    assert_eq!(dst.len(), rows * k * dtype.size(), "{rows} rows of {k} weights");
    if level == Level::Scalar {
        return reference::decode(words, scales, zeros, k, group, dtype, dst);
    }
    let stored = Stored {
        words,
        scales,
        zeros,
        k,
        group,
    };
    match dtype {
        Float::F32 => dispatch(
            level,
            Decode::<F32> {
                dst,
                stored,
                dtype: PhantomData,
            },
        ),
        Float::F16 => dispatch(
            level,
            Decode::<F16> {
                dst,
                stored,
                dtype: PhantomData,
            },
        ),
        Float::Bf16 => dispatch(
            level,
            Decode::<Bf16> {
                dst,
                stored,
                dtype: PhantomData,
            },
        ),
    }
}

fn check_shape(rows: usize, k: usize, group: usize, [words, scales, zeros]: [usize; 3]) {
    assert!(
        group > 0 && group.is_multiple_of(8) && k.is_multiple_of(group),
        "groups of {group} in rows of {k}"
    );
    assert_eq!(words, rows * (k / 8), "words of {rows} rows of {k} codes");
    assert_eq!(
        scales,
        rows * (k / group),
        "scales of {rows} rows of {k} in groups of {group}"
    );
    assert_eq!(zeros, scales, "one zero point per scale");
}

/// The 32 columns that a chunk holds, and the part of them that a group has. Chunks begin at multiples of 16 columns,
/// so that each lane of a chunk always belongs to the same accumulator.
#[derive(Clone, Copy)]
struct Span {
    /// Lanes before the part; 0 or 8.
    skip: usize,
    /// The first weight, counted from the group's first.
    first: usize,
    /// Weights of the part; a multiple of 8, at most `32 - skip`.
    len: usize,
}

/// The chunks of the group that begins at column `start`, in order, for groups that are not made of whole ones.
#[inline(always)]
fn spans(start: usize, group: usize) -> impl Iterator<Item = Span> {
    let lead = start % 16;
    (0..(lead + group).div_ceil(32)).map(move |i| {
        let skip = if i == 0 { lead } else { 0 };
        let first = 32 * i + skip - lead;
        Span {
            skip,
            first,
            len: (group - first).min(32 - skip),
        }
    })
}

/// Accumulators of one row: columns at even and at odd offsets.
struct RowSums<L: Lanes> {
    signal: (L::D, L::D),
    noise: (L::D, L::D),
}

impl<L: Lanes> RowSums<L> {
    #[inline(always)]
    fn new(l: L) -> Self {
        let zero = l.zero_d();
        RowSums {
            signal: (zero, zero),
            noise: (zero, zero),
        }
    }

    /// Adds a chunk: its weights, and what is lost of them. Zeros in unused lanes change nothing.
    #[inline(always)]
    fn add(&mut self, l: L, weights: (L::F, L::F), errors: (L::F, L::F)) {
        self.signal = (
            l.add_squares(self.signal.0, weights.0),
            l.add_squares(self.signal.1, weights.1),
        );
        self.noise = (
            l.add_squares(self.noise.0, errors.0),
            l.add_squares(self.noise.1, errors.1),
        );
    }

    #[inline(always)]
    fn total(&self, l: L) -> ErrorSums {
        ErrorSums {
            signal: fold_pair(l, self.signal),
            noise: fold_pair(l, self.noise),
        }
    }
}

#[inline(always)]
fn fold_pair<L: Lanes>(l: L, (even, odd): (L::D, L::D)) -> f64 {
    let (even, odd) = (l.to_array_d(even), l.to_array_d(odd));
    reference::fold(std::array::from_fn(
        |i| if i % 2 == 0 { even[i / 2] } else { odd[i / 2] },
    ))
}

/// The weights of a part of a group as a whole chunk, zeros in the lanes that it does not fill. (Sized for f32.)
#[inline(always)]
fn padded<W: Weight>(group: &[u8], span: Span) -> [u8; 128] {
    let mut chunk = [0; 128];
    let weights = &group[span.first * W::SIZE..][..span.len * W::SIZE];
    chunk[span.skip * W::SIZE..][..weights.len()].copy_from_slice(weights);
    chunk
}

/// The weights after the whole chunks of a group, if there are any, padded with zeros.
#[inline(always)]
fn last_chunk<W: Weight>(rest: &[u8]) -> Option<[u8; 128]> {
    let span = Span {
        skip: 0,
        first: 0,
        len: rest.len() / W::SIZE,
    };
    (!rest.is_empty()).then(|| padded::<W>(rest, span))
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
    #[inline(always)]
    fn new(l: L, scale: f32, stored: f32, zero: f32) -> Self {
        let zero = zero as u32;
        Grid {
            scale: l.splat(scale),
            stored: l.splat(stored),
            top: l.splat_i(BIAS.to_bits() + 15 - zero),
            zeros: l.splat_i(17 * zero),
        }
    }

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

#[inline(always)]
fn get_words(words: &[u32]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (i, word) in words.iter().enumerate() {
        bytes[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// What the range of a group gives.
struct Range {
    scale: f32,
    zero: f32,
    /// All weights are 0.
    empty: bool,
    finite: bool,
}

#[inline(always)]
fn range<L: Lanes, W: Weight, const ASYM: bool>(l: L, group: &[u8]) -> Range {
    let chunks = group.chunks_exact(W::CHUNK);
    let rest = last_chunk::<W>(chunks.remainder());
    let none = l.splat_i(0);
    if ASYM {
        let mut acc = (none, none);
        for chunk in chunks {
            acc = W::raise_both(l, acc, chunk);
        }
        if let Some(chunk) = rest {
            acc = W::raise_both(l, acc, &chunk);
        }
        let (mx, mn) = (W::largest(l, acc.0), W::largest(l, acc.1));
        let mn = if mn.is_sign_negative() { mn } else { 0.0 };
        let scale = (mx - mn).max(reference::FLOOR) / 15.0;
        Range {
            scale,
            zero: ((-mn / scale) + BIAS) - BIAS,
            empty: mx == 0.0 && mn == 0.0,
            finite: mx.is_finite() && mn.is_finite(),
        }
    } else {
        let mut acc = none;
        for chunk in chunks {
            acc = W::raise_abs(l, acc, chunk);
        }
        if let Some(chunk) = rest {
            acc = W::raise_abs(l, acc, &chunk);
        }
        let amax = W::largest(l, acc);
        Range {
            scale: (amax / 8.0).max(reference::FLOOR),
            zero: 8.0,
            empty: amax == 0.0,
            finite: amax.is_finite(),
        }
    }
}

struct Encode<'a, W, const ASYM: bool> {
    src: &'a [u8],
    k: usize,
    group: usize,
    out: Tile<'a>,
    dtype: PhantomData<W>,
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
        for (row, row_sums) in out.sums.iter_mut().enumerate() {
            let mut sums = RowSums::new(l);
            for start in (0..k).step_by(group) {
                let first = row * k + start;
                let weights = &src[first * W::SIZE..][..group * W::SIZE];
                let range = range::<L, W, ASYM>(l, weights);
                let stored = l.f16_bits(range.scale);
                if !range.finite || stored == F16_INFINITY {
                    return Err(diagnose(W::FLOAT, src, first));
                }
                counts.zero += u64::from(range.empty);
                counts.underflowed += u64::from(stored == 0 && !range.empty);
                out.scales[first / group] = stored;
                out.zeros[first / group] = range.zero as u8;

                let grid = Grid::new(l, range.scale, l.f16_value(stored), range.zero);
                let words = &mut out.words[first / 8..][..group / 8];
                if group.is_multiple_of(32) {
                    for (chunk, words) in weights.chunks_exact(W::CHUNK).zip(words.chunks_exact_mut(4)) {
                        put_words(grid.encode::<W>(l, chunk, &mut sums), words);
                    }
                    continue;
                }
                for part in spans(start, group) {
                    let mut all = [0; 4];
                    put_words(grid.encode::<W>(l, &padded::<W>(weights, part), &mut sums), &mut all);
                    let words = &mut words[part.first / 8..][..part.len / 8];
                    words.copy_from_slice(&all[part.skip / 8..][..words.len()]);
                }
            }
            *row_sums = sums.total(l);
        }
        Ok(counts)
    }
}

const F16_INFINITY: u16 = 0x7c00;

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

/// A stored tile: what [`encode`] wrote, or what a checkpoint holds.
#[derive(Clone, Copy)]
struct Stored<'a> {
    words: &'a [u32],
    scales: &'a [u16],
    zeros: &'a [u8],
    k: usize,
    group: usize,
}

/// `(code - zp, scale)` is all that is needed of a stored group.
#[derive(Clone, Copy)]
struct StoredGroup<L: Lanes> {
    scale: L::F,
    zero: L::I,
}

impl<L: Lanes> StoredGroup<L> {
    #[inline(always)]
    fn new(l: L, stored: &Stored<'_>, index: usize) -> Self {
        StoredGroup {
            scale: l.splat(l.f16_value(stored.scales[index])),
            zero: l.splat_i(u32::from(stored.zeros[index])),
        }
    }

    /// `code - zp` at even and odd offsets of a chunk, as integers.
    #[inline(always)]
    fn steps(&self, l: L, words: &[u32]) -> (L::I, L::I) {
        let bytes = l.from_bytes(&get_words(words));
        let (even, odd) = (l.and(bytes, l.splat_i(15)), l.shr::<4>(bytes));
        (l.sub_i(even, self.zero), l.sub_i(odd, self.zero))
    }

    #[inline(always)]
    fn measure<W: Weight>(&self, l: L, chunk: &[u8], steps: (L::I, L::I), sums: &mut RowSums<L>) {
        let (even, odd) = W::load(l, chunk);
        let even_error = l.sub_exact_product(even, l.to_f32(steps.0), self.scale);
        let odd_error = l.sub_exact_product(odd, l.to_f32(steps.1), self.scale);
        sums.add(l, (even, odd), (even_error, odd_error));
    }

    #[inline(always)]
    fn decode<W: Weight>(&self, l: L, steps: (L::I, L::I), chunk: &mut [u8]) {
        let (even, odd) = (
            l.mul(l.to_f32(steps.0), self.scale),
            l.mul(l.to_f32(steps.1), self.scale),
        );
        W::store(l, even, odd, chunk);
    }
}

/// The words of a part of a group as a whole chunk.
#[inline(always)]
fn padded_words(group: &[u32], span: Span) -> [u32; 4] {
    let mut words = [0; 4];
    words[span.skip / 8..][..span.len / 8].copy_from_slice(&group[span.first / 8..][..span.len / 8]);
    words
}

/// All ones in the lanes (of pairs of columns) that a part fills.
#[inline(always)]
fn mask<L: Lanes>(l: L, span: Span) -> L::I {
    let filled = span.skip / 2..(span.skip + span.len) / 2;
    l.load(&std::array::from_fn(|i| if filled.contains(&i) { u32::MAX } else { 0 }))
}

struct Measure<'a, W> {
    src: &'a [u8],
    stored: Stored<'a>,
    sums: &'a mut [ErrorSums],
    dtype: PhantomData<W>,
}

impl<W: Weight> Job for Measure<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Measure {
            src,
            stored,
            sums,
            dtype: _,
        } = self;
        let Stored { k, group, .. } = stored;
        for (row, row_sums) in sums.iter_mut().enumerate() {
            let mut sums = RowSums::new(l);
            for start in (0..k).step_by(group) {
                let first = row * k + start;
                let weights = &src[first * W::SIZE..][..group * W::SIZE];
                let words = &stored.words[first / 8..][..group / 8];
                let grid = StoredGroup::new(l, &stored, first / group);
                if group.is_multiple_of(32) {
                    for (chunk, words) in weights.chunks_exact(W::CHUNK).zip(words.chunks_exact(4)) {
                        grid.measure::<W>(l, chunk, grid.steps(l, words), &mut sums);
                    }
                    continue;
                }
                for part in spans(start, group) {
                    let (even, odd) = grid.steps(l, &padded_words(words, part));
                    let filled = mask(l, part);
                    let steps = (l.and(even, filled), l.and(odd, filled));
                    grid.measure::<W>(l, &padded::<W>(weights, part), steps, &mut sums);
                }
            }
            *row_sums = sums.total(l);
        }
    }
}

struct Decode<'a, W> {
    stored: Stored<'a>,
    dst: &'a mut [u8],
    dtype: PhantomData<W>,
}

impl<W: Weight> Job for Decode<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Decode { stored, dst, dtype: _ } = self;
        let Stored { group, .. } = stored;
        // Groups lie one after the other through all rows.
        for index in 0..stored.scales.len() {
            let first = index * group;
            let weights = &mut dst[first * W::SIZE..][..group * W::SIZE];
            let words = &stored.words[first / 8..][..group / 8];
            let grid = StoredGroup::new(l, &stored, index);
            if group.is_multiple_of(32) {
                for (chunk, words) in weights.chunks_exact_mut(W::CHUNK).zip(words.chunks_exact(4)) {
                    grid.decode::<W>(l, grid.steps(l, words), chunk);
                }
                continue;
            }
            for part in spans(0, group) {
                let mut chunk = [0; 128];
                grid.decode::<W>(l, grid.steps(l, &padded_words(words, part)), &mut chunk);
                let weights = &mut weights[part.first * W::SIZE..][..part.len * W::SIZE];
                weights.copy_from_slice(&chunk[part.skip * W::SIZE..][..weights.len()]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
