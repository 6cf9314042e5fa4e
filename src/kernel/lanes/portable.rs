//! Lanes as arrays, for every target. The loops have fixed lengths and no branches, so that the compiler turns them
//! into the target's baseline vectors.

use super::Lanes;

#[derive(Clone, Copy)]
pub struct Portable;

/// `[f(0), .., f(15)]` without a closure call left over.
macro_rules! lanes {
    ($i:ident => $value:expr) => {{
        let mut out = [Default::default(); 16];
        for $i in 0..16 {
            out[$i] = $value;
        }
        out
    }};
}

/// The value of an f16 without branches: the exponent is moved by a multiplication, which is exact and gets subnormals
/// right, and infinity and NaN get the largest exponent back.
#[inline(always)]
fn widen(bits: u32) -> f32 {
    let magnitude = bits & 0x7fff;
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((254 - 15) << 23);
    let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite.to_bits() | special | (bits & 0x8000) << 16)
}

/// The bits of an f16, rounded half to even, without branches. Subnormals are rounded by an addition that puts their
/// unit in the last place at the end of the mantissa, others by adding just under half a unit in integers.
#[inline(always)]
fn narrow(x: f32) -> u32 {
    let sign = x.to_bits() >> 16 & 0x8000;
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + odd) >> 13;
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < (127 - 14) << 23 {
        subnormal
    } else {
        normal
    };
    let special = if magnitude > 0x7f80_0000 {
        0x7e00 | magnitude >> 13 & 0x3ff
    } else {
        0x7c00
    };
    // 65520 and beyond round to infinity.
    sign | if magnitude >= 0x477f_f000 { special } else { finite }
}

impl Lanes for Portable {
    type F = [f32; 16];
    type I = [u32; 16];
    type D = [f64; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; 16]
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => a[i] / b[i])
    }

    #[inline(always)]
    fn sub_exact_product(self, c: Self::F, a: Self::F, b: Self::F) -> Self::F {
        lanes!(i => c[i] - a[i] * b[i])
    }

    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::I {
        lanes!(i => x[i].to_bits())
    }

    #[inline(always)]
    fn from_bits(self, x: Self::I) -> Self::F {
        lanes!(i => f32::from_bits(x[i]))
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        lanes!(i => x[i] as i32 as f32)
    }

    #[inline(always)]
    fn splat_i(self, x: u32) -> Self::I {
        [x; 16]
    }

    #[inline(always)]
    fn load(self, lanes: &[u32; 16]) -> Self::I {
        *lanes
    }

    #[inline(always)]
    fn store(self, x: Self::I, lanes: &mut [u32; 16]) {
        *lanes = x;
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; 64]) -> Self::I {
        lanes!(i => u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]]))
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::I, bytes: &mut [u8; 64]) {
        for i in 0..16 {
            bytes[4 * i..4 * i + 4].copy_from_slice(&x[i].to_le_bytes());
        }
    }

    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i] & b[i])
    }

    #[inline(always)]
    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i] | b[i])
    }

    #[inline(always)]
    fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i] & mask[i] | b[i] & !mask[i])
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: Self::I) -> Self::I {
        lanes!(i => x[i] << N)
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: Self::I) -> Self::I {
        lanes!(i => x[i] >> N)
    }

    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i].wrapping_sub(b[i]))
    }

    #[inline(always)]
    fn min_i32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => (a[i] as i32).min(b[i] as i32) as u32)
    }

    #[inline(always)]
    fn max_i32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => (a[i] as i32).max(b[i] as i32) as u32)
    }

    #[inline(always)]
    fn max_u32(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(i => a[i].max(b[i]))
    }

    #[inline(always)]
    fn max_i16(self, a: Self::I, b: Self::I) -> Self::I {
        // With the sign bits flipped, signed order is unsigned order.
        let flip = [0x8000_8000; 16];
        let largest = self.max_u16(lanes!(i => a[i] ^ flip[i]), lanes!(i => b[i] ^ flip[i]));
        lanes!(i => largest[i] ^ flip[i])
    }

    #[inline(always)]
    fn max_u16(self, a: Self::I, b: Self::I) -> Self::I {
        // Halves fit in 31 bits, so that signed comparisons, which SSE2 has, order them.
        let low = self.max_i32(lanes!(i => a[i] & 0xffff), lanes!(i => b[i] & 0xffff));
        let high = self.max_i32(lanes!(i => a[i] >> 16), lanes!(i => b[i] >> 16));
        lanes!(i => low[i] | high[i] << 16)
    }

    #[inline(always)]
    fn largest_u32(self, x: Self::I) -> u32 {
        let mut largest = 0;
        for lane in x {
            largest = lane.max(largest);
        }
        largest
    }

    #[inline(always)]
    fn low_bytes(self, x: Self::I) -> [u8; 16] {
        lanes!(i => x[i] as u8)
    }

    #[inline(always)]
    fn from_bytes(self, bytes: &[u8; 16]) -> Self::I {
        lanes!(i => u32::from(bytes[i]))
    }

    #[inline(always)]
    fn pair_bytes(self, even: Self::I, odd: Self::I) -> [u8; 32] {
        let mut bytes = [0; 32];
        for i in 0..16 {
            (bytes[2 * i], bytes[2 * i + 1]) = (even[i] as u8, odd[i] as u8);
        }
        bytes
    }

    #[inline(always)]
    fn unpair_bytes(self, bytes: &[u8; 32]) -> (Self::I, Self::I) {
        (
            lanes!(i => u32::from(bytes[2 * i])),
            lanes!(i => u32::from(bytes[2 * i + 1])),
        )
    }

    #[inline(always)]
    fn deinterleave(self, a: Self::F, b: Self::F) -> (Self::F, Self::F) {
        let (mut even, mut odd) = (a, b);
        for i in 0..8 {
            (even[i], odd[i]) = (a[2 * i], a[2 * i + 1]);
            (even[i + 8], odd[i + 8]) = (b[2 * i], b[2 * i + 1]);
        }
        (even, odd)
    }

    #[inline(always)]
    fn interleave(self, even: Self::F, odd: Self::F) -> (Self::F, Self::F) {
        let (mut a, mut b) = (even, odd);
        for i in 0..8 {
            (a[2 * i], a[2 * i + 1]) = (even[i], odd[i]);
            (b[2 * i], b[2 * i + 1]) = (even[i + 8], odd[i + 8]);
        }
        (a, b)
    }

    #[inline(always)]
    fn widen_f16(self, x: Self::I) -> (Self::F, Self::F) {
        (lanes!(i => widen(x[i] & 0xffff)), lanes!(i => widen(x[i] >> 16)))
    }

    #[inline(always)]
    fn narrow_f16(self, even: Self::F, odd: Self::F) -> Self::I {
        lanes!(i => narrow(even[i]) | narrow(odd[i]) << 16)
    }

    #[inline(always)]
    fn f16_value(self, bits: u16) -> f32 {
        widen(u32::from(bits))
    }

    #[inline(always)]
    fn zero_d(self) -> Self::D {
        [0.0; 8]
    }

    #[inline(always)]
    fn add_squares(self, mut acc: Self::D, x: Self::F) -> Self::D {
        for half in 0..2 {
            for i in 0..8 {
                let wide = f64::from(x[8 * half + i]);
                acc[i] += wide * wide;
            }
        }
        acc
    }

    #[inline(always)]
    fn to_array_d(self, x: Self::D) -> [f64; 8] {
        x
    }

    #[inline(always)]
    fn transpose(self, rows: [Self::I; 16]) -> [Self::I; 16] {
        let mut out = [[0; 16]; 16];
        for (r, row) in rows.iter().enumerate() {
            for c in 0..16 {
                out[c][r] = row[c];
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn every_f16_widens_and_comes_back() {
        for bits in 0..=u16::MAX {
            let exact = f16::from_bits(bits).to_f32();
            let ours = widen(u32::from(bits));
            assert_eq!(ours.is_nan(), exact.is_nan(), "{bits:#06x}");
            if !exact.is_nan() {
                assert_eq!(ours.to_bits(), exact.to_bits(), "{bits:#06x}");
                assert_eq!(narrow(exact), u32::from(bits));
            }
        }
    }

    #[test]
    fn narrowing_rounds_as_half_does() {
        // Every 16th pattern of the upper 20 bits, with the neighbourhood of each tie below it.
        for upper in (0..1u32 << 20).step_by(5) {
            for lower in [0, 1, 0x7ff, 0x800, 0x801, 0xfff] {
                let x = f32::from_bits(upper << 12 | lower);
                let (ours, theirs) = (narrow(x) as u16, f16::from_f32(x));
                assert!(
                    ours == theirs.to_bits() || theirs.is_nan() && f16::from_bits(ours).is_nan(),
                    "{x:e}"
                );
            }
        }
    }
}
