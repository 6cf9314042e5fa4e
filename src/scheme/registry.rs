//! Which scheme a request or a config names. A new scheme is one file beside this one and a row here.

use super::gptq::Gptq;
use super::int4::Int4;
use super::Scheme;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
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
    pub group: usize,
}

/// `None`: not this layout's config; `Err`: this layout's, but not one that can be read, and why.
type Recognition = Option<Result<Recognised, String>>;

struct Row {
    name: &'static str,
    select: fn(&Request) -> Result<Box<dyn Scheme>>,
    recognise: fn(&Map<String, Value>) -> Recognition,
}

const ROWS: &[Row] = &[Row {
    name: "gptq",
    select: select_gptq,
    recognise: recognise_gptq,
}];

/// Names for `--layout`.
pub const ALL_LAYOUTS: &[&str] = &["gptq"];

/// The scheme that a request names.
///
/// # Errors
/// [`Error::BadGroup`] or [`Error::BadRequest`] where the settings do not go together.
pub fn select(request: &Request) -> Result<Box<dyn Scheme>> {
    let name = request.layout.unwrap_or("gptq");
    let row = ROWS.iter().find(|row| row.name == name);
    row.map_or_else(
        || Err(Error::BadRequest(format!("--layout {name} is not known"))),
        |row| (row.select)(request),
    )
}

/// The scheme that wrote a checkpoint with this `quantization_config`, or the reason it cannot be read.
pub fn recognise(config: &Map<String, Value>) -> Result<Recognised, String> {
    ROWS.iter().find_map(|row| (row.recognise)(config)).unwrap_or_else(|| {
        let method = config.get("quant_method").map_or("none".to_string(), Value::to_string);
        Err(format!("quant_method {method} is not one that this tool reads"))
    })
}

/// Packed words hold eight codes along K.
fn check_int4_group(group: usize) -> Result<()> {
    if group == 0 || !group.is_multiple_of(8) {
        return Err(Error::BadGroup {
            group,
            why: "int4 packs 8 codes in a word, so the group is a multiple of 8",
        });
    }
    Ok(())
}

fn select_gptq(request: &Request) -> Result<Box<dyn Scheme>> {
    check_int4_group(request.group)?;
    Ok(Box::new(Int4(Gptq::written(!request.asym))))
}

fn recognise_gptq(config: &Map<String, Value>) -> Recognition {
    if config.get("quant_method")?.as_str()? != "gptq" {
        return None;
    }
    Some(read_gptq(config))
}

fn read_gptq(config: &Map<String, Value>) -> Result<Recognised, String> {
    require_bits(config)?;
    let group = read_group(config)?;
    let symmetric = config.get("sym").and_then(Value::as_bool).ok_or("sym is missing")?;
    if config.get("desc_act").and_then(Value::as_bool).unwrap_or(false) {
        return Err("desc_act is true, and this tool reads groups in order only".into());
    }
    let direct_zeros = match config
        .get("checkpoint_format")
        .and_then(Value::as_str)
        .unwrap_or("gptq")
    {
        "gptq" => false,
        "gptq_v2" => true,
        other => {
            return Err(format!(
                "checkpoint_format {other:?} is neither \"gptq\" nor \"gptq_v2\""
            ))
        }
    };
    Ok(Recognised {
        scheme: Box::new(Int4(Gptq {
            symmetric,
            direct_zeros,
        })),
        group,
    })
}

fn require_bits(config: &Map<String, Value>) -> Result<(), String> {
    match config.get("bits").and_then(Value::as_u64) {
        Some(4) => Ok(()),
        other => Err(format!("bits is {other:?}, and this layout is read with 4")),
    }
}

fn read_group(config: &Map<String, Value>) -> Result<usize, String> {
    let group = config
        .get("group_size")
        .and_then(Value::as_u64)
        .ok_or("group_size is missing")? as usize;
    check_int4_group(group).map_err(|error| error.to_string())?;
    Ok(group)
}
