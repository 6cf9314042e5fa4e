//! What the test files share: checkpoints of any shape and dtype, a folder to work in, and runs of the binary.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

pub mod subject;

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use twox_hash::XxHash3_128;

pub const BINARY: &str = env!("CARGO_BIN_EXE_spark-quant");
pub const REPORT: &str = "quantization_report.json";
pub const WEIGHTS: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";

/// Where `tests/data` is.
pub fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

// --- tensors and files

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// `values` rounded to `dtype`, which is F32, F16 or BF16.
    pub fn floats(name: &str, dtype: Dtype, shape: &[usize], values: impl Iterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = match dtype {
            Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
            Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
            _ => panic!("{dtype} is not a weight's dtype"),
        };
        let count = shape.iter().product::<usize>();
        assert_eq!(bytes.len(), count * dtype.bitsize() / 8, "{name}");
        Self::bytes(name, dtype, shape, bytes)
    }

    /// Bell-shaped values around a centre that is not 0, so that zero points vary; the same for the same name.
    pub fn random(name: &str, dtype: Dtype, shape: &[usize]) -> Self {
        let mut state = XxHash3_128::oneshot(name.as_bytes()) as u64;
        let count = shape.iter().product::<usize>();
        let values = (0..count).map(|at| {
            // Four uniform numbers of 16 bits from one step of splitmix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^= mixed >> 31;
            let sum: u64 = (0..4).map(|part| (mixed >> (16 * part)) & 0xffff).sum();
            (sum as f32 / 131_070.0 - 1.0) * 0.1 + ((at / 64 % 5) as f32 - 2.0) * 0.01
        });
        Self::floats(name, dtype, shape, values)
    }

    pub fn bytes(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Puts `value` at one element.
    pub fn set(&mut self, element: usize, value: f32) {
        let one = Self::floats(&self.name, self.dtype, &[1], std::iter::once(value)).bytes;
        self.bytes[element * one.len()..][..one.len()].copy_from_slice(&one);
    }
}

/// A safetensors file of `header` (any text) and `data`.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// The header of a file that holds `tensors` in this order.
pub fn header_of(tensors: &[Tensor]) -> Map<String, Value> {
    let mut header = Map::new();
    header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes.len();
        let entry = json!({
            "dtype": tensor.dtype.to_string(), "shape": tensor.shape, "data_offsets": [begin, end],
        });
        header.insert(tensor.name.clone(), entry);
        begin = end;
    }
    header
}

/// Writes `tensors` in this order.
pub fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let header = Value::Object(header_of(tensors)).to_string();
    let data: Vec<u8> = tensors.iter().flat_map(|tensor| tensor.bytes.iter().copied()).collect();
    fs::write(path, raw_file(&header, &data)).unwrap();
}

/// The tensors of a file, in the order of their offsets.
pub fn read_tensors(path: &Path) -> Vec<Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut tensors: Vec<_> = file.iter().collect();
    tensors.sort_by_key(|(_, view)| view.data().as_ptr());
    let own = |(name, view): (&str, safetensors::tensor::TensorView)| {
        Tensor::bytes(name, view.dtype(), view.shape(), view.data().to_vec())
    };
    tensors.into_iter().map(own).collect()
}

/// Edits the header of a file that holds no padding.
pub fn edit_header(path: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = fs::read(path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    edit(&mut header);
    fs::write(path, raw_file(&Value::Object(header).to_string(), &bytes[8 + len..])).unwrap();
}

pub fn read_json(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    edit(&mut value);
    fs::write(path, serde_json::to_vec_pretty(&value).unwrap()).unwrap();
}

/// XXH3-128 as reports write it.
pub fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}

// --- checkpoints

/// A checkpoint in the Spark layout: fused q_k_v projections, tied embedding.
#[derive(Clone, Debug)]
pub struct Spark {
    pub dtype: Dtype,
    pub hidden: usize,
    pub inter: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
}

impl Spark {
    /// One layer, about 400 kB.
    pub const TINY: Spark = Spark {
        dtype: Dtype::BF16,
        hidden: 128,
        inter: 256,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 64,
        vocab: 256,
    };

    pub fn tensors(&self) -> Vec<Tensor> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: &[usize]| tensors.push(Tensor::random(&name, self.dtype, shape));
        add("model.embedding.weight".to_string(), &[self.vocab, self.hidden]);
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
            add("input_layernorm.weight", &[self.hidden]);
            add("self_attn.q_k_v_proj.weight", &[q + 2 * kv, self.hidden]);
            add("self_attn.q_k_v_proj.bias", &[q + 2 * kv]);
            add("self_attn.g_proj.weight", &[self.heads, self.hidden]);
            add("self_attn.out_proj.weight", &[self.hidden, q]);
            add("post_attention_layernorm.weight", &[self.hidden]);
            add("mlp.gate_proj.weight", &[self.inter, self.hidden]);
            add("mlp.up_proj.weight", &[self.inter, self.hidden]);
            add("mlp.down_proj.weight", &[self.hidden, self.inter]);
        }
        add("model.norm.weight".to_string(), &[self.hidden]);
        let positions = (0..4u64).flat_map(u64::to_le_bytes).collect();
        tensors.push(Tensor::bytes("model.position_ids", Dtype::I64, &[4], positions));
        tensors
    }

    /// With numbers that a careless writer would change.
    pub fn config(&self) -> String {
        format!(
            r#"{{
  "model_type": "spark2_5",
  "architectures": ["Spark2_5ForCausalLM"],
  "hidden_size": {},
  "intermediate_size": {},
  "num_hidden_layers": {},
  "num_attention_heads": {},
  "num_key_value_heads": {},
  "head_dim": {},
  "vocab_size": {},
  "tie_word_embeddings": true,
  "rope_theta": 1e6,
  "rms_norm_eps": 1.0e-06,
  "a_long_number": 12345678901234567890123
}}
"#,
            self.hidden, self.inter, self.layers, self.heads, self.kv_heads, self.head_dim, self.vocab
        )
    }

    pub fn write(&self, folder: &Path) {
        self.write_with(folder, |_| {});
    }

    /// As one file, after `edit` of its tensors.
    pub fn write_with(&self, folder: &Path, edit: impl FnOnce(&mut Vec<Tensor>)) {
        let mut tensors = self.tensors();
        edit(&mut tensors);
        self.write_sides(folder);
        write_tensors(&folder.join(WEIGHTS), &tensors);
    }

    /// As `count` shards with an index.
    pub fn write_shards(&self, folder: &Path, count: usize) {
        self.write_sides(folder);
        let tensors = self.tensors();
        let mut map = Map::new();
        for (at, part) in tensors.chunks(tensors.len().div_ceil(count)).enumerate() {
            let name = shard_name(at + 1, count);
            write_tensors(&folder.join(&name), part);
            map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
        }
        let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        fs::write(folder.join(INDEX), index.to_string()).unwrap();
    }

    fn write_sides(&self, folder: &Path) {
        fs::create_dir_all(folder.join("assets/deep")).unwrap();
        fs::write(folder.join("config.json"), self.config()).unwrap();
        fs::write(folder.join("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
        fs::write(folder.join("modeling_spark.py"), "# code that auto_map needs\n").unwrap();
        fs::write(folder.join("assets/deep/note.txt"), "nested\n").unwrap();
    }
}

pub fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// The tensor of this name.
pub fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    let found = tensors.iter_mut().find(|tensor| tensor.name == name);
    found.unwrap_or_else(|| panic!("no tensor {name}"))
}

// --- folders

/// Every file below `folder` with a hash of its bytes; folders and symlinks too.
pub fn tree(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            let kind = fs::symlink_metadata(&path).unwrap();
            let what = if kind.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else if kind.is_dir() {
                folders.push(path.clone());
                "folder".to_string()
            } else {
                hash(&fs::read(&path).unwrap())
            };
            found.insert(path.strip_prefix(folder).unwrap().to_path_buf(), what);
        }
    }
    found
}

/// Copies the files of one folder into another.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

/// A folder for one test, with a source and a destination in it.
pub struct Sandbox(TempDir);

impl Sandbox {
    /// With nothing in it.
    pub fn empty() -> Self {
        Sandbox(TempDir::new().unwrap())
    }

    /// With the tiny checkpoint at `src`.
    pub fn tiny() -> Self {
        Self::with(|folder| Spark::TINY.write(folder))
    }

    pub fn with(write: impl FnOnce(&Path)) -> Self {
        let sandbox = Self::empty();
        fs::create_dir(sandbox.src()).unwrap();
        write(&sandbox.src());
        sandbox
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn root(&self) -> &Path {
        self.0.path()
    }

    pub fn src(&self) -> PathBuf {
        self.path("src")
    }

    pub fn dst(&self) -> PathBuf {
        self.path("dst")
    }

    /// `--src src --dst dst` and more.
    pub fn run(&self, args: &[&str]) -> Outcome {
        run(Self::arguments(&self.src(), &self.dst(), args))
    }

    /// A run that must succeed.
    pub fn quantize(&self, args: &[&str]) -> Outcome {
        self.run(args).expect(0)
    }

    pub fn verify(&self, args: &[&str]) -> Outcome {
        let args = Self::arguments(&self.src(), &self.dst(), args);
        run(args.into_iter().chain(["--verify".into()]))
    }

    /// A run that must end with exit code 2 and name all of `says`, and change nothing: no output, no sibling left.
    #[track_caller]
    pub fn refused(&self, args: &[&str], says: &[&str]) -> Outcome {
        let (src, dst) = (self.src(), self.dst());
        self.refused_at(&src, &dst, args, says)
    }

    #[track_caller]
    pub fn refused_at(&self, src: &Path, dst: &Path, args: &[&str], says: &[&str]) -> Outcome {
        let before = tree(self.root());
        let outcome = run(Self::arguments(src, dst, args)).expect(2);
        outcome.says(says);
        assert_eq!(outcome.stdout, "", "an error belongs on stderr");
        assert_eq!(tree(self.root()), before, "a refused run changed something");
        outcome
    }

    fn arguments(src: &Path, dst: &Path, args: &[&str]) -> Vec<std::ffi::OsString> {
        let mut all = vec!["--src".into(), src.into(), "--dst".into(), dst.into()];
        all.extend(args.iter().map(Into::into));
        all
    }

    pub fn report(&self) -> Value {
        read_json(&self.dst().join(REPORT))
    }

    pub fn config(&self) -> Value {
        read_json(&self.dst().join("config.json"))
    }

    /// Every tensor of the output by name.
    pub fn output(&self) -> BTreeMap<String, Tensor> {
        let files = fs::read_dir(self.dst()).unwrap().map(|entry| entry.unwrap().path());
        let weights = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
        let tensors = weights.flat_map(|path| read_tensors(&path));
        tensors.map(|tensor| (tensor.name.clone(), tensor)).collect()
    }
}

// --- the binary

#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// All of `words` are on stderr or stdout.
    #[track_caller]
    pub fn says(&self, words: &[&str]) {
        let text = format!("{}{}", self.stdout, self.stderr);
        for word in words {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
        assert!(!text.contains("panicked"), "{text}");
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// Runs the binary to its end, with pipes for stdout and stderr.
pub fn run(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Outcome {
    finish(assert_cmd::Command::new(BINARY).args(args).output().unwrap())
}

/// Runs the binary from a POSIX shell after `before`, which can set limits and the umask.
pub fn run_in_shell(before: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Outcome {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{before}; exec \"$@\""), "sh", BINARY])
        .args(args);
    finish(shell.output().unwrap())
}

pub fn finish(output: std::process::Output) -> Outcome {
    Outcome {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}
