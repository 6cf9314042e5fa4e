//! Checkpoints that other tools wrote, built here by the layouts' specifications: `--verify` reads them without a report,
//! and `--dequantize` decodes them. The source is their exact decoding, so any slip of a convention shows as noise.

mod common;
mod packing;

use common::*;
use packing::Packed;
use safetensors::Dtype;
use serde_json::{json, Value};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

const DOWN: &str = "model.layers.0.mlp.down_proj";
const BORROW: u32 = 0x1111_1111;

/// A folder `dst` with `packed` tensors and `config`, and a folder `src` with what they decode to.
struct Foreign(Sandbox);

impl Foreign {
    fn new(dense: &[f32], shape: [usize; 2], packed: Vec<Tensor>, config: Value) -> Self {
        let norm = Tensor::random("model.norm.weight", Dtype::BF16, &[128]);
        let weight = Tensor::floats(&format!("{DOWN}.weight"), Dtype::F32, &shape, dense.iter().copied());
        let sandbox = Sandbox::with(|src| {
            write_tensors(&src.join(WEIGHTS), &[norm.clone(), weight]);
            fs::write(src.join("config.json"), json!({ "num_hidden_layers": 1 }).to_string()).unwrap();
        });
        fs::create_dir(sandbox.dst()).unwrap();
        write_tensors(&sandbox.dst().join(WEIGHTS), &[packed, vec![norm]].concat());
        let whole = json!({ "num_hidden_layers": 1, "torch_dtype": "float32", "quantization_config": config });
        fs::write(sandbox.dst().join("config.json"), whole.to_string()).unwrap();
        Foreign(sandbox)
    }

    fn of(packed: &Packed, tensors: Vec<Tensor>, config: Value) -> Self {
        Self::new(&packed.dense(), [packed.n, packed.k], tensors, config)
    }

    /// Passes `--verify` without the source, is without loss against it, and comes back dense.
    #[track_caller]
    fn is_read(&self) {
        let sandbox = &self.0;
        run([OsStr::new("--verify"), OsStr::new("--dst"), sandbox.dst().as_os_str()]).expect(0);
        let outcome = sandbox.verify(&["--json"]).expect(0).json();
        assert_eq!(outcome["snr_db"], json!({ format!("{DOWN}.weight"): null }));
        assert_eq!(outcome["modules"], 1);
        let (from, to) = (sandbox.dst(), sandbox.path("dense"));
        dequantize(&from, &to).expect(0);
        let sorted = |folder: &Path| {
            let mut tensors = read_tensors(&folder.join(WEIGHTS));
            tensors.sort_by(|a, b| a.name.cmp(&b.name));
            tensors
        };
        assert!(sorted(&to) == sorted(&sandbox.src()));
    }

    /// Cannot be read: exit 2 with the reason, for it is no fault of the checkpoint.
    #[track_caller]
    fn is_not_read(&self, why: &str) {
        self.0.verify(&[]).expect(2).says(&["does not read", why]);
        dequantize(&self.0.dst(), &self.0.path("dense")).expect(2).says(&[why]);
    }
}

fn dequantize(from: &Path, to: &Path) -> Outcome {
    let words: [&OsStr; 5] = [
        "--dequantize".as_ref(),
        "--src".as_ref(),
        from.as_ref(),
        "--dst".as_ref(),
        to.as_ref(),
    ];
    run(words)
}

fn edited(mut config: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    config.pointer_mut(parent).unwrap()[key] = value;
    config
}

fn gptq(format: &str) -> Value {
    json!({
        "bits": 4, "group_size": 32, "desc_act": false, "sym": false, "lm_head": false, "quant_method": "gptq",
        "checkpoint_format": format, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:4.0.0"]},
    })
}

fn awq() -> Value {
    json!({
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm",
        "modules_to_not_convert": null,
    })
}

fn compressed_tensors(symmetric: bool) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {
            "targets": ["Linear"], "format": "pack-quantized", "input_activations": null, "output_activations": null,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32,
                "actorder": null, "dynamic": false, "observer": "minmax", "observer_kwargs": {},
                "block_structure": null, "scale_dtype": null, "zp_dtype": if symmetric { Value::Null } else { json!("torch.int8") },
            },
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, "version": "0.13.0",
    })
}

fn example() -> Packed {
    let packed = Packed::example(72, 96, 32);
    assert!(packed.zeros.contains(&0) && packed.zeros.contains(&15));
    packed
}

#[test]
fn gptq_of_both_versions() {
    let packed = example();
    for scales in [Dtype::F16, Dtype::BF16] {
        // Zero points of 0 among others: the subtraction from the whole word borrows.
        Foreign::of(&packed, packed.gptq(DOWN, scales, BORROW), gptq("gptq")).is_read();
        Foreign::of(&packed, packed.gptq(DOWN, scales, 0), gptq("gptq_v2")).is_read();
    }
    let mut symmetric = packed.clone();
    symmetric.zeros.fill(8);
    let config = edited(gptq("gptq"), "/sym", json!(true));
    Foreign::of(&symmetric, symmetric.gptq(DOWN, Dtype::F16, BORROW), config.clone()).is_read();
    // The one convention under the other's name.
    let wrong = Foreign::of(&symmetric, symmetric.gptq(DOWN, Dtype::F16, 0), config);
    wrong
        .0
        .verify(&[])
        .expect(1)
        .says(&[&format!("{DOWN}.qzeros"), "zero point 9"]);
}

#[test]
fn gptq_with_its_config_in_a_file_of_its_own() {
    let packed = example();
    let foreign = Foreign::of(&packed, packed.gptq(DOWN, Dtype::F16, BORROW), Value::Null);
    let dst = foreign.0.dst();
    fs::write(
        dst.join("config.json"),
        r#"{"num_hidden_layers": 1, "torch_dtype": "float32"}"#,
    )
    .unwrap();
    let mut config = gptq("gptq");
    config.as_object_mut().unwrap().remove("quant_method");
    fs::write(dst.join("quantize_config.json"), config.to_string()).unwrap();
    foreign.is_read();
}

#[test]
fn awq_by_its_new_and_old_keys() {
    let packed = example();
    for scales in [Dtype::F16, Dtype::BF16] {
        Foreign::of(&packed, packed.awq(DOWN, scales), awq()).is_read();
    }
    let old = json!({ "zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM" });
    let foreign = Foreign::of(&packed, packed.awq(DOWN, Dtype::F16), Value::Null);
    let dst = foreign.0.dst();
    fs::write(
        dst.join("config.json"),
        r#"{"num_hidden_layers": 1, "torch_dtype": "float32"}"#,
    )
    .unwrap();
    fs::write(dst.join("quant_config.json"), old.to_string()).unwrap();
    foreign.is_read();
}

#[test]
fn compressed_tensors_of_any_grid_and_scale() {
    let packed = example();
    let mut symmetric = packed.clone();
    symmetric.zeros.fill(8);
    for scales in [Dtype::F16, Dtype::BF16] {
        let tensors = packed.compressed_tensors(DOWN, scales, true);
        Foreign::of(&packed, tensors, compressed_tensors(false)).is_read();
        let tensors = symmetric.compressed_tensors(DOWN, scales, false);
        Foreign::of(&symmetric, tensors, compressed_tensors(true)).is_read();
    }
    // Rows that need not be a multiple of 8 where no zero points are packed.
    let mut odd = Packed::example(13, 96, 32);
    odd.zeros.fill(8);
    let tensors = odd.compressed_tensors(DOWN, Dtype::BF16, false);
    Foreign::of(&odd, tensors, compressed_tensors(true)).is_read();
}

#[test]
fn a_group_for_each_row() {
    let packed = Packed::example(72, 96, 96);
    let config = edited(gptq("gptq_v2"), "/group_size", json!(-1));
    Foreign::of(&packed, packed.gptq(DOWN, Dtype::F16, 0), config).is_read();
    let weights = "/config_groups/group_0/weights";
    let config = edited(
        compressed_tensors(false),
        &format!("{weights}/strategy"),
        json!("channel"),
    );
    let config = edited(config, &format!("{weights}/group_size"), Value::Null);
    let tensors = packed.compressed_tensors(DOWN, Dtype::BF16, true);
    Foreign::of(&packed, tensors, config).is_read();
}

/// Below float16's least value: what only bfloat16 holds.
#[test]
fn scales_that_only_bfloat16_holds() {
    let mut packed = example();
    packed.scales.iter_mut().for_each(|scale| *scale *= 2f32.powi(-24));
    let tensors = packed.compressed_tensors(DOWN, Dtype::BF16, true);
    Foreign::of(&packed, tensors, compressed_tensors(false)).is_read();
}

#[test]
fn what_is_packed_otherwise_is_refused_with_the_reason() {
    let packed = example();
    let gptq_tensors = || packed.gptq(DOWN, Dtype::F16, 0);
    let of = |tensors, config| Foreign::of(&packed, tensors, config);
    of(gptq_tensors(), edited(gptq("gptq_v2"), "/desc_act", json!(true))).is_not_read("desc_act");
    of(gptq_tensors(), edited(gptq("gptq_v2"), "/bits", json!(8))).is_not_read("bits is 8");
    of(gptq_tensors(), gptq("marlin")).is_not_read("\"marlin\"");
    let dynamic = json!({ "+:.*down_proj": {"bits": 8} });
    of(gptq_tensors(), edited(gptq("gptq_v2"), "/dynamic", dynamic)).is_not_read("dynamic");
    of(packed.awq(DOWN, Dtype::F16), edited(awq(), "/version", json!("gemv"))).is_not_read("gemv");
    of(packed.awq(DOWN, Dtype::F16), edited(awq(), "/zero_point", json!(false))).is_not_read("zero_point");
    let tensors = || packed.compressed_tensors(DOWN, Dtype::BF16, true);
    let changed = |key: &str, value| edited(compressed_tensors(false), key, value);
    let weights = "/config_groups/group_0/weights";
    of(tensors(), changed(&format!("{weights}/actorder"), json!("group"))).is_not_read("actorder");
    of(tensors(), changed(&format!("{weights}/num_bits"), json!(8))).is_not_read("num_bits is 8");
    of(tensors(), changed(&format!("{weights}/strategy"), json!("block"))).is_not_read("block");
    of(tensors(), changed("/config_groups/group_1", json!({}))).is_not_read("2 groups");
    of(
        tensors(),
        changed("/config_groups/group_0/format", json!("nvfp4-pack-quantized")),
    )
    .is_not_read("nvfp4");
    of(tensors(), json!({ "quant_method": "bitsandbytes" })).is_not_read("bitsandbytes");
}

#[test]
fn broken_ones_are_faults() {
    let packed = example();
    let spoilt = |tensors: Vec<Tensor>, config: Value, says: &[&str], spoil: &dyn Fn(&mut Vec<Tensor>)| {
        let foreign = Foreign::of(&packed, tensors, config);
        let file = foreign.0.dst().join(WEIGHTS);
        let mut tensors = read_tensors(&file);
        spoil(&mut tensors);
        write_tensors(&file, &tensors);
        foreign.0.verify(&[]).expect(1).says(&[&["FAULT"], says].concat());
        dequantize(&foreign.0.dst(), &foreign.0.path("dense")).expect(2);
    };
    let name = |suffix: &str| format!("{DOWN}.{suffix}");
    let ct = || packed.compressed_tensors(DOWN, Dtype::BF16, true);
    let scale = name("weight_scale");
    spoilt(ct(), compressed_tensors(false), &[&scale, "is missing"], &|tensors| {
        tensors.retain(|tensor| tensor.name != scale);
    });
    let packed_name = name("weight_packed");
    spoilt(
        ct(),
        compressed_tensors(false),
        &[&packed_name, "where the layout has I32"],
        &|tensors| {
            named(tensors, &packed_name).dtype = Dtype::F32;
        },
    );
    // A row count that packed zero points cannot have: nothing panics.
    let qzeros = name("qzeros");
    spoilt(
        packed.gptq(DOWN, Dtype::F16, 0),
        gptq("gptq_v2"),
        &[DOWN, "not divisible by 8"],
        &|tensors| {
            for (suffix, rows) in [("qweight", 12), ("scales", 3)] {
                let tensor = named(tensors, &name(suffix));
                tensor.shape = vec![rows, 68];
                tensor
                    .bytes
                    .truncate(rows * 68 * if suffix == "scales" { 2 } else { 4 });
            }
            let tensor = named(tensors, &qzeros);
            tensor.shape = vec![3, 8];
            tensor.bytes.truncate(96);
        },
    );
}

/// Values, not structure.
#[test]
fn values_that_cannot_be_are_faults() {
    let packed = example();
    let ct = || packed.compressed_tensors(DOWN, Dtype::BF16, true);
    for (suffix, bytes, says) in [
        ("weight_scale", [0x80, 0x7f], "holds the scale inf at row 0, group 0"),
        ("weight_scale", [0x80, 0xbf], "holds the scale -1 at row 0, group 0"),
        ("weight_shape", [71, 0], "says [71, 96]"),
    ] {
        let mut tensors = ct();
        named(&mut tensors, &format!("{DOWN}.{suffix}")).bytes[..2].copy_from_slice(&bytes);
        let foreign = Foreign::of(&packed, tensors, compressed_tensors(false));
        foreign.0.verify(&[]).expect(1).says(&["FAULT", suffix, says]);
        dequantize(&foreign.0.dst(), &foreign.0.path("dense"))
            .expect(2)
            .says(&[suffix, says]);
        assert!(!foreign.0.path("dense").exists());
    }
    // Groups out of order although the config says they are in order: decoding would be quietly wrong.
    let mut tensors = packed.gptq(DOWN, Dtype::F16, 0);
    named(&mut tensors, &format!("{DOWN}.g_idx")).bytes.rotate_left(4);
    let foreign = Foreign::of(&packed, tensors, gptq("gptq_v2"));
    foreign
        .0
        .verify(&[])
        .expect(1)
        .says(&["FAULT", "g_idx", "says group 1 for input 31"]);
    dequantize(&foreign.0.dst(), &foreign.0.path("dense"))
        .expect(2)
        .says(&["g_idx"]);
}
