//! The golden cases: what the PyTorch reference wrote for 4 checkpoints in 17 variants, made again from the command line.
//!
//! `tests/data/gptq/expected.json` keeps of each expected `model.safetensors` its header as text, its length, and the
//! XXH3-128 of the whole file and of each tensor; config.json and the report are kept whole.

mod common;

use common::*;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[derive(Deserialize)]
struct Case {
    source: String,
    variant: String,
    args: Vec<String>,
    file: ExpectedFile,
    config: Value,
    report: Value,
}

#[derive(Deserialize)]
struct ExpectedFile {
    bytes: usize,
    xxh3_128: String,
    header: String,
    tensors: BTreeMap<String, String>,
}

/// Readers of "gptq" add 1 to the stored zero points, which the reference's asymmetric files do not need.
fn right_format(config: &mut Value) {
    let config = &mut config["quantization_config"];
    if config["sym"] == false {
        config["checkpoint_format"] = "gptq_v2".into();
    }
}

fn check_file(tag: &str, path: &Path, expected: &ExpectedFile) {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + len]).unwrap();
    assert_eq!(header, expected.header, "{tag}: the header");
    for tensor in read_tensors(path) {
        let (is, want) = (hash(&tensor.bytes), &expected.tensors[&tensor.name]);
        assert_eq!(&is, want, "{tag}: {} is the first tensor that differs", tensor.name);
    }
    assert_eq!(bytes.len(), expected.bytes, "{tag}: the length");
    assert_eq!(hash(&bytes), expected.xxh3_128, "{tag}: the whole file");
}

fn check_report(tag: &str, report: &Value, expected: &Value) {
    for key in [
        "group",
        "tensors",
        "bits_per_weight",
        "quantized_embedding",
        "quantized_lm_head",
    ] {
        assert_eq!(
            report[key].to_string(),
            expected[key].to_string(),
            "{tag}: {key} of the report"
        );
    }
    let close = |what: &str, is: &Value, want: &Value| {
        let off = (is.as_f64().unwrap() - want.as_f64().unwrap()).abs();
        assert!(off <= 0.05, "{tag}: {what} is {is} dB, the reference has {want}");
    };
    for key in ["snr_db_mean", "snr_db_min"] {
        close(key, &report[key], &expected[key]);
    }
    let (is, want) = (
        &report["per_tensor"].as_array().unwrap(),
        &expected["per_tensor"].as_array().unwrap(),
    );
    assert_eq!(is.len(), want.len(), "{tag}");
    for (is, want) in is.iter().zip(want.iter()) {
        assert_eq!(is["name"], want["name"], "{tag}: the order of per_tensor");
        close(&is["name"].to_string(), &is["snr_db"], &want["snr_db"]);
    }
}

fn keys(value: &Value) -> Vec<&String> {
    value.as_object().map(Map::keys).into_iter().flatten().collect()
}

fn check(case: &mut Case) {
    let tag = format!("{}/{}", case.source, case.variant);
    let sandbox = Sandbox::empty();
    let (src, dst) = (data().join("gptq").join(&case.source).join("src"), sandbox.dst());
    let mut args = vec!["--src", src.to_str().unwrap(), "--dst", dst.to_str().unwrap()];
    args.extend(case.args.iter().map(String::as_str));
    run(&args).expect(0);
    check_file(&tag, &dst.join(WEIGHTS), &case.file);

    right_format(&mut case.config);
    assert_eq!(sandbox.config(), case.config, "{tag}: config.json");
    assert_eq!(
        keys(&sandbox.config()),
        keys(&case.config),
        "{tag}: the order in config.json"
    );
    check_report(&tag, &sandbox.report(), &case.report);

    let mut written: Vec<_> = tree(&dst).into_keys().map(|path| path.display().to_string()).collect();
    written.retain(|name| name != WEIGHTS && name != REPORT);
    let mut sides: Vec<_> = tree(&src).into_keys().map(|path| path.display().to_string()).collect();
    sides.retain(|name| !name.contains(".safetensors"));
    assert_eq!(written, sides, "{tag}: the other files");

    for against in [&["--src", src.to_str().unwrap()][..], &[]] {
        run(["--verify", "--dst", dst.to_str().unwrap()].iter().chain(against)).expect(0);
    }
}

fn check_all(source: &str, count: usize) {
    let cases = fs::read(data().join("gptq/expected.json")).unwrap();
    let mut cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
    cases.retain(|case| case.source == source);
    assert_eq!(cases.len(), count);
    cases.iter_mut().for_each(check);
}

#[test]
fn bf16_in_three_shards() {
    check_all("bf16-sharded", 5);
}

#[test]
fn f16_in_one_file() {
    check_all("f16-single", 5);
}

#[test]
fn f32_in_one_file() {
    check_all("f32-single", 5);
}

/// Groups whose weights all have one sign: the range is extended to 0.
#[test]
fn groups_of_one_sign() {
    check_all("onesided", 2);
}
