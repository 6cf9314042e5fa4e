//! Words that every module shares: element types, and the sums and counts that kernels return.

pub use safetensors::Dtype;

/// The element types that are quantized. Everything else passes through byte for byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    pub const ALL: [Float; 3] = [Float::F32, Float::F16, Float::Bf16];

    /// `None` for every dtype that is not a weight's.
    pub fn from_dtype(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Float::F32),
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::Bf16),
            _ => None,
        }
    }

    pub fn dtype(self) -> Dtype {
        match self {
            Float::F32 => Dtype::F32,
            Float::F16 => Dtype::F16,
            Float::Bf16 => Dtype::BF16,
        }
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// The inverse of [`Float::torch_name`].
    pub fn from_torch_name(name: &str) -> Option<Self> {
        Float::ALL.into_iter().find(|float| float.torch_name() == name)
    }

    /// The name PyTorch and config.json use: `float32`, `float16`, `bfloat16`.
    pub const fn torch_name(self) -> &'static str {
        match self {
            Float::F32 => "float32",
            Float::F16 => "float16",
            Float::Bf16 => "bfloat16",
        }
    }
}

/// Sums behind one SNR: `signal` = sum w^2 and `noise` = sum (w - dequantized)^2, in f64.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    pub signal: f64,
    pub noise: f64,
}

impl ErrorSums {
    /// `10 log10(signal / noise)`; `None` where nothing was lost (the ratio is infinite or the tensor all zero).
    pub fn snr_db(self) -> Option<f64> {
        (self.noise > 0.0).then(|| 10.0 * (self.signal / self.noise).log10())
    }
}

impl std::ops::AddAssign for ErrorSums {
    fn add_assign(&mut self, other: Self) {
        self.signal += other.signal;
        self.noise += other.noise;
    }
}

/// What a kernel counted on its way; order does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Groups whose weights are all zero.
    pub zero: u64,
    /// Groups with a weight that is not zero whose stored scale is.
    pub underflowed: u64,
}

impl std::ops::AddAssign for GroupCounts {
    fn add_assign(&mut self, other: Self) {
        self.zero += other.zero;
        self.underflowed += other.underflowed;
    }
}

/// Why a kernel refused a tile. `element` counts from the tile's first weight in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The first NaN or infinite weight of the tile.
    NonFinite { element: usize },
    /// The group at `element` (its first weight) has a scale beyond the largest finite value it can be stored as.
    ScaleOverflow { element: usize },
}

impl Fault {
    /// The same fault, counted from `by` elements earlier.
    pub fn shifted(self, by: usize) -> Self {
        match self {
            Fault::NonFinite { element } => Fault::NonFinite { element: element + by },
            Fault::ScaleOverflow { element } => Fault::ScaleOverflow { element: element + by },
        }
    }
}
