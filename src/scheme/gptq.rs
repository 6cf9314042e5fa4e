//! The `gptq` layout: `qweight` I32 [K/8, N], `qzeros` I32 [G, N/8], `scales` F16 [G, N], `g_idx` I32 [K].
//!
//! Two conventions for `qzeros`: "gptq_v2" holds the zero point itself; "gptq" (v1) holds the word of 8 zero points less
//! 0x11111111, so that a zero point of 0 borrows from the nibble above it, and readers add the same word back.
//! Symmetric weights (zero point 8, nibble 7) are written as "gptq", asymmetric ones as "gptq_v2".

use super::int4::{object, packed_shape, Int4, Layout, RowCodes, RowCodesMut, Rows};
use super::registry::{any_of, check_int4_group, read_group, require_4_bits};
use super::*;
use crate::kernel::layout::{
    pack_rows, transpose, transpose_u16, unpack_rows, untranspose, untranspose_u16, NibbleOrder,
};
use serde_json::{json, Map};

const QWEIGHT: usize = 0;
const QZEROS: usize = 1;
const SCALES: usize = 2;
const G_IDX: usize = 3;

/// Every nibble 7: zero point 8 in the v1 convention.
const SYMMETRIC_ZEROS: u32 = 0x7777_7777;

pub(super) struct Gptq {
    pub symmetric: bool,
    /// Whether `qzeros` holds the zero point itself ("gptq_v2").
    pub direct_zeros: bool,
    pub scales: Float,
}

/// The scheme that a request names.
///
/// # Errors
/// [`Error::BadGroup`].
pub(super) fn select(request: &Request) -> Result<Box<dyn Scheme>, Error> {
    check_int4_group(request.group)?;
    let symmetric = !request.asym;
    Ok(Box::new(Int4(Gptq {
        symmetric,
        direct_zeros: !symmetric,
        scales: Float::F16,
    })))
}

/// Reads what this tool, GPTQModel and AutoGPTQ write.
///
/// # Errors
/// What cannot be read, in words.
pub(super) fn recognise(config: &Map<String, Value>, scales: Float) -> Result<Recognised, String> {
    require_4_bits(config, &["bits"])?;
    let group = read_group(config, &["group_size"])?;
    let symmetric = config.get("sym").and_then(Value::as_bool).ok_or("sym is missing")?;
    if config.get("desc_act").and_then(Value::as_bool).unwrap_or(false) {
        return Err("desc_act is true, and this tool reads groups in order only".into());
    }
    let dynamic = config.get("dynamic").and_then(Value::as_object);
    if let Some(rule) = dynamic.and_then(|rules| rules.keys().find(|rule| !rule.starts_with("-:"))) {
        return Err(format!("dynamic gives the modules {rule:?} settings of their own"));
    }
    let format = any_of(config, &["checkpoint_format", "format"]).filter(|format| !format.is_null());
    let direct_zeros = match format.map(|format| format.as_str().unwrap_or_default()) {
        None | Some("gptq") => false,
        Some("gptq_v2") => true,
        Some(other) => {
            return Err(format!(
                "checkpoint_format {other:?} is neither \"gptq\" nor \"gptq_v2\""
            ))
        }
    };
    let layout = Gptq {
        symmetric,
        direct_zeros,
        scales,
    };
    Ok(Recognised {
        scheme: Box::new(Int4(layout)),
        group,
    })
}

impl Layout for Gptq {
    const NAME: &'static str = "gptq";
    const PACK_ROWS: usize = 64;

    fn suffixes(&self) -> &'static [&'static str] {
        &["qweight", "qzeros", "scales", "g_idx"]
    }

    fn symmetric(&self) -> bool {
        self.symmetric
    }

    fn scale_dtype(&self) -> Float {
        self.scales
    }

    fn vllm(&self) -> Vllm {
        if self.symmetric {
            Vllm::OneOfMany
        } else {
            Vllm::Refuses("asymmetric gptq; --layout awq, or --layout compressed-tensors --asym, load there")
        }
    }

    fn fresh_head_in_transformers(&self) -> bool {
        true
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        vec![
            OutputSpec::new("qweight", Dtype::I32, vec![k / 8, n]),
            OutputSpec::new("qzeros", Dtype::I32, vec![g, n / 8]),
            OutputSpec::new("scales", self.scales.dtype(), vec![g, n]),
            OutputSpec::new("g_idx", Dtype::I32, vec![k]),
        ]
    }

    fn refuse(&self, shape: &Shape) -> Option<String> {
        (!shape.rows.is_multiple_of(8)).then(|| {
            format!(
                "out_features {} is not divisible by 8, which packed zero points need",
                shape.rows
            )
        })
    }

    fn pieces(&self, shape: &Shape, rows: &Range<usize>) -> Vec<Piece> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        let (first, count) = (rows.start, rows.len());
        let mut pieces = vec![
            Piece::strided(QWEIGHT, 4 * first as u64, 4 * count, k / 8, 4 * n as u64),
            Piece::strided(QZEROS, (first / 2) as u64, count / 2, g, (n / 2) as u64),
            Piece::strided(SCALES, 2 * first as u64, 2 * count, g, 2 * n as u64),
        ];
        if first == 0 {
            pieces.push(Piece::run(G_IDX, 0, 0, 4 * k));
        }
        pieces
    }

    fn constants(&self, shape: &Shape, outputs: &mut [Buffer]) {
        for (k, index) in outputs[G_IDX].of_mut::<u32>().iter_mut().enumerate() {
            *index = (k / shape.group) as u32;
        }
    }

    fn check_constants(&self, shape: &Shape, outputs: &[Buffer]) -> Option<StoredFault> {
        let g_idx = outputs[G_IDX].of::<i32>();
        let k = (0..g_idx.len()).find(|&k| g_idx[k] != (k / shape.group) as i32)?;
        let what = format!(
            "says group {} for input {k}, where k / {} is {}",
            g_idx[k],
            shape.group,
            k / shape.group
        );
        Some(StoredFault { suffix: "g_idx", what })
    }

    fn pack(&self, level: Level, at: &Rows, codes: RowCodes, outputs: &mut [Buffer]) {
        let (stride, first, count) = (at.tile.len(), at.first(), at.count());
        let (words, groups) = (at.shape.columns / 8, at.shape.groups());
        transpose(
            level,
            codes.words,
            count,
            words,
            &mut outputs[QWEIGHT].of_mut::<u32>()[first..],
            stride,
        );
        transpose_u16(
            codes.scales,
            count,
            groups,
            &mut outputs[SCALES].of_mut::<u16>()[first..],
            stride,
        );
        let qzeros = &mut outputs[QZEROS].of_mut::<u32>()[first / 8..];
        if self.symmetric {
            for group in qzeros.chunks_mut(stride / 8) {
                let count = group.len().min(count / 8);
                group[..count].fill(SYMMETRIC_ZEROS);
            }
        } else {
            pack_rows(codes.zeros, count, groups, NibbleOrder::Sequential, qzeros, stride / 8);
        }
    }

    fn unpack(&self, level: Level, at: &Rows, outputs: &[Buffer], codes: RowCodesMut) {
        let (stride, first, count) = (at.tile.len(), at.first(), at.count());
        let (words, groups) = (at.shape.columns / 8, at.shape.groups());
        untranspose(
            level,
            &outputs[QWEIGHT].of::<u32>()[first..],
            stride,
            count,
            words,
            codes.words,
        );
        untranspose_u16(
            &outputs[SCALES].of::<u16>()[first..],
            stride,
            count,
            groups,
            codes.scales,
        );
        let qzeros = &outputs[QZEROS].of::<u32>()[first / 8..];
        unpack_rows(qzeros, stride / 8, count, groups, NibbleOrder::Sequential, codes.zeros);
        if !self.direct_zeros {
            add_one_to_words(codes.zeros, groups);
        }
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Map<String, Value> {
        let mut config = object(json!({
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": false,
            "sym": self.symmetric,
            "true_sequential": true,
            "checkpoint_format": if self.direct_zeros { "gptq_v2" } else { "gptq" },
            "lm_head": context.lm_head,
        }));
        if context.partly_dense {
            tell_partly_dense(&mut config, context);
        }
        config
    }

    fn dense_size(&self, outputs: &[Option<(Dtype, &[usize])>]) -> Result<(usize, usize), StoredFault> {
        let [words, n] = packed_shape(outputs[QWEIGHT], "qweight", "[in_features / 8, out_features]")?;
        Ok((n, words * 8))
    }
}

/// Adds 0x11111111 to the words behind zero points `[rows, G]`, 8 rows of a group each, with the carries between nibbles.
fn add_one_to_words(zeros: &mut [u8], groups: usize) {
    for block in zeros.chunks_exact_mut(8 * groups) {
        for group in 0..groups {
            let mut carry = 0;
            for row in 0..8 {
                let zero = &mut block[row * groups + group];
                let sum = *zero + 1 + carry;
                (*zero, carry) = (sum & 15, sum >> 4);
            }
        }
    }
}

/// GPTQModel packs every linear of the models it knows unless `dynamic` excludes it; transformers, and vLLM where the key
/// is there, pack what the list names (a list of lists: transformers concatenates them). Names are anchored: vLLM
/// matches the patterns against its own fused names too.
fn tell_partly_dense(config: &mut Map<String, Value>, context: &ConfigContext) {
    let dense = context.dense_linears.iter().filter(|name| *name != "lm_head");
    let dynamic: Map<String, Value> = dense
        .map(|name| (format!("-:^{}$", name.replace('.', r"\.")), json!({})))
        .collect();
    config.insert("dynamic".into(), dynamic.into());
    config.insert("modules_in_block_to_quantize".into(), json!([context.quantized]));
    let quantizer = concat!("spark-quant:", env!("CARGO_PKG_VERSION"));
    config.insert("meta".into(), json!({ "quantizer": [quantizer] }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_zero_points_come_back_from_a_word_that_borrowed() {
        // Two groups; in the first, zero points of 0 beside others.
        let zero_points: [[u8; 2]; 8] = [[0, 8], [0, 8], [3, 8], [15, 8], [0, 8], [1, 8], [15, 8], [0, 8]];
        let word = |group: usize| (0..8).fold(0, |word, row| word | u32::from(zero_points[row][group]) << (4 * row));
        let stored = [0, 1].map(|group| word(group).wrapping_sub(0x1111_1111));
        let mut zeros: Vec<u8> = (0..16).map(|i| (stored[i % 2] >> (4 * (i / 2)) & 15) as u8).collect();
        add_one_to_words(&mut zeros, 2);
        assert_eq!(zeros, zero_points.as_flattened());
    }
}
