//! The same bytes and the same report for every number of threads, instruction level and memory budget.

mod common;

use common::*;
use safetensors::Dtype;
use spark_quant::kernel::Level;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Weights that are cut into several tiles at the smallest budget, the last one with an uneven end; 55 MB.
const LARGE: Spark = Spark {
    dtype: Dtype::BF16,
    hidden: 1536,
    inter: 4352,
    layers: 1,
    heads: 12,
    kv_heads: 2,
    head_dim: 96,
    vocab: 5000,
};

/// Quantizes with each set of options and compares the whole output folders.
fn all_the_same(sandbox: &Sandbox, args: &[&str], options: &[Vec<String>]) {
    let mut first: Option<BTreeMap<PathBuf, String>> = None;
    for options in options {
        let mut all = args.to_vec();
        all.extend(options.iter().map(String::as_str));
        all.push("--overwrite");
        sandbox.quantize(&all);
        let found = tree(&sandbox.dst());
        match &first {
            None => first = Some(found),
            Some(first) => assert_eq!(*first, found, "{all:?}"),
        }
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        sandbox.verify(&options).expect(0);
    }
}

fn option(name: &str, value: impl ToString) -> Vec<String> {
    vec![name.to_string(), value.to_string()]
}

fn threads() -> Vec<Vec<String>> {
    [1, 2, 3, 8].map(|threads| option("--threads", threads)).to_vec()
}

fn levels() -> Vec<Vec<String>> {
    let levels = Level::available();
    assert!(levels.len() >= 2);
    levels.into_iter().map(|level| option("--level", level)).collect()
}

fn budgets() -> Vec<Vec<String>> {
    ["1B", "5MB", "1GB"]
        .map(|budget| [option("--budget", budget), option("--threads", 2)].concat())
        .to_vec()
}

#[test]
fn a_large_checkpoint() {
    let sandbox = Sandbox::with(|src| LARGE.write(src));
    let every = [threads(), levels(), budgets()].concat();
    all_the_same(&sandbox, &["--quantize-embedding", "--group", "96"], &every);
    let some = [
        option("--threads", 3),
        option("--budget", "1B"),
        option("--level", Level::Scalar),
    ];
    all_the_same(&sandbox, &["--asym", "--quantize-lm-head"], &some);
}

#[test]
fn small_checkpoints_of_every_dtype() {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        // Rows and groups that fill no vector: 8 * 13 rows, 24 columns a group.
        let odd = Spark {
            dtype,
            hidden: 72,
            inter: 24 * 9,
            heads: 1,
            head_dim: 104,
            vocab: 40,
            ..Spark::TINY
        };
        let sandbox = Sandbox::with(|src| odd.write_shards(src, 3));
        for args in [
            &["--group", "24", "--fused-qkv", "keep"][..],
            &["--group", "8", "--asym", "--quantize-lm-head"],
        ] {
            let args = [args, &["--max-shard-size", "30KB"]].concat();
            all_the_same(&sandbox, &args, &[threads(), levels(), budgets()].concat());
        }
    }
}
