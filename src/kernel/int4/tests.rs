//! Every level against the reference, over one table of shapes and values.

use half::{bf16, f16};

use super::*;

/// xorshift64*: the same weights on every run.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In [0, 1).
    fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    /// Near enough to a standard normal.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }
}

/// What the weights of a group look like.
#[derive(Clone, Copy, Debug)]
enum Values {
    Gaussian,
    /// Multiples of half a step: every quotient is an integer or a tie.
    Ties,
    /// Ties, moved by a few units in the last place.
    NearTies,
    Zeros,
    /// Zeros and subnormals of the dtype.
    Subnormal,
    Positive,
    Negative,
    /// One weight that is not zero.
    Single,
    /// Scales around the smallest f16.
    Underflow,
    /// Scales just below the largest f16.
    Large,
    /// Magnitudes over the whole exponent range, below overflow.
    Wide,
    /// Any of the above, another for each group.
    Mixed,
}

const KINDS: [Values; 11] = [
    Values::Gaussian,
    Values::Ties,
    Values::NearTies,
    Values::Zeros,
    Values::Subnormal,
    Values::Positive,
    Values::Negative,
    Values::Single,
    Values::Underflow,
    Values::Large,
    Values::Wide,
];

/// One group of weights that `dtype` can hold.
fn group_of(random: &mut Random, kind: Values, group: usize, dtype: Float) -> Vec<f32> {
    let kind = match kind {
        Values::Mixed => KINDS[random.below(KINDS.len())],
        kind => kind,
    };
    let steps = if random.below(2) == 0 { 8.0 } else { 15.0 };
    let step = (1.0 + random.below(128) as f32 / 128.0) * 2_f32.powi(random.below(12) as i32 - 10);
    let odd_one = random.below(group);
    let mut weights: Vec<f32> = (0..group)
        .map(|i| match kind {
            Values::Gaussian => 0.02 * random.normal(),
            Values::Ties | Values::NearTies if i == odd_one => steps * step,
            Values::Ties => (random.below(2 * steps as usize + 1) as f32 - steps) * step / 2.0,
            Values::NearTies => {
                let tie = (random.below(2 * steps as usize + 1) as f32 - steps) * step / 2.0;
                let ulps = random.below(5) as u32;
                f32::from_bits(tie.to_bits().wrapping_add(ulps).saturating_sub(2))
            }
            Values::Zeros => [0.0, -0.0][random.below(2)],
            Values::Subnormal if dtype == Float::F16 => (random.below(2048) as f32 - 1024.0) * 2_f32.powi(-24),
            Values::Subnormal => f32::from_bits((random.bits() as u32) & 0x807f_ffff),
            Values::Positive => 1.0 + 0.01 * random.uniform(),
            Values::Negative => -0.3 - 0.1 * random.uniform(),
            Values::Single if i == odd_one => random.normal(),
            Values::Single => [0.0, -0.0][random.below(2)],
            Values::Underflow => 2_f32.powi(-22) * random.normal(),
            Values::Large => 32_760.0 * (2.0 * random.uniform() - 1.0),
            Values::Wide => random.normal() * 2_f32.powi(random.below(30) as i32 - 20),
            Values::Mixed => unreachable!(),
        })
        .collect();
    // A sign for the whole group makes ties at both ends.
    if random.below(2) == 0 && !matches!(kind, Values::Positive | Values::Negative) {
        weights.iter_mut().for_each(|w| *w = -*w);
    }
    weights
}

fn to_bytes(weights: &[f32], dtype: Float) -> Vec<u8> {
    weights
        .iter()
        .flat_map(|&w| match dtype {
            Float::F32 => w.to_le_bytes().to_vec(),
            Float::F16 => f16::from_f32(w).to_le_bytes().to_vec(),
            Float::Bf16 => bf16::from_f32(w).to_le_bytes().to_vec(),
        })
        .collect()
}

fn tile_bytes(random: &mut Random, kind: Values, rows: usize, k: usize, group: usize, dtype: Float) -> Vec<u8> {
    let weights: Vec<f32> = (0..rows * k / group)
        .flat_map(|_| group_of(random, kind, group, dtype))
        .collect();
    to_bytes(&weights, dtype)
}

/// The outputs of [`encode`], owned, and started from garbage.
#[derive(Clone, Debug, PartialEq)]
struct Encoded {
    words: Vec<u32>,
    scales: Vec<u16>,
    zeros: Vec<u8>,
    sums: Vec<ErrorSums>,
}

impl Encoded {
    fn new(rows: usize, k: usize, group: usize) -> Self {
        Encoded {
            words: vec![0xdead_beef; rows * k / 8],
            scales: vec![0xbeef; rows * k / group],
            zeros: vec![0xef; rows * k / group],
            sums: vec![
                ErrorSums {
                    signal: -1.0,
                    noise: -1.0
                };
                rows
            ],
        }
    }

    fn tile(&mut self) -> Tile<'_> {
        Tile {
            words: &mut self.words,
            scales: &mut self.scales,
            zeros: &mut self.zeros,
            sums: &mut self.sums,
        }
    }
}

fn encoded(
    level: Level,
    dtype: Float,
    src: &[u8],
    shape: (usize, usize, usize),
    asym: bool,
) -> Result<(Encoded, GroupCounts), Fault> {
    let (rows, k, group) = shape;
    let mut out = Encoded::new(rows, k, group);
    let counts = encode(level, dtype, src, k, group, asym, out.tile())?;
    Ok((out, counts))
}

fn bits(sums: &[ErrorSums]) -> Vec<[u64; 2]> {
    sums.iter().map(|s| [s.signal.to_bits(), s.noise.to_bits()]).collect()
}

/// Encodes, measures and decodes `src` at every level and compares each with the reference.
fn check(dtype: Float, src: &[u8], shape: (usize, usize, usize), asym: bool, what: &str) {
    let (rows, k, group) = shape;
    let expected = encoded(Level::Scalar, dtype, src, shape, asym);
    for level in Level::available() {
        let actual = encoded(level, dtype, src, shape, asym);
        let what = format!("{level}, {dtype:?}, {shape:?}, asym {asym}, {what}");
        let ((expected, counts), (actual, actual_counts)) = match (&expected, &actual) {
            (Ok(expected), Ok(actual)) => (expected, actual),
            (expected, actual) => {
                assert_eq!(expected, actual, "{what}");
                continue;
            }
        };
        assert_eq!(counts, actual_counts, "{what}");
        assert_eq!(expected.scales, actual.scales, "{what}");
        assert_eq!(expected.zeros, actual.zeros, "{what}");
        assert_eq!(expected.words, actual.words, "{what}");
        assert_eq!(bits(&expected.sums), bits(&actual.sums), "{what}");

        let mut sums = vec![ErrorSums::default(); rows];
        let Encoded {
            words, scales, zeros, ..
        } = actual;
        measure(level, dtype, src, k, group, words, scales, zeros, &mut sums);
        assert_eq!(bits(&expected.sums), bits(&sums), "measure: {what}");
        for to in Float::ALL {
            let decoded = |level| {
                let mut dst = vec![0xef; rows * k * to.size()];
                decode(level, words, scales, zeros, k, group, to, &mut dst);
                dst
            };
            assert_eq!(decoded(Level::Scalar), decoded(level), "decode to {to:?}: {what}");
        }
    }
}

#[test]
fn levels_agree_on_every_kind_of_value() {
    let mut random = Random(1);
    for dtype in Float::ALL {
        for kind in KINDS {
            for asym in [false, true] {
                for shape in [(7, 384, 128), (3, 256, 32), (2, 160, 80), (2, 48, 24)] {
                    for _ in 0..4 {
                        let src = tile_bytes(&mut random, kind, shape.0, shape.1, shape.2, dtype);
                        check(dtype, &src, shape, asym, &format!("{kind:?}"));
                    }
                }
            }
        }
    }
}

#[test]
fn levels_agree_on_every_shape() {
    let mut random = Random(2);
    for group in [8, 16, 24, 32, 40, 48, 64, 72, 128, 256] {
        for groups in [1, 2, 3, 4, 5, 8] {
            for rows in [0, 1, 2, 3, 5, 8, 17, 40] {
                let dtype = Float::ALL[random.below(3)];
                let shape = (rows, group * groups, group);
                let src = tile_bytes(&mut random, Values::Mixed, rows, shape.1, group, dtype);
                for asym in [false, true] {
                    check(dtype, &src, shape, asym, "mixed");
                }
            }
        }
    }
}

#[test]
fn levels_agree_at_any_alignment() {
    let mut random = Random(3);
    for dtype in Float::ALL {
        let src = tile_bytes(&mut random, Values::Gaussian, 3, 256, 64, dtype);
        for offset in 1..5 {
            let mut moved = vec![0; offset];
            moved.extend(&src);
            check(dtype, &moved[offset..], (3, 256, 64), true, "moved");
        }
    }
}

/// Every pair of bf16 mantissas: all quotients, and with them all ties, that 8-bit mantissas can make.
#[test]
fn all_quotients_of_bf16() {
    for largest in 0..128_u32 {
        let amax = f32::from_bits(0x3f80_0000 | largest << 16);
        let mut weights = Vec::new();
        for exponent in 123..=127 {
            for mantissa in 0..128 {
                let w = f32::from_bits(exponent << 23 | mantissa << 16);
                weights.push(if w <= amax { w } else { -amax });
            }
        }
        weights[0] = amax;
        let src = to_bytes(&weights, Float::Bf16);
        for asym in [false, true] {
            check(Float::Bf16, &src, (1, 640, 640), asym, "quotients");
        }
    }
}

#[test]
fn sums_are_those_of_the_formula() {
    let mut random = Random(4);
    let src = tile_bytes(&mut random, Values::Gaussian, 1, 64, 32, Float::F32);
    let (out, _) = encoded(Level::detect(), Float::F32, &src, (1, 64, 32), true).unwrap();
    let mut noise = 0.0;
    for i in 0..64 {
        let code = out.words[i / 8] >> (4 * (i % 8)) & 15;
        let step = f64::from(code) - f64::from(out.zeros[i / 32]);
        let dequantized = step * f64::from(f16::from_bits(out.scales[i / 32]).to_f32());
        noise += (f64::from(reference::weight(Float::F32, &src, i)) - dequantized).powi(2);
    }
    assert!(
        (out.sums[0].noise / noise - 1.0).abs() < 1e-6,
        "{} {noise}",
        out.sums[0].noise
    );
}

/// Scales of any sign, and the zero point 16 that gptq's first format can express.
#[test]
fn stored_groups_of_any_kind_are_measured_and_decoded_alike() {
    let mut random = Random(5);
    for group in [8, 16, 24, 32, 64] {
        let (rows, k) = (5, 6 * group);
        let words: Vec<u32> = (0..rows * k / 8).map(|_| random.bits() as u32).collect();
        let zeros: Vec<u8> = (0..rows * 6).map(|_| random.below(17) as u8).collect();
        // Any finite f16, subnormals and both zeros included.
        let scales: Vec<u16> = (0..rows * 6).map(|_| (random.bits() as u16) & 0xbfff).collect();
        for dtype in Float::ALL {
            let src = tile_bytes(&mut random, Values::Mixed, rows, k, group, dtype);
            let measured = |level| {
                let mut sums = vec![ErrorSums::default(); rows];
                measure(level, dtype, &src, k, group, &words, &scales, &zeros, &mut sums);
                bits(&sums)
            };
            let decoded = |level| {
                let mut dst = vec![0xef; rows * k * dtype.size()];
                decode(level, &words, &scales, &zeros, k, group, dtype, &mut dst);
                dst
            };
            for level in Level::available() {
                assert_eq!(
                    measured(level),
                    measured(Level::Scalar),
                    "{level}, {dtype:?}, group {group}"
                );
                assert_eq!(
                    decoded(level),
                    decoded(Level::Scalar),
                    "{level}, {dtype:?}, group {group}"
                );
            }
        }
    }
}

#[test]
fn scales_that_are_not_finite_decode_to_what_is_not_finite() {
    for level in Level::available() {
        for dtype in Float::ALL {
            for scale in [f16::INFINITY, f16::NEG_INFINITY, f16::NAN] {
                let mut dst = vec![0; 32 * dtype.size()];
                decode(
                    level,
                    &[0xfedc_ba91; 4],
                    &[scale.to_bits()],
                    &[8],
                    32,
                    32,
                    dtype,
                    &mut dst,
                );
                for i in 0..32 {
                    let w = reference::weight(dtype, &dst, i);
                    let code = [1, 9, 10, 11, 12, 13, 14, 15][i % 8];
                    assert!(!w.is_finite(), "{level}, {dtype:?}");
                    assert_eq!(w.is_nan(), scale.is_nan(), "{level}, {dtype:?}");
                    assert!(w.is_nan() || w.is_sign_positive() == ((code > 8) == scale.is_sign_positive()));
                }
            }
        }
    }
}

#[test]
fn the_first_weight_that_is_not_finite_is_named() {
    for level in Level::available() {
        for dtype in Float::ALL {
            for group in [8, 24, 32, 128] {
                let (rows, k) = (3, 2 * group);
                for element in [0, 7, group - 1, group, 2 * k - 1, 3 * k - 1] {
                    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                        let mut weights = vec![0.5; rows * k];
                        weights[element] = bad;
                        weights[3 * k - 1] = bad;
                        let src = to_bytes(&weights, dtype);
                        for asym in [false, true] {
                            let fault = encoded(level, dtype, &src, (rows, k, group), asym).unwrap_err();
                            assert_eq!(
                                fault,
                                Fault::NonFinite { element },
                                "{level}, {dtype:?}, {group}, {bad}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_first_scale_that_overflows_is_named_unless_a_weight_is_not_finite() {
    // f16 rounds 65520 and beyond to infinity.
    let limit = |asym: bool| if asym { 65_520.0 * 15.0 } else { 65_520.0 * 8.0 };
    for level in Level::available() {
        for asym in [false, true] {
            let shape = (2, 64, 32);
            let mut weights = vec![1.0; 128];
            weights[40] = limit(asym) - 64.0;
            assert!(
                encoded(level, Float::F32, &to_bytes(&weights, Float::F32), shape, asym).is_ok(),
                "{level}"
            );
            for over in [limit(asym), f32::MAX] {
                weights[40] = over;
                weights[100] = -over;
                weights[101] = over;
                let fault = encoded(level, Float::F32, &to_bytes(&weights, Float::F32), shape, asym).unwrap_err();
                assert_eq!(fault, Fault::ScaleOverflow { element: 32 }, "{level}");
            }
            weights[127] = f32::NAN;
            let fault = encoded(level, Float::F32, &to_bytes(&weights, Float::F32), shape, asym).unwrap_err();
            assert_eq!(fault, Fault::NonFinite { element: 127 }, "{level}");
        }
    }
}

#[test]
fn zero_and_underflowed_groups_are_counted() {
    let mut weights = vec![0.0; 128];
    weights[1] = -0.0;
    weights[40] = 1e-12;
    weights[70] = 1e-3;
    for level in Level::available() {
        for dtype in [Float::F32, Float::Bf16] {
            for asym in [false, true] {
                let (out, counts) = encoded(level, dtype, &to_bytes(&weights, dtype), (1, 128, 32), asym).unwrap();
                assert_eq!(
                    counts,
                    GroupCounts {
                        zero: 2,
                        underflowed: 1
                    },
                    "{level}, {dtype:?}"
                );
                assert_eq!(out.zeros[0], if asym { 0 } else { 8 });
                assert_eq!(out.scales[0], 0);
            }
        }
    }
}

#[test]
fn symmetric_codes_by_hand() {
    // amax 8, so the scale is 1; +8 has no code of its own, and halves go to even.
    let weights = [8.0, -8.0, 0.5, 1.5, -0.5, -1.5, 7.49, 0.0];
    for level in Level::available() {
        let (out, _) = encoded(level, Float::F32, &to_bytes(&weights, Float::F32), (1, 8, 8), false).unwrap();
        assert_eq!(out.words, [0x8f68_a80f], "{level}");
        assert_eq!((out.scales[0], out.zeros[0]), (f16::ONE.to_bits(), 8));
        assert_eq!(out.sums[0].noise, 1.0 + 4.0 * 0.25 + f64::from(7.49_f32 - 7.0).powi(2));
    }
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any bit pattern at all: levels agree on the bytes or on the fault, and nothing panics.
        #[test]
        fn levels_agree_on_any_bits(
            pattern in proptest::collection::vec(any::<u32>(), 8),
            tame in any::<bool>(),
            dtype in 0..3_usize,
            group in 1..12_usize,
            asym in any::<bool>(),
        ) {
            let (dtype, group) = (Float::ALL[dtype], 8 * group);
            let mut random = Random(u64::from(pattern[0]) | 1);
            let weights: Vec<f32> = (0..4 * group)
                .map(|_| {
                    let bits = pattern[random.below(8)] ^ (random.bits() as u32 & 0x80ff_ffff);
                    f32::from_bits(if tame { bits & 0x87ff_ffff | 0x3000_0000 } else { bits })
                })
                .collect();
            check(dtype, &to_bytes(&weights, dtype), (2, 2 * group, group), asym, "any bits");
        }

        /// Away from the ends, a decoded weight is within half a step of the weight, plus what the f16 scale is off.
        #[test]
        fn decoded_weights_are_near(seed in 1..u64::MAX, asym in any::<bool>()) {
            let mut random = Random(seed);
            let src = tile_bytes(&mut random, Values::Gaussian, 2, 64, 32, Float::F32);
            let (out, _) = encoded(Level::detect(), Float::F32, &src, (2, 64, 32), asym).unwrap();
            let mut dst = vec![0; src.len()];
            decode(Level::detect(), &out.words, &out.scales, &out.zeros, 64, 32, Float::F32, &mut dst);
            for i in 0..128 {
                let (w, near) = (reference::weight(Float::F32, &src, i), reference::weight(Float::F32, &dst, i));
                let scale = f16::from_bits(out.scales[i / 32]).to_f32();
                prop_assert!((w - near).abs() <= 1.01 * scale, "{w} {near} {scale}");
            }
        }
    }
}
