//! The `awq` layout (AutoAWQ's "gemm"): `qweight` I32 [K, N/8] and `qzeros` I32 [G, N/8], 8 codes along N in AWQ's nibble
//! order; `scales` F16 [G, N]. Asymmetric only: a reader always subtracts the stored zero points.

use super::int4::{object, packed_shape, Int4, Layout, RowCodes, RowCodesMut, Rows};
use super::registry::{check_int4_group, read_group, require_4_bits};
use super::*;
use crate::kernel::layout::{
    awq_pack, awq_unpack, pack_rows, transpose_u16, unpack_rows, untranspose_u16, NibbleOrder,
};
use serde_json::{json, Map};

const QWEIGHT: usize = 0;
const QZEROS: usize = 1;
const SCALES: usize = 2;

pub(super) struct Awq {
    pub scales: Float,
}

/// The scheme that a request names; asymmetric whether it says so or not.
///
/// # Errors
/// [`Error::BadGroup`].
pub(super) fn select(request: &Request) -> Result<Box<dyn Scheme>, Error> {
    check_int4_group(request.group)?;
    Ok(Box::new(Int4(Awq { scales: Float::F16 })))
}

/// Reads what this tool and AutoAWQ write.
///
/// # Errors
/// What cannot be read, in words.
pub(super) fn recognise(config: &Map<String, Value>, scales: Float) -> Result<Recognised, String> {
    require_4_bits(config, &["bits", "w_bit"])?;
    let group = read_group(config, &["group_size", "q_group_size"])?;
    let version = config.get("version").and_then(Value::as_str).unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(format!(
            "version {version:?} packs otherwise than \"gemm\", which this tool reads"
        ));
    }
    if config.get("zero_point") != Some(&Value::Bool(true)) {
        return Err("zero_point is not true, and awq has no symmetric grid: its readers subtract zero points".into());
    }
    Ok(Recognised {
        scheme: Box::new(Int4(Awq { scales })),
        group,
    })
}

impl Layout for Awq {
    const NAME: &'static str = "awq";
    const PACK_ROWS: usize = 128;

    /// A row's share of a run is an eighth of gptq's.
    const TILE_SHARE: usize = 4;

    fn suffixes(&self) -> &'static [&'static str] {
        &["qweight", "qzeros", "scales"]
    }

    fn symmetric(&self) -> bool {
        false
    }

    fn scale_dtype(&self) -> Float {
        self.scales
    }

    fn vllm(&self) -> Vllm {
        Vllm::Target
    }

    fn fresh_head_in_transformers(&self) -> bool {
        true
    }

    /// vLLM takes a module for dense if any name of `modules_to_not_convert` is a part of its name.
    fn hides(&self, dense: &str, quantized: &str) -> bool {
        quantized.contains(dense)
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        vec![
            OutputSpec::new("qweight", Dtype::I32, vec![k, n / 8]),
            OutputSpec::new("qzeros", Dtype::I32, vec![g, n / 8]),
            OutputSpec::new("scales", self.scales.dtype(), vec![g, n]),
        ]
    }

    fn refuse(&self, shape: &Shape) -> Option<String> {
        (!shape.rows.is_multiple_of(8)).then(|| {
            format!(
                "out_features {} is not divisible by 8, the codes of a packed word",
                shape.rows
            )
        })
    }

    fn pieces(&self, shape: &Shape, rows: &Range<usize>) -> Vec<Piece> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        let (first, count) = (rows.start, rows.len());
        let nibbles = |output, lines| Piece::strided(output, (first / 2) as u64, count / 2, lines, (n / 2) as u64);
        vec![
            nibbles(QWEIGHT, k),
            nibbles(QZEROS, g),
            Piece::strided(SCALES, 2 * first as u64, 2 * count, g, 2 * n as u64),
        ]
    }

    fn constants(&self, _shape: &Shape, _outputs: &mut [Buffer]) {}

    fn check_constants(&self, _shape: &Shape, _outputs: &[Buffer]) -> Option<StoredFault> {
        None
    }

    fn pack(&self, level: Level, at: &Rows, codes: RowCodes, outputs: &mut [Buffer]) {
        let (stride, first, count) = (at.tile.len(), at.first(), at.count());
        let (k, groups) = (at.shape.columns, at.shape.groups());
        let qweight = &mut outputs[QWEIGHT].of_mut::<u32>()[first / 8..];
        awq_pack(level, codes.words, count, k, qweight, stride / 8);
        let qzeros = &mut outputs[QZEROS].of_mut::<u32>()[first / 8..];
        pack_rows(codes.zeros, count, groups, NibbleOrder::Awq, qzeros, stride / 8);
        let scales = &mut outputs[SCALES].of_mut::<u16>()[first..];
        transpose_u16(codes.scales, count, groups, scales, stride);
    }

    fn unpack(&self, level: Level, at: &Rows, outputs: &[Buffer], codes: RowCodesMut) {
        let (stride, first, count) = (at.tile.len(), at.first(), at.count());
        let (k, groups) = (at.shape.columns, at.shape.groups());
        let qweight = &outputs[QWEIGHT].of::<u32>()[first / 8..];
        awq_unpack(level, qweight, stride / 8, count, k, codes.words);
        let qzeros = &outputs[QZEROS].of::<u32>()[first / 8..];
        unpack_rows(qzeros, stride / 8, count, groups, NibbleOrder::Awq, codes.zeros);
        let scales = &outputs[SCALES].of::<u16>()[first..];
        untranspose_u16(scales, stride, count, groups, codes.scales);
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Map<String, Value> {
        // Readers take a list that is not empty as complete.
        let dense = match context.dense_linears {
            [] => Value::Null,
            names => json!(names),
        };
        let mut config = object(json!({
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": true,
            "version": "gemm",
            "modules_to_not_convert": dense,
        }));
        if context.lm_head {
            config.insert("lm_head".into(), true.into());
        }
        config
    }

    fn dense_size(&self, outputs: &[Option<(Dtype, &[usize])>]) -> Result<(usize, usize), StoredFault> {
        let [k, words] = packed_shape(outputs[QWEIGHT], "qweight", "[in_features, out_features / 8]")?;
        Ok((words * 8, k))
    }
}
