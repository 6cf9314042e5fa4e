//! The destination: replaced only where this tool wrote it, and whole or untouched after an interruption or a full disk.

mod common;

use common::*;
use rustix::process::{kill_process, Pid, Signal};
use serde_json::json;
use std::fs;
use std::io::Read;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

// --- the destination

#[test]
fn parents_are_made_and_an_empty_folder_is_used() {
    let sandbox = Sandbox::tiny();
    let deep = sandbox.path("a/b/c");
    let src = sandbox.src();
    run(["--src".as_ref(), src.as_os_str(), "--dst".as_ref(), deep.as_os_str()]).expect(0);
    assert!(deep.join(WEIGHTS).exists());
    fs::create_dir(sandbox.dst()).unwrap();
    sandbox.quantize(&[]);
    assert_eq!(tree(&sandbox.dst()), tree(&deep));
}

#[test]
fn overwrite_replaces_what_this_tool_wrote() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    fs::remove_file(sandbox.src().join("tokenizer.json")).unwrap();
    sandbox.quantize(&["--asym", "--overwrite"]);
    assert_eq!(sandbox.config()["quantization_config"]["sym"], false);
    assert!(!sandbox.dst().join("tokenizer.json").exists());
    assert_eq!(names(sandbox.root()), ["dst", "src"], "no sibling is left");
    sandbox.verify(&[]).expect(0);
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

// --- interruptions and full disks

/// 1 GiB of zeros that take no room on disk, and with the reference kernels on one thread many seconds to quantize.
fn slow_source(src: &Path) {
    Spark::TINY.write(src);
    let len: u64 = 1 << 30;
    let name = "model.layers.0.mlp.up_proj.weight";
    let header = json!({ name: { "dtype": "F32", "shape": [len / 4096, 1024], "data_offsets": [0, len] } }).to_string();
    let path = src.join(WEIGHTS);
    fs::write(&path, raw_file(&header, &[])).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + len).unwrap();
}

fn start_slow(sandbox: &Sandbox, args: &[&str]) -> Child {
    let (src, dst) = (sandbox.src(), sandbox.dst());
    let mut command = Command::new(BINARY);
    command.arg("--src").arg(src).arg("--dst").arg(dst).args(args);
    command.args(["--threads", "1", "--level", "scalar", "--budget", "1MB"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    // Its staging folder is there and holds the output file: it is at work.
    let at_work = || {
        let hidden = names(sandbox.root()).into_iter().find(|name| name.starts_with(".dst"));
        hidden.is_some_and(|name| sandbox.path(&name).join(WEIGHTS).exists())
    };
    while !at_work() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the run does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    child
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let sandbox = Sandbox::with(slow_source);
        let child = start_slow(&sandbox, &[]);
        send(&child, signal);
        let outcome = finish(child.wait_with_output().unwrap()).expect(2);
        outcome.says(&["interrupted"]);
        assert_eq!(names(sandbox.root()), ["src"], "{signal:?}");
    }
}

#[test]
fn an_interrupted_overwrite_leaves_the_old_checkpoint() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let before = tree(&sandbox.dst());
    slow_source(&sandbox.src());
    let child = start_slow(&sandbox, &["--overwrite"]);
    send(&child, Signal::INT);
    finish(child.wait_with_output().unwrap()).expect(2);
    assert_eq!(tree(&sandbox.dst()), before);
    assert_eq!(names(sandbox.root()), ["dst", "src"]);
}

#[test]
fn after_a_killed_run_there_is_no_output_and_the_next_run_cleans_up() {
    let sandbox = Sandbox::with(slow_source);
    let mut child = start_slow(&sandbox, &[]);
    send(&child, Signal::KILL);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), None);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
    assert!(!sandbox.dst().exists());
    assert_eq!(
        names(sandbox.root()).len(),
        2,
        "what a killed run leaves is beside --dst"
    );
    Spark::TINY.write(&sandbox.src());
    sandbox.quantize(&[]);
    assert_eq!(names(sandbox.root()), ["dst", "src"]);
}

#[test]
fn a_disk_that_is_too_small_is_told_before_the_first_byte() {
    let sandbox = Sandbox::tiny();
    let free = spark_quant::checkpoint::free_bytes(sandbox.root()).unwrap();
    let needed = free + (64 << 30);
    // Files of a TiB that take no room, since a file system has a largest file.
    for (at, begin) in (0..needed).step_by(1 << 40).enumerate() {
        let len = (needed - begin).min(1 << 40);
        let name = format!("visual.{at}");
        let header = json!({ name: { "dtype": "U8", "shape": [len], "data_offsets": [0, len] } }).to_string();
        let path = sandbox.src().join(format!("extra{at}.safetensors"));
        fs::write(&path, raw_file(&header, &[])).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(8 + header.len() as u64 + len).unwrap();
    }
    let outcome = sandbox.run(&[]).expect(2);
    outcome.says(&["dst: ", "bytes are needed and", "are free"]);
    assert!(!outcome.stderr.contains(".dst"), "{}", outcome.stderr);
    let numbers: Vec<u64> = outcome
        .stderr
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect();
    assert!(numbers.iter().any(|&number| number >= needed), "{}", outcome.stderr);
    assert_eq!(names(sandbox.root()), ["src"]);
    // The plan can still be read.
    sandbox.run(&["--dry-run"]).expect(0).says(&["needed"]);
}

/// A limit on the size of files stands in for a disk that fills: before the weights are written, and after.
#[test]
fn a_disk_that_fills_leaves_nothing() {
    let sandbox = Sandbox::tiny();
    let args = ["--src".into(), sandbox.src(), "--dst".into(), sandbox.dst()];
    let limited = |blocks: u32| run_in_shell(&format!("trap '' XFSZ; ulimit -f {blocks}"), &args);
    limited(20).expect(2).says(&[WEIGHTS]);
    assert_eq!(names(sandbox.root()), ["src"]);
    fs::write(sandbox.src().join("tokenizer.json"), vec![b' '; 4 << 20]).unwrap();
    limited(1500).expect(2).says(&["tokenizer.json"]);
    assert_eq!(names(sandbox.root()), ["src"]);
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let sandbox = Sandbox::tiny();
    fs::write(sandbox.path("file"), "in the way").unwrap();
    let dst = sandbox.path("file/below");
    sandbox.refused_at(&sandbox.src(), &dst, &[], &["file"]);
}
