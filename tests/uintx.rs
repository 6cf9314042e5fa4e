//! uint2 .. uint7 from the command line.
//!
//! `tests/data/uintx/DTYPE.safetensors` holds nine families of weights, `FAMILY.weight`, and for each width what torchao
//! 0.10.0 makes of them on a CPU: `FAMILY.uintN.uintx_packed`, `.uintx_scale`, `.uintx_zero_point`, `.dequantized`.

mod common;

use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const SUFFIXES: [&str; 3] = ["uintx_packed", "uintx_scale", "uintx_zero_point"];
const DTYPES: [(&str, &str); 3] = [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")];

/// A sandbox whose source is the file `src/some_model.safetensors`.
struct OneFile(Sandbox);

impl OneFile {
    fn new(tensors: &[Tensor]) -> Self {
        let sandbox = Sandbox::with(|_| {});
        write_tensors(&sandbox.src().join("some_model.safetensors"), tensors);
        let file = OneFile(sandbox);
        edit_header(&file.src(), |header| {
            header.insert("__metadata__".into(), json!({ "author": "kept" }));
        });
        file
    }

    fn src(&self) -> std::path::PathBuf {
        self.0.src().join("some_model.safetensors")
    }

    fn run(&self, dst: &Path, args: &[&str]) -> Outcome {
        run_at(&self.src(), dst, args)
    }
}

fn run_at(src: &Path, dst: &Path, args: &[&str]) -> Outcome {
    let paths = ["--src".as_ref(), src.as_os_str(), "--dst".as_ref(), dst.as_os_str()];
    run(paths.into_iter().chain(args.iter().map(AsRef::as_ref)))
}

fn tensors_in(folder: &Path) -> BTreeMap<String, Tensor> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let tensors = weights.flat_map(|path| read_tensors(&path));
    tensors.map(|tensor| (tensor.name.clone(), tensor)).collect()
}

fn modules_in(folder: &Path) -> Vec<String> {
    let tensors = tensors_in(folder);
    let packed = tensors.keys().filter_map(|name| name.strip_suffix(".uintx_packed"));
    packed.map(str::to_string).collect()
}

/// `__metadata__` of a file.
fn metadata(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header["__metadata__"].clone()
}

fn quantization(metadata: &Value) -> Value {
    serde_json::from_str(metadata["aitk_quantization"].as_str().unwrap()).unwrap()
}

#[test]
fn golden_buffers_and_dense_weights_are_equal_in_every_bit() {
    for (dtype, torch_name) in DTYPES {
        let golden = read_tensors(&data().join(format!("uintx/{dtype}.safetensors")));
        let golden: BTreeMap<&str, &Tensor> = golden.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let weights: Vec<Tensor> = golden
            .values()
            .filter(|tensor| tensor.name.ends_with(".weight"))
            .map(|tensor| Tensor::clone(tensor))
            .collect();
        assert_eq!(weights.len(), 9);
        let source = OneFile::new(&weights);
        for bits in 2..=7 {
            let qtype = format!("uint{bits}");
            let (dst, dense) = (source.0.path(&qtype), source.0.path(&format!("{qtype}-dense")));
            source.run(&dst, &["--qtype", &qtype]).expect(0);
            let output = tensors_in(&dst);
            assert_eq!(output.len(), 27);
            let mut entries = serde_json::Map::new();
            for weight in &weights {
                let family = weight.name.strip_suffix(".weight").unwrap();
                for suffix in SUFFIXES {
                    let (is, want) = (
                        &output[&format!("{family}.{suffix}")],
                        golden[&*format!("{family}.{qtype}.{suffix}")],
                    );
                    assert_eq!(
                        (is.dtype, &is.shape),
                        (want.dtype, &want.shape),
                        "{dtype} {}",
                        want.name
                    );
                    assert!(is.bytes == want.bytes, "{dtype} {}", want.name);
                }
                let entry = json!({ "qtype": qtype, "dtype": torch_name, "buffers": SUFFIXES, "attrs": {} });
                entries.insert(family.to_string(), entry);
            }
            let found = metadata(&dst.join("some_model.safetensors"));
            assert_eq!(
                quantization(&found),
                json!({ "modules": entries, "layers_only": false })
            );
            assert_eq!(found["author"], "kept");
            assert_eq!(found.get("format"), None);
            let config = read_json(&dst.join("config.json"));
            assert_eq!(config.as_object().unwrap().len(), 1);
            let config = &config["quantization_config"];
            assert_eq!(
                (&config["quant_method"], &config["bits"]),
                (&json!("uintx"), &json!(bits))
            );
            assert_eq!(config["group_size"], 64);

            source.run(&dst, &["--verify"]).expect(0);
            run_at(&dst, &dense, &["--dequantize"]).expect(0);
            for (name, tensor) in tensors_in(&dense) {
                let family = name.strip_suffix(".weight").unwrap();
                let want = golden[&*format!("{family}.{qtype}.dequantized")];
                assert_eq!(
                    (tensor.dtype, &tensor.shape),
                    (want.dtype, &want.shape),
                    "{dtype} {}",
                    want.name
                );
                assert!(tensor.bytes == want.bytes, "{dtype} {}", want.name);
            }
            assert!(!dense.join("config.json").exists());
        }
    }
}

/// Codes of a tensor, unpacked one by one as the format's description has it.
fn unpack(packed: &[u8], bits: usize, elements: usize) -> Vec<u8> {
    let mut codes = vec![0; elements];
    let (mut offset, mut low) = (0, 0);
    for k in [4, 2, 1].into_iter().filter(|k| bits & k != 0) {
        let bytes = (elements * k).div_ceil(8);
        for (i, code) in codes.iter_mut().enumerate() {
            let byte = packed[offset + i % bytes];
            *code |= (byte >> (k * (i / bytes)) & ((1 << k) - 1)) << low;
        }
        offset += bytes;
        low += k;
    }
    assert_eq!(packed.len(), offset);
    codes
}

/// The same weights with one group to a row, which has the same codes wherever it lies.
#[test]
fn shapes_at_the_joints_are_packed_as_described() {
    // (rows, columns, group): sizes that are not multiples of 8, 4 or 2, one row, groups that segments cut.
    let shapes: [(usize, usize, usize); 13] = [
        (1, 64, 64),
        (1, 1, 1),
        (3, 5, 5),
        (3, 5, 1),
        (7, 9, 3),
        (5, 7, 7),
        (9, 64, 64),
        (31, 66, 22),
        (2, 6, 3),
        (13, 192, 96),
        (17, 40, 8),
        (33, 1000, 250),
        (1, 100_003, 100_003),
    ];
    let tensors: Vec<Tensor> = shapes
        .iter()
        .enumerate()
        .map(|(i, &(n, k, _))| Tensor::random(&format!("m{i}.weight"), Dtype::BF16, &[n, k]))
        .collect();
    for (i, &(n, k, group)) in shapes.iter().enumerate() {
        let source = OneFile::new(&tensors[i..=i]);
        // Each group as a row of its own, padded to a group that needs no care.
        let padded = group.next_multiple_of(64);
        let rows = tensors[i].bytes.chunks(2 * group);
        let bytes: Vec<u8> = rows
            .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0, 2 * (padded - group))))
            .collect();
        let apart = OneFile::new(&[Tensor::bytes("m.weight", Dtype::BF16, &[n * k / group, padded], bytes)]);
        for bits in 2..=7 {
            let at = format!("[{n}, {k}] group {group} uint{bits}");
            let qtype = format!("uint{bits}");
            let (dst, other) = (source.0.path(&qtype), apart.0.path(&qtype));
            source
                .run(&dst, &["--qtype", &qtype, "--group", &group.to_string()])
                .expect(0);
            apart
                .run(&other, &["--qtype", &qtype, "--group", &padded.to_string()])
                .expect(0);
            let (is, want) = (tensors_in(&dst), tensors_in(&other));
            let name = format!("m{i}");
            for suffix in &SUFFIXES[1..] {
                assert_eq!(
                    is[&format!("{name}.{suffix}")].bytes,
                    want[&format!("m.{suffix}")].bytes,
                    "{at}"
                );
            }
            let codes = unpack(&is[&format!("{name}.uintx_packed")].bytes, bits, n * k);
            let all = unpack(&want["m.uintx_packed"].bytes, bits, n * k / group * padded);
            let expected: Vec<u8> = all.chunks(padded).flat_map(|row| row[..group].to_vec()).collect();
            assert!(codes == expected, "{at}");
            source.run(&dst, &["--verify"]).expect(0);

            let (dense, dense_apart) = (source.0.path("dense"), apart.0.path("dense"));
            run_at(&dst, &dense, &["--dequantize", "--overwrite"]).expect(0);
            run_at(&other, &dense_apart, &["--dequantize", "--overwrite"]).expect(0);
            let (is, want) = (tensors_in(&dense), tensors_in(&dense_apart));
            let rows = want["m.weight"].bytes.chunks(2 * padded);
            let expected: Vec<u8> = rows.flat_map(|row| row[..2 * group].to_vec()).collect();
            assert!(is[&format!("{name}.weight")].bytes == expected, "{at}");
        }
    }
}

#[test]
fn threads_levels_and_budgets_change_no_byte() {
    // Larger than a step, so that a small budget makes several tiles.
    let tensors = [
        Tensor::random("a.weight", Dtype::BF16, &[2600, 2048]),
        Tensor::random("b.weight", Dtype::F16, &[257, 1111 * 11]),
        Tensor::random("c.weight", Dtype::F32, &[300, 1111 * 11]),
    ];
    let source = OneFile::new(&tensors);
    for (bits, group, include) in [(3, 64, "a"), (5, 64, "a"), (7, 11, "?"), (2, 11, "[bc]"), (4, 11, "b")] {
        let (qtype, group) = (format!("uint{bits}"), group.to_string());
        let args = ["--qtype", &qtype, "--group", &group, "--include", include];
        let dst = source.0.path(&format!("{qtype}-1"));
        let first = source.run(&dst, &[&args[..], &["--threads", "1"]].concat());
        if include == "?" {
            // 2048 is not a multiple of 11: the other two are quantized.
            assert_eq!(modules_in(&dst), ["b", "c"]);
        }
        first.expect(0);
        let want = tree(&dst);
        for (name, more) in [
            ("2", &["--threads", "2", "--budget", "1B"][..]),
            ("3", &["--threads", "3", "--level", "portable"]),
            ("s", &["--level", "scalar", "--budget", "1B"]),
        ] {
            let dst = source.0.path(&format!("{qtype}-{name}"));
            source.run(&dst, &[&args[..], more].concat()).expect(0);
            assert_eq!(tree(&dst), want, "{qtype} {name}");
            source
                .run(&dst, &["--verify", "--budget", "1B", "--threads", "2"])
                .expect(0);
            let dense = source.0.path(&format!("{qtype}-{name}-dense"));
            let more = if name == "2" { more } else { &[][..] };
            run_at(&dst, &dense, &[&["--dequantize"], more].concat()).expect(0);
        }
        let dense = |name: &str| tensors_in(&source.0.path(&format!("{qtype}-{name}-dense")));
        assert!(dense("2") == dense("3"), "{qtype}");
    }
}

#[test]
fn verify_names_the_module_of_a_changed_bit() {
    let tensors = [
        Tensor::random("a.lin.weight", Dtype::BF16, &[16, 128]),
        Tensor::random("b.lin.weight", Dtype::BF16, &[16, 128]),
        Tensor::random("norm.weight", Dtype::BF16, &[128]),
    ];
    let source = OneFile::new(&tensors);
    let (good, bad) = (source.0.path("good"), source.0.path("bad"));
    source.run(&good, &["--qtype", "uint4"]).expect(0);
    let fault = |says: &[&str], edit: &dyn Fn(&Path)| {
        let _ = fs::remove_dir_all(&bad);
        copy_folder(&good, &bad);
        edit(&bad.join("some_model.safetensors"));
        source.run(&bad, &["--verify"]).expect(1).says(says);
    };
    let flip = |path: &Path, name: &str, at: usize, bit: u8| {
        let mut tensors = read_tensors(path);
        let tensor = tensors.iter_mut().find(|tensor| tensor.name == name).unwrap();
        tensor.bytes[at] ^= bit;
        let kept = metadata(path);
        write_tensors(path, &tensors);
        edit_header(path, |header| drop(header.insert("__metadata__".into(), kept)));
    };
    for suffix in SUFFIXES {
        let name = format!("b.lin.{suffix}");
        for (at, bit) in [(0, 1), (31, 0x10)] {
            fault(&[&name], &|path| flip(path, &name, at, bit));
        }
    }
    // Without its hash each is found by what it holds.
    let _ = fs::remove_dir_all(&bad);
    copy_folder(&good, &bad);
    fs::remove_file(bad.join(REPORT)).unwrap();
    flip(&bad.join("some_model.safetensors"), "b.lin.uintx_zero_point", 3, 0x80);
    flip(&bad.join("some_model.safetensors"), "a.lin.uintx_scale", 3, 0x80);
    source
        .run(&bad, &["--verify"])
        .expect(1)
        .says(&["b.lin.uintx_zero_point", "row 1, group 1", "a.lin.uintx_scale"]);

    let edit_metadata = |path: &Path, from: &str, to: &str| {
        edit_header(path, |header| {
            let text = header["__metadata__"]["aitk_quantization"]
                .as_str()
                .unwrap()
                .replacen(from, to, 1);
            header["__metadata__"]["aitk_quantization"] = text.into();
        });
    };
    fault(&["a.lin", "uint5"], &|path| edit_metadata(path, "uint4", "uint5"));
    fault(&["a.lin", "dtype float16"], &|path| {
        edit_metadata(path, "bfloat16", "float16")
    });
    fault(&["a.lin", "does not name it"], &|path| {
        edit_metadata(path, "a.lin", "c.lin")
    });
    fault(&["a.lin", "aitk_quantization"], &|path| {
        edit_header(path, |header| drop(header.remove("__metadata__")));
    });
}

#[test]
fn an_adapter_chooses_the_modules() {
    let tensors: Vec<Tensor> = ["blocks.0.to_q", "blocks.0.to_k", "proj_in", "odd"]
        .iter()
        .map(|name| {
            let columns = if *name == "odd" { 100 } else { 128 };
            Tensor::random(&format!("{name}.weight"), Dtype::BF16, &[8, columns])
        })
        .collect();
    let source = OneFile::new(&tensors);
    let adapter = source.0.path("adapter.safetensors");
    let write = |keys: &[&str]| {
        let tensors: Vec<Tensor> = keys
            .iter()
            .map(|key| Tensor::random(key, Dtype::F32, &[2, 2]))
            .collect();
        write_tensors(&adapter, &tensors);
    };
    let args = ["--qtype", "uint3", "--ara", adapter.to_str().unwrap()];
    for (i, key) in [
        "blocks.0.to_q.lora_A.weight",
        "transformer.blocks.0.to_q.lora_down.weight",
        "diffusion_model.blocks.0.to_q.lokr_w1",
        "lycoris_blocks.0.to_q.lokr_w1_a",
        "lycoris_blocks_0_to_q.lokr_w1",
        "lycoris_transformer$$blocks$$0$$to_q.lokr_w1",
    ]
    .into_iter()
    .enumerate()
    {
        write(&[key, "odd.lora_A.weight", "odd.alpha"]);
        let dst = source.0.path(&format!("out{i}"));
        source.run(&dst, &args).expect(0);
        assert_eq!(modules_in(&dst), ["blocks.0.to_q"], "{key}");
        let report = read_json(&dst.join(REPORT)).to_string();
        assert!(
            report.contains("not named by the adapter") && report.contains("in_features 100"),
            "{report}"
        );
    }
    let dst = source.0.path("refused");
    write(&["proj_in.lora_A.weight", "proj_out.lora_A.weight"]);
    source
        .run(&dst, &args)
        .expect(2)
        .says(&["adapter.safetensors", "proj_out"]);
    write(&["proj_in.alpha"]);
    source.run(&dst, &args).expect(2).says(&["names no module"]);
    write(&["proj_in.lora_A.weight", ".lora_A.weight"]);
    source.run(&dst, &args).expect(2).says(&["\".lora_A.weight\""]);
    write(&["proj_in.lora_A.weight"]);
    source
        .run(&dst, &["--ara", adapter.to_str().unwrap()])
        .expect(2)
        .says(&["--ara", "uint2"]);
    assert!(!dst.exists());
}

#[test]
fn a_diffusers_folder_is_sharded_with_metadata_in_each_file() {
    let sandbox = Sandbox::with(|folder| {
        let mut map = serde_json::Map::new();
        for shard in 0..2 {
            let file = format!("diffusion_pytorch_model-0000{}-of-00002.safetensors", shard + 1);
            let names = [
                format!("blocks.{shard}.to_q.weight"),
                format!("proj_out.{shard}.weight"),
            ];
            let tensors = names.map(|name| Tensor::random(&name, Dtype::BF16, &[16, 128]));
            write_tensors(&folder.join(&file), &tensors);
            map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
        }
        let index = json!({ "metadata": {}, "weight_map": map });
        fs::write(
            folder.join("diffusion_pytorch_model.safetensors.index.json"),
            index.to_string(),
        )
        .unwrap();
        let config = r#"{"_class_name": "WanTransformer3DModel", "eps": 1e-6}"#;
        fs::write(folder.join("config.json"), config).unwrap();
    });
    sandbox.quantize(&["--qtype", "uint5", "--max-shard-size", "4KB"]);
    let mut files: Vec<_> = fs::read_dir(sandbox.dst())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "safetensors"));
    assert!(files.len() > 1);
    for file in files {
        let names: Vec<String> = read_tensors(&file).into_iter().map(|tensor| tensor.name).collect();
        let mut held: Vec<&str> = names
            .iter()
            .filter_map(|name| name.strip_suffix(".uintx_packed"))
            .collect();
        held.sort_unstable();
        let metadata = metadata(&file);
        match metadata.get("aitk_quantization") {
            None => assert!(held.is_empty()),
            Some(_) => {
                let modules = quantization(&metadata)["modules"].as_object().unwrap().clone();
                assert_eq!(modules.keys().map(String::as_str).collect::<Vec<_>>(), held);
            }
        }
        assert!(file
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("diffusion_pytorch_model-0000"));
    }
    assert_eq!(modules_in(&sandbox.dst()), ["blocks.0.to_q", "blocks.1.to_q"]);
    assert!(sandbox
        .report()
        .to_string()
        .contains("Wan 2.2's exclude list: proj_out*"));
    let config = fs::read_to_string(sandbox.dst().join("config.json")).unwrap();
    assert!(config.contains("\"eps\": 1e-6"));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn what_does_not_go_with_uintx_is_refused_with_the_reason() {
    let sandbox = Sandbox::tiny();
    sandbox.refused(&["--qtype", "uint8"], &["torchao 0.10.0", "dense"]);
    sandbox.refused(&["--qtype", "uint9"], &["uint2", "uint7"]);
    sandbox.refused(&["--qtype", "uint4", "--asym"], &["--asym", "zero point"]);
    sandbox.refused(&["--qtype", "uint4", "--layout", "gptq"], &["--layout", "int4"]);
    sandbox.refused(&["--qtype", "uint4", "--group", "0"], &["--group 0"]);
    sandbox.refused(&["--qtype", "uint4", "--quantize-lm-head"], &["--quantize-lm-head"]);
    sandbox.refused(&["--qtype", "uint4", "--quantize-embedding"], &["--quantize-embedding"]);
    sandbox.refused(
        &["--qtype", "uint4", "--group", "48"],
        &["not divisible by the group of 48"],
    );
    // Every linear is quantized under its own name, fused or not; the table and the norms stay.
    sandbox.quantize(&["--qtype", "uint4"]);
    let output = sandbox.output();
    assert!(output.contains_key("model.layers.0.self_attn.q_k_v_proj.uintx_packed"));
    assert!(output.contains_key("model.layers.0.self_attn.g_proj.uintx_packed"));
    assert!(output.contains_key("model.embedding.weight") && output.contains_key("model.norm.weight"));
}
