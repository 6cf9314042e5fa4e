//! The int4 layouts by their specifications, written apart from the tool: packed modules to codes, scales and zero points
//! and back, one element at a time.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use super::common::Tensor;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;

/// Which of 8 neighbours along N an AWQ nibble holds.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// What every layout stores of one weight `[n, k]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    pub n: usize,
    pub k: usize,
    pub group: usize,
    /// `[n, k]`
    pub codes: Vec<u8>,
    /// `[n, k / group]`
    pub zeros: Vec<u8>,
    pub scales: Vec<f32>,
}

fn words(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.dtype, Dtype::I32, "{}", tensor.name);
    let words = tensor.bytes.chunks_exact(4);
    words.map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn halves(tensor: &Tensor) -> Vec<f32> {
    let bits = tensor
        .bytes
        .chunks_exact(2)
        .map(|two| u16::from_le_bytes([two[0], two[1]]));
    match tensor.dtype {
        Dtype::F16 => bits.map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Dtype::BF16 => bits.map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        other => panic!("{}: {other}", tensor.name),
    }
}

fn nibble(word: u32, at: usize) -> u8 {
    (word >> (4 * at) & 15) as u8
}

fn join(nibbles: [u8; 8]) -> u32 {
    (0..8).fold(0, |word, at| word | u32::from(nibbles[at]) << (4 * at))
}

impl Packed {
    pub fn groups(&self) -> usize {
        self.k / self.group
    }

    /// Every code and zero point, and scales that float16 and bfloat16 both hold.
    pub fn example(n: usize, k: usize, group: usize) -> Self {
        let mix = |at: usize, salt: usize| ((at + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 16;
        let groups = n * k / group;
        Self {
            n,
            k,
            group,
            codes: (0..n * k).map(|at| mix(at, 0) as u8).collect(),
            zeros: (0..groups).map(|at| mix(at, 7) as u8).collect(),
            scales: (0..groups).map(|at| (16 + mix(at, 3)) as f32 / 1024.0).collect(),
        }
    }

    /// `(code - zero point) * scale`, `[n, k]`.
    pub fn dense(&self) -> Vec<f32> {
        let group_of = |at: usize| at / self.k * self.groups() + at % self.k / self.group;
        let value =
            |at: usize| (f32::from(self.codes[at]) - f32::from(self.zeros[group_of(at)])) * self.scales[group_of(at)];
        (0..self.n * self.k).map(value).collect()
    }

    /// The module `name` of a checkpoint with this `quantization_config`.
    pub fn read(tensors: &BTreeMap<String, Tensor>, config: &Value, name: &str) -> Self {
        let get = |suffix: &str| &tensors[&format!("{name}.{suffix}")];
        match config["quant_method"].as_str().unwrap() {
            "gptq" => {
                let (qweight, qzeros) = (words(get("qweight")), words(get("qzeros")));
                let (n, k) = (get("qweight").shape[1], get("qweight").shape[0] * 8);
                let plus = if config["checkpoint_format"] == "gptq" {
                    0x1111_1111
                } else {
                    0
                };
                Self::gather(
                    n,
                    k,
                    &halves(get("scales")),
                    true,
                    |row, column| nibble(qweight[column / 8 * n + row], column % 8),
                    |row, group| nibble(qzeros[group * (n / 8) + row / 8].wrapping_add(plus), row % 8),
                )
            }
            "awq" => {
                let (qweight, qzeros) = (words(get("qweight")), words(get("qzeros")));
                let (n, k) = (get("qweight").shape[1] * 8, get("qweight").shape[0]);
                let place = |row: usize| AWQ_ORDER.iter().position(|&offset| offset == row % 8).unwrap();
                let at = |words: &[u32], line: usize, row: usize| nibble(words[line * (n / 8) + row / 8], place(row));
                Self::gather(
                    n,
                    k,
                    &halves(get("scales")),
                    true,
                    |row, column| at(&qweight, column, row),
                    |row, group| at(&qzeros, group, row),
                )
            }
            "compressed-tensors" => {
                let shape = get("weight_shape").bytes.chunks_exact(8);
                let shape: Vec<usize> = shape
                    .map(|n| i64::from_le_bytes(n.try_into().unwrap()) as usize)
                    .collect();
                let (n, k, packed) = (shape[0], shape[1], words(get("weight_packed")));
                let groups = get("weight_scale").shape[1];
                let zeros = tensors.get(&format!("{name}.weight_zero_point")).map(words);
                Self::gather(
                    n,
                    k,
                    &halves(get("weight_scale")),
                    false,
                    |row, column| nibble(packed[row * (k / 8) + column / 8], column % 8),
                    |row, group| {
                        zeros
                            .as_ref()
                            .map_or(8, |zeros| nibble(zeros[row / 8 * groups + group], row % 8))
                    },
                )
            }
            other => panic!("{other}"),
        }
    }

    /// `across`: scales are `[groups, n]`, not `[n, groups]`.
    fn gather(
        n: usize,
        k: usize,
        scales: &[f32],
        across: bool,
        code: impl Fn(usize, usize) -> u8,
        zero: impl Fn(usize, usize) -> u8,
    ) -> Self {
        let groups = scales.len() / n;
        let scale = |row, group| {
            if across {
                scales[group * n + row]
            } else {
                scales[row * groups + group]
            }
        };
        let cells = |columns: usize| (0..n * columns).map(move |at| (at / columns, at % columns));
        Self {
            n,
            k,
            group: k / groups,
            codes: cells(k).map(|(row, column)| code(row, column)).collect(),
            zeros: cells(groups).map(|(row, group)| zero(row, group)).collect(),
            scales: cells(groups).map(|(row, group)| scale(row, group)).collect(),
        }
    }

    fn code(&self, row: usize, column: usize) -> u8 {
        self.codes[row * self.k + column]
    }

    fn zero(&self, row: usize, group: usize) -> u8 {
        self.zeros[row * self.groups() + group]
    }

    fn tensor(name: &str, suffix: &str, shape: [usize; 2], word: impl Fn(usize, usize) -> u32) -> Tensor {
        let cells = (0..shape[0] * shape[1]).map(|at| word(at / shape[1], at % shape[1]));
        Tensor::bytes(
            &format!("{name}.{suffix}"),
            Dtype::I32,
            &shape,
            cells.flat_map(u32::to_le_bytes).collect(),
        )
    }

    fn scales_across(&self, name: &str, dtype: Dtype) -> Tensor {
        let (n, groups) = (self.n, self.groups());
        let values = (0..groups * n).map(|at| self.scales[at % n * groups + at / n]);
        Tensor::floats(&format!("{name}.scales"), dtype, &[groups, n], values)
    }

    /// `less`: what is subtracted from each word of zero points, 0x11111111 in "gptq", 0 in "gptq_v2".
    pub fn gptq(&self, name: &str, scales: Dtype, less: u32) -> Vec<Tensor> {
        let (n, k, groups) = (self.n, self.k, self.groups());
        let g_idx = (0..k)
            .flat_map(|column| ((column / self.group) as u32).to_le_bytes())
            .collect();
        vec![
            Self::tensor(name, "qweight", [k / 8, n], |line, row| {
                join([0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.code(row, 8 * line + i)))
            }),
            Self::tensor(name, "qzeros", [groups, n / 8], |group, block| {
                join([0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.zero(8 * block + i, group))).wrapping_sub(less)
            }),
            self.scales_across(name, scales),
            Tensor::bytes(&format!("{name}.g_idx"), Dtype::I32, &[k], g_idx),
        ]
    }

    pub fn awq(&self, name: &str, scales: Dtype) -> Vec<Tensor> {
        let (n, k, groups) = (self.n, self.k, self.groups());
        vec![
            Self::tensor(name, "qweight", [k, n / 8], |column, block| {
                join(AWQ_ORDER.map(|i| self.code(8 * block + i, column)))
            }),
            Self::tensor(name, "qzeros", [groups, n / 8], |group, block| {
                join(AWQ_ORDER.map(|i| self.zero(8 * block + i, group)))
            }),
            self.scales_across(name, scales),
        ]
    }

    pub fn compressed_tensors(&self, name: &str, scales: Dtype, zero_points: bool) -> Vec<Tensor> {
        let (n, k, groups) = (self.n, self.k, self.groups());
        let shape = [n, k]
            .into_iter()
            .flat_map(|size| (size as i64).to_le_bytes())
            .collect();
        let values = self.scales.iter().copied();
        let mut tensors = vec![
            Self::tensor(name, "weight_packed", [n, k / 8], |row, line| {
                join([0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.code(row, 8 * line + i)))
            }),
            Tensor::floats(&format!("{name}.weight_scale"), scales, &[n, groups], values),
            Tensor::bytes(&format!("{name}.weight_shape"), Dtype::I64, &[2], shape),
        ];
        if zero_points {
            tensors.push(Self::tensor(
                name,
                "weight_zero_point",
                [n / 8, groups],
                |block, group| join([0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.zero(8 * block + i, group))),
            ));
        }
        tensors
    }
}
