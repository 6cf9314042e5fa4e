//! Which variant of the kernels runs.

use std::fmt;
use std::str::FromStr;

use super::lanes;

/// One variant of every kernel. All give the same bits; they differ in speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The reference: one weight at a time.
    Scalar,
    /// Fixed-width lanes in safe Rust, vectorised by the compiler for the target's baseline (SSE2, NEON).
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Portable, Level::Avx2, Level::Avx512];

    /// The fastest level of this CPU. The standard library caches what it asks the CPU, so this is a few loads.
    pub fn detect() -> Level {
        if lanes::has_avx512() {
            Level::Avx512
        } else if lanes::has_avx2() {
            Level::Avx2
        } else {
            Level::Portable
        }
    }

    /// Every level that this CPU can run, slowest first.
    pub fn available() -> Vec<Level> {
        Level::ALL.into_iter().filter(|level| level.is_available()).collect()
    }

    /// Whether this CPU can run the level. A kernel asked for one that it cannot run uses [`Level::detect`] instead.
    pub fn is_available(self) -> bool {
        match self {
            Level::Scalar | Level::Portable => true,
            Level::Avx2 => lanes::has_avx2(),
            Level::Avx512 => lanes::has_avx512(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Level::ALL
            .into_iter()
            .find(|level| level.name() == text)
            .ok_or_else(|| {
                let names = Level::ALL.map(Level::name).join(", ");
                format!("{text:?} is not a kernel level; they are {names}")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for level in Level::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        assert!("AVX2".parse::<Level>().unwrap_err().contains("portable"));
    }

    #[test]
    fn the_detected_level_is_the_last_available() {
        assert_eq!(Level::available().last(), Some(&Level::detect()));
    }
}
