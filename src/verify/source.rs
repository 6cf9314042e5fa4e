//! What lies around the weights: `__metadata__`, config.json and sidecars, against the source where it is given.

use super::check::{Check, HEAD};
use super::Outcome;
use crate::checkpoint::{open_regular, Checkpoint, Config, Sidecar, SourceFile};
use crate::error::{Error, Result};
use crate::pool::Watch;
use crate::run::COPY_STEP;
use crate::tensor::Float;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Read;

const CONFIG: &str = "config.json";
const TIED: &str = "tie_word_embeddings";

impl Check<'_> {
    /// # Errors
    /// A file that cannot be read; [`Error::Interrupted`].
    pub fn against_source(&self, watch: &dyn Watch, outcome: &mut Outcome) -> Result<()> {
        for (at, file) in self.checkpoint.files.iter().enumerate() {
            self.file_metadata(at, file, outcome);
        }
        self.untied(outcome);
        let Some(source) = self.source else { return Ok(()) };
        self.config(source, outcome);
        let mut chunks = [vec![0; COPY_STEP], vec![0; COPY_STEP]];
        for sidecar in &source.sidecars {
            if let Some(what) = self.sidecar(sidecar, &mut chunks, watch)? {
                outcome.differs(self.report.is_some(), sidecar.relative.display(), what);
            }
        }
        Ok(())
    }

    /// `__metadata__` of one file: the source's, and what the scheme adds.
    fn file_metadata(&self, at: usize, file: &SourceFile, outcome: &mut Outcome) {
        let (scheme, ours) = (self.scheme.scheme.as_ref(), self.report.is_some());
        let here = self.stacks.iter().filter(|stack| stack.module.tensors[0].file == at);
        let held: Vec<(&str, Float)> = here
            .map(|stack| (stack.module.name.as_str(), stack.module.shape.dtype))
            .collect();
        let own = scheme.file_metadata(&held);
        if let Some((key, value)) = &own {
            let object = |text: &str| serde_json::from_str::<Map<String, Value>>(text).unwrap_or_default();
            let found = object(file.metadata.get(key).unwrap_or_default());
            compare(key, &found, &object(value), &mut |key, is, should| {
                outcome.find(&file.name, format!("{key} is {is}, and should be {should}"));
            });
        }
        let own = own.as_ref().map(|(key, _)| key.as_str());
        if scheme.writes_format() && file.metadata.get("format").is_none() {
            let what = "its __metadata__ has no format, and transformers refuses such a file";
            outcome.differs(ours, &file.name, what);
        }
        let Some(source) = self.source else { return };
        let mut expected: BTreeMap<&str, &str> = source.metadata.iter().collect();
        if scheme.writes_format() {
            expected.entry("format").or_insert("pt");
        }
        let found: BTreeMap<&str, &str> = file.metadata.iter().collect();
        for key in expected
            .keys()
            .chain(found.keys().filter(|key| !expected.contains_key(*key)))
        {
            let (is, should) = (found.get(key), expected.get(key));
            if is != should && Some(*key) != own {
                let text = |value: Option<&&str>| value.map_or("absent".to_string(), |value| format!("{value:?}"));
                let what = format!(
                    "{key} of its __metadata__ is {}, by the source it should be {}",
                    text(is),
                    text(should)
                );
                outcome.differs(ours, &file.name, what);
            }
        }
    }

    fn has_head(&self) -> bool {
        self.stacks.iter().any(|stack| stack.module.name == HEAD)
    }

    /// A quantized head is loaded only where the config does not tie it, at the top level and below.
    fn untied(&self, outcome: &mut Outcome) {
        if !self.has_head() {
            return;
        }
        let config = self.checkpoint.config.as_ref();
        let top = config.and_then(|config| config.get(TIED));
        let nested = config.and_then(|config| config.get("text_config")?.get(TIED));
        for (below, value) in [("", top), ("text_config.", nested)] {
            if value == Some(&Value::Bool(true)) {
                let what = format!("{below}{TIED} is true, so readers would not load the quantized lm_head");
                outcome.find(CONFIG, what);
            }
        }
        // Many readers take a missing key for true; with the source, `config` finds it.
        if self.report.is_some() && self.source.is_none() && !top.is_some_and(Value::is_boolean) {
            let is = top.map_or("absent".to_string(), Config::show);
            let what = format!("{TIED} is {is}, and should be false for the quantized lm_head");
            outcome.find(CONFIG, what);
        }
    }

    /// config.json is the source's but for the keys that quantizing sets.
    fn config(&self, source: &Checkpoint, outcome: &mut Outcome) {
        let mut expected = source.config.clone().unwrap_or_default();
        // A source may have it as null.
        expected.remove("quantization_config");
        if self.has_head() {
            expected.set_everywhere(TIED, false);
        }
        let mut here = self.checkpoint.config.clone().unwrap_or_default();
        here.remove("quantization_config");
        compare("", here.as_map(), expected.as_map(), &mut |key, is, should| {
            let what = format!("{key} is {is}, by the source it should be {should}");
            outcome.differs(self.report.is_some(), CONFIG, what);
        });
    }

    /// What is wrong with the copy of a sidecar.
    fn sidecar(&self, sidecar: &Sidecar, chunks: &mut [Vec<u8>; 2], watch: &dyn Watch) -> Result<Option<String>> {
        let path = self.checkpoint.root.join(&sidecar.relative);
        let (mut here, len) = match open_regular(&path) {
            Ok(opened) => opened,
            Err(error) if error.is_absence() => return Ok(Some("is in the source and missing here".to_string())),
            Err(Error::NotAFile { kind, .. }) => return Ok(Some(format!("is {kind}, in the source a file"))),
            Err(error) => return Err(error),
        };
        let (mut there, source_len) = open_regular(&sidecar.from)?;
        if len != source_len {
            return Ok(Some(format!("has {len} bytes, in the source {source_len}")));
        }
        let mut offset = 0;
        while offset < len {
            if watch.cancelled() {
                return Err(Error::Interrupted);
            }
            let step = (len - offset).min(COPY_STEP as u64) as usize;
            let [a, b] = chunks.each_mut().map(|chunk| &mut chunk[..step]);
            here.read_exact(a).map_err(Error::io(&path, "reading"))?;
            there.read_exact(b).map_err(Error::io(&sidecar.from, "reading"))?;
            if a != b {
                let at = a.iter().zip(b.iter()).position(|(a, b)| a != b).unwrap_or(0);
                let byte = offset + at as u64;
                return Ok(Some(format!("differs from the source, first at byte {byte} of {len}")));
            }
            offset += step as u64;
        }
        Ok(None)
    }
}

/// Tells of every key, dotted where it is nested, whose value is not the expected one: the key and both values.
fn compare(
    above: &str,
    found: &Map<String, Value>,
    expected: &Map<String, Value>,
    tell: &mut dyn FnMut(&str, String, String),
) {
    let absent = expected.keys().filter(|key| !found.contains_key(*key));
    for key in found.keys().chain(absent) {
        let path = match above {
            "" => key.clone(),
            above => format!("{above}.{key}"),
        };
        match (found.get(key), expected.get(key)) {
            (Some(Value::Object(found)), Some(Value::Object(expected))) => compare(&path, found, expected, tell),
            (Some(found), Some(expected)) if Config::same(found, expected) => {}
            (found, expected) => tell(&path, text(found), text(expected)),
        }
    }
}

/// A value for a message, cut where it is long.
fn text(value: Option<&Value>) -> String {
    const MOST: usize = 100;
    let text = value.map_or("absent".to_string(), Config::show);
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text,
    }
}
