//! Runs that the system gives too little: descriptors, threads, file sizes; and files that others change meanwhile.

mod common;

use common::*;
use safetensors::Dtype;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

fn arguments(sandbox: &Sandbox, args: &[&str]) -> Vec<OsString> {
    let mut all: Vec<OsString> = vec![
        "--src".into(),
        sandbox.src().into(),
        "--dst".into(),
        sandbox.dst().into(),
    ];
    all.extend(args.iter().map(Into::into));
    all
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn many_tensors(src: &Path) {
    Spark::TINY.write_with(src, |tensors| {
        tensors.extend((0..150).map(|at| Tensor::random(&format!("visual.{at}"), Dtype::F32, &[7])));
    });
}

#[test]
fn more_shards_than_descriptors() {
    let sandbox = Sandbox::with(many_tensors);
    let args = ["--max-shard-size", "1", "--threads", "2"];
    run_in_shell("ulimit -n 24", arguments(&sandbox, &args)).expect(0);
    assert!(names(&sandbox.dst()).len() > 150);
    sandbox.verify(&[]).expect(0);
    let whole = Sandbox::with(many_tensors);
    whole.quantize(&[]);
    assert_eq!(sandbox.output(), whole.output());
}

#[test]
fn too_few_descriptors_leave_nothing() {
    let sandbox = Sandbox::with(many_tensors);
    for limit in 4..12 {
        let limit = format!("ulimit -n {limit}");
        let outcome = run_in_shell(&limit, arguments(&sandbox, &["--max-shard-size", "1", "--overwrite"]));
        if outcome.code == Some(0) {
            fs::remove_dir_all(sandbox.dst()).unwrap();
        }
        assert!(matches!(outcome.code, Some(0 | 2)), "{limit}: {outcome:?}");
        assert_eq!(names(sandbox.root()), ["src"], "{limit}: {outcome:?}");
    }
}

/// Stacks larger than the address space: no thread can be started.
#[test]
fn without_threads_it_runs_on_one() {
    let sandbox = Sandbox::tiny();
    let no_threads = "export RUST_MIN_STACK=200000000000000";
    run_in_shell(no_threads, arguments(&sandbox, &["--threads", "4"])).expect(0);
    run_in_shell(no_threads, arguments(&sandbox, &["--verify", "--threads", "4"])).expect(0);
    let plain = Sandbox::tiny();
    plain.quantize(&[]);
    assert_eq!(tree(&sandbox.dst()), tree(&plain.dst()));
}

#[test]
fn the_file_size_limit_is_an_error_of_the_write() {
    let sandbox = Sandbox::tiny();
    run_in_shell("ulimit -f 20", arguments(&sandbox, &[]))
        .expect(2)
        .says(&[WEIGHTS, "os error"]);
    assert_eq!(names(sandbox.root()), ["src"]);
}

#[test]
fn an_error_tells_its_cause_once() {
    let sandbox = Sandbox::tiny();
    let src = sandbox.path("loop.safetensors");
    std::os::unix::fs::symlink(&src, &src).unwrap();
    let outcome = run(["--src".as_ref(), src.as_os_str(), "--dst".as_ref(), "x".as_ref()]).expect(2);
    assert_eq!(outcome.stderr.matches("os error").count(), 1, "{}", outcome.stderr);
}

#[test]
fn names_as_long_as_a_name_can_be() {
    let sandbox = Sandbox::tiny();
    for name in ["d".repeat(255), "\u{e9}".repeat(127), "e".repeat(201)] {
        let dst = sandbox.path(&name);
        for _ in 0..2 {
            let args = [
                "--src".into(),
                sandbox.src(),
                "--dst".into(),
                dst.clone(),
                "--overwrite".into(),
            ];
            run(args).expect(0);
        }
        fs::remove_dir_all(dst).unwrap();
        assert_eq!(names(sandbox.root()), ["src"]);
    }
}

#[test]
fn overwrite_spares_files_of_others() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let files: Vec<String> = tree(&sandbox.dst())
        .into_iter()
        .filter(|(_, what)| what != "folder")
        .map(|(path, _)| path.to_str().unwrap().to_string())
        .collect();
    assert_eq!(sandbox.report()["files"], serde_json::json!(files));
    sandbox.quantize(&["--overwrite"]);
    fs::write(sandbox.dst().join("assets/notes.txt"), "years of work").unwrap();
    let says = ["dst", "assets/notes.txt, which this tool did not write"];
    sandbox.refused(&["--overwrite"], &says);
    fs::write(sandbox.dst().join("a.txt"), "more").unwrap();
    sandbox.refused(&["--overwrite"], &["2 files that this tool did not write, a.txt first"]);
    fs::remove_file(sandbox.dst().join("a.txt")).unwrap();
    fs::remove_file(sandbox.dst().join("assets/notes.txt")).unwrap();
    edit_json(&sandbox.dst().join(REPORT), |report| {
        report.as_object_mut().unwrap().shift_remove("files");
    });
    sandbox.refused(&["--overwrite"], &["does not list the files"]);
    sandbox.verify(&[]).expect(0);
}

#[test]
fn overwrite_replaces_what_was_decoded() {
    let sandbox = Sandbox::tiny();
    sandbox.quantize(&[]);
    let dense = sandbox.path("dense");
    let decode = || {
        let from = sandbox.dst();
        let paths = ["--src".as_ref(), from.as_os_str(), "--dst".as_ref(), dense.as_os_str()];
        run(paths
            .into_iter()
            .chain(["--dequantize".as_ref(), "--overwrite".as_ref()]))
    };
    decode().expect(0);
    decode().expect(0);
    fs::write(dense.join("notes.txt"), "").unwrap();
    decode().expect(2).says(&["notes.txt"]);
}

/// What a dry run says is needed covers whole blocks and the report.
#[test]
fn the_space_asked_for_is_the_space_taken() {
    for (write, args) in [
        (many_tensors as fn(&Path), &["--max-shard-size", "1"][..]),
        (|src| Spark::TINY.write(src), &[][..]),
    ] {
        let sandbox = Sandbox::with(write);
        let plan = sandbox.run(&[args, &["--dry-run"]].concat()).expect(0).stdout;
        let (before, _) = plan.trim_end().rsplit_once(" needed").unwrap();
        let needed: u64 = before.rsplit(' ').next().unwrap().parse().unwrap();
        sandbox.quantize(args);
        let paths = tree(&sandbox.dst()).into_keys().map(|path| sandbox.dst().join(path));
        let files = paths
            .map(|path| fs::metadata(path).unwrap())
            .filter(fs::Metadata::is_file);
        let taken: u64 = files.map(|file| file.len().next_multiple_of(4096)).sum();
        assert!(needed >= taken && needed < taken + (256 << 10), "{needed}, {taken}");
    }
}
