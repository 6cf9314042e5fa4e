//! Lanes as AVX2 registers: two for 16 lanes.

use std::arch::x86_64::*;

use super::{Job, Lanes};

/// Exists only inside [`run_here`], where the CPU is known to have the instructions.
#[derive(Clone, Copy)]
pub struct Avx2(());

/// Whether this CPU has what [`run`] needs.
pub fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

pub fn run<J: Job>(job: J) -> J::Output {
    assert!(available(), "AVX2 asked of a CPU without it");
    // SAFETY: the CPU has every feature that the function enables.
    unsafe { run_here(job) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_here<J: Job>(job: J) -> J::Output {
    job.run(Avx2(()))
}

type F = [__m256; 2];
type I = [__m256i; 2];
type D = [__m256d; 2];

/// Methods that are one expression of intrinsics; after `each`, one for each register of the arguments.
macro_rules! methods {
    ($(fn $name:ident ($($arg:ident: $type:ty),*) -> $out:ty = each $body:expr;)*) => {$(
        #[inline(always)]
        fn $name (self, $($arg: $type),*) -> $out {
            methods!(@half low, 0, ($($arg),*), $body);
            methods!(@half high, 1, ($($arg),*), $body);
            [low, high]
        }
    )*};
    (@half $half:ident, $i:literal, ($($arg:ident),*), $body:expr) => {
        let $half = {
            $(let $arg = $arg[$i];)*
            // SAFETY: `self` exists only where the CPU has the instructions.
            unsafe { $body }
        };
    };
}

/// Half to even, whatever the control register says.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Lanes for Avx2 {
    type F = F;
    type I = I;
    type D = D;

    methods! {
        fn add(a: F, b: F) -> F = each _mm256_add_ps(a, b);
        fn sub(a: F, b: F) -> F = each _mm256_sub_ps(a, b);
        fn mul(a: F, b: F) -> F = each _mm256_mul_ps(a, b);
        fn div(a: F, b: F) -> F = each _mm256_div_ps(a, b);
        fn sub_exact_product(c: F, a: F, b: F) -> F = each _mm256_fnmadd_ps(a, b, c);

        fn bits(x: F) -> I = each _mm256_castps_si256(x);
        fn from_bits(x: I) -> F = each _mm256_castsi256_ps(x);
        fn to_f32(x: I) -> F = each _mm256_cvtepi32_ps(x);

        fn and(a: I, b: I) -> I = each _mm256_and_si256(a, b);
        fn or(a: I, b: I) -> I = each _mm256_or_si256(a, b);
        fn select(mask: I, a: I, b: I) -> I =
            each _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
        fn add_i(a: I, b: I) -> I = each _mm256_add_epi32(a, b);
        fn sub_i(a: I, b: I) -> I = each _mm256_sub_epi32(a, b);
        fn min_i32(a: I, b: I) -> I = each _mm256_min_epi32(a, b);
        fn max_i32(a: I, b: I) -> I = each _mm256_max_epi32(a, b);
        fn max_u32(a: I, b: I) -> I = each _mm256_max_epu32(a, b);
        fn max_i16(a: I, b: I) -> I = each _mm256_max_epi16(a, b);
        fn max_u16(a: I, b: I) -> I = each _mm256_max_epu16(a, b);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn splat_i(self, x: u32) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { [_mm256_set1_epi32(x as i32); 2] }
    }

    // The shift is a u32 here and an i32 in the intrinsics of AVX2; a count in a register takes either, and the
    // compiler makes it an immediate.
    #[inline(always)]
    fn shl<const N: u32>(self, x: I) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { x.map(|x| _mm256_sll_epi32(x, _mm_cvtsi32_si128(N as i32))) }
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: I) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { x.map(|x| _mm256_srl_epi32(x, _mm_cvtsi32_si128(N as i32))) }
    }

    #[inline(always)]
    fn load(self, lanes: &[u32; 16]) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions; each load reads half of an array of 64 bytes
        // and needs no alignment.
        unsafe {
            let lanes: *const __m256i = lanes.as_ptr().cast();
            [_mm256_loadu_si256(lanes), _mm256_loadu_si256(lanes.add(1))]
        }
    }

    #[inline(always)]
    fn store(self, x: I, lanes: &mut [u32; 16]) {
        // SAFETY: as in `load`.
        unsafe {
            let lanes: *mut __m256i = lanes.as_mut_ptr().cast();
            _mm256_storeu_si256(lanes, x[0]);
            _mm256_storeu_si256(lanes.add(1), x[1]);
        }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; 64]) -> I {
        // SAFETY: as in `load`.
        unsafe {
            let bytes: *const __m256i = bytes.as_ptr().cast();
            [_mm256_loadu_si256(bytes), _mm256_loadu_si256(bytes.add(1))]
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: I, bytes: &mut [u8; 64]) {
        // SAFETY: as in `load`.
        unsafe {
            let bytes: *mut __m256i = bytes.as_mut_ptr().cast();
            _mm256_storeu_si256(bytes, x[0]);
            _mm256_storeu_si256(bytes.add(1), x[1]);
        }
    }

    #[inline(always)]
    fn largest_u32(self, [a, b]: I) -> u32 {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            let x = _mm256_max_epu32(a, b);
            let x = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_max_epu32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x))) as u32
        }
    }

    #[inline(always)]
    fn low_bytes(self, [a, b]: I) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: `self` exists only where the CPU has the instructions; 16 bytes are stored to an array of 16.
        unsafe {
            let low = _mm256_set1_epi32(0xff);
            // Packing works within 128 bits and leaves quarters in the order 0, 2, 1, 3.
            let halves = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
            let packed = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            _mm_storeu_si128(bytes.as_mut_ptr().cast(), packed);
        }
        bytes
    }

    #[inline(always)]
    fn from_bytes(self, bytes: &[u8; 16]) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions; 16 bytes are read from an array of 16.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            [
                _mm256_cvtepu8_epi32(bytes),
                _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes)),
            ]
        }
    }

    #[inline(always)]
    fn pair_bytes(self, even: I, odd: I) -> [u8; 32] {
        let mut bytes = [0; 32];
        // SAFETY: `self` exists only where the CPU has the instructions; 32 bytes are stored to an array of 32.
        unsafe {
            let low = _mm256_or_si256(even[0], _mm256_slli_epi32::<8>(odd[0]));
            let high = _mm256_or_si256(even[1], _mm256_slli_epi32::<8>(odd[1]));
            // Packing works within 128 bits and leaves quarters in the order 0, 2, 1, 3.
            let pairs = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(bytes.as_mut_ptr().cast(), pairs);
        }
        bytes
    }

    #[inline(always)]
    fn unpair_bytes(self, bytes: &[u8; 32]) -> (I, I) {
        // SAFETY: `self` exists only where the CPU has the instructions; 32 bytes are read from an array of 32.
        unsafe {
            let pairs = _mm256_loadu_si256(bytes.as_ptr().cast());
            let low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(pairs));
            let high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(pairs));
            let byte = _mm256_set1_epi32(0xff);
            (
                [_mm256_and_si256(low, byte), _mm256_and_si256(high, byte)],
                [_mm256_srli_epi32::<8>(low), _mm256_srli_epi32::<8>(high)],
            )
        }
    }

    #[inline(always)]
    fn deinterleave(self, a: F, b: F) -> (F, F) {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            // Shuffling works within 128 bits and leaves pairs in the order 0, 2, 1, 3.
            let even = [a, b].map(|[x, y]| _mm256_shuffle_ps::<0b10_00_10_00>(x, y));
            let odd = [a, b].map(|[x, y]| _mm256_shuffle_ps::<0b11_01_11_01>(x, y));
            let sort = |x: __m256| {
                let pairs = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x));
                _mm256_castpd_ps(pairs)
            };
            (even.map(sort), odd.map(sort))
        }
    }

    #[inline(always)]
    fn interleave(self, even: F, odd: F) -> (F, F) {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            let (low, high) = (_mm256_unpacklo_ps(even[0], odd[0]), _mm256_unpackhi_ps(even[0], odd[0]));
            let a = [
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            ];
            let (low, high) = (_mm256_unpacklo_ps(even[1], odd[1]), _mm256_unpackhi_ps(even[1], odd[1]));
            let b = [
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            ];
            (a, b)
        }
    }

    #[inline(always)]
    fn widen_f16(self, x: I) -> (F, F) {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let order = _mm256_broadcastsi128_si256(order);
            let [a, b] = x.map(|x| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(x, order)));
            let even = [a, b].map(|x| _mm256_cvtph_ps(_mm256_castsi256_si128(x)));
            let odd = [a, b].map(|x| _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(x)));
            (even, odd)
        }
    }

    #[inline(always)]
    fn narrow_f16(self, even: F, odd: F) -> I {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            [(even[0], odd[0]), (even[1], odd[1])].map(|(even, odd)| {
                let (even, odd) = (_mm256_cvtps_ph::<NEAREST>(even), _mm256_cvtps_ph::<NEAREST>(odd));
                _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd))
            })
        }
    }

    #[inline(always)]
    fn f16_value(self, bits: u16) -> f32 {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
    }

    #[inline(always)]
    fn zero_d(self) -> D {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { [_mm256_setzero_pd(); 2] }
    }

    #[inline(always)]
    fn add_squares(self, mut acc: D, x: F) -> D {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            for x in x {
                let low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
                let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(x));
                // The squares are exact in f64, so that fusing changes nothing.
                acc = [_mm256_fmadd_pd(low, low, acc[0]), _mm256_fmadd_pd(high, high, acc[1])];
            }
        }
        acc
    }

    #[inline(always)]
    fn to_array_d(self, x: D) -> [f64; 8] {
        let mut out = [0.0; 8];
        // SAFETY: `self` exists only where the CPU has the instructions; each store fills half of an array of 64 bytes.
        unsafe {
            _mm256_storeu_pd(out.as_mut_ptr(), x[0]);
            _mm256_storeu_pd(out.as_mut_ptr().add(4), x[1]);
        }
        out
    }

    #[inline(always)]
    fn transpose(self, rows: [I; 16]) -> [I; 16] {
        let mut out = rows;
        // The quarter of 8 by 8 words at row 8 i, register j goes to row 8 j, register i.
        for i in 0..2 {
            for j in 0..2 {
                let mut x = [rows[0][0]; 8];
                for r in 0..8 {
                    x[r] = rows[8 * i + r][j];
                }
                // SAFETY: `self` exists only where the CPU has the instructions.
                let x = unsafe { transpose8(x) };
                for r in 0..8 {
                    out[8 * j + r][i] = x[r];
                }
            }
        }
        out
    }
}

/// # Safety
///
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn transpose8(mut x: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the caller's.
    unsafe {
        // 4 by 4 words within each 128 bits: first pairs of words, then pairs of pairs.
        for i in [0, 4] {
            let [a, b, c, d] = [x[i], x[i + 1], x[i + 2], x[i + 3]];
            let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            x[i] = _mm256_unpacklo_epi64(ab, cd);
            x[i + 1] = _mm256_unpackhi_epi64(ab, cd);
            x[i + 2] = _mm256_unpacklo_epi64(ab_high, cd_high);
            x[i + 3] = _mm256_unpackhi_epi64(ab_high, cd_high);
        }
        // Then 2 by 2 of those 128 bits.
        for i in 0..4 {
            let (a, b) = (x[i], x[i + 4]);
            x[i] = _mm256_permute2x128_si256::<0x20>(a, b);
            x[i + 4] = _mm256_permute2x128_si256::<0x31>(a, b);
        }
    }
    x
}
