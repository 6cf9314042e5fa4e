//! A checkpoint to spoil: what `--verify` must find, and the edits that the tests of it share.

use super::*;

/// A quantized tiny checkpoint, copied anew for each fault.
pub struct Subject {
    pub sandbox: Sandbox,
    pub dst: std::path::PathBuf,
}

impl Subject {
    pub fn new(args: &[&str]) -> Self {
        let sandbox = Sandbox::tiny();
        sandbox.quantize(&[&["--group", "64", "--quantize-lm-head"], args].concat());
        let dst = sandbox.path("spoilt");
        Subject { sandbox, dst }
    }

    /// Verifies a copy after `spoil`, with the source or without.
    pub fn verify(&self, with_source: bool, spoil: impl FnOnce(&Path)) -> Outcome {
        if self.dst.exists() {
            fs::remove_dir_all(&self.dst).unwrap();
        }
        copy_folder(&self.sandbox.dst(), &self.dst);
        spoil(&self.dst);
        let before = tree(self.sandbox.root());
        let mut args = vec!["--verify".into(), "--dst".into(), self.dst.clone()];
        if with_source {
            args.extend(["--src".into(), self.sandbox.src()]);
        }
        let outcome = run(args);
        assert_eq!(tree(self.sandbox.root()), before, "--verify wrote something");
        outcome
    }

    /// The fault is found and all of `says` named.
    #[track_caller]
    pub fn faulty(&self, with_source: bool, says: &[&str], spoil: impl FnOnce(&Path)) {
        let outcome = self.verify(with_source, spoil).expect(1);
        outcome.says(&[&["FAULT"], says].concat());
        assert_eq!(outcome.stderr, "", "faults belong on stdout");
    }

    /// The fault is found with the source and without.
    #[track_caller]
    pub fn faulty_anyhow(&self, says: &[&str], spoil: impl Fn(&Path)) {
        self.faulty(false, says, &spoil);
        self.faulty(true, says, &spoil);
    }
}

/// Changes one tensor.
pub fn edit(name: &str, change: impl Fn(&mut Tensor)) -> impl Fn(&Path) {
    let name = name.to_string();
    move |dst| edit_tensors(dst, |tensors| change(named(tensors, &name)))
}

pub fn edit_tensors(dst: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let mut tensors = read_tensors(&dst.join(WEIGHTS));
    change(&mut tensors);
    write_tensors(&dst.join(WEIGHTS), &tensors);
}

/// Makes the report's hashes those of the bytes that are there.
pub fn mend_hashes(dst: &Path) {
    edit_json(&dst.join(REPORT), |report| {
        for tensor in read_tensors(&dst.join(WEIGHTS)) {
            report["xxh3_128"][&tensor.name] = hash(&tensor.bytes).into();
        }
    });
}

pub fn config(dst: &Path, change: impl FnOnce(&mut Value)) {
    edit_json(&dst.join("config.json"), change);
}

pub fn report(dst: &Path, change: impl FnOnce(&mut Value)) {
    edit_json(&dst.join(REPORT), change);
}
