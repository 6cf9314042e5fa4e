//! int4 whose scales are BF16: other tools store them so, and F16 does not hold them all. The kernels give `code - zp`
//! (their scale is 1); the product with the scale, 5 bits times 8, is exact in f32.

use crate::kernel::{int4, reference, Level};
use crate::tensor::{ErrorSums, Float};
use half::{bf16, f16};

pub(super) fn scale(bits: u16) -> f32 {
    bf16::from_bits(bits).to_f32()
}

/// `(code - zp) * scale` of stored rows, in f32.
fn dequantize(level: Level, words: &[u32], scales: &[u16], zeros: &[u8], k: usize, group: usize) -> Vec<f32> {
    let ones = vec![f16::ONE.to_bits(); scales.len()];
    let mut values = vec![0f32; words.len() * 8];
    let bytes = bytemuck::cast_slice_mut(&mut values);
    int4::decode(level, words, &ones, zeros, k, group, Float::F32, bytes);
    for (group, &bits) in values.chunks_exact_mut(group).zip(scales) {
        group.iter_mut().for_each(|value| *value *= scale(bits));
    }
    values
}

/// As [`int4::decode`].
#[allow(clippy::too_many_arguments)] // as the kernel that it stands in for
pub(super) fn decode(
    level: Level,
    words: &[u32],
    scales: &[u16],
    zeros: &[u8],
    k: usize,
    group: usize,
    dtype: Float,
    dst: &mut [u8],
) {
    let values = dequantize(level, words, scales, zeros, k, group);
    for (value, dst) in values.into_iter().zip(dst.chunks_exact_mut(dtype.size())) {
        match dtype {
            Float::F32 => dst.copy_from_slice(&value.to_le_bytes()),
            Float::F16 => dst.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            Float::Bf16 => dst.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// As [`int4::measure`], the sums of a row taken in the order of its columns.
#[allow(clippy::too_many_arguments)] // as the kernel that it stands in for
pub(super) fn measure(
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
    let values = dequantize(level, words, scales, zeros, k, group);
    for (row, sums) in sums.iter_mut().enumerate() {
        *sums = ErrorSums::default();
        for (at, &value) in (row * k..).zip(&values[row * k..][..k]) {
            let weight = f64::from(reference::weight(dtype, src, at));
            *sums += ErrorSums {
                signal: weight * weight,
                noise: (weight - f64::from(value)).powi(2),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_that_float16_cannot_hold_decodes() {
        // 3 * 2^-30 is below float16's least value; two groups of 8 in one row, zero points 8 and 1.
        let scales = [3.0 * 2f32.powi(-30), 0.5].map(|scale| bf16::from_f32(scale).to_bits());
        let words = [0x7654_3210, 0xfedc_ba98];
        let mut bytes = [0; 64];
        decode(Level::Scalar, &words, &scales, &[8, 1], 16, 8, Float::F32, &mut bytes);
        let expected: Vec<f32> = (0..16)
            .map(|code| match code {
                0..8 => (code as f32 - 8.0) * 3.0 * 2f32.powi(-30),
                _ => (code as f32 - 1.0) * 0.5,
            })
            .collect();
        assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), expected);
        let mut sums = [ErrorSums::default()];
        measure(
            Level::Scalar,
            Float::F32,
            &bytes,
            16,
            8,
            &words,
            &scales,
            &[8, 1],
            &mut sums,
        );
        assert!(sums[0].signal > 0.0 && sums[0].noise == 0.0);
    }
}
