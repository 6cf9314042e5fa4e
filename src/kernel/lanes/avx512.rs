//! Lanes as AVX-512 registers: one for 16 lanes.

use std::arch::x86_64::*;

use super::{Job, Lanes};

/// Exists only inside [`run_here`], where the CPU is known to have the instructions.
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Whether this CPU has what [`run`] needs.
pub fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("f16c")
}

pub fn run<J: Job>(job: J) -> J::Output {
    assert!(available(), "AVX-512 asked of a CPU without it");
    // SAFETY: the CPU has every feature that the function enables.
    unsafe { run_here(job) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
fn run_here<J: Job>(job: J) -> J::Output {
    job.run(Avx512(()))
}

/// Methods that are one expression of intrinsics.
macro_rules! methods {
    ($(fn $name:ident $(<const $n:ident: u32>)? ($($arg:ident: $type:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name $(<const $n: u32>)? (self, $($arg: $type),*) -> $out {
            // SAFETY: `self` exists only where the CPU has the instructions; loads and stores go through references to
            // arrays as large as a register and need no alignment.
            unsafe { $body }
        }
    )*};
}

/// Even offsets of 32 lanes, then odd ones.
const EVEN: [u32; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30];
const ODD: [u32; 16] = [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31];
/// What undoes them.
const LOW: [u32; 16] = [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23];
const HIGH: [u32; 16] = [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31];
/// The same as `EVEN`, `ODD` for 32 lanes of 16 bits.
const EVEN_ODD: [u16; 32] = [
    0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29,
    31,
];

/// Half to even, whatever the control register says.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type D = __m512d;

    methods! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn sub_exact_product(c: __m512, a: __m512, b: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);

        fn bits(x: __m512) -> __m512i = _mm512_castps_si512(x);
        fn from_bits(x: __m512i) -> __m512 = _mm512_castsi512_ps(x);
        fn to_f32(x: __m512i) -> __m512 = _mm512_cvtepi32_ps(x);

        fn splat_i(x: u32) -> __m512i = _mm512_set1_epi32(x as i32);
        fn load(lanes: &[u32; 16]) -> __m512i = _mm512_loadu_si512(lanes.as_ptr().cast());
        fn store(x: __m512i, lanes: &mut [u32; 16]) -> () = _mm512_storeu_si512(lanes.as_mut_ptr().cast(), x);
        fn load_bytes(bytes: &[u8; 64]) -> __m512i = _mm512_loadu_si512(bytes.as_ptr().cast());
        fn store_bytes(x: __m512i, bytes: &mut [u8; 64]) -> () = _mm512_storeu_si512(bytes.as_mut_ptr().cast(), x);
        fn and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        // 0xca is the truth table of `mask ? a : b`.
        fn select(mask: __m512i, a: __m512i, b: __m512i) -> __m512i = _mm512_ternarylogic_epi32::<0xca>(mask, a, b);
        fn shl<const N: u32>(x: __m512i) -> __m512i = _mm512_slli_epi32::<N>(x);
        fn shr<const N: u32>(x: __m512i) -> __m512i = _mm512_srli_epi32::<N>(x);
        fn add_i(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn sub_i(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        fn min_i32(a: __m512i, b: __m512i) -> __m512i = _mm512_min_epi32(a, b);
        fn max_i32(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epi32(a, b);
        fn max_u32(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epu32(a, b);
        fn max_i16(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epi16(a, b);
        fn max_u16(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epu16(a, b);
        fn largest_u32(x: __m512i) -> u32 = _mm512_reduce_max_epu32(x);

        fn from_bytes(bytes: &[u8; 16]) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));

        fn f16_value(bits: u16) -> f32 = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));

        fn zero_d() -> __m512d = _mm512_setzero_pd();
    }

    #[inline(always)]
    fn low_bytes(self, x: __m512i) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: `self` exists only where the CPU has the instructions; 16 bytes are stored to an array of 16.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x)) };
        bytes
    }

    #[inline(always)]
    fn pair_bytes(self, even: __m512i, odd: __m512i) -> [u8; 32] {
        let mut bytes = [0; 32];
        // SAFETY: `self` exists only where the CPU has the instructions; 32 bytes are stored to an array of 32.
        unsafe {
            let pairs = _mm512_or_si512(even, _mm512_slli_epi32::<8>(odd));
            _mm256_storeu_si256(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(pairs));
        }
        bytes
    }

    #[inline(always)]
    fn unpair_bytes(self, bytes: &[u8; 32]) -> (__m512i, __m512i) {
        // SAFETY: `self` exists only where the CPU has the instructions; 32 bytes are read from an array of 32.
        unsafe {
            let pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast()));
            (
                _mm512_and_si512(pairs, _mm512_set1_epi32(0xff)),
                _mm512_srli_epi32::<8>(pairs),
            )
        }
    }

    #[inline(always)]
    fn deinterleave(self, a: __m512, b: __m512) -> (__m512, __m512) {
        let (even, odd) = (self.load(&EVEN), self.load(&ODD));
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe { (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)) }
    }

    #[inline(always)]
    fn interleave(self, even: __m512, odd: __m512) -> (__m512, __m512) {
        let (low, high) = (self.load(&LOW), self.load(&HIGH));
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            (
                _mm512_permutex2var_ps(even, low, odd),
                _mm512_permutex2var_ps(even, high, odd),
            )
        }
    }

    #[inline(always)]
    fn widen_f16(self, x: __m512i) -> (__m512, __m512) {
        // SAFETY: `self` exists only where the CPU has the instructions; the load reads an array of 64 bytes.
        unsafe {
            let halves = _mm512_permutexvar_epi16(_mm512_loadu_si512(EVEN_ODD.as_ptr().cast()), x);
            let (even, odd) = (_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves));
            (_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd))
        }
    }

    #[inline(always)]
    fn narrow_f16(self, even: __m512, odd: __m512) -> __m512i {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            let even = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<NEAREST>(even));
            let odd = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<NEAREST>(odd));
            _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd))
        }
    }

    #[inline(always)]
    fn add_squares(self, acc: __m512d, x: __m512) -> __m512d {
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(x));
            // The squares are exact in f64, so that fusing changes nothing.
            _mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, acc))
        }
    }

    #[inline(always)]
    fn to_array_d(self, x: __m512d) -> [f64; 8] {
        let mut out = [0.0; 8];
        // SAFETY: `self` exists only where the CPU has the instructions; 64 bytes are stored to an array of 64.
        unsafe { _mm512_storeu_pd(out.as_mut_ptr(), x) };
        out
    }

    #[inline(always)]
    fn transpose(self, rows: [__m512i; 16]) -> [__m512i; 16] {
        let mut x = rows;
        // SAFETY: `self` exists only where the CPU has the instructions.
        unsafe {
            // 4 by 4 words within each 128 bits: first pairs of words, then pairs of pairs.
            for i in (0..16).step_by(4) {
                let [a, b, c, d] = [x[i], x[i + 1], x[i + 2], x[i + 3]];
                let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                x[i] = _mm512_unpacklo_epi64(ab, cd);
                x[i + 1] = _mm512_unpackhi_epi64(ab, cd);
                x[i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
                x[i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
            }
            // Then 4 by 4 of those 128 bits.
            for i in 0..4 {
                let [a, b, c, d] = [x[i], x[i + 4], x[i + 8], x[i + 12]];
                let (ab, cd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d));
                let (ab_odd, cd_odd) = (_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d));
                x[i] = _mm512_shuffle_i32x4::<0x88>(ab, cd);
                x[i + 4] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
                x[i + 8] = _mm512_shuffle_i32x4::<0xdd>(ab, cd);
                x[i + 12] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
            }
        }
        x
    }
}
