//! What the tool refuses: each input that is wrong, with exit code 2, a message that names the file, the tensor and both
//! numbers, and nothing written anywhere.

mod common;

use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

const EMBEDDING: &str = "model.embedding.weight";
const NORM: &str = "model.norm.weight";
const UP: &str = "model.layers.0.mlp.up_proj.weight";
const QKV: &str = "model.layers.0.self_attn.q_k_v_proj.weight";

/// The tiny checkpoint after `spoil`, refused with a message that says all of `says`.
#[track_caller]
fn refused(spoil: impl FnOnce(&Path), says: &[&str]) {
    let sandbox = Sandbox::tiny();
    spoil(&sandbox.src());
    sandbox.refused(&[], says);
}

/// The same of a checkpoint in shards with an index.
#[track_caller]
fn shards_refused(spoil: impl FnOnce(&Path), says: &[&str]) {
    let sandbox = Sandbox::with(|src| Spark::TINY.write_shards(src, 3));
    spoil(&sandbox.src());
    sandbox.refused(&[], says);
}

#[test]
fn missing_paths() {
    let sandbox = Sandbox::empty();
    sandbox.refused(&[], &["src", "no such file or folder"]);
    fs::create_dir(sandbox.src()).unwrap();
    sandbox.refused(&[], &["src", "no .safetensors file"]);
    fs::write(sandbox.path("text.txt"), "text").unwrap();
    sandbox.refused_at(
        &sandbox.path("text.txt"),
        &sandbox.dst(),
        &[],
        &["text.txt", "not a .safetensors file"],
    );
    fs::write(sandbox.path("text.safetensors"), "hello, this is text and no tensors").unwrap();
    sandbox.refused_at(
        &sandbox.path("text.safetensors"),
        &sandbox.dst(),
        &[],
        &["text.safetensors", "claims"],
    );
}

#[test]
fn missing_shards() {
    let second = shard_name(2, 3);
    shards_refused(
        |src| fs::remove_file(src.join(&second)).unwrap(),
        &[INDEX, &second, "not there"],
    );
    shards_refused(
        |src| {
            fs::remove_file(src.join(&second)).unwrap();
            fs::remove_file(src.join(INDEX)).unwrap();
        },
        &["shard 2 of 3 of model is missing"],
    );
    let sandbox = Sandbox::with(|src| Spark::TINY.write_shards(src, 3));
    let alone = sandbox.src().join(&second);
    sandbox.refused_at(&alone, &sandbox.dst(), &[], &[&second, "shard 2 of 3", "folder"]);
}

#[test]
fn files_of_a_wrong_length() {
    let data: usize = Spark::TINY.tensors().iter().map(|tensor| tensor.bytes.len()).sum();
    let resize = |by: i64| {
        move |src: &Path| {
            let file = fs::OpenOptions::new().write(true).open(src.join(WEIGHTS)).unwrap();
            file.set_len(file.metadata().unwrap().len().checked_add_signed(by).unwrap())
                .unwrap();
        }
    };
    let all = data.to_string();
    refused(
        resize(-1),
        &[
            WEIGHTS,
            "model.position_ids",
            &all,
            &(data - 1).to_string(),
            "truncated",
        ],
    );
    refused(resize(-1000), &[WEIGHTS, &(data - 1000).to_string(), "truncated"]);
    refused(resize(3), &[WEIGHTS, &all, &(data + 3).to_string(), "trailing"]);
    refused(
        |src| fs::write(src.join(WEIGHTS), "").unwrap(),
        &[WEIGHTS, "0 bytes", "8"],
    );
    refused(
        |src| fs::write(src.join(WEIGHTS), [1, 0, 0, 0, 0]).unwrap(),
        &[WEIGHTS, "5 bytes", "8"],
    );
    for claim in [1u64 << 40, 1 << 63, u64::MAX] {
        let spoil = |src: &Path| {
            let mut bytes = fs::read(src.join(WEIGHTS)).unwrap();
            bytes[..8].copy_from_slice(&claim.to_le_bytes());
            fs::write(src.join(WEIGHTS), bytes).unwrap();
        };
        refused(spoil, &[WEIGHTS, &claim.to_string()]);
    }
}

#[test]
fn headers_that_are_no_headers() {
    for header in ["?", "[1, 2]", "{\"a\": 1}", "{\"a\": {\"dtype\": \"F32\"}}", "{"] {
        refused(
            |src| fs::write(src.join(WEIGHTS), raw_file(header, &[])).unwrap(),
            &[WEIGHTS, "header"],
        );
    }
    let twice = r#"{"a.weight": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                    "a.weight": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}"#;
    refused(
        |src| fs::write(src.join(WEIGHTS), raw_file(twice, &[0; 2])).unwrap(),
        &[WEIGHTS, "a.weight", "twice"],
    );
}

#[test]
fn tensors_that_do_not_fit_their_bytes() {
    type Edit = fn(&mut Value, u64);
    let cases: [(&str, Edit, &[&str]); 7] = [
        (EMBEDDING, |entry, _| entry["dtype"] = "Q7".into(), &["Q7"]),
        (
            EMBEDDING,
            |entry, _| entry["shape"] = json!([256, 127]),
            &[EMBEDDING, "65536", "65024"],
        ),
        (
            EMBEDDING,
            |entry, _| entry["shape"] = json!([1u64 << 62, 16]),
            &[EMBEDDING, "4611686018427387904"],
        ),
        (EMBEDDING, |entry, _| entry["shape"] = json!([-1, 128]), &[]),
        (
            NORM,
            |entry, begin| entry["data_offsets"] = json!([begin + 256, begin]),
            &[NORM],
        ),
        (
            NORM,
            |entry, begin| entry["data_offsets"] = json!([begin - 2, begin + 254]),
            &[NORM, "overlap"],
        ),
        (
            NORM,
            |entry, begin| entry["data_offsets"] = json!([begin + 2, begin + 258]),
            &[NORM, "gap"],
        ),
    ];
    for (name, edit, says) in cases {
        let spoil = |src: &Path| {
            edit_header(&src.join(WEIGHTS), |header| {
                let begin = header[name]["data_offsets"][0].as_u64().unwrap();
                edit(&mut header[name], begin);
            });
        };
        refused(spoil, &[&[WEIGHTS], says].concat());
    }
}

#[test]
fn duplicate_tensors_across_files() {
    let twice = |src: &Path| write_tensors(&src.join("more.safetensors"), &[Tensor::random(NORM, Dtype::F16, &[4])]);
    refused(twice, &[NORM, WEIGHTS, "more.safetensors"]);
}

#[test]
fn indexes_that_do_not_agree() {
    let edit = |edit: fn(&mut Value)| move |src: &Path| edit_json(&src.join(INDEX), edit);
    let first = shard_name(1, 3);
    for path in [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "sub/../../evil.safetensors",
    ] {
        let spoil = |src: &Path| edit_json(&src.join(INDEX), |index| index["weight_map"][NORM] = path.into());
        shards_refused(spoil, &[INDEX, path, "leaves the folder"]);
    }
    shards_refused(
        edit(|index| index["weight_map"]["ghost.weight"] = shard_name(1, 3).into()),
        &[INDEX, "ghost.weight", &first],
    );
    shards_refused(
        edit(|index| _ = index["weight_map"].as_object_mut().unwrap().shift_remove(NORM)),
        &[INDEX, NORM, &shard_name(3, 3)],
    );
    shards_refused(
        edit(|index| index["weight_map"][NORM] = shard_name(1, 3).into()),
        &[INDEX, NORM, &first],
    );
    shards_refused(|src| fs::write(src.join(INDEX), "{").unwrap(), &[INDEX]);
    shards_refused(|src| fs::write(src.join(INDEX), "{}").unwrap(), &[INDEX, "weight_map"]);
    shards_refused(
        |src| fs::write(src.join("other.safetensors.index.json"), "{}").unwrap(),
        &[INDEX, "other"],
    );
}

#[test]
fn config_that_cannot_be_used() {
    let config = |text: &'static str| move |src: &Path| fs::write(src.join("config.json"), text).unwrap();
    refused(config("{"), &["config.json", "JSON"]);
    refused(config("[]"), &["config.json", "object"]);
    refused(config("{}"), &[QKV, "num_attention_heads", "config.json"]);
    let heads = |src: &Path| {
        edit_json(&src.join("config.json"), |config| {
            config["num_attention_heads"] = 3.into()
        })
    };
    refused(
        heads,
        &["config.json", QKV, "256 rows", "q 192", "320", "--fused-qkv keep"],
    );
    for (key, value, shown) in [
        ("num_attention_heads", json!(4.0), "4.0"),
        ("num_attention_heads", json!(-4), "-4"),
        ("num_attention_heads", json!("4"), "\"4\""),
        ("num_key_value_heads", json!(2.5), "2.5"),
        ("head_dim", json!(u64::MAX), "18446744073709551615"),
    ] {
        let spoil = |src: &Path| edit_json(&src.join("config.json"), |config| config[key] = value);
        refused(spoil, &["config.json", QKV, &format!("{key} is {shown}, not a count")]);
    }
    refused(
        |src| fs::remove_file(src.join("config.json")).unwrap(),
        &[QKV, "num_attention_heads", "has none"],
    );
}

#[test]
fn weights_that_are_not_finite() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        for (value, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
            for asym in [&[][..], &["--asym"]] {
                let tiny = Spark { dtype, ..Spark::TINY };
                let sandbox = Sandbox::with(|src| {
                    tiny.write_with(src, |tensors| named(tensors, UP).set(101 * 128 + 37, value));
                });
                let says = [
                    WEIGHTS,
                    UP,
                    text,
                    "row 101",
                    "column 37",
                    "--exclude \"model.layers.0.mlp.up_proj\"",
                ];
                sandbox.refused(asym, &says);
                sandbox.quantize(&["--exclude", "model.layers.0.mlp.up_proj"]);
            }
        }
    }
    // Rows count from the first of the source's own tensor, also in k of a fused one.
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| named(tensors, QKV).set(150 * 128 + 3, f32::NAN));
    });
    sandbox.refused(&[], &[QKV, "row 150", "column 3"]);
}

/// The first fault is told, however many threads look.
#[test]
fn the_first_of_several_faults_is_told() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            named(tensors, UP).set(3 * 128, f32::NAN);
            named(tensors, UP).set(200 * 128, f32::INFINITY);
            named(tensors, "model.layers.0.mlp.down_proj.weight").set(0, f32::NAN);
        })
    });
    for threads in ["1", "2", "8"] {
        sandbox.refused(&["--threads", threads], &[UP, "NaN", "row 3, column 0"]);
    }
}

#[test]
fn scales_that_overflow() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| named(tensors, UP).set(17 * 128 + 100, 3e6));
    });
    for asym in [&["--group", "64"][..], &["--group", "64", "--asym"]] {
        sandbox.refused(asym, &[WEIGHTS, UP, "row 17, group 1", "float16", "65504", "--exclude"]);
    }
}

#[test]
fn nothing_left_to_quantize() {
    let sandbox = Sandbox::with(|src| {
        Spark {
            hidden: 48,
            inter: 80,
            head_dim: 40,
            ..Spark::TINY
        }
        .write(src)
    });
    sandbox.refused(
        &["--group", "64"],
        &["nothing to quantize", "in_features", "group of 64"],
    );
    let sandbox = Sandbox::tiny();
    sandbox.refused(&["--exclude", "*"], &["nothing to quantize", "--exclude"]);
}

#[test]
fn patterns_that_match_nothing() {
    let sandbox = Sandbox::tiny();
    sandbox.refused(&["--exclude", "zzz.*"], &["--exclude", "zzz.*", "matches no module"]);
    sandbox.refused(&["--include", "yyy"], &["--include", "yyy", "matches no module"]);
    sandbox.refused(&["--exclude", "*.mlp.*", "--exclude", "zzz"], &["--exclude", "zzz"]);
    sandbox.refused(&["--exclude", "[a"], &["--exclude", "[a"]);
}

#[test]
fn a_source_that_is_quantized_already() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let (done, again) = (sandbox.dst(), sandbox.path("again"));
    sandbox.refused_at(
        &done,
        &again,
        &[],
        &["dst", "already quantized", "quantization_config", "--dequantize"],
    );
    edit_json(&done.join("config.json"), |config| {
        config.as_object_mut().unwrap().shift_remove("quantization_config");
    });
    sandbox.refused_at(&done, &again, &[], &["already quantized", ".qweight", "--dequantize"]);
}

#[test]
fn heads_and_embeddings_that_are_not_there() {
    let untied = |src: &Path| {
        edit_json(&src.join("config.json"), |config| {
            config["tie_word_embeddings"] = false.into()
        })
    };
    let sandbox = Sandbox::tiny();
    untied(&sandbox.src());
    sandbox.refused(&["--quantize-lm-head"], &["--quantize-lm-head", "lm_head.weight"]);
    let sandbox = Sandbox::with(|src| Spark::TINY.write_with(src, |tensors| _ = tensors.remove(0)));
    sandbox.refused(&["--quantize-embedding"], &["--quantize-embedding"]);
}

#[test]
fn a_name_that_the_output_needs() {
    let spoil = |src: &Path| {
        Spark::TINY.write_with(src, |tensors| {
            let name = "model.layers.0.mlp.up_proj.g_idx";
            tensors.push(Tensor::bytes(name, Dtype::I32, &[1], vec![0; 4]));
        });
    };
    refused(
        spoil,
        &["src", "model.layers.0.mlp.up_proj.g_idx", "model.layers.0.mlp.up_proj"],
    );
}

// --- the destination

#[test]
fn destinations_that_hold_something() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    sandbox.refused(&[], &["dst", "not empty", "--overwrite"]);
    for (name, content) in [
        ("report of no tool", "{}"),
        ("report of another", "{\"tool\": \"other 1.0\"}"),
    ] {
        let dst = sandbox.path(name);
        fs::create_dir(&dst).unwrap();
        fs::write(dst.join(REPORT), content).unwrap();
        sandbox.refused_at(
            &sandbox.src(),
            &dst,
            &["--overwrite"],
            &[name, REPORT, "only a checkpoint that this tool"],
        );
    }
    let foreign = sandbox.path("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("thesis.tex"), "years of work").unwrap();
    sandbox.refused_at(
        &sandbox.src(),
        &foreign,
        &["--overwrite"],
        &["foreign", "only a checkpoint that this tool"],
    );
    fs::write(sandbox.path("file"), "text").unwrap();
    for args in [&[][..], &["--overwrite"]] {
        sandbox.refused_at(
            &sandbox.src(),
            &sandbox.path("file"),
            args,
            &["file", "--dst is a folder"],
        );
    }
}

#[test]
fn destinations_in_the_source() {
    let sandbox = Sandbox::tiny();
    symlink(sandbox.src(), sandbox.path("link")).unwrap();
    for dst in ["src", "src/out", "src/a/b", "src/assets/..", "link", "link/out"] {
        for args in [&[][..], &["--overwrite"]] {
            sandbox.refused_at(
                &sandbox.src(),
                &sandbox.path(dst),
                args,
                &["--dst is the source", "src"],
            );
        }
    }
}

#[test]
fn a_source_inside_what_would_be_replaced() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    copy_folder(&sandbox.src(), &sandbox.dst().join("inner"));
    let (src, dst) = (sandbox.dst().join("inner"), sandbox.dst());
    sandbox.refused_at(&src, &dst, &["--overwrite"], &["inner", "--overwrite would replace"]);
}

#[test]
fn a_refused_overwrite_leaves_the_old_checkpoint() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let last = "model.layers.0.mlp.down_proj.weight";
    Spark::TINY.write_with(&sandbox.src(), |tensors| named(tensors, last).set(0, f32::NAN));
    sandbox.refused(&["--overwrite"], &[last, "NaN"]);
}

// --- the request

#[test]
fn requests_that_make_no_sense() {
    let sandbox = Sandbox::tiny();
    for (args, says) in [
        (&["--group", "0"][..], "--group"),
        (&["--group", "7"], "multiple of 8"),
        (&["--group", "-1"], "-1"),
        (&["--threads", "0"], "--threads"),
        (&["--qtype", "int3"], "int3"),
        (&["--layout", "nowhere"], "known layouts"),
        (&["--max-shard-size", "5 parsecs"], "parsecs"),
        (&["--max-shard-size", "0"], "at least one byte"),
        (&["--min-snr", "20"], "--verify"),
        (&["--verify", "--asym"], "--asym"),
        (&["--verify", "--dry-run"], "--dry-run"),
        (&["--level", "quantum"], "portable"),
        (&["--bogus"], "--bogus"),
    ] {
        sandbox.refused(args, &[says]);
    }
    run(["--src", "x"]).expect(2).says(&["--dst"]);
    run(["--dst", "x"]).expect(2).says(&["--src"]);
    run(["--help"])
        .expect(0)
        .says(&["--fused-qkv", "--max-shard-size", "--min-snr"]);
    run(["--version"]).expect(0).says(&["spark-quant"]);
}
