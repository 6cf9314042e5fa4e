//! Which scheme a request or a config names. A new scheme is one file beside this one and a row here.

use super::{awq, compressed_tensors, gptq, uintx, Scheme, WHOLE_ROW};
use crate::error::{Error, Result};
use crate::tensor::{Dtype, Float};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fmt;

/// What a weight becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QType {
    Int4,
    /// Bits: 2 to 7.
    Uint(u8),
}

impl QType {
    pub fn bits(self) -> u8 {
        match self {
            QType::Int4 => 4,
            QType::Uint(bits) => bits,
        }
    }

    /// The group where none is asked for.
    pub fn default_group(self) -> usize {
        match self {
            QType::Int4 => 128,
            QType::Uint(_) => 64,
        }
    }
}

impl fmt::Display for QType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QType::Int4 => f.write_str("int4"),
            QType::Uint(bits) => write!(f, "uint{bits}"),
        }
    }
}

/// What the command line asks of the registry.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub qtype: QType,
    /// `None`: the qtype's own (`gptq` for int4).
    pub layout: Option<&'static str>,
    pub asym: bool,
    pub group: usize,
}

/// The scheme and group that a checkpoint's `quantization_config` names.
pub struct Recognised {
    pub scheme: Box<dyn Scheme>,
    /// [`WHOLE_ROW`] where each row is one group.
    pub group: usize,
}

struct Row {
    name: &'static str,
    select: fn(&Request) -> Result<Box<dyn Scheme>>,
    /// Its `quant_method` in a config.
    method: &'static str,
    /// Given the dtype of the stored scales; `Err`: this layout's config, but not one that can be read, and why.
    recognise: fn(&Map<String, Value>, Float) -> Result<Recognised, String>,
}

const ROWS: &[Row] = &[
    Row {
        name: "gptq",
        select: gptq::select,
        method: "gptq",
        recognise: gptq::recognise,
    },
    Row {
        name: "awq",
        select: awq::select,
        method: "awq",
        recognise: awq::recognise,
    },
    Row {
        name: "compressed-tensors",
        select: compressed_tensors::select,
        method: "compressed-tensors",
        recognise: compressed_tensors::recognise,
    },
    Row {
        name: uintx::NAME,
        select: uintx::select,
        method: uintx::NAME,
        recognise: uintx::recognise,
    },
];

/// Names for `--layout`: int4's.
pub const ALL_LAYOUTS: &[&str] = &["gptq", "awq", "compressed-tensors"];

/// The scheme that a request names.
///
/// # Errors
/// [`Error::BadGroup`] or [`Error::BadRequest`] where the settings do not go together.
pub fn select(request: &Request) -> Result<Box<dyn Scheme>> {
    let name = match request.qtype {
        QType::Int4 => request.layout.unwrap_or("gptq"),
        QType::Uint(_) => uintx::NAME,
    };
    let row = ROWS.iter().find(|row| row.name == name);
    row.map_or_else(
        || Err(Error::BadRequest(format!("--layout {name} is not known"))),
        |row| (row.select)(request),
    )
}

/// The scheme that wrote a checkpoint with this `quantization_config` and these tensors (names and dtypes), or the reason
/// it cannot be read.
pub fn recognise<'a>(
    config: &Map<String, Value>,
    tensors: impl IntoIterator<Item = (&'a str, Dtype)>,
) -> Result<Recognised, String> {
    let method = config.get("quant_method").unwrap_or(&Value::Null);
    let row = ROWS.iter().find(|row| method == row.method);
    let row = row.ok_or_else(|| format!("quant_method {method} is not one that this tool reads"))?;
    (row.recognise)(config, scale_dtype(tensors))
}

/// The dtype of the stored scales, which no config tells: that of the first packed module. One for all: a module with
/// another is then a fault of its shape.
fn scale_dtype<'a>(tensors: impl IntoIterator<Item = (&'a str, Dtype)>) -> Float {
    let parts = |(name, dtype): (&'a str, Dtype)| name.rsplit_once('.').map(|(module, suffix)| (module, suffix, dtype));
    let parts: Vec<_> = tensors.into_iter().filter_map(parts).collect();
    let named = |suffixes: [&'static str; 2]| parts.iter().filter(move |(_, suffix, _)| suffixes.contains(suffix));
    // Other tensors may be called `scales`: only those beside packed codes count.
    let packed: HashSet<&str> = named(["qweight", "weight_packed"])
        .map(|(module, ..)| *module)
        .collect();
    let scales = named(["scales", "weight_scale"]).find(|(module, ..)| packed.contains(module));
    match scales {
        Some((.., Dtype::BF16)) => Float::Bf16,
        _ => Float::F16,
    }
}

/// Packed words hold eight codes along K.
pub(super) fn check_int4_group(group: usize) -> Result<()> {
    if group == 0 || !group.is_multiple_of(8) {
        return Err(Error::BadGroup {
            group,
            why: "int4 packs 8 codes in a word, so the group is a multiple of 8",
        });
    }
    Ok(())
}

/// The value of the first of `keys` that is there: tools have renamed some.
pub(super) fn any_of<'a>(config: &'a Map<String, Value>, keys: &[&str]) -> Option<&'a Value> {
    keys.iter().find_map(|key| config.get(*key))
}

/// # Errors
/// Where the config is of another width than 4 bits, in words.
pub(super) fn require_4_bits(config: &Map<String, Value>, keys: &[&str]) -> Result<(), String> {
    match any_of(config, keys) {
        Some(bits) if bits.as_u64() == Some(4) => Ok(()),
        Some(bits) => Err(format!("{} is {bits}, and this layout is read with 4", keys[0])),
        None => Err(format!("{} is missing", keys[0])),
    }
}

/// The group; -1 is [`WHOLE_ROW`].
///
/// # Errors
/// Where it is missing or cannot be, in words.
pub(super) fn read_group(config: &Map<String, Value>, keys: &[&str]) -> Result<usize, String> {
    let value = any_of(config, keys).ok_or_else(|| format!("{} is missing", keys[0]))?;
    if value.as_i64() == Some(-1) {
        return Ok(WHOLE_ROW);
    }
    let group = value.as_u64().and_then(|group| usize::try_from(group).ok());
    let group = group.ok_or_else(|| format!("{} is {value}, not a count", keys[0]))?;
    check_int4_group(group).map_err(|error| error.to_string())?;
    Ok(group)
}
