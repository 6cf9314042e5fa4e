//! Request + headers -> [`Plan`], a pure value: which tensor becomes what, where every byte goes, and why the rest stays
//! as it is. Nothing here reads a weight or writes a file.
//!
//! | file | what it settles |
//! |---|---|
//! | `rules` | tables of module names: linears, fused sets, embeddings |
//! | `rules_uintx` | the same for uintN |
//! | `pattern` | `--include`, `--exclude` |
//! | `judge` | what becomes of each source tensor, and why |
//! | `quantize` | the plan of a quantizing run |
//! | `dequantize` | the plan of a dequantizing run |
//! | `stored` | the packed modules of a checkpoint |
//! | `metadata` | what the files of a packed checkpoint say of their modules |
//! | `adapter` | the modules that an adapter was trained on |
//! | `origin` | where an output tensor's values come from |
//! | `layout` | shards, offsets and headers of the output |
//! | `readers` | what named readers cannot load |
//! | `recognise` | the scheme that a checkpoint says it is in |

mod adapter;
mod dequantize;
mod judge;
mod layout;
mod metadata;
mod origin;
mod pattern;
mod quantize;
mod readers;
mod recognise;
mod rules;
mod rules_uintx;
mod stored;

pub use adapter::Adapter;
pub use dequantize::plan_dequantize;
pub use metadata::{module_metadata, ModuleMetadata};
pub use origin::{fused_set, origin, FusedSet, Origin};
pub use quantize::plan;
pub use recognise::{is_packed, stored_config, stored_scheme};
pub use rules::is_embedding;
pub use stored::{find_modules, PackedModule};

use crate::checkpoint::{Config, Sidecar, CONFIG_FILE};
use crate::scheme::{QType, Scheme, Shape};
use crate::tensor::{Dtype, Float};

/// What the command line asks of a quantizing run.
#[derive(Clone, Debug)]
pub struct Request {
    pub qtype: QType,
    /// `None`: the qtype's own.
    pub layout: Option<&'static str>,
    /// `None`: the qtype's default.
    pub group: Option<usize>,
    pub asym: bool,
    pub quantize_lm_head: bool,
    pub quantize_embedding: bool,
    /// `--fused-qkv keep`
    pub keep_fused: bool,
    pub include: Vec<String>,
    pub exclude: Vec<String>,
    /// `--ara`: only the modules that it names are quantized.
    pub adapter: Option<Adapter>,
    /// Bytes of one output file, header included.
    pub max_shard_size: u64,
}

impl Request {
    /// The defaults of the command line.
    pub fn new(qtype: QType) -> Self {
        Self {
            qtype,
            layout: None,
            group: None,
            asym: false,
            quantize_lm_head: false,
            quantize_embedding: false,
            keep_fused: false,
            include: Vec::new(),
            exclude: Vec::new(),
            adapter: None,
            max_shard_size: 5_000_000_000,
        }
    }
}

/// Bytes of a source file: an offset from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRange {
    pub file: usize,
    pub offset: u64,
    pub len: u64,
}

/// A tensor of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub shard: usize,
    /// From the beginning of the shard's file.
    pub offset: u64,
    pub len: u64,
}

impl OutputTensor {
    /// Not placed yet.
    fn new(name: String, dtype: Dtype, shape: Vec<usize>, len: u64) -> Self {
        Self {
            name,
            dtype,
            shape,
            shard: 0,
            offset: 0,
            len,
        }
    }
}

/// An output file: its header (length prefix and padding included) and its length in all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputFile {
    pub name: String,
    pub header: Vec<u8>,
    pub len: u64,
}

/// A module that is quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// `model.layers.0.self_attn.q_proj`
    pub name: String,
    /// As the report names it: the reference's `...weight`, or `lm_head`.
    pub report_name: String,
    /// The source's tensor, which for a part of a fused projection has more rows.
    pub tensor: String,
    /// First row of the module in that tensor.
    pub first_row: usize,
    pub shape: Shape,
    pub source: SourceRange,
}

/// A tensor, or some rows of one, that passes through byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dense {
    /// In the output.
    pub name: String,
    pub reason: String,
    /// What it is put together from, in order.
    pub parts: Vec<SourceRange>,
}

/// A packed module that is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// `model.layers.0.self_attn.q_proj`
    pub name: String,
    pub shape: Shape,
    /// Its stored tensors, in the order of [`Scheme::outputs`].
    pub stored: Vec<SourceRange>,
}

/// Packed modules whose rows follow each other in one dense weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decode {
    pub dtype: Float,
    pub parts: Vec<Packed>,
}

/// What is done with some bytes of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    Encode(Module),
    Copy(Dense),
    Decode(Decode),
}

/// One piece of the plan, in the source's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub work: Work,
    /// Its tensors in [`Plan::tensors`]; for a module in the order of [`Scheme::outputs`].
    pub outputs: std::ops::Range<usize>,
}

/// All that a run does, before it does any of it.
pub struct Plan {
    pub scheme: Box<dyn Scheme>,
    pub group: usize,
    pub items: Vec<Item>,
    pub tensors: Vec<OutputTensor>,
    pub files: Vec<OutputFile>,
    /// The output's index, where there is more than one file: its name and contents.
    pub index: Option<(String, Vec<u8>)>,
    /// `None`: no config.json is written.
    pub config: Option<Config>,
    pub sidecars: Vec<Sidecar>,
    pub quantized_embedding: bool,
    pub quantized_lm_head: bool,
    /// For stderr.
    pub warnings: Vec<String>,
    pub source_bytes: u64,
    /// Elements of all float tensors of the source, and how many of them are quantized.
    pub weights: u64,
    pub weights_quantized: u64,
}

impl Work {
    /// Bytes that are read for it.
    pub fn bytes_in(&self) -> u64 {
        match self {
            Work::Encode(module) => module.source.len,
            Work::Copy(dense) => dense.parts.iter().map(|part| part.len).sum(),
            Work::Decode(decode) => decode
                .parts
                .iter()
                .flat_map(|part| &part.stored)
                .map(|range| range.len)
                .sum(),
        }
    }
}

impl Plan {
    pub fn modules(&self) -> impl Iterator<Item = &Module> {
        self.items.iter().filter_map(|item| match &item.work {
            Work::Encode(module) => Some(module),
            _ => None,
        })
    }

    pub fn dense(&self) -> impl Iterator<Item = &Dense> {
        self.items.iter().filter_map(|item| match &item.work {
            Work::Copy(dense) => Some(dense),
            _ => None,
        })
    }

    /// Bytes of all files that the run writes but the report, whose length depends on figures not known yet.
    pub fn output_bytes(&self) -> u64 {
        let weights: u64 = self.files.iter().map(|file| file.len).sum();
        let sidecars: u64 = self.sidecars.iter().map(|sidecar| sidecar.len).sum();
        let index = self.index.as_ref().map_or(0, |(_, bytes)| bytes.len() as u64);
        let config = self.config.as_ref().map_or(0, |config| config.to_bytes().len() as u64);
        weights + sidecars + index + config
    }

    /// At least the bytes that the output takes on a disk: whole blocks, and a guess at the report.
    pub fn disk_bytes(&self) -> u64 {
        const BLOCK: u64 = 4096;
        let weights = self.files.iter().map(|file| file.len);
        let sidecars = self.sidecars.iter().map(|sidecar| sidecar.len);
        let index = self.index.iter().map(|(_, bytes)| bytes.len() as u64);
        let config = self.config.iter().map(|config| config.to_bytes().len() as u64);
        let report = (64 << 10) + 512 * self.tensors.len() as u64;
        let all = weights.chain(sidecars).chain(index).chain(config).chain([report]);
        all.map(|len| len.div_ceil(BLOCK).saturating_mul(BLOCK))
            .fold(0, u64::saturating_add)
    }

    /// Every file that the run writes, sorted, below the destination. A name that is not UTF-8 is shown as far as it is.
    pub fn written(&self, report: &str) -> Vec<String> {
        let weights = self.files.iter().map(|file| file.name.clone());
        let sidecars = self
            .sidecars
            .iter()
            .map(|sidecar| sidecar.relative.to_string_lossy().into_owned());
        let index = self.index.iter().map(|(name, _)| name.clone());
        let config = self.config.iter().map(|_| CONFIG_FILE.to_string());
        let all = weights.chain(sidecars).chain(index).chain(config);
        let mut all: Vec<String> = all.chain([report.to_string()]).collect();
        all.sort();
        all
    }

    /// Bytes of the safetensors files alone.
    pub fn weight_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len).sum()
    }

    /// Share of all weights that are quantized.
    pub fn coverage(&self) -> f64 {
        self.weights_quantized as f64 / (self.weights as f64).max(1.0)
    }
}
