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

mod encode;
mod stored;

use std::marker::PhantomData;

use self::encode::Encode;
use self::stored::{Decode, Measure, Stored};
use super::lanes::{dispatch, with_weight, Lanes, Weight};
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
    if k == 0 {
        out.sums.fill(ErrorSums::default());
        return Ok(GroupCounts::default());
    }
    if level == Level::Scalar {
        return reference::encode(dtype, src, k, group, asym, out);
    }
    with_weight!(dtype, W => match asym {
        false => dispatch(level, Encode::<W, false> { src, k, group, out, dtype: PhantomData }),
        true => dispatch(level, Encode::<W, true> { src, k, group, out, dtype: PhantomData }),
    })
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
    with_weight!(dtype, W => dispatch(level, Measure::<W> { src, stored, sums, dtype: PhantomData }))
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
    with_weight!(dtype, W => dispatch(level, Decode::<W> { dst, stored, dtype: PhantomData }))
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

#[cfg(test)]
mod tests;
