use super::*;
use half::{bf16, f16};

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// -1 .. 1
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn bytes(dtype: Float, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; values.len() * dtype.size()];
    for (i, &value) in values.iter().enumerate() {
        reference::set_weight(dtype, &mut out, i, value);
    }
    out
}

/// Weights of `groups` groups: of one family each, in turn.
fn weights(dtype: Float, group: usize, groups: usize, random: &mut Random) -> Vec<u8> {
    let largest = if dtype == Float::F16 { 3e4 } else { 3e37 };
    let mut values = Vec::new();
    for g in 0..groups {
        // Up to what the dtype can tell from 0.
        let tiny = (-(random.next() as f64 % 40.0)).exp2() as f32;
        values.extend((0..group).map(|i| {
            let unit = random.unit();
            match g % 11 {
                0 => unit,
                1 => unit.abs() + 0.1,
                2 => -unit.abs() - 0.1,
                3 => unit * 1e-7,
                4 => unit * tiny,
                5 => unit * largest,
                6 => [0.0, -0.0][i % 2],
                // Ties of codes and of roundings.
                7 => (unit * 16.0).round() / 8.0,
                8 => [0.0, 1e-5 * unit][usize::from(i % 3 == 0)],
                9 => [0.0, 6e-8, -6e-8, 1e-40][i % 4],
                _ => (unit * 2.0).round() * tiny,
            }
        }));
    }
    bytes(dtype, &values)
}

struct Encoded {
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
    done: Result<(ErrorSums, GroupCounts), Fault>,
}

impl Encoded {
    fn stored(&self) -> Stored<'_> {
        Stored {
            codes: &self.codes,
            scales: &self.scales,
            zeros: &self.zeros,
        }
    }
}

fn encoded(level: Level, dtype: Float, bits: u8, group: usize, src: &[u8]) -> Encoded {
    let elements = src.len() / dtype.size();
    let groups = elements / group;
    let mut out = Encoded {
        codes: vec![0xee; elements],
        scales: vec![0xee; groups * dtype.size()],
        zeros: vec![0xee; groups],
        done: Ok(Default::default()),
    };
    let tile = Tile {
        codes: &mut out.codes,
        scales: &mut out.scales,
        zeros: &mut out.zeros,
    };
    out.done = encode(level, dtype, bits, group, src, tile);
    out
}

#[test]
fn every_level_equals_the_reference() {
    let mut random = Random(7);
    for dtype in Float::ALL {
        for group in [1, 3, 7, 8, 16, 24, 32, 48, 64, 96, 128, 250] {
            for bits in 2..=7 {
                let src = weights(dtype, group, 35, &mut random);
                let want = encoded(Level::Scalar, dtype, bits, group, &src);
                let sums = want.done.expect("the weights are in range").0;
                for level in Level::available() {
                    let at = format!("{level} {dtype:?} uint{bits} group {group}");
                    let got = encoded(level, dtype, bits, group, &src);
                    assert_eq!(got.codes, want.codes, "{at}");
                    assert_eq!((&got.scales, &got.zeros), (&want.scales, &want.zeros), "{at}");
                    assert_eq!(got.done, want.done, "{at}");
                    assert_eq!(measure(level, dtype, group, &src, got.stored()), sums, "{at}");
                    for to in Float::ALL {
                        let decoded = |level| {
                            let mut dst = vec![0xee; got.codes.len() * to.size()];
                            decode(level, dtype, group, got.stored(), to, &mut dst);
                            dst
                        };
                        assert_eq!(decoded(level), decoded(Level::Scalar), "{at} to {to:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_bf16_and_f16_weight_gets_the_references_code() {
    for dtype in [Float::F16, Float::Bf16] {
        // Each pattern beside one of 24 scales' ends, so that the group's range is set and the rest is ties and corners.
        let finite = (0..=u16::MAX).filter(|&bits| match dtype {
            Float::F16 => f16::from_bits(bits).is_finite(),
            _ => bf16::from_bits(bits).is_finite(),
        });
        let src: Vec<u8> = finite.flat_map(u16::to_le_bytes).collect();
        for bits in 2..=7 {
            for group in [2, 32, 64] {
                let whole = &src[..src.len() / (2 * group) * (2 * group)];
                let want = encoded(Level::Scalar, dtype, bits, group, whole);
                for level in Level::available() {
                    let got = encoded(level, dtype, bits, group, whole);
                    assert_eq!(got.done, want.done, "{level} {dtype:?} uint{bits}");
                    assert!(got.codes == want.codes && got.scales == want.scales && got.zeros == want.zeros);
                }
            }
        }
    }
}

/// 1 / 2^-23 is infinite in f16: 0 * inf is NaN, which PyTorch's CPU cast takes to 0, and other weights go to the ends.
#[test]
fn an_infinite_reciprocal_sends_zero_to_code_zero() {
    let ulp = f16::from_bits(1).to_f32();
    let src = bytes(Float::F16, &[0.0, -0.0, ulp, -ulp]);
    for level in Level::available() {
        let got = encoded(level, Float::F16, 4, 4, &src);
        assert_eq!(got.codes, [0, 0, 15, 0], "{level}");
        assert_eq!(got.scales, f16::from_f32(SMALLEST_SCALE).to_le_bytes(), "{level}");
    }
}

#[test]
fn faults_are_named_alike_at_every_level() {
    for level in Level::available() {
        for dtype in Float::ALL {
            let mut values = vec![0.5; 40 * 32];
            let fault = |values: &[f32]| encoded(level, dtype, 4, 32, &bytes(dtype, values)).done.unwrap_err();
            let largest = match dtype {
                Float::F16 => 65504.0,
                _ => 3e38,
            };
            (values[700], values[701]) = (largest, -largest);
            assert_eq!(
                fault(&values),
                Fault::ScaleOverflow { element: 21 * 32 },
                "{level} {dtype:?}"
            );
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                values[1279] = bad;
                assert_eq!(
                    fault(&values),
                    Fault::NonFinite { element: 1279 },
                    "{level} {dtype:?} {bad}"
                );
            }
        }
    }
}
