//! What a quantized checkpoint says of itself, wherever the tool that wrote it put that.

use crate::checkpoint::{Checkpoint, Config};
use crate::error::Result;
use crate::scheme::{recognise, Recognised};
use serde_json::{Map, Value};
use std::path::Path;

/// Key of `config.json`.
const KEY: &str = "quantization_config";

/// Files of their own, from before the key was common, and the method of a file that does not name it.
const FILES: &[(&str, &str)] = &[("quantize_config.json", "gptq"), ("quant_config.json", "awq")];

/// Suffixes that only packed weights have, of this tool's layouts and its neighbours'.
const PACKED_SUFFIXES: &[&str] = &[
    "qweight",
    "qzeros",
    "weight_packed",
    "uintx_packed",
    "weight_zero_point",
    "weight_g_idx",
    "weight_scale_inv",
];

/// Whether only a packed weight has a tensor of this name.
pub fn is_packed(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, suffix)| PACKED_SUFFIXES.contains(&suffix))
}

/// The `quantization_config` of a checkpoint: the key of its config.json, or else of AutoGPTQ's `quantize_config.json` or
/// AutoAWQ's `quant_config.json`. `None` where there is none of them.
///
/// # Errors
/// A file that cannot be read or is no JSON object.
pub fn stored_config(checkpoint: &Checkpoint) -> Result<Option<Map<String, Value>>> {
    let found = checkpoint.config.as_ref().and_then(|config| config.get(KEY));
    if let Some(Value::Object(config)) = found {
        return Ok(Some(config.clone()));
    }
    for (name, method) in FILES {
        if checkpoint
            .sidecars
            .iter()
            .any(|sidecar| sidecar.relative == Path::new(name))
        {
            let mut config = Config::read(&checkpoint.root.join(name))?.into_map();
            config.entry("quant_method").or_insert_with(|| (*method).into());
            return Ok(Some(config));
        }
    }
    Ok(None)
}

/// The scheme that `config` names for the tensors of `checkpoint`, or the reason it cannot be read.
pub fn stored_scheme(checkpoint: &Checkpoint, config: &Map<String, Value>) -> Result<Recognised, String> {
    let tensors = checkpoint.tensors.iter();
    recognise(config, tensors.map(|tensor| (tensor.name.as_str(), tensor.dtype)))
}
