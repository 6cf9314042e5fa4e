//! 16 lanes of `f32` or of 32-bit integers, the same operations on every instruction set.
//!
//! A kernel is a [`Job`]: one safe generic algorithm over [`Lanes`]. [`dispatch`] compiles it once per instruction set
//! and runs the one asked for. An implementation of [`Lanes`] is a token that exists only where its instructions do, so
//! its methods are safe to call.
//!
//! 32 neighbouring weights are held as two vectors, those at even and those at odd offsets: that is how two bf16 lie in
//! a 32-bit lane, and how two 4-bit codes lie in a byte, so that neither widening nor packing has to move anything
//! between lanes.
//!
//! `unsafe` is confined to `avx2.rs` and `avx512.rs` here.

mod portable;
mod weight;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub use weight::{Bf16, Weight, F16, F32};

use super::Level;

/// `$body` with `$W` the [`Weight`] of a [`Float`](crate::tensor::Float): where a dtype that is a value becomes a type.
macro_rules! with_weight {
    ($dtype:expr, $W:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::Float::F32 => {
                type $W = $crate::kernel::lanes::F32;
                $body
            }
            $crate::tensor::Float::F16 => {
                type $W = $crate::kernel::lanes::F16;
                $body
            }
            $crate::tensor::Float::Bf16 => {
                type $W = $crate::kernel::lanes::Bf16;
                $body
            }
        }
    };
}
pub(super) use with_weight;

/// An algorithm that can run on any instruction set. Its `run` and all that it calls with `lanes` must be
/// `#[inline(always)]`: code that is not inlined into the instance does not get the instance's instructions.
pub trait Job {
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs `job` with the instructions of `level`, or of [`Level::detect`] where this CPU does not have them.
/// [`Level::Scalar`] has no lanes and gets the portable ones.
pub fn dispatch<J: Job>(level: Level, job: J) -> J::Output {
    let level = if level.is_available() { level } else { Level::detect() };
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::run(job),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::run(job),
        _ => job.run(portable::Portable),
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use {avx2::available as has_avx2, avx512::available as has_avx512};

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx512() -> bool {
    false
}

/// Operations on 16 lanes. Float operations are IEEE 754 with round half to even, one rounding each; nothing is
/// contracted, reordered or flushed to zero.
#[allow(clippy::wrong_self_convention)] // `self` is the token, not a value that is converted
pub trait Lanes: Copy {
    /// 16 `f32`.
    type F: Copy;
    /// 16 integers of 32 bits, also read as 32 of 16 bits.
    type I: Copy;
    /// 8 `f64`.
    type D: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `c - a * b` where the product is exact in f32, so that fused and unfused hardware agree.
    fn sub_exact_product(self, c: Self::F, a: Self::F, b: Self::F) -> Self::F;

    fn bits(self, x: Self::F) -> Self::I;
    fn from_bits(self, x: Self::I) -> Self::F;
    /// Signed integers to the nearest `f32`.
    fn to_f32(self, x: Self::I) -> Self::F;

    fn splat_i(self, x: u32) -> Self::I;
    fn load(self, lanes: &[u32; 16]) -> Self::I;
    fn store(self, x: Self::I, lanes: &mut [u32; 16]);
    /// 64 bytes, little-endian.
    fn load_bytes(self, bytes: &[u8; 64]) -> Self::I;
    fn store_bytes(self, x: Self::I, bytes: &mut [u8; 64]);
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// `a` where `mask` has a bit set, else `b`.
    fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I;
    fn shl<const N: u32>(self, x: Self::I) -> Self::I;
    /// Fills with zeros.
    fn shr<const N: u32>(self, x: Self::I) -> Self::I;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn min_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_i32(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_u32(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_i16(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_u16(self, a: Self::I, b: Self::I) -> Self::I;
    /// The largest of 16 unsigned lanes.
    fn largest_u32(self, x: Self::I) -> u32;

    /// The low byte of each lane.
    fn low_bytes(self, x: Self::I) -> [u8; 16];
    /// A byte in each lane.
    fn from_bytes(self, bytes: &[u8; 16]) -> Self::I;
    /// `even 0, odd 0, even 1, ..`: 32 bytes from lanes that are below 256.
    fn pair_bytes(self, even: Self::I, odd: Self::I) -> [u8; 32];
    /// The inverse of [`Lanes::pair_bytes`].
    fn unpair_bytes(self, bytes: &[u8; 32]) -> (Self::I, Self::I);

    /// `(even, odd)` of the 32 lanes `a, b`.
    fn deinterleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F);
    /// The inverse of [`Lanes::deinterleave`].
    fn interleave(self, even: Self::F, odd: Self::F) -> (Self::F, Self::F);
    /// `(even, odd)` of 32 f16, widened.
    fn widen_f16(self, x: Self::I) -> (Self::F, Self::F);
    /// The inverse of [`Lanes::widen_f16`], rounded half to even.
    fn narrow_f16(self, even: Self::F, odd: Self::F) -> Self::I;

    /// The value of one f16.
    fn f16_value(self, bits: u16) -> f32;

    fn zero_d(self) -> Self::D;
    /// `acc + x[0..8]^2 + x[8..16]^2`, in this order. The square of an f32 is exact in f64.
    fn add_squares(self, acc: Self::D, x: Self::F) -> Self::D;
    fn to_array_d(self, x: Self::D) -> [f64; 8];

    /// `out[c]` lane `r` = `rows[r]` lane `c`.
    fn transpose(self, rows: [Self::I; 16]) -> [Self::I; 16];
}
