//! The three dtypes of a weight: how 32 of them become lanes, and how the range of many is found.

use super::Lanes;
use crate::tensor::Float;

/// A dtype of weights. A chunk is 32 neighbours, `32 * SIZE` bytes, little-endian, at any alignment.
pub trait Weight: Copy {
    const FLOAT: Float;
    /// Bytes of one weight.
    const SIZE: usize;
    /// Bytes of 32.
    const CHUNK: usize = 32 * Self::SIZE;

    /// `(even, odd)` of a chunk, widened exactly.
    fn load<L: Lanes>(l: L, chunk: &[u8]) -> (L::F, L::F);
    /// The inverse of [`Weight::load`], rounded half to even.
    fn store<L: Lanes>(l: L, even: L::F, odd: L::F, chunk: &mut [u8]);
    /// `(even, odd)`, none of them NaN, rounded half to even to the dtype and widened again.
    fn round<L: Lanes>(l: L, pair: (L::F, L::F)) -> (L::F, L::F);

    /// `acc` raised to the bit patterns of a chunk's magnitudes. Starts from zeros, ends in [`Weight::largest`].
    fn raise_abs<L: Lanes>(l: L, acc: L::I, chunk: &[u8]) -> L::I;
    /// `(positive, negative)` raised to the bit patterns of a chunk, as signed and as unsigned integers: for
    /// sign-magnitude numbers the largest signed pattern is the largest weight, if any is positive, and the largest
    /// unsigned one is the smallest weight, if any is negative.
    fn raise_both<L: Lanes>(l: L, acc: (L::I, L::I), chunk: &[u8]) -> (L::I, L::I);
    /// The largest unsigned pattern of each column of 16 accumulators, as the bits of an `f32` of the same value (NaN
    /// and infinity included).
    fn largest<L: Lanes>(l: L, columns: [L::I; 16]) -> L::I;
}

#[derive(Clone, Copy)]
pub struct F32;
#[derive(Clone, Copy)]
pub struct F16;
#[derive(Clone, Copy)]
pub struct Bf16;

/// The first 64 bytes of `bytes`. Callers pass whole chunks, so the check folds away.
#[inline(always)]
fn line(bytes: &[u8]) -> &[u8; 64] {
    bytes.first_chunk().expect("a chunk is at least 64 bytes")
}

#[inline(always)]
fn line_mut(bytes: &mut [u8]) -> &mut [u8; 64] {
    bytes.first_chunk_mut().expect("a chunk is at least 64 bytes")
}

impl Weight for F32 {
    const FLOAT: Float = Float::F32;
    const SIZE: usize = 4;

    #[inline(always)]
    fn load<L: Lanes>(l: L, chunk: &[u8]) -> (L::F, L::F) {
        let (a, b) = (l.load_bytes(line(chunk)), l.load_bytes(line(&chunk[64..])));
        l.deinterleave(l.from_bits(a), l.from_bits(b))
    }

    #[inline(always)]
    fn store<L: Lanes>(l: L, even: L::F, odd: L::F, chunk: &mut [u8]) {
        let (a, b) = l.interleave(even, odd);
        l.store_bytes(l.bits(a), line_mut(chunk));
        l.store_bytes(l.bits(b), line_mut(&mut chunk[64..]));
    }

    #[inline(always)]
    fn round<L: Lanes>(_: L, pair: (L::F, L::F)) -> (L::F, L::F) {
        pair
    }

    #[inline(always)]
    fn raise_abs<L: Lanes>(l: L, acc: L::I, chunk: &[u8]) -> L::I {
        let magnitude = l.splat_i(0x7fff_ffff);
        let acc = l.max_i32(acc, l.and(l.load_bytes(line(chunk)), magnitude));
        l.max_i32(acc, l.and(l.load_bytes(line(&chunk[64..])), magnitude))
    }

    #[inline(always)]
    fn raise_both<L: Lanes>(l: L, acc: (L::I, L::I), chunk: &[u8]) -> (L::I, L::I) {
        let (a, b) = (l.load_bytes(line(chunk)), l.load_bytes(line(&chunk[64..])));
        let positive = l.max_i32(l.max_i32(acc.0, a), b);
        (positive, l.max_u32(l.max_u32(acc.1, a), b))
    }

    #[inline(always)]
    fn largest<L: Lanes>(l: L, columns: [L::I; 16]) -> L::I {
        let mut largest = columns[0];
        for x in columns {
            largest = l.max_u32(largest, x);
        }
        largest
    }
}

/// The range operations of both 16-bit dtypes.
macro_rules! range_of_16_bits {
    () => {
        #[inline(always)]
        fn raise_abs<L: Lanes>(l: L, acc: L::I, chunk: &[u8]) -> L::I {
            l.max_i16(acc, l.and(l.load_bytes(line(chunk)), l.splat_i(0x7fff_7fff)))
        }

        #[inline(always)]
        fn raise_both<L: Lanes>(l: L, acc: (L::I, L::I), chunk: &[u8]) -> (L::I, L::I) {
            let bits = l.load_bytes(line(chunk));
            (l.max_i16(acc.0, bits), l.max_u16(acc.1, bits))
        }
    };
}

/// The largest of the 32 halves in each column, in the low half of a lane.
#[inline(always)]
fn largest_halves<L: Lanes>(l: L, columns: [L::I; 16]) -> L::I {
    let mut largest = columns[0];
    for x in columns {
        largest = l.max_u16(largest, x);
    }
    l.max_u16(l.and(largest, l.splat_i(0xffff)), l.shr::<16>(largest))
}

impl Weight for F16 {
    const FLOAT: Float = Float::F16;
    const SIZE: usize = 2;

    #[inline(always)]
    fn load<L: Lanes>(l: L, chunk: &[u8]) -> (L::F, L::F) {
        l.widen_f16(l.load_bytes(line(chunk)))
    }

    #[inline(always)]
    fn store<L: Lanes>(l: L, even: L::F, odd: L::F, chunk: &mut [u8]) {
        l.store_bytes(l.narrow_f16(even, odd), line_mut(chunk));
    }

    #[inline(always)]
    fn round<L: Lanes>(l: L, (even, odd): (L::F, L::F)) -> (L::F, L::F) {
        l.widen_f16(l.narrow_f16(even, odd))
    }

    range_of_16_bits!();

    #[inline(always)]
    fn largest<L: Lanes>(l: L, columns: [L::I; 16]) -> L::I {
        l.bits(l.widen_f16(largest_halves(l, columns)).0)
    }
}

impl Weight for Bf16 {
    const FLOAT: Float = Float::Bf16;
    const SIZE: usize = 2;

    #[inline(always)]
    fn load<L: Lanes>(l: L, chunk: &[u8]) -> (L::F, L::F) {
        let bits = l.load_bytes(line(chunk));
        let odd = l.and(bits, l.splat_i(0xffff_0000));
        (l.from_bits(l.shl::<16>(bits)), l.from_bits(odd))
    }

    #[inline(always)]
    fn store<L: Lanes>(l: L, even: L::F, odd: L::F, chunk: &mut [u8]) {
        let (even, odd) = (round_bf16(l, even), round_bf16(l, odd));
        let bits = l.select(l.splat_i(0xffff_0000), odd, l.shr::<16>(even));
        l.store_bytes(bits, line_mut(chunk));
    }

    #[inline(always)]
    fn round<L: Lanes>(l: L, (even, odd): (L::F, L::F)) -> (L::F, L::F) {
        (upper_half(l, even), upper_half(l, odd))
    }

    range_of_16_bits!();

    #[inline(always)]
    fn largest<L: Lanes>(l: L, columns: [L::I; 16]) -> L::I {
        l.shl::<16>(largest_halves(l, columns))
    }
}

/// `x`, which is not NaN, rounded half to even to bf16. Subnormals are rounded as every other number is.
#[inline(always)]
fn upper_half<L: Lanes>(l: L, x: L::F) -> L::F {
    let bits = l.bits(x);
    let odd = l.and(l.shr::<16>(bits), l.splat_i(1));
    let rounded = l.add_i(bits, l.add_i(odd, l.splat_i(0x7fff)));
    l.from_bits(l.and(rounded, l.splat_i(0xffff_0000)))
}

/// Bits of `x` whose upper half is `x` rounded half to even to bf16; the lower half is of no use. NaN keeps its sign
/// and becomes quiet.
#[inline(always)]
fn round_bf16<L: Lanes>(l: L, x: L::F) -> L::I {
    let bits = l.bits(x);
    let odd = l.and(l.shr::<16>(bits), l.splat_i(1));
    let rounded = l.add_i(bits, l.add_i(odd, l.splat_i(0x7fff)));
    // All ones where |x| > infinity: the subtraction is negative there, and the sign is spread by a comparison with 0.
    let above = l.sub_i(l.splat_i(0x7f80_0000), l.and(bits, l.splat_i(0x7fff_ffff)));
    let nan = l.sub_i(l.splat_i(0), l.shr::<31>(above));
    l.select(nan, l.or(bits, l.splat_i(0x0040_0000)), rounded)
}
