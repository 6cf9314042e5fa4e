//! The three int4 layouts: one arithmetic under three packings, configs that readers accept, and what does not fit.

mod common;
mod packing;

use common::*;
use packing::Packed;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::fs;

const UP: &str = "model.layers.0.mlp.up_proj";
const CT: &str = "compressed-tensors";

/// Quantizes anew and gives every packed module.
fn modules(sandbox: &Sandbox, args: &[&str]) -> BTreeMap<String, Packed> {
    if sandbox.dst().exists() {
        fs::remove_dir_all(sandbox.dst()).unwrap();
    }
    sandbox.quantize(args);
    run(["--verify".as_ref(), "--dst".as_ref(), sandbox.dst().as_os_str()]).expect(0);
    sandbox.verify(&[]).expect(0);
    let (tensors, config) = (sandbox.output(), sandbox.config());
    let report = sandbox.report();
    let names = report["per_tensor"].as_array().unwrap().iter().map(|entry| {
        let name = entry["name"].as_str().unwrap();
        name.strip_suffix(".weight").unwrap_or(name).to_string()
    });
    let packed = |name: String| {
        let module = Packed::read(&tensors, &config["quantization_config"], &name);
        (name, module)
    };
    names.map(packed).collect()
}

#[test]
fn all_layouts_hold_the_same_codes_scales_and_zero_points() {
    let sandbox = Sandbox::tiny();
    for group in ["32", "64", "128"] {
        let args = ["--quantize-lm-head", "--group", group];
        let with = |more: &[&str]| modules(&sandbox, &[&args, more].concat());
        let asymmetric = with(&["--asym"]);
        assert!(asymmetric.contains_key("lm_head") && asymmetric.contains_key(UP));
        assert!(asymmetric
            .values()
            .any(|module| module.zeros.iter().any(|&zero| zero != 8)));
        assert_eq!(with(&["--layout", "awq"]), asymmetric);
        assert_eq!(with(&["--layout", CT, "--asym"]), asymmetric);
        let symmetric = with(&[]);
        assert!(symmetric
            .values()
            .all(|module| module.zeros.iter().all(|&zero| zero == 8)));
        assert_eq!(with(&["--layout", CT]), symmetric);
    }
}

/// Modules that are cut into several tiles, the last of them short.
#[test]
fn a_module_of_several_tiles_is_packed_as_one() {
    let tall = Spark {
        hidden: 256,
        inter: 16448,
        ..Spark::TINY
    };
    let sandbox = Sandbox::with(|src| tall.write(src));
    let with = |more: &[&str]| modules(&sandbox, &[&["--group", "64", "--threads", "2"], more].concat());
    let asymmetric = with(&["--asym"]);
    assert_eq!(asymmetric.len(), 7);
    assert_eq!(with(&["--layout", "awq"]), asymmetric);
    assert_eq!(with(&["--layout", CT, "--asym"]), asymmetric);
}

#[test]
fn every_layout_comes_back_dense() {
    let sandbox = Sandbox::tiny();
    for layout in [&["--layout", "awq"][..], &["--layout", CT, "--asym"], &["--layout", CT]] {
        let packed = modules(&sandbox, &[&["--group", "64"], layout].concat());
        let dense = sandbox.path("dense");
        let (src, dst) = (sandbox.dst(), dense.clone());
        let args: [&std::ffi::OsStr; 7] = [
            "--dequantize".as_ref(),
            "--src".as_ref(),
            src.as_ref(),
            "--dst".as_ref(),
            dst.as_ref(),
            "--dtype".as_ref(),
            "f32".as_ref(),
        ];
        run(args).expect(0);
        let decoded = read_tensors(&dense.join(WEIGHTS));
        let up = decoded
            .iter()
            .find(|tensor| tensor.name == format!("{UP}.weight"))
            .unwrap();
        let expected = Tensor::floats(&up.name, Dtype::F32, &up.shape, packed[UP].dense().into_iter());
        assert!(*up == expected, "{layout:?}");
        fs::remove_dir_all(dense).unwrap();
    }
}

/// `quantization_config` of the tiny checkpoint.
fn config(args: &[&str]) -> Value {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[&["--group", "64"], args].concat());
    assert_eq!(
        sandbox.config()["tie_word_embeddings"],
        !args.contains(&"--quantize-lm-head")
    );
    sandbox.config()["quantization_config"].clone()
}

fn gptq_config(more: Value) -> Value {
    let mut config = json!({
        "quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": false, "sym": true, "true_sequential": true,
        "checkpoint_format": "gptq", "lm_head": false,
    });
    config
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    config
}

fn ct_config(symmetric: bool, targets: Value, ignore: Value) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": targets,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 64,
                "dynamic": false, "observer": "minmax",
            },
            "input_activations": null, "output_activations": null,
        }},
        "ignore": ignore, "kv_cache_scheme": null,
    })
}

const GATE: &str = "model.layers.0.self_attn.g_proj";

#[test]
fn configs_of_whole_models() {
    assert_eq!(config(&[]), gptq_config(json!({})));
    let asym = json!({ "sym": false, "checkpoint_format": "gptq_v2" });
    assert_eq!(config(&["--asym"]), gptq_config(asym));
    assert_eq!(config(&["--quantize-lm-head"]), gptq_config(json!({ "lm_head": true })));
    let awq = |dense: Value| {
        json!({
            "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm",
            "modules_to_not_convert": dense,
        })
    };
    assert_eq!(config(&["--layout", "awq"]), awq(json!([GATE])));
    let mut with_head = awq(json!([GATE]));
    with_head["lm_head"] = json!(true);
    assert_eq!(config(&["--layout", "awq", "--quantize-lm-head"]), with_head);
    let ignore = json!([GATE, "lm_head"]);
    assert_eq!(
        config(&["--layout", CT]),
        ct_config(true, json!(["Linear"]), ignore.clone())
    );
    assert_eq!(
        config(&["--layout", CT, "--asym"]),
        ct_config(false, json!(["Linear"]), ignore)
    );
    // vLLM's head is no Linear: it is found by its name alone.
    let head = ct_config(true, json!(["Linear", "lm_head"]), json!([GATE]));
    assert_eq!(config(&["--layout", CT, "--quantize-lm-head"]), head);
}

#[test]
fn partly_dense_models_say_which_modules_are_dense() {
    let exclude = ["--exclude", "*.mlp.*", "--quantize-lm-head"];
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.{name}"));
    let found = config(&exclude);
    let attention = ["q_proj", "k_proj", "v_proj", "out_proj"].map(|name| format!("model.layers.0.self_attn.{name}"));
    let patterns = [GATE, &mlp[0], &mlp[1], &mlp[2]].map(|name| format!("-:^{}$", name.replace('.', r"\.")));
    let dynamic: serde_json::Map<_, _> = patterns.into_iter().map(|pattern| (pattern, json!({}))).collect();
    let named = found["modules_in_block_to_quantize"][0].as_array().unwrap();
    let mut quantized: Vec<&str> = named.iter().map(|name| name.as_str().unwrap()).collect();
    quantized.sort_unstable();
    let mut expected: Vec<&str> = attention.iter().map(String::as_str).chain(["lm_head"]).collect();
    expected.sort_unstable();
    assert_eq!(quantized, expected);
    let more = json!({
        "lm_head": true, "dynamic": dynamic, "modules_in_block_to_quantize": [named],
        "meta": {"quantizer": [concat!("spark-quant:", env!("CARGO_PKG_VERSION"))]},
    });
    assert_eq!(found, gptq_config(more));
    let dense = json!([GATE, mlp[0], mlp[1], mlp[2]]);
    let awq = config(&[&exclude[..], &["--layout", "awq"]].concat());
    assert_eq!(awq["modules_to_not_convert"], dense);
    let ct = config(&[&exclude[..], &["--layout", CT]].concat());
    assert_eq!(ct["config_groups"]["group_0"]["targets"], json!(["Linear", "lm_head"]));
    assert_eq!(ct["ignore"], dense);
}

/// A tiny checkpoint with Llama's names and a head of its own.
fn llama(folder: &std::path::Path) {
    let mut tensors = vec![
        Tensor::random("lm_head.weight", Dtype::BF16, &[256, 128]),
        Tensor::random("model.embed_tokens.weight", Dtype::BF16, &[256, 128]),
        Tensor::random("model.norm.weight", Dtype::BF16, &[128]),
    ];
    let mut add = |name: &str, shape: [usize; 2]| {
        tensors.push(Tensor::random(
            &format!("model.layers.0.{name}.weight"),
            Dtype::BF16,
            &shape,
        ));
    };
    add("self_attn.q_proj", [128, 128]);
    add("self_attn.k_proj", [64, 128]);
    add("self_attn.v_proj", [64, 128]);
    add("self_attn.o_proj", [128, 128]);
    add("mlp.gate_proj", [256, 128]);
    add("mlp.up_proj", [256, 128]);
    add("mlp.down_proj", [128, 256]);
    write_tensors(&folder.join(WEIGHTS), &tensors);
    let config = json!({ "model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": false });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn standard_decoders_go_through() {
    let sandbox = Sandbox::with(llama);
    assert_eq!(modules(&sandbox, &["--group", "64"]).len(), 7);
    assert_eq!(
        modules(&sandbox, &["--group", "64", "--quantize-lm-head", "--layout", "awq"]).len(),
        8
    );
    assert_eq!(
        sandbox.config()["quantization_config"]["modules_to_not_convert"],
        Value::Null
    );
    assert_eq!(modules(&sandbox, &["--layout", "awq"]).len(), 7);
    assert_eq!(
        sandbox.config()["quantization_config"]["modules_to_not_convert"],
        json!(["lm_head"])
    );
}

/// Reasons of the dense tensors whose names end so.
fn reasons(sandbox: &Sandbox, end: &str) -> Vec<String> {
    let report = sandbox.report();
    let dense = report["dense"].as_array().unwrap().iter();
    let named = dense.filter(|dense| dense["name"].as_str().unwrap().ends_with(end));
    named
        .map(|dense| dense["reason"].as_str().unwrap().to_string())
        .collect()
}

#[test]
fn what_vllm_cannot_load_stays_dense_where_the_layout_is_for_it() {
    // gate and up together have 400 rows, down 200 columns.
    let odd = Spark {
        inter: 200,
        vocab: 288,
        ..Spark::TINY
    };
    let args = ["--group", "8", "--quantize-lm-head"];
    for layout in [&["--layout", "awq"][..], &["--layout", CT], &["--layout", CT, "--asym"]] {
        let sandbox = Sandbox::with(|src| odd.write(src));
        let outcome = sandbox.quantize(&[&args, layout].concat());
        outcome.says(&[
            "the head stays dense: its vocabulary of 288 is not divisible by 64",
            "groups of 8",
        ]);
        let set = "out_features 400 of its fused set is not divisible by 32, which vLLM needs";
        assert_eq!(reasons(&sandbox, "up_proj.weight"), [set]);
        assert_eq!(reasons(&sandbox, "gate_proj.weight"), [set]);
        let down = "in_features 200 is not divisible by 32, which vLLM needs";
        assert_eq!(reasons(&sandbox, "down_proj.weight"), [down]);
        assert!(reasons(&sandbox, "out_proj.weight").is_empty());
        sandbox.verify(&[]).expect(0);
    }
    // Others load gptq, so there it is a warning.
    let sandbox = Sandbox::with(|src| odd.write(src));
    let outcome = sandbox.quantize(&args);
    outcome.says(&[
        "warning: vLLM cannot load model.layers.0.mlp.gate_proj and 3 more: out_features 400 of its fused set",
    ]);
    assert!(reasons(&sandbox, "mlp.up_proj.weight").is_empty() && sandbox.output().contains_key("lm_head.qweight"));
}

#[test]
fn a_member_of_a_fused_set_must_fit_too() {
    // q, k and v have 24, 4 and 4 rows: 32 together.
    let odd = Spark {
        heads: 6,
        head_dim: 4,
        ..Spark::TINY
    };
    let sandbox = Sandbox::with(|src| odd.write(src));
    sandbox.quantize(&["--group", "8", "--layout", CT]);
    let reason = reasons(&sandbox, "q_k_v_proj.weight");
    assert!(
        reason.len() == 1 && reason[0].contains("out_features 4 is not divisible by 8"),
        "{reason:?}"
    );
}

#[test]
fn warnings_name_the_reader_and_the_way_out() {
    let warned = |args: &[&str]| {
        let sandbox = Sandbox::tiny();
        let outcome = sandbox.run(&[args, &["--dry-run"]].concat()).expect(0);
        outcome.stderr
    };
    assert_eq!(warned(&[]), "");
    assert_eq!(warned(&["--layout", "awq", "--asym"]), "");
    assert_eq!(warned(&["--layout", CT, "--asym", "--quantize-lm-head"]), "");
    let asym = warned(&["--asym"]);
    assert!(
        asym.contains("vLLM refuses asymmetric gptq") && asym.contains("--layout awq"),
        "{asym}"
    );
    let head = warned(&["--quantize-lm-head"]);
    assert!(head.contains("transformers ignores a quantized lm_head"), "{head}");
    assert!(warned(&["--quantize-lm-head", "--layout", "awq"]).contains("transformers"));
    let embedding = warned(&["--quantize-embedding"]);
    assert!(
        embedding.contains("vLLM cannot load a quantized embedding"),
        "{embedding}"
    );
    let group = warned(&["--group", "16"]);
    assert!(
        group.contains("vLLM does not load groups of 16") && group.contains("--group 32, 64 or 128"),
        "{group}"
    );
    assert_eq!(group.lines().count(), 1);
}

/// A dense name that is a part of a quantized one makes vLLM take both for dense.
#[test]
fn awq_warns_of_names_that_hide_others() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            tensors.push(Tensor::random("model.layers.0.mlp.gate.weight", Dtype::BF16, &[8, 128]));
        });
    });
    let outcome = sandbox.run(&["--dry-run", "--layout", "awq"]).expect(0);
    outcome.says(&["model.layers.0.mlp.gate makes it take model.layers.0.mlp.gate_proj for dense"]);
    assert_eq!(sandbox.run(&["--dry-run", "--layout", CT]).expect(0).stderr, "");
    // And a gate that readers do not know of is told to them.
    sandbox.quantize(&[]);
    let config = sandbox.config();
    let dynamic = config["quantization_config"]["dynamic"].as_object().unwrap();
    assert!(dynamic.contains_key(r"-:^model\.layers\.0\.mlp\.gate$"));
}

#[test]
fn verify_finds_a_flipped_bit_in_every_tensor_of_every_layout() {
    let layouts = [
        (&["--layout", "awq"][..], &["qweight", "qzeros", "scales"][..]),
        (&["--layout", CT], &["weight_packed", "weight_scale", "weight_shape"]),
        (
            &["--layout", CT, "--asym"],
            &["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"],
        ),
    ];
    for (args, suffixes) in layouts {
        let sandbox = Sandbox::tiny();
        sandbox.quantize(&[&["--group", "64"], args].concat());
        let file = sandbox.dst().join(WEIGHTS);
        let written = read_tensors(&file);
        for suffix in suffixes {
            let mut tensors = written.clone();
            let name = format!("{UP}.{suffix}");
            named(&mut tensors, &name).bytes[9] ^= 1;
            write_tensors(&file, &tensors);
            sandbox.verify(&[]).expect(1).says(&["FAULT", &name]);
        }
        write_tensors(&file, &written);
        sandbox.verify(&[]).expect(0);
        for suffix in suffixes {
            let mut tensors = written.clone();
            tensors.retain(|tensor| tensor.name != format!("{UP}.{suffix}"));
            write_tensors(&file, &tensors);
            fs::rename(sandbox.dst().join(REPORT), sandbox.path(REPORT)).unwrap();
            sandbox
                .verify(&[])
                .expect(1)
                .says(&["FAULT", &format!("{UP}.{suffix}"), "missing"]);
            fs::rename(sandbox.path(REPORT), sandbox.dst().join(REPORT)).unwrap();
        }
    }
}

/// Without the report, so that structure and config alone must show it.
#[test]
fn verify_finds_a_config_that_says_otherwise() {
    let faulty = |args: &[&str], key: &str, value: Value, says: &str| {
        let sandbox = Sandbox::tiny();
        sandbox.quantize(&[&["--group", "64"], args].concat());
        let change = |config: &mut Value| *config.pointer_mut(&format!("/quantization_config{key}")).unwrap() = value;
        edit_json(&sandbox.dst().join("config.json"), change);
        sandbox
            .verify(&[])
            .expect(1)
            .says(&["FAULT config.json", key.rsplit('/').next().unwrap()]);
        fs::remove_file(sandbox.dst().join(REPORT)).unwrap();
        let outcome = sandbox.verify(&[]);
        assert!(outcome.code != Some(0), "{}", outcome.stdout);
        outcome.says(&[says]);
    };
    faulty(&["--layout", "awq"], "/group_size", json!(32), "qzeros");
    faulty(
        &["--layout", "awq"],
        "/zero_point",
        json!(false),
        "zero_point is not true",
    );
    let weights = "/config_groups/group_0/weights";
    faulty(
        &["--layout", CT],
        &format!("{weights}/group_size"),
        json!(32),
        "weight_scale",
    );
    faulty(
        &["--layout", CT],
        &format!("{weights}/symmetric"),
        json!(false),
        "weight_zero_point",
    );
    faulty(
        &["--layout", CT, "--asym"],
        &format!("{weights}/symmetric"),
        json!(true),
        "weight_zero_point",
    );
    faulty(&["--asym"], "/sym", json!(true), "qzeros");
}
