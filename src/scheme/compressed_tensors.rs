//! The `compressed-tensors` layout, format "pack-quantized": `weight_packed` I32 [N, K/8], 8 codes along K, lowest nibble
//! first; `weight_scale` F16 [N, G]; `weight_shape` I64 [2] = N, K; asymmetric also `weight_zero_point` I32 [N/8, G], 8 rows
//! to a word. Codes and zero points are stored unsigned: the package's signed values plus 8.

use super::int4::{object, packed_shape, Int4, Layout, RowCodes, RowCodesMut, Rows};
use super::registry::{check_int4_group, read_group, require_4_bits};
use super::*;
use crate::kernel::layout::{pack_rows_along, unpack_rows_along};
use serde_json::{json, Map};

const FORMAT: &str = "pack-quantized";

const PACKED: usize = 0;
const SCALE: usize = 1;
const SHAPE: usize = 2;
const ZERO_POINT: usize = 3;

/// The zero point of signed codes, stored plus 8.
const SYMMETRIC_ZERO: u8 = 8;

pub(super) struct CompressedTensors {
    pub symmetric: bool,
    pub scales: Float,
}

/// The scheme that a request names.
///
/// # Errors
/// [`Error::BadGroup`].
pub(super) fn select(request: &Request) -> Result<Box<dyn Scheme>, Error> {
    check_int4_group(request.group)?;
    Ok(Box::new(Int4(CompressedTensors {
        symmetric: !request.asym,
        scales: Float::F16,
    })))
}

/// Reads what this tool and the compressed-tensors package (LLM Compressor) write: one group of int4 weights.
///
/// # Errors
/// What cannot be read, in words.
pub(super) fn recognise(config: &Map<String, Value>, scales: Float) -> Result<Recognised, String> {
    let groups = config.get("config_groups").and_then(Value::as_object);
    let groups = groups.ok_or("config_groups is missing")?;
    let mut all = groups.values();
    let (Some(group), None) = (all.next(), all.next()) else {
        return Err(format!("config_groups has {} groups, and one is read", groups.len()));
    };
    let format = [group.get("format"), config.get("format")];
    let format = format.into_iter().flatten().find(|format| !format.is_null());
    if format.is_none_or(|format| format != FORMAT) {
        let format = format.unwrap_or(&Value::Null);
        return Err(format!("format is {format}, and \"{FORMAT}\" is read"));
    }
    let weights = group.get("weights").and_then(Value::as_object);
    let weights = weights.ok_or("config_groups has no weights")?;
    require_4_bits(weights, &["num_bits"])?;
    if weights.get("type").is_some_and(|kind| kind != "int") {
        return Err(format!("weights of type {} are not read, \"int\" is", weights["type"]));
    }
    match weights.get("actorder").unwrap_or(&Value::Null) {
        Value::Null | Value::Bool(false) => {}
        // Ordered while it was quantized, stored in place.
        Value::String(order) if order == "weight" || order == "static" => {}
        order => return Err(format!("actorder is {order}, and this tool reads groups in order only")),
    }
    let symmetric = weights.get("symmetric").and_then(Value::as_bool).unwrap_or(true);
    let group = match weights.get("strategy").and_then(Value::as_str) {
        Some("channel") => WHOLE_ROW,
        Some("group") => read_group(weights, &["group_size"])?,
        other => return Err(format!("strategy is {other:?}, and \"group\" and \"channel\" are read")),
    };
    Ok(Recognised {
        scheme: Box::new(Int4(CompressedTensors { symmetric, scales })),
        group,
    })
}

impl Layout for CompressedTensors {
    const NAME: &'static str = "compressed-tensors";
    const PACK_ROWS: usize = 16;

    fn suffixes(&self) -> &'static [&'static str] {
        let all = &["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"];
        if self.symmetric {
            &all[..ZERO_POINT]
        } else {
            all
        }
    }

    fn symmetric(&self) -> bool {
        self.symmetric
    }

    fn scale_dtype(&self) -> Float {
        self.scales
    }

    fn vllm(&self) -> Vllm {
        Vllm::Target
    }

    fn fresh_head_in_transformers(&self) -> bool {
        false
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        let mut outputs = vec![
            OutputSpec::new("weight_packed", Dtype::I32, vec![n, k / 8]),
            OutputSpec::new("weight_scale", self.scales.dtype(), vec![n, g]),
            OutputSpec::new("weight_shape", Dtype::I64, vec![2]),
        ];
        if !self.symmetric {
            outputs.push(OutputSpec::new("weight_zero_point", Dtype::I32, vec![n / 8, g]));
        }
        outputs
    }

    fn refuse(&self, shape: &Shape) -> Option<String> {
        (!self.symmetric && !shape.rows.is_multiple_of(8)).then(|| {
            format!(
                "out_features {} is not divisible by 8, which packed zero points need",
                shape.rows
            )
        })
    }

    fn pieces(&self, shape: &Shape, rows: &Range<usize>) -> Vec<Piece> {
        let (k, g) = (shape.columns, shape.groups());
        let (first, count) = (rows.start, rows.len());
        let mut pieces = vec![
            Piece::run(PACKED, 0, (first * k / 2) as u64, count * k / 2),
            Piece::run(SCALE, 0, (first * g * 2) as u64, count * g * 2),
        ];
        if first == 0 {
            pieces.push(Piece::run(SHAPE, 0, 0, 16));
        }
        if !self.symmetric {
            pieces.push(Piece::run(ZERO_POINT, 0, (first * g / 2) as u64, count * g / 2));
        }
        pieces
    }

    fn constants(&self, shape: &Shape, outputs: &mut [Buffer]) {
        outputs[SHAPE]
            .of_mut::<i64>()
            .copy_from_slice(&[shape.rows as i64, shape.columns as i64]);
    }

    fn check_constants(&self, shape: &Shape, outputs: &[Buffer]) -> Option<StoredFault> {
        let stored = outputs[SHAPE].of::<i64>();
        let packed = [shape.rows as i64, shape.columns as i64];
        (stored != packed).then(|| StoredFault {
            suffix: "weight_shape",
            what: format!("says {stored:?}, weight_packed holds {packed:?}"),
        })
    }

    fn pack(&self, _level: Level, at: &Rows, codes: RowCodes, outputs: &mut [Buffer]) {
        let (first, count, groups) = (at.first(), at.count(), at.shape.groups());
        let words = at.shape.columns / 8;
        outputs[PACKED].of_mut::<u32>()[first * words..][..codes.words.len()].copy_from_slice(codes.words);
        outputs[SCALE].of_mut::<u16>()[first * groups..][..codes.scales.len()].copy_from_slice(codes.scales);
        if !self.symmetric {
            let zeros = &mut outputs[ZERO_POINT].of_mut::<u32>()[first / 8 * groups..];
            pack_rows_along(codes.zeros, count, groups, zeros);
        }
    }

    fn unpack(&self, _level: Level, at: &Rows, outputs: &[Buffer], codes: RowCodesMut) {
        let (first, count, groups) = (at.first(), at.count(), at.shape.groups());
        let words = at.shape.columns / 8;
        codes
            .words
            .copy_from_slice(&outputs[PACKED].of::<u32>()[first * words..][..count * words]);
        codes
            .scales
            .copy_from_slice(&outputs[SCALE].of::<u16>()[first * groups..][..count * groups]);
        if self.symmetric {
            codes.zeros.fill(SYMMETRIC_ZERO);
        } else {
            let zeros = &outputs[ZERO_POINT].of::<u32>()[first / 8 * groups..];
            unpack_rows_along(zeros, count, groups, codes.zeros);
        }
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Map<String, Value> {
        // vLLM's head is no "Linear" by its class, so it is named; and to transformers a tied head is one, so it is
        // ignored even where the file has none.
        let mut targets = vec!["Linear"];
        let mut ignore: Vec<&str> = context.dense_linears.iter().map(String::as_str).collect();
        if context.lm_head {
            targets.push("lm_head");
        } else if !ignore.contains(&"lm_head") {
            ignore.push("lm_head");
        }
        object(json!({
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": targets,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": self.symmetric,
                        "strategy": "group",
                        "group_size": group,
                        "dynamic": false,
                        "observer": "minmax",
                    },
                    "input_activations": null,
                    "output_activations": null,
                },
            },
            "ignore": ignore,
            "kv_cache_scheme": null,
        }))
    }

    fn dense_size(&self, outputs: &[Option<(Dtype, &[usize])>]) -> Result<(usize, usize), StoredFault> {
        let [n, words] = packed_shape(outputs[PACKED], "weight_packed", "[out_features, in_features / 8]")?;
        Ok((n, words * 8))
    }
}
