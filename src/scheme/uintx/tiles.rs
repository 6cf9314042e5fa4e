//! Which codes and groups a range of packed bytes holds.

use crate::kernel::shards::{shards, Shard};
use crate::scheme::{Piece, Shape, Tile};
use std::ops::Range;

/// Weights encoded at a time, over all segments: with their codes they fit a core's second-level cache. Part of the
/// report's arithmetic, as sums are folded at the ends of steps.
const STEP_ELEMENTS: usize = 256 << 10;

/// Some shards of a tensor that are packed together: byte `i` of the narrowest holds the codes `i`, `i + length`, ..,
/// and of one that is `k` times as wide the byte `i + q * length` the codes of the segments `q`, `q + k`, ..
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub shards: &'static [Shard],
    /// Of the first shard, in bytes from the start of `uintx_packed`.
    pub offset: usize,
    /// Bytes of the narrowest shard, which is also how many codes a segment has.
    pub length: usize,
    pub segments: usize,
    /// Where the tiles of this pass begin to count.
    pub base: usize,
    /// Codes of a segment that are encoded at a time.
    pub step: usize,
}

impl Pass {
    /// All shards in one pass, where their bytes line up. In a tensor whose size is not a multiple of the segments (the
    /// group is then not one of 8) they do not, and each shard has a pass of its own.
    pub fn all(bits: u8, shape: &Shape) -> Vec<Pass> {
        let (shards, elements) = (shards(bits), shape.elements());
        let narrowest = shards[shards.len() - 1];
        if elements.is_multiple_of(narrowest.codes()) {
            return vec![Pass::new(shards, 0, 0, shape)];
        }
        let mut offset = 0;
        let single = shards.chunks(1).map(|shard| {
            let pass = Pass::new(shard, offset, offset, shape);
            offset += pass.length;
            pass
        });
        single.collect()
    }

    pub fn new(shards: &'static [Shard], offset: usize, base: usize, shape: &Shape) -> Pass {
        let narrowest = shards[shards.len() - 1];
        let segments = narrowest.codes();
        Pass {
            shards,
            offset,
            length: narrowest.bytes(shape.elements()),
            segments,
            base,
            step: (STEP_ELEMENTS / segments).next_multiple_of(shape.group),
        }
    }

    /// How many times a shard is as wide as the narrowest.
    pub fn times(&self, shard: Shard) -> usize {
        self.segments / shard.codes()
    }

    /// Packed bytes for each byte of the narrowest shard.
    pub fn width(&self) -> usize {
        self.shards.iter().map(|&shard| self.times(shard)).sum()
    }

    pub fn steps(&self) -> usize {
        self.length.div_ceil(self.step)
    }

    /// Whole steps whose packed bytes are about `budget`, as even as they come.
    pub fn tiles(&self, shape: &Shape, budget: usize) -> Vec<Tile> {
        let most = (budget / self.width() / self.step).max(1);
        let count = self.steps().div_ceil(most);
        let each = self.steps().div_ceil(count) * self.step;
        let tile = |begin: usize| {
            let bytes = begin..(begin + each).min(self.length);
            let codes = |segment| Run::new(shape, self, segment, &bytes).codes.len();
            let read = (0..self.segments).map(codes).sum::<usize>() * shape.dtype.size();
            Tile {
                begin: self.base + bytes.start,
                end: self.base + bytes.end,
                // Later passes read the same weights again.
                source_bytes: if self.base == 0 { read as u64 } else { 0 },
            }
        };
        (0..self.length).step_by(each).map(tile).collect()
    }
}

/// Some codes of one segment and the groups that begin among them.
pub(super) struct Run {
    /// Codes, counted through the tensor.
    pub codes: Range<usize>,
    pub groups: Range<usize>,
}

impl Run {
    pub fn new(shape: &Shape, pass: &Pass, segment: usize, bytes: &Range<usize>) -> Run {
        let at = |byte: usize| (segment * pass.length + byte).min(shape.elements());
        let codes = at(bytes.start)..at(bytes.end);
        let groups = codes.start.div_ceil(shape.group)..codes.end.div_ceil(shape.group);
        Run { codes, groups }
    }

    /// The codes of its groups: the last may reach beyond the run's.
    pub fn whole(&self, shape: &Shape) -> Range<usize> {
        self.groups.start * shape.group..self.groups.end * shape.group
    }
}

/// A tile's place: a pass, and a range of the bytes of its narrowest shard.
pub(super) struct Place {
    pub pass: Pass,
    pub bytes: Range<usize>,
    /// Whether it holds the scales, zero points and sums: each pass reads all weights, and the first keeps them.
    pub first: bool,
}

impl Place {
    pub fn of(bits: u8, shape: &Shape, tile: &Tile) -> Place {
        let passes = Pass::all(bits, shape);
        let index = passes.iter().rposition(|pass| pass.base <= tile.begin).unwrap_or(0);
        let pass = passes[index];
        Place {
            pass,
            bytes: tile.begin - pass.base..tile.end - pass.base,
            first: index == 0,
        }
    }

    pub fn steps(&self) -> impl Iterator<Item = Range<usize>> {
        let (end, step) = (self.bytes.end, self.pass.step);
        self.bytes
            .clone()
            .step_by(step)
            .map(move |begin| begin..(begin + step).min(end))
    }

    /// Where the tile's part of shard `index` begins in its buffer.
    pub fn from(&self, index: usize) -> usize {
        let before = self.pass.shards[..index].iter().map(|&shard| self.pass.times(shard));
        before.sum::<usize>() * self.bytes.len()
    }

    /// The runs of the whole tile, one per segment; none where another pass has them.
    pub fn runs<'a>(&'a self, shape: &'a Shape) -> impl Iterator<Item = Run> + 'a {
        let segments = if self.first { self.pass.segments } else { 0 };
        (0..segments).map(|segment| Run::new(shape, &self.pass, segment, &self.bytes))
    }

    /// Group of the tile, in the order of its runs, at which each segment begins.
    pub fn group_offsets(&self, shape: &Shape) -> [usize; 8] {
        let mut offsets = [0; 8];
        let mut sum = 0;
        for (offset, run) in offsets.iter_mut().zip(self.runs(shape)) {
            *offset = sum;
            sum += run.groups.len();
        }
        offsets
    }
}

/// Codes of one step, a region for each segment. A region has room for a group that begins before the segment's codes
/// and for one that ends after them.
pub(super) struct Regions {
    pub stride: usize,
}

impl Regions {
    pub fn new(shape: &Shape, pass: &Pass) -> Regions {
        Regions {
            stride: pass.step + 2 * shape.group,
        }
    }

    pub fn len(&self, pass: &Pass) -> usize {
        self.stride * pass.segments
    }

    /// The segments of a shard's byte run `q`, of the starts of all segments.
    pub fn starts(pass: &Pass, shard: Shard, q: usize, all: &[usize; 8]) -> [usize; 8] {
        let times = pass.times(shard);
        std::array::from_fn(|j| all.get(q + j * times).copied().unwrap_or(0))
    }
}

/// Appends a run of bytes, joined to the last piece where it continues it.
pub(super) fn push_run(pieces: &mut Vec<Piece>, output: usize, from: usize, offset: usize, width: usize) {
    if width == 0 {
        return;
    }
    match pieces.last_mut() {
        Some(last)
            if last.output == output
                && last.from + last.width == from
                && last.offset + last.width as u64 == offset as u64 =>
        {
            last.width += width;
        }
        _ => pieces.push(Piece::run(output, from, offset as u64, width)),
    }
}
