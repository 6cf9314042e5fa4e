use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::checkpoint::testing::{safetensors, write_all};

fn shard(names: &[&str]) -> Vec<u8> {
    let tensors: Vec<_> = names
        .iter()
        .map(|name| (*name, Dtype::BF16, &[2usize, 3][..]))
        .collect();
    safetensors(&tensors)
}

fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<String, serde_json::Value> = pairs
        .iter()
        .map(|(tensor, shard)| (tensor.to_string(), (*shard).into()))
        .collect();
    serde_json::to_vec(&json!({"metadata": {"total_size": 12 * pairs.len()}, "weight_map": map})).unwrap()
}

const INDEX: &str = "model.safetensors.index.json";
const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";

/// Two shards and their index.
fn sharded() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let index = index(&[("a", ONE), ("b", ONE), ("c", TWO)]);
    write_all(
        dir.path(),
        &[(ONE, &shard(&["a", "b"])), (TWO, &shard(&["c"])), (INDEX, &index)],
    );
    dir
}

/// A checkpoint's or an error's text, without the temporary folder.
fn message(dir: &Path, path: &Path) -> String {
    strip(dir, &Checkpoint::open(path).unwrap_err().to_string())
}

fn strip(dir: &Path, text: &str) -> String {
    text.replace(&format!("{}/", dir.display()), "")
        .replace(&dir.display().to_string(), "DIR")
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors.iter().map(|tensor| tensor.name.as_str()).collect()
}

fn sidecar_names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint
        .sidecars
        .iter()
        .map(|sidecar| sidecar.relative.to_str().unwrap())
        .collect()
}

#[test]
fn shards_with_an_index() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!((checkpoint.stem.as_str(), checkpoint.is_folder), ("model", true));
    assert_eq!(
        checkpoint.files.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(),
        [ONE, TWO]
    );
    assert_eq!(names(&checkpoint), ["a", "b", "c"]);
    let c = checkpoint.tensor("c").unwrap();
    assert_eq!(
        (c.file, c.offset, c.len, &c.shape[..]),
        (1, checkpoint.files[1].data_start, 12, &[2, 3][..])
    );
    assert_eq!(
        checkpoint.tensor("b").unwrap().offset,
        checkpoint.files[0].data_start + 12
    );
    assert!(checkpoint.tensor("d").is_none());
    assert_eq!(checkpoint.metadata.get("format"), Some("pt"));
    assert_eq!(
        (checkpoint.config, checkpoint.sidecars.len(), checkpoint.warnings.len()),
        (None, 0, 0)
    );
}

#[test]
fn index_and_shards_must_agree_both_ways() {
    let dir = sharded();
    let path = dir.path();
    let with_index = |pairs: &[(&str, &str)]| {
        write_all(path, &[(INDEX, &index(pairs))]);
        message(path, path)
    };
    let missing = with_index(&[("a", ONE), ("b", ONE), ("x", TWO), ("c", TWO)]);
    assert_eq!(
        missing,
        format!("{INDEX}: the index places x in {TWO}, which does not hold it")
    );
    let extra = with_index(&[("a", ONE), ("c", TWO)]);
    assert_eq!(extra, format!("{INDEX}: {ONE} holds b, which the index does not name"));
    let swapped = with_index(&[("a", ONE), ("b", TWO), ("c", TWO)]);
    assert_eq!(
        swapped,
        format!("{INDEX}: {ONE} holds b, which the index does not name")
    );
    let gone = with_index(&[("a", ONE), ("b", ONE), ("c", TWO), ("d", "model-3.safetensors")]);
    assert_eq!(
        gone,
        format!("{INDEX}: the index names shard model-3.safetensors, which is not there")
    );
    let stranger = with_index(&[("a", ONE), ("b", ONE)]);
    assert_eq!(
        stranger,
        format!("{INDEX}: shard {TWO} belongs to this checkpoint by its name, but the index does not name it")
    );
    let leaving = with_index(&[("a", ONE), ("b", ONE), ("c", TWO), ("d", "../d.safetensors")]);
    assert_eq!(
        leaving,
        format!("{INDEX}: the index path \"../d.safetensors\" leaves the folder")
    );
    let leaving = with_index(&[("a", "/etc/d.safetensors")]);
    assert_eq!(
        leaving,
        format!("{INDEX}: the index path \"/etc/d.safetensors\" leaves the folder")
    );
    let other = with_index(&[("a", "pytorch_model.bin")]);
    assert_eq!(
        other,
        format!("{INDEX}: not a usable index: \"pytorch_model.bin\" is not a .safetensors file")
    );
    assert_eq!(
        with_index(&[]),
        format!("{INDEX}: not a usable index: its weight_map is empty")
    );
}

#[test]
fn an_index_that_is_no_index() {
    let dir = sharded();
    for (json, why) in [
        ("", "EOF while parsing"),
        ("[1]", "invalid type"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map": {"a": 1}}"#, "a: invalid type: integer `1`"),
        (r#"{"weight_map": {"a": "x", "a": "y"}}"#, "\"a\" appears twice"),
        ("{\"weight_map\": {\"\u{0}\": \"\\ud800\"}}", "control character"),
    ] {
        write_all(dir.path(), &[(INDEX, json.as_bytes())]);
        let message = message(dir.path(), dir.path());
        assert!(
            message.starts_with(&format!("{INDEX}: not a usable index: {why}")),
            "{message}"
        );
    }
    write_all(dir.path(), &[("other.safetensors.index.json", b"{}")]);
    let two = message(dir.path(), dir.path());
    assert_eq!(
        two,
        format!(
            "DIR: more than one *.safetensors.index.json ({INDEX} and other{}); keep one",
            &INDEX[5..]
        )
    );
}

#[test]
fn an_index_as_found_in_the_wild() {
    let dir = tempfile::tempdir().unwrap();
    let map = index(&[
        ("a", "./model-00001-of-00001.safetensors"),
        ("b", "sub/more.safetensors"),
    ]);
    let map = String::from_utf8(map).unwrap().replace("24", "23.0");
    write_all(
        dir.path(),
        &[
            ("model-00001-of-00001.safetensors", &shard(&["a"])),
            ("sub/more.safetensors", &shard(&["b"])),
            ("sub/copied.safetensors", b"anything"),
            ("consolidated.safetensors", b"not even read"),
            (INDEX, map.as_bytes()),
        ],
    );
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert_eq!(sidecar_names(&checkpoint), ["sub/copied.safetensors"]);
    let warnings: Vec<_> = checkpoint.warnings.iter().map(|w| strip(dir.path(), w)).collect();
    assert_eq!(
        warnings,
        [
            format!("consolidated.safetensors: skipped, since {INDEX} does not name it"),
            format!("{INDEX}: total_size is 23.0, the tensors have 24 bytes"),
        ]
    );
}

#[test]
fn shards_without_an_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let names_of: Vec<_> = (1..=11)
        .map(|n| (format!("m-{n}-of-11.safetensors"), shard(&[&format!("t{n}")])))
        .collect();
    for (name, bytes) in &names_of {
        write_all(path, &[(name, bytes)]);
    }
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(
        (checkpoint.stem.as_str(), checkpoint.files[10].name.as_str()),
        ("m", "m-11-of-11.safetensors")
    );

    write_all(
        path,
        &[
            ("other.safetensors", &shard(&["o"])),
            (".hidden.safetensors", b"x"),
            ("UP.SAFETENSORS", b"x"),
        ],
    );
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!((checkpoint.stem.as_str(), checkpoint.files.len()), ("model", 12));
    assert_eq!(sidecar_names(&checkpoint), ["UP.SAFETENSORS"]);

    write_all(path, &[("other.safetensors", &shard(&["t10"]))]);
    assert_eq!(
        message(path, path),
        "t10 is in m-10-of-11.safetensors and in other.safetensors"
    );
    std::fs::remove_file(path.join("m-7-of-11.safetensors")).unwrap();
    assert!(message(path, path).starts_with("DIR: shard 7 of 11 of m is missing"));
}

#[test]
fn a_single_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let weights = shard(&["a"]);
    write_all(
        path,
        &[
            ("lora.safetensors", &weights),
            ("config.json", b"{}"),
            ("a.bin", b""),
            (ONE, &weights),
        ],
    );
    let checkpoint = Checkpoint::open(&path.join("lora.safetensors")).unwrap();
    assert_eq!(
        (checkpoint.stem.as_str(), checkpoint.is_folder, checkpoint.config),
        ("lora", false, None)
    );
    assert_eq!(
        (checkpoint.files[0].name.as_str(), checkpoint.sidecars.len()),
        ("lora.safetensors", 0)
    );

    let alone = format!("{ONE}: shard 1 of 2; give --src its folder, DIR");
    assert_eq!(message(path, &path.join(ONE)), alone);
    write_all(path, &[("m-1-of-1.safetensors", &weights)]);
    assert_eq!(Checkpoint::open(&path.join("m-1-of-1.safetensors")).unwrap().stem, "m");
}

#[test]
fn paths_that_are_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    assert_eq!(message(path, path), "DIR: no .safetensors file in this folder");
    assert_eq!(message(path, &path.join("x")), "x: no such file or folder");
    write_all(path, &[("a.bin", b"x")]);
    let no = "a.bin: not a folder and not a .safetensors file";
    assert_eq!(message(path, &path.join("a.bin")), no);
    let odd = std::ffi::OsStr::from_bytes(b"\xff.safetensors");
    std::fs::write(path.join(odd), shard(&["a"])).unwrap();
    assert!(message(path, path).contains(".safetensors: opening: "));
    std::fs::remove_file(path.join(odd)).unwrap();
    std::fs::create_dir(path.join("model.safetensors")).unwrap();
    assert_eq!(message(path, path), "model.safetensors: a folder, not a regular file");
}

#[test]
fn a_symlinked_cache_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = dir.path().join("snapshots/main");
    write_all(
        dir.path(),
        &[
            ("blobs/1", &shard(&["a"])),
            ("blobs/2", b"{\"a\": 1}"),
            ("blobs/3", b"xyz"),
            ("snapshots/main/x/y", b""),
        ],
    );
    for (name, blob) in [
        ("model.safetensors", "1"),
        ("config.json", "2"),
        ("tokenizer.json", "3"),
    ] {
        symlink(Path::new("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(&snapshot).unwrap();
    assert_eq!(
        (checkpoint.stem.as_str(), checkpoint.files[0].name.as_str()),
        ("model", "model.safetensors")
    );
    assert_eq!(checkpoint.config.as_ref().unwrap().usize("a"), Some(1));
    assert_eq!(sidecar_names(&checkpoint), ["tokenizer.json", "x/y"]);
    assert_eq!(checkpoint.sidecars[0].len, 3);

    std::fs::remove_file(dir.path().join("blobs/1")).unwrap();
    assert!(message(dir.path(), &snapshot).starts_with("snapshots/main/model.safetensors: opening: "));
}

#[test]
fn sidecars_are_everything_else_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let kept = [
        "B",
        "LICENSE",
        "a.py",
        "a/b/c.txt",
        "a/config.json",
        "a0",
        "tokenizer.json",
        "é",
    ];
    for name in kept.iter().chain(&[
        ".git/HEAD",
        ".cache/x",
        "a/.git/x",
        "m.gguf",
        "a/m.pt",
        "quantization_report.json",
    ]) {
        write_all(path, &[(name, b"x")]);
    }
    write_all(path, &[("model.safetensors", &shard(&["a"])), ("config.json", b"{}")]);
    symlink("..", path.join("a/loop")).unwrap();
    symlink("nothing", path.join("dangling")).unwrap();
    symlink("self", path.join("self")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path.join("pipe"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(sidecar_names(&checkpoint), kept);
    let warnings: Vec<_> = checkpoint.warnings.iter().map(|w| strip(path, w)).collect();
    assert_eq!(
        warnings,
        [
            "a/loop: not copied: a symlink to a folder that it is in",
            "dangling: not copied: a symlink to nothing",
            "pipe: not copied: not a regular file",
            "self: not copied: a symlink to itself",
        ]
    );
}

#[test]
fn metadata_of_the_first_file_wins() {
    let dir = tempfile::tempdir().unwrap();
    let file = |pairs: &[(&str, &str)]| crate::checkpoint::encode_header(&pairs.iter().copied().collect(), &[]);
    write_all(
        dir.path(),
        &[
            ("a.safetensors", &file(&[("k", "1"), ("a", "x")])),
            ("b.safetensors", &file(&[("b", "y"), ("k", "2")])),
        ],
    );
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let merged: Vec<_> = checkpoint.metadata.iter().collect();
    assert_eq!(merged, [("k", "1"), ("a", "x"), ("b", "y")]);
    assert_eq!(checkpoint.files[1].metadata.get("k"), Some("2"));
}

#[test]
fn files_that_are_written_to_meanwhile_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, safetensors(&[("a", Dtype::U8, &[4])])).unwrap();
    let source = Checkpoint::open(dir.path()).unwrap();
    source.check_unchanged().unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let later = source.files[0].modified + std::time::Duration::from_millis(1);
    file.set_modified(later).unwrap();
    let message = source.check_unchanged().unwrap_err().to_string();
    assert!(message.contains("model.safetensors: was written to while"), "{message}");
    file.set_len(source.files[0].len + 1).unwrap();
    file.set_modified(source.files[0].modified).unwrap();
    let message = source.check_unchanged().unwrap_err().to_string();
    assert!(message.contains("model.safetensors: was "), "{message}");
}
