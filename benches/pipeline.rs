//! The whole pipeline on a synthetic checkpoint: quantizing and verifying, in bytes of source per second, and next to
//! them a plain copy of the same files. Everything is in the page cache; what is written is flushed to disk, as always.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Sandbox, Spark};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use safetensors::Dtype;
use spark_quant::checkpoint::Checkpoint;
use spark_quant::plan::{plan, Request};
use spark_quant::pool::Watch;
use spark_quant::run::{quantize, Settings};
use spark_quant::scheme::QType;
use spark_quant::verify::{verify, Against};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// Two layers of the 1.7 billion weights model: 220 MB.
const CHECKPOINT: Spark = Spark {
    dtype: Dtype::BF16,
    hidden: 2048,
    inter: 6144,
    layers: 2,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    vocab: 4096,
};

struct Unwatched;

impl Watch for Unwatched {
    fn advance(&self, _bytes: u64) {}

    fn cancelled(&self) -> bool {
        false
    }
}

fn settings() -> Settings {
    let mut settings = Settings::new(std::thread::available_parallelism().map_or(1, usize::from));
    settings.overwrite = true;
    settings
}

fn run(src: &Path, dst: &Path, asym: bool) {
    let source = Checkpoint::open(src).unwrap();
    let mut request = Request::new(QType::Int4);
    request.asym = asym;
    let plan = plan(&request, &source).unwrap();
    quantize(&plan, &source, dst, &settings(), &Unwatched).unwrap();
}

/// Through user space and flushed, so that no file system can share blocks between the two.
fn copy(from: &Path, to: &Path) {
    let mut to = File::create(to).unwrap();
    let mut from = File::open(from).unwrap();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut from, &mut buffer).unwrap() {
            0 => break,
            read => std::io::Write::write_all(&mut to, &buffer[..read]).unwrap(),
        }
    }
    to.sync_all().unwrap();
}

fn pipeline(criterion: &mut Criterion) {
    let sandbox = Sandbox::with(|src| CHECKPOINT.write_shards(src, 2));
    let (src, dst) = (sandbox.src(), sandbox.dst());
    let shards: Vec<_> = [1, 2].map(|number| src.join(common::shard_name(number, 2))).to_vec();
    let bytes = shards.iter().map(|shard| shard.metadata().unwrap().len()).sum();
    let mut group = criterion.benchmark_group("pipeline");
    group.throughput(Throughput::Bytes(bytes));
    group.sample_size(10).measurement_time(Duration::from_secs(10));
    group.bench_function("copy", |bencher| {
        bencher.iter(|| shards.iter().for_each(|shard| copy(shard, &sandbox.path("copied"))));
    });
    for (name, asym) in [("int4 symmetric", false), ("int4 asymmetric", true)] {
        group.bench_function(name, |bencher| bencher.iter(|| run(&src, &dst, asym)));
    }
    group.bench_function("verify with source", |bencher| {
        bencher.iter(|| {
            let against = Against {
                src: Some(&src),
                min_snr: None,
            };
            let outcome = verify(&dst, against, &settings(), &Unwatched).unwrap();
            assert!(outcome.findings.is_empty());
        });
    });
    group.finish();
}

criterion_group!(benches, pipeline);
criterion_main!(benches);
