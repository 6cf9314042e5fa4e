//! Stored codes back to weights, and the sums of what they lost.

use std::marker::PhantomData;

use super::{padded, spans, RowSums, Span};
use crate::kernel::lanes::{Job, Lanes, Weight};
use crate::tensor::ErrorSums;

/// A stored tile: what [`encode`] wrote, or what a checkpoint holds.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a> {
    pub words: &'a [u32],
    pub scales: &'a [u16],
    pub zeros: &'a [u8],
    pub k: usize,
    pub group: usize,
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

pub(super) struct Measure<'a, W> {
    pub src: &'a [u8],
    pub stored: Stored<'a>,
    pub sums: &'a mut [ErrorSums],
    pub dtype: PhantomData<W>,
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

pub(super) struct Decode<'a, W> {
    pub stored: Stored<'a>,
    pub dst: &'a mut [u8],
    pub dtype: PhantomData<W>,
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

#[inline(always)]
fn get_words(words: &[u32]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (i, word) in words.iter().enumerate() {
        bytes[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}
