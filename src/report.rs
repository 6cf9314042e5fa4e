//! `quantization_report.json`: what was quantized, how well, and a hash of every stored tensor.
//!
//! The keys of the PyTorch reference come first, as it writes them; the tool's own follow.

use crate::checkpoint::{open_regular, TOOL_MARK};
use crate::error::{Error, Result};
use crate::tensor::ErrorSums;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// The value of [`Report::tool`], and what `--overwrite` looks for.
pub fn tool_version() -> String {
    format!("{TOOL_MARK}{}", env!("CARGO_PKG_VERSION"))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub group: usize,
    /// Number of quantized weights.
    pub tensors: usize,
    /// Mean of the finite entries of `per_tensor`, in dB; null where none is finite.
    #[serde(deserialize_with = "required")]
    pub snr_db_mean: Option<f64>,
    #[serde(deserialize_with = "required")]
    pub snr_db_min: Option<f64>,
    pub bits_per_weight: f64,
    pub quantized_embedding: bool,
    pub quantized_lm_head: bool,
    pub per_tensor: Vec<TensorReport>,
    pub tool: String,
    pub qtype: String,
    pub layout: String,
    pub symmetric: bool,
    pub zero_groups: u64,
    pub underflowed_groups: u64,
    /// Share of all weights (elements of float tensors) that were quantized.
    pub coverage: f64,
    pub quantization_config: Map<String, Value>,
    pub dense: Vec<DenseReport>,
    /// Every file of the output, this one too, sorted: `--overwrite` removes no other. None in reports of old versions.
    #[serde(default)]
    pub files: Vec<String>,
    /// XXH3-128 of each stored tensor's bytes, as 32 hex digits.
    pub xxh3_128: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    pub name: String,
    /// Of the stored values against the source, rounded to 0.01 dB; null where nothing was lost.
    #[serde(deserialize_with = "required")]
    pub snr_db: Option<f64>,
    /// The source's tensor, and the first of its rows: a part of a fused projection begins further down.
    pub source: String,
    pub first_row: usize,
    /// Of the dense weight, as PyTorch names it.
    pub dtype: String,
    /// `[out_features, in_features]`
    pub shape: [usize; 2],
    pub group: usize,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub zero_groups: u64,
    pub underflowed_groups: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DenseReport {
    pub name: String,
    pub reason: String,
}

/// A value or null; a key that is not there is an error, where serde would take it for null.
fn required<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(from)
}

/// Rounds as the reference's `round(snr, 2)`: to the nearest hundredth of the exact value.
pub fn round_db(db: f64) -> f64 {
    format!("{db:.2}").parse().unwrap_or(db)
}

/// The rounded SNR of folded sums.
pub fn snr_db(sums: ErrorSums) -> Option<f64> {
    sums.snr_db().map(round_db)
}

/// Mean and minimum of the finite values, rounded.
pub fn summarise(values: impl Iterator<Item = Option<f64>>) -> (Option<f64>, Option<f64>) {
    let finite: Vec<f64> = values.flatten().collect();
    if finite.is_empty() {
        return (None, None);
    }
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    (Some(round_db(mean)), finite.iter().copied().reduce(f64::min))
}

/// `dequantization_report.json`: what was decoded. Without hashes: dense weights are there to be used, and reading back
/// what is written in parts would cost a third of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DenseSummary {
    pub tool: String,
    pub qtype: String,
    pub layout: String,
    pub group: usize,
    /// Names of the weights that were decoded.
    pub decoded: Vec<String>,
    /// As [`Report::files`].
    pub files: Vec<String>,
    pub bytes: u64,
}

impl Report {
    /// The report at `path`; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`]; [`Error::BadJson`] where it is not a report of this tool.
    pub fn read(path: &Path) -> Result<Option<Report>> {
        let mut file = match open_regular(path) {
            Ok((file, _)) => file,
            Err(error) if error.is_absence() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(Error::io(path, "reading"))?;
        let bad = |error: serde_json::Error| Error::BadJson {
            path: path.to_path_buf(),
            why: error.to_string(),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(bad)
    }
}

/// Indented JSON with a final newline.
pub fn to_bytes(report: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(report).expect("a report holds no value that JSON cannot");
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snr_is_rounded_and_null_where_nothing_is_lost() {
        assert_eq!(
            snr_db(ErrorSums {
                signal: 1000.0,
                noise: 1.0
            }),
            Some(30.0)
        );
        assert_eq!(
            snr_db(ErrorSums {
                signal: 123.456,
                noise: 1.0
            }),
            Some(20.92)
        );
        assert_eq!(
            snr_db(ErrorSums {
                signal: 5.0,
                noise: 0.0
            }),
            None
        );
        assert_eq!(snr_db(ErrorSums::default()), None);
        assert_eq!(
            summarise([Some(10.0), None, Some(20.005)].into_iter()),
            (Some(15.0), Some(10.0))
        );
        assert_eq!(summarise([None].into_iter()), (None, None));
    }
}
