//! `config.json`, edited key by key: all that the user had stays, in its order, numbers as they were written.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::header::open_regular;
use crate::error::{Error, Result};

/// What Python's `json` writes and reads beyond JSON.
const PYTHON_LITERALS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Begins the JSON string that stands for a literal which serde_json would refuse or write otherwise (`1E5` as `1e+5`).
const STAND_IN: &str = r#""\u0000literal:"#;

/// Parts of a multimodal model keep the language model's sizes here.
const NESTED: &str = "text_config";

/// A model's `config.json`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Where it was read from.
    pub path: PathBuf,
    map: Map<String, Value>,
    ends_with_newline: bool,
}

impl Config {
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`], [`Error::BadJson`], [`Error::NotAnObject`].
    pub fn read(path: &Path) -> Result<Config> {
        let (mut file, len) = open_regular(path)?;
        let mut bytes = Vec::with_capacity(len.min(1 << 20) as usize);
        file.read_to_end(&mut bytes).map_err(Error::io(path, "reading"))?;
        Config::parse(path, &bytes)
    }

    /// Parses the bytes of a config; `path` is for messages. A byte order mark and Python's NaN and Infinity are taken.
    ///
    /// # Errors
    /// [`Error::BadJson`], [`Error::NotAnObject`].
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Config> {
        let bad = |why: String| Error::BadJson {
            path: path.to_path_buf(),
            why,
        };
        let text = std::str::from_utf8(bytes).map_err(|e| bad(e.to_string()))?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        match serde_json::from_str(&hide_literals(text)).map_err(|e| bad(e.to_string()))? {
            Value::Object(map) => Ok(Config {
                path: path.to_path_buf(),
                map,
                ends_with_newline: text.ends_with('\n'),
            }),
            _ => Err(Error::NotAnObject {
                path: path.to_path_buf(),
            }),
        }
    }

    /// A top-level value. NaN, the infinities and exponents such as `1E5` show as strings that begin
    /// with a NUL.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key)
    }

    /// A count at the top level or, where it is not there, in `text_config`.
    pub fn usize(&self, key: &str) -> Option<usize> {
        let count = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let nested = || self.get(NESTED)?.get(key).and_then(count);
        self.get(key).and_then(count).or_else(nested)
    }

    /// What [`Config::usize`] finds or fails to read, as it was written; `None` where it is not there or null.
    pub fn shown(&self, key: &str) -> Option<String> {
        let there = |value: &&Value| !value.is_null();
        let nested = || self.get(NESTED)?.get(key).filter(there);
        let value = self.get(key).filter(there).or_else(nested)?;
        Some(show_literals(&value.to_string()))
    }

    /// A flag at the top level or, where it is not there, in `text_config`.
    pub fn bool(&self, key: &str) -> Option<bool> {
        let nested = || self.get(NESTED)?.get(key)?.as_bool();
        self.get(key).and_then(Value::as_bool).or_else(nested)
    }

    /// A text at the top level or, where it is not there, in `text_config`.
    pub fn text(&self, key: &str) -> Option<&str> {
        let nested = || self.get(NESTED)?.get(key)?.as_str();
        self.get(key).and_then(Value::as_str).or_else(nested)
    }

    /// An object at the top level or, where it is not there, in `text_config`; null counts as absent.
    pub fn object(&self, key: &str) -> Option<&Map<String, Value>> {
        let nested = || self.get(NESTED)?.get(key)?.as_object();
        self.get(key).and_then(Value::as_object).or_else(nested)
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Replaces a top-level value in its place, or appends it.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.map.insert(key.to_string(), value.into());
    }

    /// Replaces a value at the top level and, where `text_config` has it, there too: readers differ in which they obey.
    pub fn set_everywhere(&mut self, key: &str, value: impl Into<Value>) {
        let value = value.into();
        if let Some(slot) = self.map.get_mut(NESTED).and_then(|nested| nested.get_mut(key)) {
            *slot = value.clone();
        }
        self.set(key, value);
    }

    pub fn as_map(&self) -> &Map<String, Value> {
        &self.map
    }

    pub fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// A value as the file has it, on one line.
    pub fn show(value: &Value) -> String {
        show_literals(&value.to_string())
    }

    /// Whether two values are one to a reader: floats by value, all else as it is written.
    pub fn same(a: &Value, b: &Value) -> bool {
        let float = |value: &Value| {
            let text = Config::show(value);
            let is_float = !value.is_string() || value.as_str()?.starts_with('\0');
            (is_float && text.contains(['.', 'e', 'E'])).then(|| text.parse::<f64>().ok())?
        };
        a == b || matches!((float(a), float(b)), (Some(a), Some(b)) if a == b)
    }

    /// Takes a top-level key out; the others keep their order.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key)
    }

    /// As Python's `json.dumps(indent=2, ensure_ascii=False)`; ends with a newline if the source did.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = serde_json::to_string_pretty(&self.map).expect("a map of JSON values serializes");
        if text.contains(STAND_IN) {
            text = show_literals(&text);
        }
        if self.ends_with_newline {
            text.push('\n');
        }
        text.into_bytes()
    }
}

/// Turns literals that would not come back as they are into strings; every other byte is kept, errors included.
fn hide_literals(text: &str) -> String {
    let is_literal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        let taken = match c {
            // The character after a backslash never ends a string.
            '\\' if in_string => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            '"' => {
                in_string = !in_string;
                1
            }
            c if !in_string && is_literal(c) => {
                let literal = &rest[..rest.find(|c| !is_literal(c)).unwrap_or(rest.len())];
                if changes(literal) {
                    out.push_str(STAND_IN);
                    out.push_str(literal);
                    out.push('"');
                    rest = &rest[literal.len()..];
                    continue;
                }
                literal.len()
            }
            c => c.len_utf8(),
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

/// A literal that Python reads and serde_json refuses or does not write back as it is.
fn changes(literal: &str) -> bool {
    let written = serde_json::from_str(literal).map(|value: Value| value.to_string());
    PYTHON_LITERALS.contains(&literal) || written.is_ok_and(|written| written != literal)
}

/// Turns the stand-ins in compact or pretty JSON back.
fn show_literals(text: &str) -> String {
    let mut parts = text.split(STAND_IN);
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (literal, after) = part.split_once('"').unwrap_or((part, ""));
        out.push_str(literal);
        out.push_str(after);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(Path::new("m/config.json"), text.as_bytes())
    }

    fn round_trip(text: &str) -> String {
        String::from_utf8(parse(text).unwrap().to_bytes()).unwrap()
    }

    #[test]
    fn all_bytes_survive_a_round_trip() {
        let text = r#"{
  "z": 1,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000.0,
  "upper": 1E5,
  "plus": 1.5e+10,
  "minus_zero": -0.0,
  "minus_zero_int": -0,
  "big": 123456789012345678901234567890,
  "long": 0.1000000000000000055511151231257827,
  "huge": 1e400,
  "a": [
    1,
    2.50,
    []
  ],
  "empty": {},
  "text": "é \"NaN\" \\ / Infinity \u0001 \n",
  "null": null
}"#;
        assert_eq!(round_trip(text), text);
        assert_eq!(round_trip(&format!("{text}\n")), format!("{text}\n"));
        assert_eq!(round_trip(&format!("\u{feff}{text}")), text);
    }

    #[test]
    fn python_literals_survive() {
        let text = "{\n  \"a\": NaN,\n  \"b\": [\n    Infinity,\n    -Infinity\n  ],\n  \"c\": \"NaN\"\n}";
        assert_eq!(round_trip(text), text);
        assert!(parse("{\"a\": NaNa}").is_err());
        assert_eq!(
            round_trip("{\"a\": 1e5, \"b\": 1e+5}"),
            "{\n  \"a\": 1e5,\n  \"b\": 1e+5\n}"
        );
    }

    #[test]
    fn edits_keep_the_order() {
        let mut config = parse(r#"{"a": 1, "b": 2, "c": 3, "d": 4}"#).unwrap();
        assert_eq!(config.remove("b"), Some(Value::from(2)));
        config.set("c", "new");
        config.set("e", false);
        let text = String::from_utf8(config.to_bytes()).unwrap();
        assert_eq!(
            text,
            "{\n  \"a\": 1,\n  \"c\": \"new\",\n  \"d\": 4,\n  \"e\": false\n}"
        );
    }

    #[test]
    fn a_key_is_set_at_the_top_and_where_it_is_nested() {
        let set = |text| {
            let mut config = parse(text).unwrap();
            config.set_everywhere("t", false);
            Value::Object(config.into_map()).to_string()
        };
        assert_eq!(
            set(r#"{"text_config":{"t":true,"a":1}}"#),
            r#"{"text_config":{"t":false,"a":1},"t":false}"#
        );
        assert_eq!(
            set(r#"{"t":true,"text_config":{"a":1}}"#),
            r#"{"t":false,"text_config":{"a":1}}"#
        );
        assert_eq!(set(r#"{"text_config":null}"#), r#"{"text_config":null,"t":false}"#);
    }

    #[test]
    fn floats_are_the_same_by_value_and_all_else_as_written() {
        let same = |a: &str, b: &str| {
            let value = |text: &str| parse(&format!("{{\"k\": {text}}}")).unwrap().remove("k").unwrap();
            Config::same(&value(a), &value(b))
        };
        assert!(same("1E5", "100000.0") && same("1.0e-06", "1e-06") && same("NaN", "NaN"));
        assert!(!same("1e5", "\"1e5\"") && !same("1", "1.5") && !same("1e-5", "1e-6"));
        assert!(!same("12345678901234567890123", "12345678901234567890124"));
    }

    #[test]
    fn counts_are_found_in_the_text_config_too() {
        let config = parse(r#"{"a": 1, "b": null, "f": 2.0, "text_config": {"a": 5, "b": 6, "c": -1}}"#).unwrap();
        assert_eq!(config.usize("a"), Some(1));
        assert_eq!(config.usize("b"), Some(6));
        assert_eq!(
            (config.usize("c"), config.usize("f"), config.usize("d")),
            (None, None, None)
        );
    }

    #[test]
    fn errors_name_the_file() {
        for text in [
            "",
            "{",
            "{\"a\": 1,}",
            "{\"a\": \"\\ud800\"}",
            "\"\\",
            &"[".repeat(100_000),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.starts_with("m/config.json: not valid JSON: "), "{message}");
        }
        assert_eq!(
            parse("[1]").unwrap_err().to_string(),
            "m/config.json: not a JSON object"
        );
        let message = Config::parse(Path::new("c"), b"{\"\xff\": 1}").unwrap_err().to_string();
        assert!(message.starts_with("c: not valid JSON: invalid utf-8"), "{message}");
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_is_written_is_read(text in "[\\[\\]{}\":,0-9aeE.NI+\\-é \\\\u\n]{0,40}|.{0,20}") {
            for text in [text.clone(), format!("{{\"k\": [{text}]}}")] {
                if let Ok(config) = parse(&text) {
                    let again = Config::parse(&config.path, &config.to_bytes()).unwrap();
                    prop_assert_eq!(again.to_bytes(), config.to_bytes());
                }
            }
        }
    }
}
