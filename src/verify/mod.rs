//! Proves what was written: decodes the stored bytes by a path of its own and compares with the report, the config and,
//! where it is given, the source. Never writes.

mod bytes;
mod check;
mod report;
mod source;

use crate::checkpoint::{Checkpoint, REPORT_FILE};
use crate::error::{Error, Result};
use crate::plan::{stored_config, stored_scheme};
use crate::pool::Watch;
use crate::report::Report;
use crate::run::Settings;
use crate::scheme::Recognised;
use check::Check;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// The tensor, module or file.
    pub subject: String,
    pub what: String,
}

/// What `--verify` came to.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    /// Empty: all is as it should be.
    pub findings: Vec<Finding>,
    /// Quantized modules looked at.
    pub modules: usize,
    /// Stored tensors looked at.
    pub tensors: usize,
    /// Tensors whose bytes were hashed and compared with the report's.
    pub hashed: usize,
    /// Dense tensors compared with the source byte by byte.
    pub compared: usize,
    /// Recomputed from stored bytes and the source, in dB; by the report's names.
    pub snr_db: BTreeMap<String, Option<f64>>,
    pub snr_db_mean: Option<f64>,
    pub snr_db_min: Option<f64>,
    /// Checks that could not be made, and why.
    pub notes: Vec<String>,
}

/// What to compare with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Against<'a> {
    pub src: Option<&'a Path>,
    /// Every module's SNR must reach it, in dB. Needs `src`.
    pub min_snr: Option<f64>,
}

/// Verifies the checkpoint at `dst`.
///
/// # Errors
/// What keeps the check from being made: no checkpoint at `dst`, an unreadable file, a bad source. A fault of the
/// checkpoint itself is a [`Finding`].
pub fn verify(dst: &Path, against: Against, settings: &Settings, watch: &dyn Watch) -> Result<Outcome> {
    let source = against.src.map(Checkpoint::open).transpose()?;
    let mut outcome = Outcome::default();
    // One file cannot say how it was quantized.
    if dst.metadata().is_ok_and(|metadata| !metadata.is_dir()) {
        let path = dst.to_path_buf();
        return Err(Error::DestinationIsFile { path });
    }
    let checkpoint = match Checkpoint::open(dst) {
        Ok(checkpoint) => checkpoint,
        Err(error) if error.is_about_contents() => {
            outcome.find(dst.display(), error);
            return Ok(outcome);
        }
        Err(error) => return Err(error),
    };
    let report = read_report(dst, &mut outcome)?;
    outcome.folder(&checkpoint, report.as_ref());
    let Some(recognised) = recognised(&checkpoint, report.as_ref(), &mut outcome)? else {
        return Ok(outcome);
    };
    let mut check = Check::new(&checkpoint, source.as_ref(), report.as_ref(), recognised);
    check.structure(&mut outcome)?;
    check.against_report(&mut outcome);
    check.against_source(watch, &mut outcome)?;
    check.bytes(settings, watch, &mut outcome)?;
    check.figures(against.min_snr, &mut outcome);
    outcome.findings.sort();
    outcome.findings.dedup();
    Ok(outcome)
}

impl Outcome {
    /// What the files say of each other. Where this tool wrote them, nothing may be odd about them.
    fn folder(&mut self, checkpoint: &Checkpoint, report: Option<&Report>) {
        for warning in &checkpoint.warnings {
            match report {
                Some(_) => self.find(checkpoint.root.display(), warning),
                None => self.notes.push(warning.clone()),
            }
        }
        if checkpoint.files.len() > 1 && !checkpoint.indexed {
            let index = format!("{}.safetensors.index.json", checkpoint.stem);
            self.find(
                index,
                format!("is missing, and {} files need it", checkpoint.files.len()),
            );
        }
        if report.is_some() && checkpoint.indexed && !checkpoint.index_has_size {
            let index = format!("{}.safetensors.index.json", checkpoint.stem);
            self.find(index, "has no metadata.total_size");
        }
    }

    /// A fault where this tool's report vouches for what was written, else a note: other tools may have had reasons.
    fn differs(&mut self, ours: bool, subject: impl ToString, what: impl ToString) {
        match ours {
            true => self.find(subject, what),
            false => self
                .notes
                .push(format!("{}: {}", subject.to_string(), what.to_string())),
        }
    }

    fn find(&mut self, subject: impl ToString, what: impl ToString) {
        self.findings.push(Finding {
            subject: subject.to_string(),
            what: what.to_string(),
        });
    }
}

/// The report, if the folder has one; one that cannot be read is a finding.
fn read_report(dst: &Path, outcome: &mut Outcome) -> Result<Option<Report>> {
    match Report::read(&dst.join(REPORT_FILE)) {
        Ok(Some(report)) => return Ok(Some(report)),
        Ok(None) => {
            let note = format!("no {REPORT_FILE}: hashes and reported SNRs are not checked");
            outcome.notes.push(note);
        }
        Err(error @ (Error::BadJson { .. } | Error::NotAFile { .. })) => outcome.find(REPORT_FILE, error),
        Err(error) => return Err(error),
    }
    Ok(None)
}

/// The scheme that the checkpoint names, its config checked against the report's copy of it.
fn recognised(checkpoint: &Checkpoint, report: Option<&Report>, outcome: &mut Outcome) -> Result<Option<Recognised>> {
    let path = || checkpoint.root.clone();
    let Some(config) = stored_config(checkpoint)? else {
        if report.is_none() {
            let why = "config.json has no quantization_config".to_string();
            return Err(Error::NotQuantized { path: path(), why });
        }
        outcome.find("config.json", "has no quantization_config");
        return Ok(None);
    };
    if let Some(report) = report {
        compare_configs(&config, &report.quantization_config, outcome);
    }
    match stored_scheme(checkpoint, &config) {
        Ok(recognised) => Ok(Some(recognised)),
        // Of another tool, so it is no fault of the checkpoint.
        Err(why) if report.is_none() => Err(Error::UnknownLayout { path: path(), why }),
        Err(why) => {
            outcome.find("config.json", format!("quantization_config: {why}"));
            Ok(None)
        }
    }
}

fn compare_configs(config: &Map<String, Value>, reported: &Map<String, Value>, outcome: &mut Outcome) {
    let keys: BTreeSet<&String> = config.keys().chain(reported.keys()).collect();
    for key in keys {
        let (here, there) = (config.get(key), reported.get(key));
        if here != there {
            let text = |value: Option<&Value>| value.map_or("absent".to_string(), Value::to_string);
            let what = format!(
                "quantization_config.{key} is {}, the report says {}",
                text(here),
                text(there)
            );
            outcome.find("config.json", what);
        }
    }
}
