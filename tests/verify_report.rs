//! `--verify` on what lies around the weights: every field of the report, `__metadata__`, config.json, the index and the
//! sidecars, each fault with exit code 1 and its subject named.

mod common;

use common::subject::*;
use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;
use std::process::Command;

const ATTENTION: &str = "model.layers.0.self_attn";
const UP: &str = "model.layers.0.mlp.up_proj";
const CONFIG: &str = "config.json";

/// Changes the report's entry of one weight.
fn entry(dst: &Path, name: &str, change: impl FnOnce(&mut Value)) {
    report(dst, |report| {
        let all = report["per_tensor"].as_array_mut().unwrap();
        change(all.iter_mut().find(|tensor| tensor["name"] == name).unwrap());
    });
}

fn metadata(dst: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    edit_header(&dst.join(file), |header| {
        change(header.entry("__metadata__").or_insert(json!({})))
    });
}

fn remove(value: &mut Value, key: &str) {
    assert!(value.as_object_mut().unwrap().shift_remove(key).is_some(), "{key}");
}

fn make_fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// The tiny checkpoint after `write`, quantized.
fn subject_of(write: impl FnOnce(&Path), args: &[&str]) -> Subject {
    let sandbox = Sandbox::with(write);
    sandbox.quantize(args);
    let dst = sandbox.path("spoilt");
    let subject = Subject { sandbox, dst };
    subject.verify(true, |_| {}).expect(0);
    subject.verify(false, |_| {}).expect(0);
    subject
}

#[test]
fn every_field_of_a_weights_entry() {
    let subject = Subject::new(&[]);
    let up = format!("{UP}.weight");
    for (key, value) in [
        ("source", json!("model.norm.weight")),
        ("source", json!(UP)),
        ("source", json!("model.layers.0.self_attn.q_k_v_proj.weight")),
        ("first_row", json!(64)),
        ("dtype", json!("float32")),
        ("dtype", json!("int8")),
        ("bytes_in", json!(1)),
        ("bytes_out", json!(u64::MAX)),
    ] {
        let change = |dst: &Path| entry(dst, &up, |tensor| tensor[key] = value.clone());
        subject.faulty_anyhow(&[&up], change);
    }
    subject.faulty_anyhow(&[UP, "name"], |dst| {
        entry(dst, &up, |tensor| tensor["name"] = UP.into())
    });
    subject.faulty_anyhow(&[&up, "twice"], |dst| {
        report(dst, |report| {
            let all = report["per_tensor"].as_array_mut().unwrap();
            let again = all.iter().find(|tensor| tensor["name"] == *up).unwrap().clone();
            all.push(again);
        });
    });
    subject.faulty_anyhow(&[REPORT, "snr_db"], |dst| {
        entry(dst, &up, |tensor| remove(tensor, "snr_db"))
    });
    // As wide, so that only the source can tell.
    subject.faulty(true, &[&up, "dtype"], |dst| {
        entry(dst, &up, |tensor| tensor["dtype"] = "float16".into())
    });
}

#[test]
fn the_parts_of_a_fused_projection_and_the_tied_head() {
    let subject = Subject::new(&[]);
    for part in ["q_proj", "k_proj", "v_proj"] {
        let name = format!("{ATTENTION}.{part}.weight");
        for (key, value) in [
            ("source", json!(name)),
            ("source", json!("model.layers.1.self_attn.q_k_v_proj.weight")),
            ("source", json!("model.layers.0.self_attn.q_k_v_proj")),
            ("first_row", json!(1)),
            ("dtype", json!("float16")),
        ] {
            let change = |dst: &Path| entry(dst, &name, |tensor| tensor[key] = value.clone());
            subject.faulty_anyhow(&[&name], change);
        }
        // All three alike: one part of a checkpoint that was never fused, for all that is stored.
        subject.faulty(true, &[&name, "source"], |dst| {
            for part in ["q_proj", "k_proj", "v_proj"] {
                let name = format!("{ATTENTION}.{part}.weight");
                entry(dst, &name, |tensor| {
                    tensor["first_row"] = 0.into();
                    tensor["source"] = name.as_str().into();
                });
            }
        });
    }
    for source in ["model.embed_tokens.weight", "model.norm.weight"] {
        subject.faulty_anyhow(&["lm_head", "source"], |dst| {
            entry(dst, "lm_head", |tensor| tensor["source"] = source.into());
        });
    }
    // A head of its own would count as weights of its own.
    for (with_source, says) in [(false, [REPORT, "coverage"]), (true, ["lm_head", "source"])] {
        subject.faulty(with_source, &says, |dst| {
            entry(dst, "lm_head", |tensor| tensor["source"] = "lm_head.weight".into());
        });
    }
}

#[test]
fn totals_tool_and_the_list_of_dense_tensors() {
    for args in [&[][..], &["--layout", "awq"], &["--layout", "compressed-tensors"]] {
        let subject = Subject::new(args);
        for (key, value) in [
            ("bits_per_weight", json!(4.0)),
            ("coverage", json!(0.5)),
            ("coverage", json!(-1)),
            ("quantized_embedding", json!(true)),
            ("tool", json!("another 1.0")),
        ] {
            subject.faulty_anyhow(&[REPORT, key], |dst| report(dst, |report| report[key] = value.clone()));
        }
    }
    let subject = Subject::new(&[]);
    let dense = |dst: &Path, change: &dyn Fn(&mut Vec<Value>)| {
        report(dst, |report| change(report["dense"].as_array_mut().unwrap()));
    };
    subject.faulty_anyhow(&["model.norm.weight", "list of dense"], |dst| {
        dense(dst, &|list| list.retain(|entry| entry["name"] != "model.norm.weight"));
    });
    for name in ["ghost.weight", "model.norm.weight", &format!("{UP}.weight")] {
        subject.faulty_anyhow(&[name, "list of dense"], |dst| {
            dense(dst, &|list| list.push(json!({ "name": name, "reason": "" })));
        });
    }
}

#[test]
fn uintx_reports_and_metadata() {
    let lin = "a.lin.weight";
    let write = |src: &Path| {
        let tensors = [
            Tensor::random("norm.weight", Dtype::F32, &[128]),
            Tensor::random(lin, Dtype::F32, &[16, 128]),
            Tensor::random("b.lin.weight", Dtype::BF16, &[16, 128]),
        ];
        write_tensors(&src.join(WEIGHTS), &tensors);
    };
    let subject = subject_of(write, &["--qtype", "uint3"]);
    for (key, value) in [("dtype", json!("bfloat16")), ("bytes_in", json!(2 * 16 * 128))] {
        subject.faulty_anyhow(&["a.lin"], |dst| entry(dst, lin, |tensor| tensor[key] = value.clone()));
    }
    subject.faulty_anyhow(&[REPORT, "bits_per_weight"], |dst| {
        report(dst, |report| report["bits_per_weight"] = 3.5.into())
    });
    let quantization = |dst: &Path, change: &dyn Fn(&mut Value)| {
        metadata(dst, WEIGHTS, |metadata| {
            let mut value = serde_json::from_str(metadata["aitk_quantization"].as_str().unwrap()).unwrap();
            change(&mut value);
            metadata["aitk_quantization"] = value.to_string().into();
        });
    };
    subject.faulty_anyhow(&[WEIGHTS, "aitk_quantization.layers_only is true"], |dst| {
        quantization(dst, &|value| value["layers_only"] = true.into())
    });
    subject.faulty_anyhow(&[WEIGHTS, "layers_only is absent"], |dst| {
        quantization(dst, &|value| remove(value, "layers_only"))
    });
    subject.faulty_anyhow(&[WEIGHTS, "a.lin.attrs"], |dst| {
        quantization(dst, &|value| value["modules"]["a.lin"]["attrs"] = json!({ "x": 1 }))
    });
    subject.faulty_anyhow(&[WEIGHTS, "b.lin.attrs is absent"], |dst| {
        quantization(dst, &|value| remove(&mut value["modules"]["b.lin"], "attrs"))
    });
    // No source config: nothing but what quantizing adds.
    subject.faulty(true, &[CONFIG, "hidden_size is 7"], |dst| {
        config(dst, |config| config["hidden_size"] = 7.into())
    });
}

#[test]
fn sources_of_mixed_dtypes_and_metadata_pass() {
    let write = |src: &Path| {
        Spark::TINY.write_shards(src, 3);
        let head = Tensor::random("lm_head.weight", Dtype::F16, &[256, 128]);
        write_tensors(&src.join("head.safetensors"), &[head]);
        edit_json(&src.join(INDEX), |index| {
            index["weight_map"]["lm_head.weight"] = "head.safetensors".into();
            remove(index, "metadata");
        });
        metadata(src, &shard_name(2, 3), |metadata| {
            *metadata = json!({ "author": "kept", "format": "tf" })
        });
    };
    for args in [
        &["--quantize-lm-head"][..],
        &["--quantize-embedding"],
        &["--qtype", "uint4"],
    ] {
        subject_of(write, &[args, &["--max-shard-size", "90KB"]].concat());
    }
}

#[test]
fn file_metadata() {
    let author = |src: &Path| {
        Spark::TINY.write(src);
        metadata(src, WEIGHTS, |metadata| *metadata = json!({ "author": "kept" }));
    };
    let subject = subject_of(author, &["--quantize-lm-head"]);
    subject.faulty_anyhow(&[WEIGHTS, "format"], |dst| {
        metadata(dst, WEIGHTS, |metadata| remove(metadata, "format"))
    });
    subject.faulty_anyhow(&[WEIGHTS, "format"], |dst| {
        edit_header(&dst.join(WEIGHTS), |header| drop(header.shift_remove("__metadata__")));
    });
    for (key, value) in [("format", "tf"), ("author", "another"), ("more", "x")] {
        subject.faulty(true, &[WEIGHTS, key, value], |dst| {
            metadata(dst, WEIGHTS, |metadata| metadata[key] = value.into());
        });
    }
    subject.faulty(true, &[WEIGHTS, "author", "kept"], |dst| {
        metadata(dst, WEIGHTS, |metadata| remove(metadata, "author"));
    });
    // Nothing vouches for the file then, so it is worth a note alone.
    let without_report = |dst: &Path| {
        fs::remove_file(dst.join(REPORT)).unwrap();
        metadata(dst, WEIGHTS, |metadata| metadata["more"] = "x".into());
    };
    let outcome = subject.verify(true, without_report).expect(0);
    outcome.says(&["note: model.safetensors: more of its __metadata__"]);
}

#[test]
fn an_index_without_its_size() {
    let subject = Subject::new(&["--max-shard-size", "60KB"]);
    subject.faulty_anyhow(&[INDEX, "total_size"], |dst| {
        edit_json(&dst.join(INDEX), |index| remove(&mut index["metadata"], "total_size"));
    });
    subject.faulty_anyhow(&[INDEX, "total_size"], |dst| {
        edit_json(&dst.join(INDEX), |index| remove(index, "metadata"));
    });
}

#[test]
fn config_beside_the_quantization() {
    let write = |src: &Path| {
        Spark::TINY.write(src);
        edit_json(&src.join(CONFIG), |config| {
            config["rope"] = json!({ "type": "yarn", "factors": [1.5, 2.0] });
        });
    };
    for (args, tied) in [(&[][..], true), (&["--quantize-lm-head"], false)] {
        let subject = subject_of(write, args);
        let faulty = |says: &[&str], change: &dyn Fn(&mut Value)| {
            subject.faulty(true, &[&["FAULT config.json"], says].concat(), |dst| {
                config(dst, change)
            });
        };
        faulty(&["hidden_size is 64", "be 128"], &|config| {
            config["hidden_size"] = 64.into()
        });
        faulty(&["rope_theta is absent", "be 1e"], &|config| {
            remove(config, "rope_theta")
        });
        faulty(&["more is null", "be absent"], &|config| config["more"] = Value::Null);
        faulty(&["rope.type is \"linear\"", "be \"yarn\""], &|config| {
            config["rope"]["type"] = "linear".into()
        });
        faulty(&["rope.factors is [1.5]"], &|config| {
            config["rope"]["factors"] = json!([1.5])
        });
        faulty(&["a_long_number", "24", "23"], &|config| {
            config["a_long_number"] = serde_json::from_str("12345678901234567890124").unwrap();
        });
        faulty(&["tie_word_embeddings"], &|config| {
            config["tie_word_embeddings"] = (!tied).into()
        });
        faulty(&["tie_word_embeddings is absent"], &|config| {
            remove(config, "tie_word_embeddings")
        });
        // Another writer of the same number.
        let outcome = subject.verify(true, |dst| {
            config(dst, |config| {
                config["rope_theta"] = serde_json::from_str("1000000.0").unwrap()
            });
        });
        outcome.expect(0);
    }
    // A missing key ties the head, source or not.
    let subject = Subject::new(&[]);
    subject.faulty_anyhow(&[CONFIG, "tie_word_embeddings is absent"], |dst| {
        config(dst, |config| remove(config, "tie_word_embeddings"));
    });
}

#[test]
fn a_head_that_a_nested_config_ties() {
    for above in [None, Some(true)] {
        let write = |src: &Path| {
            Spark::TINY.write(src);
            edit_json(&src.join(CONFIG), |config| {
                let text = config.clone();
                *config = json!({ "model_type": "spark_vl", "text_config": text });
                if let Some(above) = above {
                    config["tie_word_embeddings"] = above.into();
                }
            });
        };
        let subject = subject_of(write, &["--quantize-lm-head"]);
        let written = subject.sandbox.config();
        assert_eq!(written["tie_word_embeddings"], false);
        assert_eq!(written["text_config"]["tie_word_embeddings"], false);
        subject.faulty_anyhow(&[CONFIG, "text_config.tie_word_embeddings is true"], |dst| {
            config(dst, |config| config["text_config"]["tie_word_embeddings"] = true.into());
        });
        subject.faulty(true, &[CONFIG, "text_config.tie_word_embeddings is absent"], |dst| {
            config(dst, |config| remove(&mut config["text_config"], "tie_word_embeddings"));
        });
        subject.faulty_anyhow(&[CONFIG, "tie_word_embeddings is"], |dst| {
            config(dst, |config| remove(config, "tie_word_embeddings"));
        });
        // Where the head stays as it was, so does the config.
        let subject = subject_of(write, &[]);
        assert_eq!(subject.sandbox.config()["text_config"]["tie_word_embeddings"], true);
    }
}

#[test]
fn sidecars() {
    let long = |src: &Path| {
        Spark::TINY.write(src);
        fs::write(src.join("long.txt"), vec![7; 1_500_000]).unwrap();
    };
    let subject = subject_of(long, &[]);
    for name in [
        "tokenizer.json",
        "modeling_spark.py",
        "assets/deep/note.txt",
        "long.txt",
    ] {
        subject.faulty(true, &[name, "missing"], |dst| fs::remove_file(dst.join(name)).unwrap());
        subject.faulty(true, &[name, "a folder"], |dst| {
            fs::remove_file(dst.join(name)).unwrap();
            fs::create_dir(dst.join(name)).unwrap();
        });
        subject.faulty(true, &[name, "bytes"], |dst| {
            let bytes = fs::read(dst.join(name)).unwrap();
            fs::write(dst.join(name), &bytes[1..]).unwrap();
        });
        subject.faulty(true, &[name, "differs from the source"], |dst| {
            let mut bytes = fs::read(dst.join(name)).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(dst.join(name), bytes).unwrap();
        });
    }
    subject.faulty(true, &["long.txt", "first at byte 1000000 of 1500000"], |dst| {
        let mut bytes = vec![7; 1_500_000];
        bytes[1_000_000] = 8;
        fs::write(dst.join("long.txt"), bytes).unwrap();
    });
    subject
        .verify(true, |dst| fs::write(dst.join("README.md"), "more\n").unwrap())
        .expect(0);
}

#[test]
fn a_report_that_is_no_regular_file() {
    type Make = fn(&Path);
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let path = sandbox.dst().join(REPORT);
    for (kind, make) in [
        ("a pipe", make_fifo as Make),
        ("a folder", |path| fs::create_dir(path).unwrap()),
    ] {
        let _ = fs::remove_file(&path);
        make(&path);
        sandbox.verify(&[]).expect(1).says(&["FAULT", REPORT, kind]);
        let (src, dst) = (sandbox.dst(), sandbox.path("dense"));
        let paths = ["--src".as_ref(), src.as_os_str(), "--dst".as_ref(), dst.as_os_str()];
        let outcome = run(paths.into_iter().chain(["--dequantize".as_ref()]));
        outcome.expect(2).says(&[REPORT, kind]);
    }
}

#[test]
fn a_file_as_the_destination() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let file = sandbox.dst().join(WEIGHTS);
    let outcome = run(["--verify".as_ref(), "--dst".as_ref(), file.as_os_str()]).expect(2);
    outcome.says(&[WEIGHTS, "--dst is a folder"]);
    assert_eq!(outcome.stdout, "");
}

#[test]
fn notes_are_seen_where_all_else_is_quiet() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    fs::remove_file(sandbox.dst().join(REPORT)).unwrap();
    let outcome = sandbox.verify(&["--quiet"]).expect(0);
    assert_eq!(outcome.stdout, "");
    assert!(
        outcome.stderr.starts_with("note: no quantization_report.json"),
        "{}",
        outcome.stderr
    );
    assert_eq!(sandbox.verify(&[]).expect(0).stderr, "");
    assert_eq!(sandbox.verify(&["--quiet", "--json"]).expect(0).stderr, "");
}
