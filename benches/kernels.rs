//! Kernels by level and dtype, in bytes of dense weights per second. The tile fits in the second-level cache, so that
//! this is arithmetic and not memory.

use std::hint::black_box;

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use half::{bf16, f16};
use spark_quant::kernel::{int4, layout, shards, uintx, Level};
use spark_quant::tensor::{ErrorSums, Float};

const ROWS: usize = 128;
const K: usize = 2048;
const GROUP: usize = 128;
/// Columns of the matrix that strips go to.
const STRIDE: usize = 2048;

/// `[ROWS, K]` weights, near enough to normal.
fn weights(dtype: Float) -> Vec<u8> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let mut bytes = Vec::new();
    for _ in 0..ROWS * K {
        let w = 0.02 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0);
        match dtype {
            Float::F32 => bytes.extend(w.to_le_bytes()),
            Float::F16 => bytes.extend(f16::from_f32(w).to_le_bytes()),
            Float::Bf16 => bytes.extend(bf16::from_f32(w).to_le_bytes()),
        }
    }
    bytes
}

struct Outputs {
    words: Vec<u32>,
    scales: Vec<u16>,
    zeros: Vec<u8>,
    sums: Vec<ErrorSums>,
}

impl Outputs {
    fn new() -> Self {
        Outputs {
            words: vec![0; ROWS * K / 8],
            scales: vec![0; ROWS * K / GROUP],
            zeros: vec![0; ROWS * K / GROUP],
            sums: vec![ErrorSums::default(); ROWS],
        }
    }

    fn encode(&mut self, level: Level, dtype: Float, src: &[u8], asym: bool) {
        let Outputs {
            words,
            scales,
            zeros,
            sums,
        } = self;
        int4::encode(
            level,
            dtype,
            src,
            K,
            GROUP,
            asym,
            int4::Tile {
                words,
                scales,
                zeros,
                sums,
            },
        )
        .expect("finite");
    }
}

fn arithmetic(c: &mut Criterion) {
    for dtype in Float::ALL {
        let src = weights(dtype);
        let mut group = c.benchmark_group(format!("int4/{}", dtype.torch_name()));
        group.throughput(Throughput::Bytes(src.len() as u64));
        let mut out = Outputs::new();
        for level in Level::available() {
            for (name, asym) in [("encode sym", false), ("encode asym", true)] {
                group.bench_function(BenchmarkId::new(name, level), |b| {
                    b.iter(|| out.encode(level, dtype, black_box(&src), asym));
                });
            }
            group.bench_function(BenchmarkId::new("measure", level), |b| {
                let Outputs {
                    words,
                    scales,
                    zeros,
                    sums,
                } = &mut out;
                b.iter(|| int4::measure(level, dtype, black_box(&src), K, GROUP, words, scales, zeros, sums));
            });
            let mut dst = vec![0; src.len()];
            group.bench_function(BenchmarkId::new("decode", level), |b| {
                let Outputs {
                    words, scales, zeros, ..
                } = &out;
                b.iter(|| int4::decode(level, black_box(words), scales, zeros, K, GROUP, dtype, &mut dst));
            });
        }
        group.finish();
    }
}

/// 3-bit codes, and one of their shards.
fn uintx_arithmetic(c: &mut Criterion) {
    for dtype in Float::ALL {
        let src = weights(dtype);
        let mut bench = c.benchmark_group(format!("uintx/{}", dtype.torch_name()));
        bench.throughput(Throughput::Bytes(src.len() as u64));
        let (mut codes, mut zeros) = (vec![0; ROWS * K], vec![0; ROWS * K / 64]);
        let mut scales = vec![0; zeros.len() * dtype.size()];
        for level in Level::available() {
            bench.bench_function(BenchmarkId::new("encode", level), |b| {
                b.iter(|| {
                    let (codes, scales, zeros) = (&mut codes[..], &mut scales[..], &mut zeros[..]);
                    let tile = uintx::Tile { codes, scales, zeros };
                    uintx::encode(level, dtype, 3, 64, black_box(&src), tile)
                });
            });
            let (mut packed, starts) = (
                vec![0; ROWS * K / 8],
                [0, 1, 2, 3, 4, 5, 6, 7].map(|j| j * ROWS * K / 8),
            );
            let shard = shards::shards(3)[1];
            bench.bench_function(BenchmarkId::new("pack 1 bit", level), |b| {
                b.iter(|| shards::pack(level, shard, black_box(&codes), &starts, &mut packed));
            });
            let mut dst = vec![0; src.len()];
            bench.bench_function(BenchmarkId::new("decode", level), |b| {
                let (codes, scales, zeros) = (&codes[..], &scales[..], &zeros[..]);
                let stored = uintx::Stored { codes, scales, zeros };
                b.iter(|| uintx::decode(level, dtype, 64, black_box(stored), dtype, &mut dst));
            });
        }
        bench.finish();
    }
}

/// Throughput in bytes of the bf16 weights that the codes stand for, to be compared with the above.
fn layouts(c: &mut Criterion) {
    let words: Vec<u32> = (0..(ROWS * K / 8) as u32)
        .map(|i| i.wrapping_mul(2_654_435_761))
        .collect();
    let mut strip = vec![0; K / 8 * STRIDE];
    let mut awq = vec![0; K * STRIDE / 8];
    let mut back = words.clone();
    let mut group = c.benchmark_group("layout");
    group.throughput(Throughput::Bytes((ROWS * K * 2) as u64));
    for level in Level::available() {
        group.bench_function(BenchmarkId::new("transpose", level), |b| {
            b.iter(|| layout::transpose(level, black_box(&words), ROWS, K / 8, &mut strip, STRIDE));
        });
        group.bench_function(BenchmarkId::new("untranspose", level), |b| {
            b.iter(|| layout::untranspose(level, black_box(&strip), STRIDE, ROWS, K / 8, &mut back));
        });
        group.bench_function(BenchmarkId::new("awq_pack", level), |b| {
            b.iter(|| layout::awq_pack(level, black_box(&words), ROWS, K, &mut awq, STRIDE / 8));
        });
        group.bench_function(BenchmarkId::new("awq_unpack", level), |b| {
            b.iter(|| layout::awq_unpack(level, black_box(&awq), STRIDE / 8, ROWS, K, &mut back));
        });
    }
    group.finish();
}

criterion_group!(benches, arithmetic, uintx_arithmetic, layouts);
criterion_main!(benches);
