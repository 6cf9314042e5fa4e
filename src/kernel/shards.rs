//! Bit shards: how codes of 2 to 7 bits are packed into bytes.
//!
//! A code of `b` bits is cut into fields of 4, 2 and 1 bits, those whose bit is set in `b`, widest first, from its low
//! end up: 3 bits are a field of 2 and one of 1. The fields of one width over a whole tensor are a shard, and the shards
//! follow each other. In a shard of `k` bits with `m = ceil(elements * k / 8)` bytes, byte `i` holds the fields of codes
//! `i`, `i + m`, `i + 2m`, .. from its low end up; where the last of these is beyond the tensor the field is 0. (As
//! torchao's `UintxTensor` cuts codes, and as ai-toolkit lays the shards out.)

use super::lanes::{dispatch, Job, Lanes};
use super::{uintx_reference, Level};

/// The fields of one width: bits `low..low + bits` of each code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// 1, 2 or 4.
    pub bits: u32,
    pub low: u32,
}

impl Shard {
    /// Codes in a byte.
    pub const fn codes(self) -> usize {
        (8 / self.bits) as usize
    }

    /// Bytes of the shard of a tensor.
    pub const fn bytes(self, elements: usize) -> usize {
        elements.div_ceil(self.codes())
    }

    pub const fn mask(self) -> u8 {
        (1 << self.bits) - 1
    }
}

/// By bits.
const SHARDS: [&[Shard]; 8] = {
    const fn shard(bits: u32, low: u32) -> Shard {
        Shard { bits, low }
    }
    [
        &[],
        &[],
        &[shard(2, 0)],
        &[shard(2, 0), shard(1, 2)],
        &[shard(4, 0)],
        &[shard(4, 0), shard(1, 4)],
        &[shard(4, 0), shard(2, 4)],
        &[shard(4, 0), shard(2, 4), shard(1, 6)],
    ]
};

/// The shards of codes of `bits` bits, 2 to 7, in their order on disk.
///
/// # Panics
///
/// If `bits` is more than 7.
pub fn shards(bits: u8) -> &'static [Shard] {
    SHARDS[usize::from(bits)]
}

/// Packs the shard of `out.len()` codes from each of `starts` in `codes`: byte `i` of `out` holds the fields of
/// `codes[start + i]`, the first start's at its low end.
///
/// # Panics
///
/// If there are not as many starts as codes in a byte, or a start is too far on.
pub fn pack(level: Level, shard: Shard, codes: &[u8], starts: &[usize], out: &mut [u8]) {
    assert_eq!(
        starts.len(),
        shard.codes(),
        "segments of a shard of {} bits",
        shard.bits
    );
    if level == Level::Scalar {
        return uintx_reference::pack(shard, codes, starts, out);
    }
    macro_rules! run {
        ($($bits:literal, $low:literal, $count:literal;)*) => {
            match (shard.bits, shard.low) {
                $(($bits, $low) => dispatch(level, Pack::<$bits, $low, $count> { codes, starts, out }),)*
                _ => uintx_reference::pack(shard, codes, starts, out),
            }
        };
    }
    run!(4, 0, 2; 2, 0, 4; 2, 4, 4; 1, 2, 8; 1, 4, 8; 1, 6, 8;)
}

/// The inverse of [`pack`]: puts the fields of `src` into the codes. The shard at the low end of the codes replaces
/// them, the others add their bits.
///
/// # Panics
///
/// As [`pack`].
pub fn unpack(level: Level, shard: Shard, src: &[u8], codes: &mut [u8], starts: &[usize]) {
    assert_eq!(
        starts.len(),
        shard.codes(),
        "segments of a shard of {} bits",
        shard.bits
    );
    if level == Level::Scalar {
        return uintx_reference::unpack(shard, src, codes, starts);
    }
    macro_rules! run {
        ($($bits:literal, $low:literal, $count:literal;)*) => {
            match (shard.bits, shard.low) {
                $(($bits, $low) => dispatch(level, Unpack::<$bits, $low, $count> { src, codes, starts }),)*
                _ => uintx_reference::unpack(shard, src, codes, starts),
            }
        };
    }
    run!(4, 0, 2; 2, 0, 4; 2, 4, 4; 1, 2, 8; 1, 4, 8; 1, 6, 8;)
}

/// Adds the fields in `src` of consecutive codes, all at position `index` of their bytes, to `codes`.
pub fn extract(shard: Shard, index: usize, src: &[u8], codes: &mut [u8]) {
    for (code, byte) in codes.iter_mut().zip(src) {
        *code |= (byte >> (shard.bits as usize * index) & shard.mask()) << shard.low;
    }
}

/// A cache line of codes or of packed bytes.
const LINE: usize = 64;

struct Pack<'a, const BITS: u32, const LOW: u32, const COUNT: usize> {
    codes: &'a [u8],
    starts: &'a [usize],
    out: &'a mut [u8],
}

impl<const BITS: u32, const LOW: u32, const COUNT: usize> Job for Pack<'_, BITS, LOW, COUNT> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let len = self.out.len();
        let segments: [&[u8]; COUNT] = std::array::from_fn(|j| &self.codes[self.starts[j]..][..len]);
        let mask = l.splat_i(0x0101_0101 * ((1 << BITS) - 1));
        // Masked fields leave room above them in their byte, so that shifting whole lanes moves nothing between bytes.
        let join = |lines: [&[u8; LINE]; COUNT], out: &mut [u8; LINE]| {
            let mut bytes = l.splat_i(0);
            for line in lines.into_iter().rev() {
                let field = l.and(l.shr::<LOW>(l.load_bytes(line)), mask);
                bytes = l.or(l.shl::<BITS>(bytes), field);
            }
            l.store_bytes(bytes, out);
        };
        let (lines, rest) = self.out.as_chunks_mut::<LINE>();
        for (i, out) in lines.iter_mut().enumerate() {
            join(segments.map(|segment| line(segment, i)), out);
        }
        if !rest.is_empty() {
            let tails = segments.map(|segment| padded(&segment[len - rest.len()..]));
            let mut out = [0; LINE];
            join(tails.each_ref(), &mut out);
            rest.copy_from_slice(&out[..rest.len()]);
        }
    }
}

struct Unpack<'a, const BITS: u32, const LOW: u32, const COUNT: usize> {
    src: &'a [u8],
    codes: &'a mut [u8],
    starts: &'a [usize],
}

impl<const BITS: u32, const LOW: u32, const COUNT: usize> Job for Unpack<'_, BITS, LOW, COUNT> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Unpack { src, codes, starts } = self;
        let mask = l.splat_i(0x0101_0101 * ((1 << BITS) - 1));
        // What the shift of whole lanes brings in from the next byte lies above the field and is masked away.
        let take = |bytes: L::I, code: &mut [u8; LINE]| {
            let field = l.shl::<LOW>(l.and(bytes, mask));
            let kept = if LOW == 0 { l.splat_i(0) } else { l.load_bytes(code) };
            l.store_bytes(l.or(kept, field), code);
        };
        let (lines, rest) = src.as_chunks::<LINE>();
        for (i, line) in lines.iter().enumerate() {
            let mut bytes = l.load_bytes(line);
            for start in &starts[..COUNT] {
                let code = codes[start + i * LINE..].first_chunk_mut();
                take(bytes, code.expect("a segment is as long as the shard"));
                bytes = l.shr::<BITS>(bytes);
            }
        }
        if !rest.is_empty() {
            let mut bytes = l.load_bytes(&padded(rest));
            for start in &starts[..COUNT] {
                let code = &mut codes[start + lines.len() * LINE..][..rest.len()];
                let mut whole = padded(code);
                take(bytes, &mut whole);
                code.copy_from_slice(&whole[..rest.len()]);
                bytes = l.shr::<BITS>(bytes);
            }
        }
    }
}

#[inline(always)]
fn line(segment: &[u8], i: usize) -> &[u8; LINE] {
    segment[i * LINE..]
        .first_chunk()
        .expect("a segment is as long as the shard")
}

/// Fewer bytes than a line, with zeros after them.
#[inline(always)]
fn padded(bytes: &[u8]) -> [u8; LINE] {
    let mut line = [0; LINE];
    line[..bytes.len()].copy_from_slice(bytes);
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_packs_and_unpacks_as_the_reference() {
        for bits in 2..=7 {
            for len in [0, 1, 63, 64, 65, 200] {
                let codes: Vec<u8> = (0..8 * (len + 3))
                    .map(|i| (i * 89 + i / 7) as u8 & ((1 << bits) - 1))
                    .collect();
                for &shard in shards(bits) {
                    let starts: Vec<usize> = (0..shard.codes()).map(|j| j * (len + 3) + j % 3).collect();
                    let mut want = vec![0; len];
                    uintx_reference::pack(shard, &codes, &starts, &mut want);
                    for level in Level::available() {
                        let mut packed = vec![0xee; len];
                        pack(level, shard, &codes, &starts, &mut packed);
                        assert_eq!(packed, want, "{level} {shard:?} {len}");
                    }
                }
                let starts = |shard: Shard| -> Vec<usize> { (0..shard.codes()).map(|j| j * (len + 3)).collect() };
                for level in Level::available() {
                    let mut back = vec![0xee; codes.len()];
                    for &shard in shards(bits) {
                        let mut packed = vec![0; len];
                        pack(level, shard, &codes, &starts(shard), &mut packed);
                        unpack(level, shard, &packed, &mut back, &starts(shard));
                        let mut some = vec![0; len];
                        extract(shard, 1, &packed, &mut some);
                        let field = |code: u8| code & shard.mask() << shard.low;
                        assert!(some.iter().zip(&codes[len + 3..]).all(|(a, b)| *a == field(*b)));
                    }
                    for start in starts(shards(bits)[0]) {
                        assert_eq!(
                            back[start..start + len],
                            codes[start..start + len],
                            "{level} {bits} {len}"
                        );
                    }
                }
            }
        }
    }
}
