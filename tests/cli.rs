//! What a user sees of a quantizing run: what is written where, the plan, and the streams. What is refused is in
//! `refusals.rs`, what happens to the destination in `destination.rs`.

mod common;

use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::fs;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

const DOWN: &str = "model.layers.0.mlp.down_proj";

// --- what is written

#[test]
fn packed_tensors_have_their_shapes_and_dense_ones_their_bytes() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&["--group", "64"]);
    let output = sandbox.output();
    for (suffix, dtype, shape) in [
        ("qweight", Dtype::I32, vec![256 / 8, 128]),
        ("qzeros", Dtype::I32, vec![4, 128 / 8]),
        ("scales", Dtype::F16, vec![4, 128]),
        ("g_idx", Dtype::I32, vec![256]),
    ] {
        let tensor = &output[&format!("{DOWN}.{suffix}")];
        assert_eq!((tensor.dtype, &tensor.shape), (dtype, &shape), "{suffix}");
    }
    assert!(!output.contains_key(&format!("{DOWN}.weight")));
    for source in Spark::TINY
        .tensors()
        .iter()
        .filter(|tensor| !tensor.name.contains("_proj"))
    {
        assert_eq!(output[&source.name], *source);
    }
    let rows = |tensor: &Tensor, from: usize, to: usize| {
        let row = tensor.bytes.len() / tensor.shape[0];
        tensor.bytes[from * row..to * row].to_vec()
    };
    let mut source = Spark::TINY.tensors();
    let bias = named(&mut source, "model.layers.0.self_attn.q_k_v_proj.bias");
    for (part, from, to) in [("q", 0, 128), ("k", 128, 192), ("v", 192, 256)] {
        let split = &output[&format!("model.layers.0.self_attn.{part}_proj.bias")];
        assert_eq!((split.shape[0], &split.bytes), (to - from, &rows(bias, from, to)));
    }
}

#[test]
fn every_other_file_is_copied_except_other_weights() {
    let sandbox = Sandbox::tiny();
    for (name, bytes) in [
        ("LICENSE", "text"),
        ("pytorch_model.bin", "weights"),
        ("assets/tower.safetensors", "kept"),
    ] {
        fs::write(sandbox.src().join(name), bytes).unwrap();
    }
    sandbox.quantize(&[]);
    let names: Vec<_> = tree(&sandbox.dst())
        .into_keys()
        .map(|path| path.display().to_string())
        .collect();
    let expected = [
        "LICENSE",
        "assets",
        "assets/deep",
        "assets/deep/note.txt",
        "assets/tower.safetensors",
        "config.json",
        WEIGHTS,
        "modeling_spark.py",
        REPORT,
        "tokenizer.json",
    ];
    assert_eq!(names, expected);
    let read = |folder: &Path| fs::read(folder.join("assets/deep/note.txt")).unwrap();
    assert_eq!(read(&sandbox.src()), read(&sandbox.dst()));
}

#[test]
fn config_keeps_its_order_and_its_numbers() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&["--quantize-lm-head"]);
    let text = fs::read_to_string(sandbox.dst().join("config.json")).unwrap();
    for kept in ["1e6", "1.0e-06", "12345678901234567890123"] {
        assert!(text.contains(kept), "{kept} is not in {text}");
    }
    let (before, after) = (read_json(&sandbox.src().join("config.json")), sandbox.config());
    let (before, after) = (before.as_object().unwrap(), after.as_object().unwrap());
    let keys: Vec<_> = after.keys().filter(|key| *key != "quantization_config").collect();
    assert_eq!(keys, before.keys().collect::<Vec<_>>());
    for (key, value) in before.iter().filter(|(key, _)| *key != "tie_word_embeddings") {
        assert_eq!(after[key], *value, "{key}");
    }
    assert_eq!(after["tie_word_embeddings"], false);
    let quantization = &after["quantization_config"];
    assert_eq!(
        (&quantization["lm_head"], &quantization["group_size"]),
        (&json!(true), &json!(128))
    );
}

#[test]
fn a_tied_head_becomes_a_copy_and_the_table_stays() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&["--quantize-lm-head"]);
    let output = sandbox.output();
    assert_eq!(output["lm_head.qweight"].shape, [16, 256]);
    assert_eq!(output["model.embedding.weight"], Spark::TINY.tensors()[0]);
    assert_eq!(sandbox.report()["quantized_lm_head"], true);
}

#[test]
fn a_tied_head_can_be_all_that_is_quantized() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&["--quantize-lm-head", "--include", "lm_head"]);
    assert_eq!(sandbox.report()["per_tensor"][0]["name"], "lm_head");
    assert_eq!(sandbox.report()["tensors"], 1);
    sandbox.verify(&[]).expect(0);
    sandbox
        .quantize(&["--quantize-lm-head", "--exclude", "lm_head", "--overwrite"])
        .says(&["warning", "lm_head"]);
}

#[test]
fn a_head_of_its_own_is_quantized_in_place() {
    let head = Tensor::random("lm_head.weight", Dtype::F16, &[256, 128]);
    let sandbox = Sandbox::with(|src| Spark::TINY.write_with(src, |tensors| tensors.push(head.clone())));
    sandbox.quantize(&[]);
    assert_eq!(sandbox.output()["lm_head.weight"], head);
    sandbox.quantize(&["--quantize-lm-head", "--overwrite"]);
    let output = sandbox.output();
    assert!(output.contains_key("lm_head.qweight") && !output.contains_key("lm_head.weight"));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn outputs_above_the_shard_size_are_split_and_indexed() {
    let sandbox = Sandbox::with(|src| Spark::TINY.write_shards(src, 3));
    sandbox.quantize(&["--max-shard-size", "40KB"]);
    let index = read_json(&sandbox.dst().join(INDEX));
    let map = index["weight_map"].as_object().unwrap();
    let count = map
        .values()
        .map(Value::to_string)
        .collect::<std::collections::BTreeSet<_>>()
        .len();
    assert!(count > 2, "{count} shards");
    let mut total = 0;
    let mut seen = 0;
    for number in 1..=count {
        let name = shard_name(number, count);
        let path = sandbox.dst().join(&name);
        let tensors = read_tensors(&path);
        // The embedding alone is larger, and has a file of its own.
        let len = fs::metadata(&path).unwrap().len();
        assert!(len <= 40_000 || tensors.len() == 1, "{name} has {len} bytes");
        for tensor in tensors {
            assert_eq!(map[&tensor.name], name);
            total += tensor.bytes.len();
            seen += 1;
        }
    }
    assert_eq!((map.len(), &index["metadata"]["total_size"]), (seen, &json!(total)));
    sandbox.verify(&[]).expect(0);

    let whole = Sandbox::with(|src| Spark::TINY.write_shards(src, 2));
    whole.quantize(&[]);
    assert_eq!(sandbox.output(), whole.output(), "shards change no tensor");
    assert!(!whole.dst().join(INDEX).exists());
}

#[test]
fn the_stem_of_the_source_is_kept() {
    let sandbox = Sandbox::tiny();
    fs::rename(
        sandbox.src().join(WEIGHTS),
        sandbox.src().join("diffusion_pytorch_model.safetensors"),
    )
    .unwrap();
    sandbox.quantize(&[]);
    assert!(sandbox.dst().join("diffusion_pytorch_model.safetensors").exists());
}

#[test]
fn one_file_can_be_the_source() {
    let sandbox = Sandbox::tiny();
    let args = ["--fused-qkv", "keep"];
    let file = sandbox.src().join(WEIGHTS);
    let all = [
        "--src".as_ref(),
        file.as_os_str(),
        "--dst".as_ref(),
        sandbox.path("one").as_os_str(),
    ]
    .map(|arg: &std::ffi::OsStr| arg.to_os_string());
    run(all.iter().cloned().chain(args.map(Into::into))).expect(0);
    sandbox.quantize(&args);
    let weights = |folder: &str| fs::read(sandbox.path(folder).join(WEIGHTS)).unwrap();
    assert!(weights("one") == weights("dst"));
    assert!(
        !sandbox.path("one/tokenizer.json").exists(),
        "only a folder has other files"
    );
}

/// A snapshot of the Hugging Face cache: symlinks into a folder of blobs.
#[test]
fn a_symlinked_snapshot_is_read_and_files_are_written() {
    let plain = Sandbox::with(|src| Spark::TINY.write_shards(src, 2));
    plain.quantize(&[]);
    let sandbox = Sandbox::with(|src| Spark::TINY.write_shards(src, 2));
    let blobs = sandbox.path("blobs");
    fs::create_dir(&blobs).unwrap();
    for (at, entry) in fs::read_dir(sandbox.src()).unwrap().enumerate() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::rename(&path, blobs.join(at.to_string())).unwrap();
            symlink(Path::new("../blobs").join(at.to_string()), &path).unwrap();
        }
    }
    sandbox.quantize(&[]);
    assert_eq!(tree(&sandbox.dst()), tree(&plain.dst()));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn fused_projections_are_kept_whole_on_request() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&["--fused-qkv", "keep"]);
    let output = sandbox.output();
    assert_eq!(output["model.layers.0.self_attn.q_k_v_proj.qweight"].shape, [16, 256]);
    assert!(output.contains_key("model.layers.0.self_attn.q_k_v_proj.bias"));
    assert!(!output.keys().any(|name| name.contains("q_proj")));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn include_and_exclude_choose_modules() {
    let modules = |args: &[&str]| -> Vec<String> {
        let sandbox = Sandbox::tiny();
        sandbox.quantize(args);
        sandbox.verify(&[]).expect(0);
        let report = sandbox.report();
        let names = report["per_tensor"].as_array().unwrap().iter();
        names
            .map(|tensor| tensor["name"].as_str().unwrap().replace("model.layers.0.", ""))
            .collect()
    };
    assert_eq!(modules(&["--include", "*.down_proj"]), ["mlp.down_proj.weight"]);
    let mlp = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"];
    assert_eq!(modules(&["--exclude", "*.self_attn.*"]), mlp);
    assert_eq!(modules(&["--include", "*.mlp.*", "--exclude", "*.down_proj"]), mlp[1..]);
    // One member of a fused set keeps the others dense, and the projection whole.
    assert_eq!(
        modules(&["--exclude", "*.up_proj", "--exclude", "*.k_proj"]),
        [mlp[0], "self_attn.out_proj.weight"]
    );
}

#[test]
fn what_does_not_fit_stays_dense_with_its_reason() {
    let odd = Spark {
        inter: 200,
        ..Spark::TINY
    };
    let sandbox = Sandbox::with(|src| odd.write(src));
    let outcome = sandbox.quantize(&["--group", "64"]);
    outcome.says(&[DOWN, "in_features 200", "group of 64"]);
    let report = sandbox.report();
    let dense = report["dense"].as_array().unwrap().iter();
    let reason = dense
        .filter(|dense| dense["name"] == format!("{DOWN}.weight"))
        .collect::<Vec<_>>();
    assert_eq!(reason.len(), 1);
    assert!(reason[0]["reason"].as_str().unwrap().contains("in_features 200"));
    sandbox
        .run(&["--group", "64", "--dry-run", "--overwrite"])
        .says(&["in_features 200"]);

    // k and v have 20 rows, which packed zero points cannot hold; q stays dense with them, and the bias whole.
    let odd = Spark {
        heads: 4,
        head_dim: 20,
        hidden: 64,
        ..Spark::TINY
    };
    let sandbox = Sandbox::with(|src| odd.write(src));
    sandbox
        .quantize(&["--group", "32"])
        .says(&["fused set", "out_features 20"]);
    let output = sandbox.output();
    assert!(output.contains_key("model.layers.0.self_attn.q_k_v_proj.weight"));
    assert!(output.contains_key("model.layers.0.self_attn.q_k_v_proj.bias"));
    assert!(output.contains_key("model.layers.0.mlp.up_proj.qweight"));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn towers_and_prediction_heads_pass_through() {
    let extra = [
        Tensor::random("visual.blocks.0.mlp.up_proj.weight", Dtype::BF16, &[128, 128]),
        Tensor::random("model.layers.1.mlp.up_proj.weight", Dtype::BF16, &[128, 128]),
        Tensor::random("visual.patch.weight", Dtype::F32, &[2, 3, 4, 4]),
        Tensor::bytes("model.flag", Dtype::BOOL, &[], vec![1]),
        Tensor::bytes("model.empty", Dtype::F16, &[0, 7], vec![]),
        Tensor::bytes(
            "model.layers.0.mlp.scale.weight",
            Dtype::F8_E4M3,
            &[2, 2],
            vec![1, 2, 3, 0x7f],
        ),
        Tensor::floats(
            "model.nan.weight",
            Dtype::F32,
            &[2],
            [f32::NAN, f32::INFINITY].into_iter(),
        ),
    ];
    let sandbox = Sandbox::with(|src| Spark::TINY.write_with(src, |tensors| tensors.extend(extra.iter().cloned())));
    sandbox.quantize(&[]);
    let output = sandbox.output();
    extra
        .iter()
        .for_each(|tensor| assert_eq!(output[&tensor.name], *tensor));
    sandbox.verify(&[]).expect(0);
}

#[test]
fn underflowed_scales_are_counted() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            let down = named(tensors, &format!("{DOWN}.weight"));
            *down = Tensor::floats(
                &down.name,
                Dtype::BF16,
                &[128, 256],
                std::iter::repeat_n(1e-9, 128 * 256),
            );
        })
    });
    sandbox
        .quantize(&["--group", "64"])
        .says(&["warning", "512 group(s)", "too small for float16"]);
    let report = sandbox.report();
    assert_eq!(report["underflowed_groups"], 512);
    let tensor = &report["per_tensor"][0];
    assert_eq!(
        (&tensor["name"], &tensor["underflowed_groups"]),
        (&json!(format!("{DOWN}.weight")), &json!(512))
    );
    sandbox.verify(&[]).expect(0);
}

#[test]
fn an_exact_or_empty_tensor_has_no_snr() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            let gate = named(tensors, "model.layers.0.mlp.gate_proj.weight");
            gate.bytes.fill(0);
            let up = named(tensors, "model.layers.0.mlp.up_proj.weight");
            let steps = (0..256 * 128).map(|at| (at % 16) as f32 - 8.0);
            *up = Tensor::floats(&up.name, Dtype::BF16, &[256, 128], steps);
        })
    });
    sandbox.quantize(&[]);
    let report = sandbox.report();
    for name in ["gate", "up"] {
        let name = format!("model.layers.0.mlp.{name}_proj.weight");
        let tensor = report["per_tensor"]
            .as_array()
            .unwrap()
            .iter()
            .find(|tensor| tensor["name"] == name);
        assert_eq!(tensor.unwrap()["snr_db"], Value::Null, "{name}");
    }
    assert_eq!(report["zero_groups"], 256);
    sandbox.verify(&[]).expect(0);
}

#[test]
fn modes_follow_the_umask() {
    let sandbox = Sandbox::tiny();
    fs::set_permissions(sandbox.src().join("tokenizer.json"), fs::Permissions::from_mode(0o400)).unwrap();
    for (umask, folder, file) in [("022", 0o755, 0o644), ("027", 0o750, 0o640), ("077", 0o700, 0o600)] {
        let dst = sandbox.path(umask);
        let args = ["--src".into(), sandbox.src(), "--dst".into(), dst.clone()];
        run_in_shell(&format!("umask {umask}"), args).expect(0);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&dst), folder, "{umask}");
        for path in tree(&dst).into_keys().map(|path| dst.join(path)) {
            let expected = if path.is_dir() { folder } else { file };
            assert_eq!(mode(&path), expected, "{umask}: {}", path.display());
        }
    }
}

// --- and back

/// Decodes by the layout's definition, one weight at a time.
fn decode(output: &std::collections::BTreeMap<String, Tensor>, module: &str, zero_less: u32) -> Vec<f32> {
    let tensor = |suffix: &str| &output[&format!("{module}.{suffix}")];
    let word = |tensor: &Tensor, at: usize| u32::from_le_bytes(tensor.bytes[4 * at..][..4].try_into().unwrap());
    let (qweight, qzeros, scales) = (tensor("qweight"), tensor("qzeros"), tensor("scales"));
    let (rows, columns) = (qweight.shape[1], qweight.shape[0] * 8);
    let group = columns / scales.shape[0];
    let weight = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        let code = word(qweight, column / 8 * rows + row) >> (column % 8 * 4) & 15;
        let zero = (word(qzeros, column / group * (rows / 8) + row / 8) >> (row % 8 * 4) & 15) + zero_less;
        let at = 2 * (column / group * rows + row);
        let scale = half::f16::from_le_bytes(scales.bytes[at..at + 2].try_into().unwrap());
        (code as f32 - zero as f32) * scale.to_f32()
    };
    (0..rows * columns).map(weight).collect()
}

#[test]
fn dequantized_weights_are_those_that_are_stored() {
    for (asym, zero_less) in [(&[][..], 1), (&["--asym"][..], 0)] {
        let sandbox = Sandbox::tiny();
        sandbox.quantize(&[&["--group", "32"], asym].concat());
        let dense = sandbox.path("dense");
        let (from, to) = (sandbox.dst(), dense.as_os_str());
        let args = [
            "--dequantize".as_ref(),
            "--src".as_ref(),
            from.as_os_str(),
            "--dst".as_ref(),
            to,
        ];
        run(args.iter().chain(&["--dtype".as_ref(), "f32".as_ref()])).expect(0);
        let mut decoded = read_tensors(&dense.join(WEIGHTS));
        let mut source = Spark::TINY.tensors();
        assert_eq!(decoded.len(), source.len());
        let output = sandbox.output();
        let expected = decode(&output, DOWN, zero_less);
        let name = format!("{DOWN}.weight");
        let expected = Tensor::floats(&name, Dtype::F32, &[128, 256], expected.into_iter());
        assert!(*named(&mut decoded, &name) == expected);
        let name = "model.layers.0.self_attn.q_k_v_proj.weight";
        let parts = ["q", "k", "v"].map(|part| format!("model.layers.0.self_attn.{part}_proj"));
        let rows = parts.iter().flat_map(|part| decode(&output, part, zero_less));
        assert!(*named(&mut decoded, name) == Tensor::floats(name, Dtype::F32, &[256, 128], rows));
        for dense in [
            "model.norm.weight",
            "model.layers.0.self_attn.q_k_v_proj.bias",
            "model.embedding.weight",
        ] {
            assert_eq!(named(&mut decoded, dense), named(&mut source, dense));
        }
        assert!(read_json(&dense.join("config.json"))
            .get("quantization_config")
            .is_none());
        let twice = [
            "--dequantize".as_ref(),
            "--src".as_ref(),
            to,
            "--dst".as_ref(),
            sandbox.path("x").as_os_str(),
        ]
        .map(std::ffi::OsStr::to_os_string);
        run(twice).expect(2).says(&["not quantized"]);
    }
}

// --- the plan, and the streams

#[test]
fn a_dry_run_writes_nothing_and_tells_what_a_run_writes() {
    for max in ["5GB", "40KB"] {
        let sandbox = Sandbox::tiny();
        let before = tree(sandbox.root());
        let args = [
            "--asym",
            "--quantize-lm-head",
            "--group",
            "32",
            "--json",
            "--max-shard-size",
            max,
        ];
        let plan = sandbox.run(&[&args[..], &["--dry-run"]].concat()).expect(0).json();
        assert_eq!(tree(sandbox.root()), before, "a dry run changed something");
        sandbox.quantize(&args);

        let files = plan["files"].as_array().unwrap();
        assert_eq!(files.len() > 1, max == "40KB");
        for file in files {
            let len = fs::metadata(sandbox.dst().join(file["name"].as_str().unwrap()))
                .unwrap()
                .len();
            assert_eq!(file["bytes"], len);
        }
        let written: u64 = tree(&sandbox.dst())
            .keys()
            .filter(|path| *path != Path::new(REPORT))
            .map(|path| fs::metadata(sandbox.dst().join(path)).unwrap())
            .filter(fs::Metadata::is_file)
            .map(|file| file.len())
            .sum();
        assert_eq!(plan["output_bytes"], written);
        assert!(plan["free_bytes"].as_u64().unwrap() > 0);

        let output = sandbox.output();
        let planned: Vec<&Value> = plan["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|tensor| tensor["outputs"].as_array().unwrap())
            .collect();
        assert_eq!(planned.len(), output.len());
        for tensor in planned {
            let stored = &output[tensor["name"].as_str().unwrap()];
            assert_eq!(tensor["shape"], json!(stored.shape));
            assert_eq!(tensor["bytes"], stored.bytes.len());
        }
        let report = sandbox.report();
        for key in ["coverage", "group", "layout", "qtype"] {
            assert_eq!(plan[key], report[key], "{key}");
        }
    }
}

#[test]
fn a_dry_run_names_every_tensor_and_needs_no_destination() {
    let sandbox = Sandbox::tiny();
    let src = sandbox.src();
    let outcome = run(["--src".as_ref(), src.as_os_str(), "--dry-run".as_ref()]).expect(0);
    outcome.says(&[
        &format!("{DOWN}.weight  int4 gptq symmetric [128, 256] group 128  65536 -> "),
        "model.embedding.weight  dense: only with --quantize-embedding  65536 bytes",
        "model.layers.0.self_attn.q_proj.bias",
        "bits per weight",
    ]);
}

#[test]
fn the_summary_json_and_quiet() {
    let sandbox = Sandbox::tiny();
    let outcome = sandbox.quantize(&[]);
    outcome.says(&["quantized  7 tensors", "SNR", "dense", "files"]);
    assert_eq!(outcome.stderr, "", "no progress on a pipe");

    let outcome = sandbox.quantize(&["--json", "--overwrite"]);
    assert_eq!(outcome.json(), sandbox.report());
    assert_eq!(outcome.stderr, "");

    let outcome = sandbox.quantize(&["--quiet", "--overwrite"]);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", ""));

    let verified = sandbox.verify(&["--json"]).expect(0).json();
    assert_eq!(verified["findings"], json!([]));
    assert_eq!(verified["modules"], 7);
    assert_eq!(verified["snr_db_mean"], sandbox.report()["snr_db_mean"]);
    let quiet = sandbox.verify(&["--quiet"]).expect(0);
    assert_eq!(quiet.stderr, "");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let sandbox = Sandbox::tiny();
    let src = sandbox.src();
    let mut child = Command::new(BINARY)
        .args(["--src".as_ref(), src.as_os_str(), "--dry-run".as_ref()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let outcome = finish(child.wait_with_output().unwrap());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
}

#[test]
fn the_same_input_gives_the_same_bytes_anywhere() {
    let (one, two) = (Sandbox::tiny(), Sandbox::tiny());
    one.quantize(&[]);
    two.quantize(&[]);
    assert_eq!(tree(&one.dst()), tree(&two.dst()));
}
