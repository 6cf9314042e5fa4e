//! The `gptq` layout: `qweight` I32 [K/8, N], `qzeros` I32 [G, N/8], `scales` F16 [G, N], `g_idx` I32 [K].
//!
//! Two conventions for `qzeros`: in "gptq" (v1) a nibble holds the zero point less 1, in "gptq_v2" the zero point itself.
//! Symmetric weights (zero point 8, nibble 7) are written as "gptq", asymmetric ones as "gptq_v2".

use super::int4::{Layout, RowCodes, RowCodesMut, Rows};
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
}

impl Gptq {
    pub fn written(symmetric: bool) -> Self {
        Gptq {
            symmetric,
            direct_zeros: !symmetric,
        }
    }
}

impl Layout for Gptq {
    const NAME: &'static str = "gptq";
    const SUFFIXES: &'static [&'static str] = &["qweight", "qzeros", "scales", "g_idx"];

    fn symmetric(&self) -> bool {
        self.symmetric
    }

    fn outputs(&self, shape: &Shape) -> Vec<OutputSpec> {
        let (n, k, g) = (shape.rows, shape.columns, shape.groups());
        vec![
            OutputSpec::new("qweight", Dtype::I32, vec![k / 8, n]),
            OutputSpec::new("qzeros", Dtype::I32, vec![g, n / 8]),
            OutputSpec::new("scales", Dtype::F16, vec![g, n]),
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
            codes.zeros.iter_mut().for_each(|zero| *zero += 1);
        }
    }

    fn config(&self, group: usize, context: &ConfigContext) -> Map<String, Value> {
        let config = json!({
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": false,
            "sym": self.symmetric,
            "true_sequential": true,
            "checkpoint_format": if self.direct_zeros { "gptq_v2" } else { "gptq" },
            "lm_head": context.lm_head,
        });
        let Value::Object(config) = config else {
            unreachable!("json! of braces is an object")
        };
        config
    }

    fn dense_size(&self, outputs: &[Option<(Dtype, &[usize])>], _group: usize) -> Result<(usize, usize), StoredFault> {
        match outputs[QWEIGHT] {
            Some((Dtype::I32, &[words, n])) => Ok((n, words * 8)),
            Some((dtype, shape)) => Err(StoredFault {
                suffix: "qweight",
                what: format!("is {dtype:?} {shape:?}, where the layout has I32 [in_features / 8, out_features]"),
            }),
            None => Err(StoredFault {
                suffix: "qweight",
                what: "is missing".into(),
            }),
        }
    }
}
