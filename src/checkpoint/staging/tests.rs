use std::os::unix::fs::symlink;
use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::checkpoint::testing::write_all;
use crate::checkpoint::{check_destination, check_space};

const REPORT: (&str, &[u8]) = (
    "quantization_report.json",
    br#"{"tool": "spark-quant 0.1.0", "files": ["quantization_report.json", "old", "sub/old"]}"#,
);

/// All names below a folder, sorted, folders included.
fn tree(root: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
            names.push(entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_string());
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    names.sort();
    names
}

fn text(result: Result<()>, root: &Path) -> String {
    result
        .unwrap_err()
        .to_string()
        .replace(&format!("{}/", root.canonicalize().unwrap().display()), "")
}

fn stage(dst: &Path, overwrite: bool, content: &[u8]) -> Staging {
    let staging = Staging::create(dst, overwrite).unwrap();
    staging.write_file("new", content).unwrap();
    staging
}

#[test]
fn a_checkpoint_appears_whole_with_its_parents() {
    let dir = tempfile::tempdir().unwrap();
    write_all(dir.path(), &[("src/sub/tok.py", b"code")]);
    std::fs::set_permissions(dir.path().join("src/sub/tok.py"), Permissions::from_mode(0o400)).unwrap();
    let dst = dir.path().join("x/y/out/");
    let staging = Staging::create(&dst, false).unwrap();
    let out = staging.create_file("m.safetensors", 6).unwrap();
    out.write_all_at(b"def", 3).unwrap();
    out.start_writeback(3, 3);
    out.write_all_at(b"abc", 0).unwrap();
    let sidecar = Sidecar {
        relative: "sub/tok.py".into(),
        from: dir.path().join("src/sub/tok.py"),
        len: 4,
    };
    staging.copy_sidecar(&sidecar).unwrap();
    staging.write_file("config.json", b"{}").unwrap();
    let mut buf = [0; 4];
    out.read_exact_at(&mut buf, 1).unwrap();
    assert_eq!(&buf, b"bcde");
    assert!(!dst.exists());
    staging.commit().unwrap();

    assert_eq!(tree(&dst), ["config.json", "m.safetensors", "sub", "sub/tok.py"]);
    assert_eq!(std::fs::read(dst.join("m.safetensors")).unwrap(), b"abcdef");
    assert_eq!(tree(&dir.path().join("x")).len(), 6, "no hidden folder is left");
    // Modes are those of any new file and folder.
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode();
    assert_eq!(mode(&dst.join("sub/tok.py")), mode(&dir.path().join("file")));
    assert_eq!(mode(&dst.join("m.safetensors")), mode(&dir.path().join("file")));
    assert_eq!(mode(&dst), mode(&dir.path().join("src")));
}

#[test]
fn dropped_it_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    drop(stage(&dir.path().join("x/y/out"), false, b"1"));
    assert!(tree(dir.path()).is_empty());
    let staging = stage(&dir.path().join("x/y/out"), false, b"1");
    write_all(dir.path(), &[("x/other", b"")]);
    drop(staging);
    assert_eq!(tree(dir.path()), ["x", "x/other"]);
}

#[test]
fn a_missing_byte_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    let staging = Staging::create(&dst, false).unwrap();
    let out = staging.create_file("m", 10).unwrap();
    out.write_all_at(&[1; 9], 0).unwrap();
    let beyond = out.write_all_at(&[1; 2], 9).unwrap_err().to_string();
    assert!(beyond.ends_with("m: writing: 2 bytes at 9 of a file of 10"), "{beyond}");
    assert!(out.write_all_at(&[1], u64::MAX).is_err());
    let message = staging.commit().unwrap_err().to_string();
    assert!(message.contains("m: 9 of its 10 bytes were written"), "{message}");
    assert!(tree(dir.path()).is_empty());
}

#[test]
fn a_file_that_cannot_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let staging = Staging::create(&dir.path().join("out"), false).unwrap();
    let message = staging.create_file("m", 1 << 60).unwrap_err().to_string();
    assert!(
        message.contains("m: 1152921504606846976 bytes are needed and "),
        "{message}"
    );
    let message = check_space(&dir.path().join("not/yet"), u64::MAX - 1)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("not/yet: 18446744073709551614 bytes are needed and "),
        "{message}"
    );
    check_space(&dir.path().join("not/yet"), 1).unwrap();
}

#[test]
fn what_vanishes_before_the_end_is_an_error() {
    type Spoil = fn(&Path);
    let cases: [(Spoil, &str); 7] = [
        (|folder| std::fs::remove_file(folder.join("m")).unwrap(), "m"),
        (|folder| std::fs::remove_file(folder.join("new")).unwrap(), "new"),
        (|folder| std::fs::write(folder.join("new"), "longer").unwrap(), "new"),
        (
            |folder| {
                // Another file of this length in its place.
                std::fs::write(folder.join("x"), "abc").unwrap();
                std::fs::rename(folder.join("x"), folder.join("m")).unwrap();
            },
            "m",
        ),
        (
            |folder| {
                std::fs::remove_file(folder.join("m")).unwrap();
                std::fs::create_dir(folder.join("m")).unwrap();
            },
            "m",
        ),
        (|folder| std::fs::remove_dir_all(folder).unwrap(), "m"),
        (
            |folder| {
                std::fs::rename(folder, folder.with_extension("aside")).unwrap();
                write_all(folder, &[("m", b"abc"), ("new", b"1")]);
                std::fs::remove_dir_all(folder.with_extension("aside")).unwrap();
            },
            "",
        ),
    ];
    for (spoil, name) in cases {
        let dir = tempfile::tempdir().unwrap();
        let staging = stage(&dir.path().join("out"), false, b"1");
        let out = staging.create_file("m", 3).unwrap();
        out.write_all_at(b"abc", 0).unwrap();
        spoil(staging.path());
        let path = staging.path().join(name);
        let message = staging.commit().unwrap_err().to_string();
        assert!(message.contains("removed or changed by something else"), "{message}");
        assert!(
            name.is_empty() || message.starts_with(path.to_str().unwrap()),
            "{message}"
        );
        assert!(tree(dir.path()).is_empty());
    }
}

#[test]
fn more_files_than_are_kept_open() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    let staging = Staging::create(&dst, false).unwrap();
    let outs: Vec<_> = (0..30u8)
        .map(|at| staging.create_file(at.to_string(), 2).unwrap())
        .collect();
    for offset in 0..2 {
        for (at, out) in outs.iter().enumerate() {
            out.write_all_at(&[at as u8], offset).unwrap();
            out.start_writeback(offset, 1);
        }
    }
    let mut both = [0; 2];
    outs[3].read_exact_at(&mut both, 0).unwrap();
    assert_eq!(both, [3, 3]);
    staging.commit().unwrap();
    for at in 0..30u8 {
        assert_eq!(std::fs::read(dst.join(at.to_string())).unwrap(), [at, at]);
    }
    // A file that is gone is named when it is opened again.
    let staging = Staging::create(&dir.path().join("other"), false).unwrap();
    let outs: Vec<_> = (0..30u8)
        .map(|at| staging.create_file(at.to_string(), 2).unwrap())
        .collect();
    std::fs::remove_file(staging.path().join("0")).unwrap();
    let message = outs[0].write_all_at(&[0], 0).unwrap_err().to_string();
    assert!(message.contains("removed or changed by something else"), "{message}");
}

#[test]
fn names_stay_inside() {
    let dir = tempfile::tempdir().unwrap();
    let staging = Staging::create(&dir.path().join("out"), false).unwrap();
    for name in ["../x", "/x", "", "a/../../x"] {
        assert!(staging.write_file(name, b"").is_err(), "{name}");
    }
    staging.write_file("x", b"").unwrap();
    let twice = staging.write_file("x", b"").unwrap_err().to_string();
    assert!(twice.contains("x: making: "), "{twice}");
}

#[test]
fn a_sidecar_that_changed_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    write_all(dir.path(), &[("tok", b"123")]);
    let staging = Staging::create(&dir.path().join("out"), false).unwrap();
    let sidecar = Sidecar {
        relative: "tok".into(),
        from: dir.path().join("tok"),
        len: 2,
    };
    let message = staging.copy_sidecar(&sidecar).unwrap_err().to_string();
    assert!(
        message.contains("tok: was 2 bytes when it was first looked at and is 3 now"),
        "{message}"
    );
}

#[test]
fn an_empty_folder_is_replaced_and_a_full_one_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    std::fs::create_dir(&dst).unwrap();
    stage(&dst, false, b"1").commit().unwrap();
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
    let message = Staging::create(&dst, false).unwrap_err().to_string();
    assert!(
        message.contains("out: not empty; --overwrite replaces a checkpoint that this tool wrote"),
        "{message}"
    );
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
}

#[test]
fn a_destination_that_fills_meanwhile_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    let staging = stage(&dst, false, b"1");
    write_all(dir.path(), &[("out/theirs", b"")]);
    assert!(text(staging.commit(), dir.path()).starts_with("out: not empty"));
    assert_eq!(tree(dir.path()), ["out", "out/theirs"]);
    for (code, start) in [
        (39, "out: not empty"),
        (20, "out: a file"),
        (16, "out: a mount point"),
        (13, "out: renaming"),
    ] {
        let message = not_renamed(Path::new("out"), io::Error::from_raw_os_error(code)).to_string();
        assert!(message.starts_with(start), "{message}");
    }
}

#[test]
fn overwrite_replaces_its_own_in_one_step() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    write_all(&dst, &[REPORT, ("old", b""), ("sub/old", b"")]);
    drop(stage(&dst, true, b"1"));
    assert_eq!(tree(&dst).len(), 4);
    stage(&dst, true, b"1").commit().unwrap();
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
}

#[test]
fn without_an_exchange_the_old_one_is_moved_aside() {
    let dir = tempfile::tempdir().unwrap();
    let (staged, target) = (dir.path().join("staged"), dir.path().join("out"));
    write_all(dir.path(), &[("staged/new", b""), ("out/old", b"")]);
    swap_by_moving_aside(&staged, &target).unwrap();
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
    // The new one cannot be renamed: the old one is back.
    assert!(swap_by_moving_aside(&staged, &target).is_err());
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
    assert!(swap_by_moving_aside(&target, &staged).is_err());
    assert_eq!(tree(dir.path()), ["out", "out/new"]);
}

#[test]
fn overwrite_replaces_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    let refused = |files: &[(&str, &[u8])]| {
        let _ = std::fs::remove_dir_all(&dst);
        write_all(&dst, files);
        let message = Staging::create(&dst, true).unwrap_err().to_string();
        let (before, found) = message.split_once("this folder holds ").unwrap();
        assert!(before.contains("out: --overwrite replaces only a checkpoint that this tool wrote"));
        assert_eq!(tree(dir.path()).len(), 1 + tree(&dst).len());
        found.to_string()
    };
    assert_eq!(refused(&[("thesis.txt", b"")]), "no quantization_report.json");
    let other: (&str, &[u8]) = (REPORT.0, br#"{"tool": "other 1"}"#);
    assert_eq!(refused(&[other]), "a quantization_report.json of \"other 1\"");
    for json in ["{}", "", "[", r#"{"tool": 1}"#, "[\"spark-quant 1\"]"] {
        let other: (&str, &[u8]) = (REPORT.0, json.as_bytes());
        let found = refused(&[other]);
        assert!(found.contains("quantization_report.json"), "{found}");
    }
    let older: (&str, &[u8]) = (REPORT.0, br#"{"tool": "spark-quant 0.1.0"}"#);
    assert!(refused(&[older]).contains("does not list the files"));
    assert_eq!(
        refused(&[REPORT, ("old", b""), ("sub/new", b"")]),
        "sub/new, which this tool did not write"
    );
    assert_eq!(
        refused(&[REPORT, (".git/HEAD", b"")]),
        ".git, which this tool does not write"
    );
}

#[test]
fn destinations_that_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_all(
        root,
        &[
            ("m/model.safetensors", b""),
            ("file", b""),
            ("ours/src/x", b""),
            ("ours/s.safetensors", b""),
        ],
    );
    let files = r#"["quantization_report.json", "src/x", "s.safetensors"]"#;
    let report = format!(r#"{{"tool": "spark-quant 0.1.0", "files": {files}}}"#);
    write_all(&root.join("ours"), &[(REPORT.0, report.as_bytes())]);
    symlink("../ours/s.safetensors", root.join("m/link.safetensors")).unwrap();
    symlink("m", root.join("to_m")).unwrap();
    let check = |dst: &str, src: &str, overwrite| check_destination(&root.join(dst), &root.join(src), overwrite);
    let refused = |dst: &str, src: &str, overwrite| {
        text(check(dst, src, overwrite), root).replace(&format!("{}/", root.display()), "")
    };
    assert_eq!(refused("m", "m", false), "m: --dst is the source m or inside it");
    assert_eq!(
        refused("m/new/deep", "m", true),
        "m/new/deep: --dst is the source m or inside it"
    );
    assert_eq!(
        refused("to_m/new", "m", true),
        "to_m/new: --dst is the source m or inside it"
    );
    assert_eq!(
        refused("m/../m/x", "to_m", true),
        "m/../m/x: --dst is the source to_m or inside it"
    );
    let inside = "ours/src: --src is inside --dst ours, which --overwrite would replace";
    assert_eq!(
        refused("ours", "ours/src", true).replace(&format!("{}/", root.display()), ""),
        inside
    );
    assert!(refused("ours", "ours/s.safetensors", true).contains("is inside --dst"));
    assert!(refused("ours", "m/link.safetensors", true).contains("is inside --dst"));
    assert!(refused("m", "m/link.safetensors", true).contains("is inside --dst"));
    assert!(refused("ours", "ours/src", false).starts_with("ours: not empty"));
    assert_eq!(refused("file", "m", false), "file: a file; --dst is a folder");
    assert!(refused("file/x", "m", false).starts_with("file/x: resolving: "));
    check("ours", "m", true).unwrap();
    check("new/x", "m", false).unwrap();
    check("m/out", "m/model.safetensors", false).unwrap();
    check("model", "m", false).unwrap();
    assert!(check_destination(Path::new(""), &root.join("m"), false).is_err());
}

#[test]
fn symlinks_and_dots_lead_to_the_real_place() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    std::fs::create_dir(root.join("real")).unwrap();
    symlink("real", root.join("link")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    assert_eq!(resolve(&root.join("link/")).unwrap(), root.join("real"));
    assert_eq!(
        resolve(&root.join("link/../link/./x/../y/")).unwrap(),
        root.join("real/y")
    );
    let message = resolve(&root.join("dangling")).unwrap_err().to_string();
    assert!(message.contains("dangling: resolving: "), "{message}");
    stage(&root.join("link"), false, b"1").commit().unwrap();
    assert_eq!(tree(&root), ["dangling", "link", "real", "real/new"]);
    assert!(resolve(Path::new("some/new"))
        .unwrap()
        .starts_with(std::env::current_dir().unwrap().canonicalize().unwrap()));
}

#[test]
fn mount_points_and_the_root_are_refused() {
    for mount in ["/proc", "/"] {
        let message = Staging::create(Path::new(mount), true).unwrap_err().to_string();
        assert!(message.starts_with(&format!("{mount}: a mount point")), "{message}");
    }
}

#[test]
fn folders_of_killed_runs_go_and_those_of_live_runs_stay() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("out");
    let live = stage(&dst, false, b"live");
    let stay = [
        ".out.spark-quant-abc/x",
        ".out.spark-quant-ABC-12/x",
        ".out.replaced-by-spark-quant-abcdef/x",
        ".o.spark-quant-abcdef/x",
    ];
    for name in stay.iter().chain(&[".out.spark-quant-ABC123/sub/x"]) {
        write_all(dir.path(), &[(name, b"")]);
    }
    drop(stage(&dst, false, b"other"));
    assert!(!dir.path().join(".out.spark-quant-ABC123").exists());
    assert!(stay.iter().all(|name| dir.path().join(name).exists()));
    live.commit().unwrap();
    assert_eq!(std::fs::read(dst.join("new")).unwrap(), b"live");
}

#[test]
fn many_runs_to_one_destination_leave_one_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let dst = dir.path().join("deep/out");
    let results: Vec<bool> = std::thread::scope(|scope| {
        let run = |i: u8| stage_all(&dst, i).and_then(Staging::commit).is_ok();
        let runs: Vec<_> = (0..8).map(|i| scope.spawn(move || run(i))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|won| **won).count(), 1, "{results:?}");
    let parts = [0, 1, 2].map(|n| std::fs::read(dst.join(n.to_string())).unwrap());
    assert!(parts.iter().all(|part| *part == parts[0] && part.len() == 1));
    assert_eq!(tree(dir.path()).len(), 5, "{:?}", tree(dir.path()));
}

fn stage_all(dst: &Path, byte: u8) -> Result<Staging> {
    let staging = Staging::create(dst, false)?;
    for n in 0..3 {
        staging.write_file(n.to_string(), &[byte])?;
    }
    Ok(staging)
}

#[test]
fn the_lock_is_seen_by_other_processes() {
    let dir = tempfile::tempdir().unwrap();
    let staging = stage(&dir.path().join("out"), false, b"1");
    let try_lock = || Command::new("flock").arg("-n").arg(staging.path()).arg("true").status();
    if let Ok(status) = try_lock() {
        assert_eq!(status.code(), Some(1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn tiles_land_at_their_offsets(len in 1usize..5000, tile in 1usize..700, threads in 1usize..4) {
        let dir = tempfile::tempdir().unwrap();
        let want: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8).collect();
        let staging = Staging::create(&dir.path().join("out"), false).unwrap();
        let out = staging.create_file("m", len as u64).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (out, want) = (&out, &want);
                scope.spawn(move || {
                    for (i, bytes) in want.chunks(tile).enumerate().skip(thread).step_by(threads) {
                        out.write_all_at(bytes, (i * tile) as u64).unwrap();
                    }
                });
            }
        });
        let mut back = vec![0; len];
        out.read_exact_at(&mut back, 0).unwrap();
        prop_assert_eq!(back, want);
    }
}
