//! Options that belong to one mode, and inputs that another tool's habits make easy to mistake.

mod common;

use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};

#[test]
fn options_of_another_mode_are_refused_rather_than_ignored() {
    let sandbox = Sandbox::tiny();
    sandbox.refused(&["--min-snr", "5"], &["--min-snr", "--verify"]);
    sandbox.refused(&["--dtype", "f32"], &["--dtype", "--dequantize"]);
    sandbox.refused(&["--min-snr", "nan"], &["finite"]);
    sandbox.quantize(&[]).expect(0);
    for option in [
        ["--qtype", "uint4"],
        ["--fused-qkv", "keep"],
        ["--max-shard-size", "1GB"],
    ] {
        sandbox.verify(&option).expect(2).says(&[option[0]]);
    }
    sandbox.verify(&["--min-snr", "inf"]).expect(2).says(&["finite"]);
}

/// The dtype of packed scales is read off the packed modules, not off whatever else is called `scales`.
#[test]
fn a_tensor_called_scales_does_not_mislead_verify() {
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            tensors.push(Tensor::random("model.layers.0.rope.scales", Dtype::BF16, &[4]));
        });
    });
    for args in [&["--group", "32"][..], &["--group", "32", "--layout", "awq"]] {
        let mut all = args.to_vec();
        all.push("--overwrite");
        let overwrite = sandbox.dst().exists();
        sandbox.quantize(if overwrite { &all } else { args }).expect(0);
        sandbox.verify(&[]).expect(0);
    }
}

#[test]
fn a_null_quantization_config_is_none() {
    let sandbox = Sandbox::tiny();
    let config = sandbox.src().join("config.json");
    edit_json(&config, |config| config["quantization_config"] = Value::Null);
    sandbox.quantize(&[]).expect(0);
    assert_eq!(sandbox.config()["quantization_config"]["quant_method"], "gptq");
    sandbox.verify(&[]).expect(0);
}

#[test]
fn a_nested_quantization_config_is_seen() {
    let sandbox = Sandbox::tiny();
    let config = sandbox.src().join("config.json");
    edit_json(&config, |config| {
        config["text_config"] = json!({ "quantization_config": { "quant_method": "fp8" } });
    });
    sandbox.refused(&[], &["already quantized", "quantization_config", "--dequantize"]);
}

/// A fused bias is cut and joined whatever its other dimensions.
#[test]
fn a_fused_bias_of_two_dimensions_comes_back_whole() {
    const BIAS: &str = "model.layers.0.self_attn.q_k_v_proj.bias";
    let sandbox = Sandbox::with(|src| {
        Spark::TINY.write_with(src, |tensors| {
            let rows = named(tensors, "model.layers.0.self_attn.q_k_v_proj.weight").shape[0];
            tensors.retain(|tensor| tensor.name != BIAS);
            tensors.push(Tensor::random(BIAS, Dtype::BF16, &[rows, 1]));
        });
    });
    sandbox.quantize(&[]).expect(0);
    let dense = sandbox.path("dense");
    run([
        "--dequantize".as_ref(),
        "--src".as_ref(),
        sandbox.dst().as_os_str(),
        "--dst".as_ref(),
        dense.as_os_str(),
    ])
    .expect(0);
    let bias = |path: &std::path::Path| {
        let mut tensors = read_tensors(&path.join("model.safetensors"));
        let bias = named(&mut tensors, BIAS);
        (bias.shape.clone(), bias.bytes.clone())
    };
    assert_eq!(bias(&dense), bias(&sandbox.src()));
}
