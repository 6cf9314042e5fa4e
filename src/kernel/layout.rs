//! The orders in which checkpoints store codes, scales and zero points.
//!
//! A tile's codes leave [`int4::encode`](super::int4::encode) as words `[rows, k / 8]`, its scales and zero points as
//! `[rows, G]`. Here `dst` is a strip of a larger matrix whose rows are `stride` elements apart: the caller passes the
//! matrix from the strip's first element on.
//!
//! | stored as | made by |
//! |---|---|
//! | gptq `qweight` `[K / 8, N]` | [`transpose`] of words |
//! | awq `qweight` `[K, N / 8]` | [`awq_pack`] of words |
//! | gptq, awq `scales` `[G, N]` | [`transpose_u16`] |
//! | gptq, awq `qzeros` `[G, N / 8]` | [`pack_rows`] |
//! | compressed-tensors `weight_zero_point` `[N / 8, G]` | [`pack_rows_along`] |
//!
//! All functions panic if a slice is shorter than its shape says, or if `rows` or `k` is not a multiple of 8 where 8 of
//! them share a word.

use super::lanes::{dispatch, Job, Lanes};
use super::{reference, Level};

/// Which of 8 values each nibble of a word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NibbleOrder {
    /// Nibble `i` holds value `i`.
    Sequential,
    /// AWQ's order, for a kernel that reads even and odd nibbles apart: 0, 2, 4, 6, 1, 3, 5, 7.
    Awq,
}

impl NibbleOrder {
    /// The value that each nibble holds, lowest nibble first.
    pub const fn offsets(self) -> [usize; 8] {
        match self {
            NibbleOrder::Sequential => [0, 1, 2, 3, 4, 5, 6, 7],
            NibbleOrder::Awq => [0, 2, 4, 6, 1, 3, 5, 7],
        }
    }
}

/// `dst[c * stride + r] = src[r * cols + c]`. Multiples of 16 rows become whole cache lines of `dst`.
pub fn transpose(level: Level, src: &[u32], rows: usize, cols: usize, dst: &mut [u32], stride: usize) {
    match level {
        Level::Scalar => reference::transpose(src, rows, cols, dst, stride),
        _ => dispatch(
            level,
            Transpose {
                src,
                src_stride: cols,
                rows,
                cols,
                dst,
                dst_stride: stride,
            },
        ),
    }
}

/// `dst[r * cols + c] = src[c * stride + r]`: the inverse of [`transpose`].
pub fn untranspose(level: Level, src: &[u32], stride: usize, rows: usize, cols: usize, dst: &mut [u32]) {
    match level {
        Level::Scalar => reference::untranspose(src, stride, rows, cols, dst),
        _ => dispatch(
            level,
            Transpose {
                src,
                src_stride: stride,
                rows: cols,
                cols: rows,
                dst,
                dst_stride: cols,
            },
        ),
    }
}

/// Rows whose scales are written together: 64 bytes of `dst`.
const U16_ROWS: usize = 32;

/// [`transpose`] of `u16`: scales `[rows, G]` to `[G, N]`.
pub fn transpose_u16(src: &[u16], rows: usize, cols: usize, dst: &mut [u16], stride: usize) {
    for first in (0..rows).step_by(U16_ROWS) {
        let rows = U16_ROWS.min(rows - first);
        for c in 0..cols {
            for (r, out) in dst[c * stride + first..][..rows].iter_mut().enumerate() {
                *out = src[(first + r) * cols + c];
            }
        }
    }
}

/// The inverse of [`transpose_u16`].
pub fn untranspose_u16(src: &[u16], stride: usize, rows: usize, cols: usize, dst: &mut [u16]) {
    for first in (0..rows).step_by(U16_ROWS) {
        let rows = U16_ROWS.min(rows - first);
        for c in 0..cols {
            for (r, value) in src[c * stride + first..][..rows].iter().enumerate() {
                dst[(first + r) * cols + c] = *value;
            }
        }
    }
}

struct Transpose<'a> {
    src: &'a [u32],
    src_stride: usize,
    rows: usize,
    cols: usize,
    dst: &'a mut [u32],
    dst_stride: usize,
}

impl Job for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Transpose {
            src,
            src_stride,
            rows,
            cols,
            dst,
            dst_stride,
        } = self;
        let (whole_rows, whole_cols) = (rows - rows % 16, cols - cols % 16);
        // Down the rows first: neighbouring blocks of rows are neighbouring lines of `dst`.
        for c in (0..whole_cols).step_by(16) {
            for r in (0..whole_rows).step_by(16) {
                let block = l.transpose(load_block(l, &src[r * src_stride + c..], src_stride));
                for (i, line) in block.into_iter().enumerate() {
                    l.store(line, line_of(&mut dst[(c + i) * dst_stride + r..]));
                }
            }
        }
        for r in 0..rows {
            let done = if r < whole_rows { whole_cols } else { 0 };
            for c in done..cols {
                dst[c * dst_stride + r] = src[r * src_stride + c];
            }
        }
    }
}

/// 16 lines of 16 words, `stride` apart.
#[inline(always)]
fn load_block<L: Lanes>(l: L, src: &[u32], stride: usize) -> [L::I; 16] {
    let mut block = [l.splat_i(0); 16];
    for (i, line) in block.iter_mut().enumerate() {
        *line = load_line(l, &src[i * stride..]);
    }
    block
}

#[inline(always)]
fn load_line<L: Lanes>(l: L, src: &[u32]) -> L::I {
    l.load(src.first_chunk().expect("a line of 16 words"))
}

/// `width` words; zeros in the other lanes.
#[inline(always)]
fn load_part_line<L: Lanes>(l: L, src: &[u32], width: usize) -> L::I {
    let mut line = [0; 16];
    line[..width].copy_from_slice(&src[..width]);
    l.load(&line)
}

#[inline(always)]
fn line_of(words: &mut [u32]) -> &mut [u32; 16] {
    words.first_chunk_mut().expect("a line of 16 words")
}

/// Codes `[rows, k / 8]`, 8 along K to a word, to AWQ's order: `dst[kk * stride + r / 8]` holds column `kk` of rows `r`
/// to `r + 7`. Multiples of 128 rows become whole cache lines of `dst`.
pub fn awq_pack(level: Level, words: &[u32], rows: usize, k: usize, dst: &mut [u32], stride: usize) {
    assert!(
        rows.is_multiple_of(8) && k.is_multiple_of(8),
        "{rows} rows of {k} codes"
    );
    match level {
        Level::Scalar => reference::awq_pack(words, rows, k, dst, stride),
        _ => dispatch(
            level,
            AwqPack {
                words,
                rows,
                k,
                dst,
                stride,
            },
        ),
    }
}

/// The inverse of [`awq_pack`].
pub fn awq_unpack(level: Level, src: &[u32], stride: usize, rows: usize, k: usize, words: &mut [u32]) {
    assert!(
        rows.is_multiple_of(8) && k.is_multiple_of(8),
        "{rows} rows of {k} codes"
    );
    match level {
        Level::Scalar => reference::awq_unpack(src, stride, rows, k, words),
        _ => dispatch(
            level,
            AwqUnpack {
                src,
                stride,
                rows,
                k,
                words,
            },
        ),
    }
}

/// Rows of a block of AWQ codes: 16 words of 8 rows each.
const AWQ_ROWS: usize = 128;

/// `out[i]` nibble `j` = `x[j]` nibble `i`, in each lane: a transpose by quarters, then pairs, then single nibbles.
#[inline(always)]
fn transpose_nibbles<L: Lanes>(l: L, mut x: [L::I; 8]) -> [L::I; 8] {
    for i in 0..4 {
        let low = l.splat_i(0x0000_ffff);
        let (a, b) = (x[i], x[i + 4]);
        (x[i], x[i + 4]) = (l.select(low, a, l.shl::<16>(b)), l.select(low, l.shr::<16>(a), b));
    }
    for i in [0, 1, 4, 5] {
        let low = l.splat_i(0x00ff_00ff);
        let (a, b) = (x[i], x[i + 2]);
        (x[i], x[i + 2]) = (l.select(low, a, l.shl::<8>(b)), l.select(low, l.shr::<8>(a), b));
    }
    for i in [0, 2, 4, 6] {
        let low = l.splat_i(0x0f0f_0f0f);
        let (a, b) = (x[i], x[i + 1]);
        (x[i], x[i + 1]) = (l.select(low, a, l.shl::<4>(b)), l.select(low, l.shr::<4>(a), b));
    }
    x
}

struct AwqPack<'a> {
    words: &'a [u32],
    rows: usize,
    k: usize,
    dst: &'a mut [u32],
    stride: usize,
}

impl Job for AwqPack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let AwqPack {
            words,
            rows,
            k,
            dst,
            stride,
        } = self;
        let cols = k / 8;
        for first in (0..rows).step_by(AWQ_ROWS) {
            let blocks = (rows - first).min(AWQ_ROWS) / 8;
            for col in (0..cols).step_by(16) {
                let width = (cols - col).min(16);
                // [row in its block of 8][column], a lane for each block.
                let mut lines = [[l.splat_i(0); 16]; 8];
                for (offset, lines) in lines.iter_mut().enumerate() {
                    let src = &words[(first + offset) * cols + col..];
                    let block = if blocks == 16 && width == 16 {
                        load_block(l, src, 8 * cols)
                    } else {
                        load_part(l, src, 8 * cols, blocks, width)
                    };
                    *lines = l.transpose(block);
                }
                for c in 0..width {
                    let mut codes = [l.splat_i(0); 8];
                    for (nibble, offset) in NibbleOrder::Awq.offsets().into_iter().enumerate() {
                        codes[nibble] = lines[offset][c];
                    }
                    for (i, line) in transpose_nibbles(l, codes).into_iter().enumerate() {
                        let dst = &mut dst[(8 * (col + c) + i) * stride + first / 8..];
                        if blocks == 16 {
                            l.store(line, line_of(dst));
                        } else {
                            let mut all = [0; 16];
                            l.store(line, &mut all);
                            dst[..blocks].copy_from_slice(&all[..blocks]);
                        }
                    }
                }
            }
        }
    }
}

/// `height` lines of `width` words, `stride` apart; zeros elsewhere.
#[inline(always)]
fn load_part<L: Lanes>(l: L, src: &[u32], stride: usize, height: usize, width: usize) -> [L::I; 16] {
    let mut block = [l.splat_i(0); 16];
    for (i, out) in block.iter_mut().enumerate().take(height) {
        *out = load_part_line(l, &src[i * stride..], width);
    }
    block
}

struct AwqUnpack<'a> {
    src: &'a [u32],
    stride: usize,
    rows: usize,
    k: usize,
    words: &'a mut [u32],
}

impl Job for AwqUnpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let AwqUnpack {
            src,
            stride,
            rows,
            k,
            words,
        } = self;
        let cols = k / 8;
        for first in (0..rows).step_by(AWQ_ROWS) {
            let blocks = (rows - first).min(AWQ_ROWS) / 8;
            for col in (0..cols).step_by(16) {
                let width = (cols - col).min(16);
                let mut lines = [[l.splat_i(0); 16]; 8];
                for c in 0..width {
                    let mut codes = [l.splat_i(0); 8];
                    for (i, line) in codes.iter_mut().enumerate() {
                        let src = &src[(8 * (col + c) + i) * stride + first / 8..];
                        *line = if blocks == 16 {
                            load_line(l, src)
                        } else {
                            load_part_line(l, src, blocks)
                        };
                    }
                    let rows_of_words = transpose_nibbles(l, codes);
                    for (nibble, offset) in NibbleOrder::Awq.offsets().into_iter().enumerate() {
                        lines[offset][c] = rows_of_words[nibble];
                    }
                }
                for (offset, lines) in lines.into_iter().enumerate() {
                    for (block, line) in l.transpose(lines).into_iter().enumerate().take(blocks) {
                        let words = &mut words[(first + 8 * block + offset) * cols + col..];
                        if width == 16 {
                            l.store(line, line_of(words));
                        } else {
                            let mut all = [0; 16];
                            l.store(line, &mut all);
                            words[..width].copy_from_slice(&all[..width]);
                        }
                    }
                }
            }
        }
    }
}

/// Zero points `[rows, g]` to words that hold 8 rows of one group: `dst[gi * stride + r / 8]`.
pub fn pack_rows(zeros: &[u8], rows: usize, g: usize, order: NibbleOrder, dst: &mut [u32], stride: usize) {
    for_each_word(rows, g, |block, gi| {
        dst[gi * stride + block] = pack_word(zeros, g, order, block, gi)
    });
}

/// The inverse of [`pack_rows`].
pub fn unpack_rows(src: &[u32], stride: usize, rows: usize, g: usize, order: NibbleOrder, zeros: &mut [u8]) {
    for_each_word(rows, g, |block, gi| {
        unpack_word(src[gi * stride + block], g, order, block, gi, zeros)
    });
}

/// Zero points `[rows, g]` to words `[rows / 8, g]` that hold 8 rows of one group each, the first in the lowest nibble.
pub fn pack_rows_along(zeros: &[u8], rows: usize, g: usize, dst: &mut [u32]) {
    let order = NibbleOrder::Sequential;
    for_each_word(rows, g, |block, gi| {
        dst[block * g + gi] = pack_word(zeros, g, order, block, gi)
    });
}

/// The inverse of [`pack_rows_along`].
pub fn unpack_rows_along(src: &[u32], rows: usize, g: usize, zeros: &mut [u8]) {
    let order = NibbleOrder::Sequential;
    for_each_word(rows, g, |block, gi| {
        unpack_word(src[block * g + gi], g, order, block, gi, zeros)
    });
}

/// Calls `word(block of 8 rows, group)` for all of them.
#[inline(always)]
fn for_each_word(rows: usize, g: usize, mut word: impl FnMut(usize, usize)) {
    assert!(rows.is_multiple_of(8), "{rows} rows of zero points, 8 to a word");
    for block in 0..rows / 8 {
        for gi in 0..g {
            word(block, gi);
        }
    }
}

#[inline(always)]
fn pack_word(zeros: &[u8], g: usize, order: NibbleOrder, block: usize, gi: usize) -> u32 {
    reference::join(
        order
            .offsets()
            .map(|offset| u32::from(zeros[(8 * block + offset) * g + gi] & 15)),
    )
}

#[inline(always)]
fn unpack_word(word: u32, g: usize, order: NibbleOrder, block: usize, gi: usize, zeros: &mut [u8]) {
    for (nibble, offset) in order.offsets().into_iter().enumerate() {
        zeros[(8 * block + offset) * g + gi] = (word >> (4 * nibble) & 15) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GARBAGE: u32 = 0xdead_beef;

    fn words(count: usize, seed: u32) -> Vec<u32> {
        (0..count as u32)
            .map(|i| (i ^ seed).wrapping_mul(2_654_435_761) ^ i << 7)
            .collect()
    }

    /// Every level, both ways, with a strip inside a larger matrix whose other elements must not change.
    fn check_transpose(rows: usize, cols: usize, stride: usize) {
        let src = words(rows * cols, 1);
        for level in Level::available() {
            let mut strip = vec![GARBAGE; (cols * stride).max(rows)];
            transpose(level, &src, rows, cols, &mut strip, stride);
            for (i, word) in strip.iter().enumerate() {
                let (c, r) = (i / stride, i % stride);
                let expected = if r < rows && c < cols {
                    src[r * cols + c]
                } else {
                    GARBAGE
                };
                assert_eq!(*word, expected, "{level}: {rows} by {cols}, stride {stride}, at {i}");
            }
            let mut back = vec![GARBAGE; src.len()];
            untranspose(level, &strip, stride, rows, cols, &mut back);
            assert_eq!(back, src, "{level}: {rows} by {cols}, stride {stride}");
        }
    }

    #[test]
    fn transposes_of_every_shape() {
        for rows in [0, 1, 7, 8, 15, 16, 17, 31, 32, 40, 64, 128] {
            for cols in [0, 1, 2, 8, 15, 16, 17, 33, 48] {
                for more in [0, 1, 24] {
                    check_transpose(rows, cols, (rows + more).max(1));
                }
            }
        }
    }

    fn check_awq(rows: usize, k: usize, stride: usize) {
        let src = words(rows * k / 8, 2);
        let code = |row: usize, column: usize| src[(row * k + column) / 8] >> (4 * (column % 8)) & 15;
        for level in Level::available() {
            let mut strip = vec![GARBAGE; k * stride];
            awq_pack(level, &src, rows, k, &mut strip, stride);
            for (i, word) in strip.iter().enumerate() {
                let (column, block) = (i / stride, i % stride);
                let expected = if block < rows / 8 {
                    let order = [0, 2, 4, 6, 1, 3, 5, 7];
                    (0..8).map(|n| code(8 * block + order[n], column) << (4 * n)).sum()
                } else {
                    GARBAGE
                };
                assert_eq!(*word, expected, "{level}: {rows} by {k}, stride {stride}, at {i}");
            }
            let mut back = vec![GARBAGE; src.len()];
            awq_unpack(level, &strip, stride, rows, k, &mut back);
            assert_eq!(back, src, "{level}: {rows} by {k}, stride {stride}");
        }
    }

    #[test]
    fn awq_of_every_shape() {
        for rows in [0, 8, 16, 40, 120, 128, 136, 256, 264] {
            for k in [8, 16, 120, 128, 136, 256, 264] {
                for more in [0, 1, 5] {
                    check_awq(rows, k, (rows / 8 + more).max(1));
                }
            }
        }
    }

    #[test]
    fn scales_are_transposed_and_come_back() {
        for (rows, cols, stride) in [(1, 1, 1), (31, 3, 40), (32, 16, 32), (33, 5, 64), (72, 7, 80)] {
            let src: Vec<u16> = (0..rows * cols).map(|i| i as u16).collect();
            let mut strip = vec![0xbeef; cols * stride];
            transpose_u16(&src, rows, cols, &mut strip, stride);
            for (i, value) in strip.iter().enumerate() {
                let (c, r) = (i / stride, i % stride);
                assert_eq!(*value, if r < rows { src[r * cols + c] } else { 0xbeef });
            }
            let mut back = vec![0; src.len()];
            untranspose_u16(&strip, stride, rows, cols, &mut back);
            assert_eq!(back, src);
        }
    }

    #[test]
    fn zero_points_by_hand() {
        // 8 rows of 2 groups: group 0 holds the row's number, group 1 that number from 15 down.
        let zeros: Vec<u8> = (0..8).flat_map(|row| [row, 15 - row]).collect();
        let mut packed = [GARBAGE; 5];
        pack_rows(&zeros, 8, 2, NibbleOrder::Sequential, &mut packed[1..], 3);
        assert_eq!(packed, [GARBAGE, 0x7654_3210, GARBAGE, GARBAGE, 0x89ab_cdef]);
        pack_rows(&zeros, 8, 2, NibbleOrder::Awq, &mut packed, 1);
        assert_eq!(packed[..2], [0x7531_6420, 0x8ace_9bdf]);
        pack_rows_along(&zeros, 8, 2, &mut packed);
        assert_eq!(packed[..2], [0x7654_3210, 0x89ab_cdef]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn zero_points_come_back(blocks in 0..6_usize, g in 1..9_usize, more in 0..3_usize, seed in any::<u32>()) {
            let rows = 8 * blocks;
            let zeros: Vec<u8> = words(rows * g, seed).iter().map(|word| (word >> 28) as u8).collect();
            let mut back = vec![0xef; zeros.len()];
            for order in [NibbleOrder::Sequential, NibbleOrder::Awq] {
                let stride = blocks + more;
                let mut packed = vec![GARBAGE; g * stride];
                pack_rows(&zeros, rows, g, order, &mut packed, stride);
                unpack_rows(&packed, stride, rows, g, order, &mut back);
                prop_assert_eq!(&back, &zeros);
            }
            let mut packed = vec![GARBAGE; g * blocks];
            pack_rows_along(&zeros, rows, g, &mut packed);
            back.fill(0xef);
            unpack_rows_along(&packed, rows, g, &mut back);
            prop_assert_eq!(&back, &zeros);
        }

        #[test]
        fn transposes_come_back(rows in 0..70_usize, cols in 1..70_usize, more in 0..9_usize) {
            check_transpose(rows, cols, (rows + more).max(1));
        }

        #[test]
        fn awq_comes_back(blocks in 0..20_usize, words in 1..20_usize, more in 0..3_usize) {
            check_awq(8 * blocks, 8 * words, (blocks + more).max(1));
        }
    }
}
