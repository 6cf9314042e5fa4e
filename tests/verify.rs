//! `--verify`: passes on what was written, never writes, and finds each fault with exit code 1 and the tensor's name;
//! also where the report was mended to hide it.

mod common;

use common::subject::*;
use common::*;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;

const UP: &str = "model.layers.0.mlp.up_proj";
const SUFFIXES: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// Changes a key of `quantization_config`, in the report's copy too.
fn config_everywhere(dst: &Path, key: &str, value: Value) {
    config(dst, |config| config["quantization_config"][key] = value.clone());
    report(dst, |report| report["quantization_config"][key] = value);
}

fn each_layout(check: impl Fn(&Subject)) {
    for args in [&[][..], &["--asym"]] {
        check(&Subject::new(args));
    }
}

#[test]
fn outputs_pass() {
    each_layout(|subject| {
        subject
            .verify(true, |_| {})
            .expect(0)
            .says(&["verified", "8 modules", "SNR recomputed"]);
        subject.verify(false, |_| {}).expect(0).says(&["verified"]);
        let no_report = subject
            .verify(true, |dst| fs::remove_file(dst.join(REPORT)).unwrap())
            .expect(0);
        no_report.says(&["note: no quantization_report.json"]);
    });
}

#[test]
fn one_flipped_bit_in_any_packed_tensor() {
    each_layout(|subject| {
        for module in [UP, "model.layers.0.self_attn.k_proj", "lm_head"] {
            for suffix in SUFFIXES {
                let name = format!("{module}.{suffix}");
                for (part, bit) in [(0, 0), (1, 3), (2, 6)] {
                    let flip = |tensor: &mut Tensor| {
                        let at = (tensor.bytes.len() - 1) * part / 2;
                        tensor.bytes[at] ^= 1 << bit;
                    };
                    subject.faulty_anyhow(&[&name], |dst| edit(&name, flip)(dst));
                }
            }
        }
    });
}

/// With the hash mended, only the decoded weights can tell.
#[test]
fn wrong_bytes_with_a_mended_hash() {
    each_layout(|subject| {
        type Change = fn(&mut Tensor);
        let cases: [(&str, Change); 2] = [
            ("qweight", |tensor| tensor.bytes.rotate_right(4)),
            ("scales", |tensor| tensor.bytes.rotate_right(2)),
        ];
        for (suffix, change) in cases {
            subject.faulty(true, &[UP, "SNR"], |dst| {
                edit(&format!("{UP}.{suffix}"), change)(dst);
                mend_hashes(dst);
            });
        }
        subject.faulty(false, &[&format!("{UP}.g_idx")], |dst| {
            edit(&format!("{UP}.g_idx"), |tensor| tensor.bytes.rotate_right(4))(dst);
            mend_hashes(dst);
        });
        for value in [f32::NAN, f32::INFINITY, -0.01] {
            subject.faulty(false, &[&format!("{UP}.scales")], |dst| {
                edit(&format!("{UP}.scales"), |tensor| tensor.set(7, value))(dst);
                mend_hashes(dst);
            });
        }
    });
}

#[test]
fn missing_and_additional_tensors() {
    each_layout(|subject| {
        for suffix in SUFFIXES {
            let name = format!("{UP}.{suffix}");
            subject.faulty_anyhow(&[&name], |dst| {
                edit_tensors(dst, |t| t.retain(|tensor| tensor.name != name))
            });
        }
        let gone = |prefix: &'static str| {
            move |dst: &Path| edit_tensors(dst, |t| t.retain(|tensor| !tensor.name.starts_with(prefix)))
        };
        subject.faulty_anyhow(&[UP], gone("model.layers.0.mlp.up_proj."));
        for dense in [
            "model.norm.weight",
            "model.layers.0.self_attn.k_proj.bias",
            "model.position_ids",
        ] {
            subject.faulty_anyhow(&[dense], gone(dense));
        }
        let add = |name: &'static str, shape: &'static [usize]| {
            move |dst: &Path| edit_tensors(dst, |tensors| tensors.push(Tensor::random(name, Dtype::BF16, shape)))
        };
        subject.faulty_anyhow(&["ghost.weight"], add("ghost.weight", &[2]));
        subject.faulty_anyhow(&[UP, "beside"], add("model.layers.0.mlp.up_proj.weight", &[256, 128]));
        // Without a report, the source tells.
        subject.faulty(true, &["model.norm.weight"], |dst| {
            gone("model.norm.weight")(dst);
            fs::remove_file(dst.join(REPORT)).unwrap();
        });
    });
}

#[test]
fn wrong_dtypes_and_shapes() {
    each_layout(|subject| {
        let name = format!("{UP}.qweight");
        subject.faulty(false, &[UP], |dst| edit(&name, |tensor| tensor.shape.reverse())(dst));
        subject.faulty(false, &[&name], |dst| {
            edit(&name, |tensor| tensor.dtype = Dtype::F32)(dst)
        });
        let name = format!("{UP}.scales");
        subject.faulty(false, &[&name], |dst| {
            edit(&name, |tensor| tensor.dtype = Dtype::BF16)(dst)
        });
        subject.faulty(false, &[&name], |dst| edit(&name, |tensor| tensor.shape.reverse())(dst));
    });
}

#[test]
fn wrong_zero_points() {
    // Symmetric: nibble 8 would be zero point 9.
    let subject = Subject::new(&[]);
    let name = format!("{UP}.qzeros");
    subject.faulty(false, &[&name], |dst| {
        edit(&name, |tensor| tensor.bytes.fill(0x88))(dst);
        mend_hashes(dst);
    });
    // Asymmetric: zero points less 1 in every module, as the older convention stores them.
    let subject = Subject::new(&["--asym"]);
    let less_one = |dst: &Path| {
        edit_tensors(dst, |tensors| {
            for tensor in tensors.iter_mut().filter(|tensor| tensor.name.ends_with(".qzeros")) {
                let less = |byte: &u8| (byte >> 4).saturating_sub(1) << 4 | (byte & 15).saturating_sub(1);
                tensor.bytes = tensor.bytes.iter().map(less).collect();
            }
        });
        mend_hashes(dst);
    };
    subject.faulty(true, &[UP, "SNR"], less_one);
    // The other convention in config.json and in the report's copy of it.
    subject.faulty(true, &[UP], |dst| {
        config_everywhere(dst, "checkpoint_format", "gptq".into())
    });
    let subject = Subject::new(&[]);
    subject.faulty(false, &[UP, "qzeros"], |dst| {
        config_everywhere(dst, "checkpoint_format", "gptq_v2".into())
    });
}

#[test]
fn config_that_says_something_else() {
    each_layout(|subject| {
        let sym = subject.sandbox.config()["quantization_config"]["sym"] == true;
        let format = if sym { "gptq_v2" } else { "gptq" };
        for (key, value) in [
            ("group_size", json!(32)),
            ("group_size", json!(128)),
            ("bits", json!(8)),
            ("sym", json!(!sym)),
            ("checkpoint_format", json!(format)),
            ("desc_act", json!(true)),
            ("lm_head", json!(false)),
            ("quant_method", json!("bitsandbytes")),
        ] {
            let change = |dst: &Path| config(dst, |config| config["quantization_config"][key] = value.clone());
            subject.faulty_anyhow(&["config.json", key], change);
        }
        for (key, value) in [
            ("group_size", json!(32)),
            ("group_size", json!(128)),
            ("bits", json!(8)),
        ] {
            subject.faulty(false, &[], |dst| config_everywhere(dst, key, value.clone()));
        }
        let none = |config: &mut Value| _ = config.as_object_mut().unwrap().shift_remove("quantization_config");
        subject.faulty_anyhow(&["config.json", "quantization_config"], |dst| config(dst, none));
        subject.faulty_anyhow(&["lm_head", "tie_word_embeddings"], |dst| {
            config(dst, |config| config["tie_word_embeddings"] = true.into());
        });
    });
    // A symmetric checkpoint that is said to be asymmetric everywhere, and the other way round.
    Subject::new(&["--asym"]).faulty(false, &["qzeros"], |dst| config_everywhere(dst, "sym", true.into()));
}

#[test]
fn report_that_says_something_else() {
    each_layout(|subject| {
        let per_tensor = |dst: &Path, change: &dyn Fn(&mut Value)| {
            report(dst, |report| {
                let all = report["per_tensor"].as_array_mut().unwrap();
                change(
                    all.iter_mut()
                        .find(|tensor| tensor["name"] == format!("{UP}.weight"))
                        .unwrap(),
                );
            });
        };
        subject.faulty(true, &[UP, "SNR"], |dst| {
            per_tensor(dst, &|tensor| {
                tensor["snr_db"] = (tensor["snr_db"].as_f64().unwrap() + 0.01).into();
            });
        });
        subject.faulty(true, &[UP, "SNR", "without loss"], |dst| {
            per_tensor(dst, &|tensor| tensor["snr_db"] = Value::Null)
        });
        subject.faulty_anyhow(&[UP, "groups of 32"], |dst| {
            per_tensor(dst, &|tensor| tensor["group"] = 32.into())
        });
        subject.faulty_anyhow(&[UP, "[1, 2]"], |dst| {
            per_tensor(dst, &|tensor| tensor["shape"] = json!([1, 2]))
        });
        for (key, value) in [
            ("snr_db_mean", json!(99.5)),
            ("snr_db_min", Value::Null),
            ("tensors", json!(3)),
            ("group", json!(32)),
            ("quantized_lm_head", json!(false)),
            ("qtype", json!("uint3")),
            ("layout", json!("awq")),
            ("zero_groups", json!(7)),
            ("underflowed_groups", json!(7)),
        ] {
            subject.faulty_anyhow(&[REPORT, key], |dst| report(dst, |report| report[key] = value.clone()));
        }
        subject.faulty_anyhow(&[UP, "not in the report"], |dst| {
            report(dst, |report| {
                let all = report["per_tensor"].as_array_mut().unwrap();
                all.retain(|tensor| tensor["name"] != format!("{UP}.weight"));
            });
        });
        subject.faulty_anyhow(&[&format!("{UP}.scales"), "not in the report"], |dst| {
            report(dst, |report| {
                _ = report["xxh3_128"]
                    .as_object_mut()
                    .unwrap()
                    .shift_remove(&format!("{UP}.scales"))
            });
        });
        subject.faulty_anyhow(&[REPORT], |dst| fs::write(dst.join(REPORT), "{").unwrap());
    });
}

#[test]
fn dense_tensors_that_differ_from_the_source() {
    each_layout(|subject| {
        for name in [
            "model.norm.weight",
            "model.embedding.weight",
            "model.layers.0.self_attn.g_proj.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.position_ids",
        ] {
            let flip = |tensor: &mut Tensor| tensor.bytes[3] ^= 4;
            subject.faulty_anyhow(&[name], |dst| edit(name, flip)(dst));
            // With the hash mended, only the source can tell.
            let stealthy = |dst: &Path| {
                edit(name, flip)(dst);
                mend_hashes(dst);
            };
            subject.faulty(true, &[name, "differs from the source, first at byte 3"], stealthy);
            subject.verify(false, stealthy).expect(0);
        }
        subject.faulty(true, &["model.norm.weight", "F16", "BF16"], |dst| {
            edit("model.norm.weight", |tensor| tensor.dtype = Dtype::F16)(dst);
        });
    });
}

#[test]
fn another_source() {
    let subject = Subject::new(&[]);
    Spark::TINY.write_with(&subject.sandbox.src(), |tensors| {
        named(tensors, &format!("{UP}.weight")).bytes.rotate_right(512);
    });
    subject.faulty(true, &[UP, "SNR"], |_| {});
    Spark {
        inter: 512,
        ..Spark::TINY
    }
    .write(&subject.sandbox.src());
    subject.faulty(true, &[UP], |_| {});
}

#[test]
fn an_snr_below_the_least_that_is_asked_for() {
    let subject = Subject::new(&[]);
    let sandbox = &subject.sandbox;
    let outcome = sandbox.verify(&["--min-snr", "60"]).expect(1);
    outcome.says(&["FAULT", &format!("{UP}.weight"), "lm_head", "--min-snr 60"]);
    sandbox.verify(&["--min-snr", "10"]).expect(0);
    let least = sandbox.report()["snr_db_min"].as_f64().unwrap();
    sandbox.verify(&["--min-snr", &least.to_string()]).expect(0);
    sandbox.verify(&["--min-snr", &(least + 0.01).to_string()]).expect(1);
    let found = sandbox.verify(&["--min-snr", "60", "--json"]).expect(1).json();
    assert_eq!(found["findings"].as_array().unwrap().len(), 8);
}

#[test]
fn shards_and_their_index() {
    let subject = Subject::new(&["--max-shard-size", "60KB"]);
    let index = read_json(&subject.sandbox.dst().join(INDEX));
    let map = index["weight_map"].as_object().unwrap();
    let count = fs::read_dir(subject.sandbox.dst()).unwrap().count() - 6;
    let (first, second) = (shard_name(1, count), shard_name(2, count));
    let in_second = map.iter().find(|(_, shard)| **shard == second).unwrap().0.as_str();
    subject.verify(true, |_| {}).expect(0);

    let edit_index = |dst: &Path, change: &dyn Fn(&mut Value)| edit_json(&dst.join(INDEX), change);
    subject.faulty_anyhow(&[&second], |dst| fs::remove_file(dst.join(&second)).unwrap());
    subject.faulty_anyhow(&[&second, "truncated"], |dst| {
        let file = fs::OpenOptions::new().write(true).open(dst.join(&second)).unwrap();
        file.set_len(file.metadata().unwrap().len() - 5).unwrap();
    });
    subject.faulty_anyhow(&["ghost.weight"], |dst| {
        edit_index(dst, &|index| {
            index["weight_map"]["ghost.weight"] = first.as_str().into()
        });
    });
    subject.faulty_anyhow(&[&second], |dst| {
        edit_index(dst, &|index| {
            _ = index["weight_map"].as_object_mut().unwrap().shift_remove(in_second)
        });
    });
    subject.faulty_anyhow(&[in_second, &first], |dst| {
        edit_index(dst, &|index| index["weight_map"][in_second] = first.as_str().into());
    });
    subject.faulty_anyhow(&["total_size"], |dst| {
        edit_index(dst, &|index| index["metadata"]["total_size"] = 1.into())
    });
    subject.faulty_anyhow(&["index"], |dst| fs::remove_file(dst.join(INDEX)).unwrap());
    subject.faulty_anyhow(&[&first], |dst| {
        fs::rename(dst.join(&first), dst.join("x")).unwrap();
        fs::rename(dst.join(&second), dst.join(&first)).unwrap();
        fs::rename(dst.join("x"), dst.join(&second)).unwrap();
    });
}

#[test]
fn what_is_no_quantized_checkpoint_is_no_finding() {
    let sandbox = Sandbox::tiny();
    let missing = sandbox.path("nowhere");
    run(["--verify".as_ref(), "--dst".as_ref(), missing.as_os_str()])
        .expect(2)
        .says(&["nowhere"]);
    let dense = sandbox.src();
    run(["--verify".as_ref(), "--dst".as_ref(), dense.as_os_str()])
        .expect(2)
        .says(&["src", "quantization_config"]);
    sandbox.quantize(&[]);
    fs::remove_dir_all(sandbox.src()).unwrap();
    sandbox.verify(&[]).expect(2).says(&["src"]);
}
