//! A module imports only from those below it: reads every `crate::` path in `src` and fails on an upward one.

use std::fs;
use std::path::{Path, PathBuf};

/// Bottom to top; modules of one row may import each other.
const LAYERS: &[&[&str]] = &[
    &["tensor", "error"],
    &["kernel"],
    &["checkpoint"],
    &["scheme"],
    &["report"],
    &["plan"],
    &["pool"],
    &["run"],
    &["verify"],
    &["progress", "signals"],
    &["cli"],
    &["main"],
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// The modules that a text names after `crate::` or `spark_quant::`, groups in braces included, with their lines.
fn imports(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for root in ["crate::", "spark_quant::"] {
        for (at, _) in text.match_indices(root) {
            // `$crate::` and a longer path that ends in `..crate::` are no import of ours.
            let word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$');
            if text[..at].ends_with(word) {
                continue;
            }
            let line_start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
            if text[line_start..at].trim_start().starts_with("//") {
                continue;
            }
            let line = text[..at].matches('\n').count() + 1;
            let rest = &text[at + root.len()..];
            let names = match rest.strip_prefix('{') {
                Some(group) => first_names(group),
                None => vec![first_name(rest)],
            };
            found.extend(names.into_iter().map(|name| (line, name)));
        }
    }
    found
}

fn first_name(text: &str) -> String {
    text.trim_start()
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect()
}

/// `a::b, c::{d, e}}` -> a, c
fn first_names(group: &str) -> Vec<String> {
    let (mut depth, mut begin) = (0, 0);
    let mut names = Vec::new();
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(first_name(&group[begin..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(first_name(&group[begin..at]));
                begin = at + 1;
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Every upward or unknown import of a file that belongs to `module`.
fn faults(module: &str, text: &str) -> Vec<String> {
    let Some(own) = layer(module) else {
        return vec![format!("{module} has no place in LAYERS")];
    };
    let upward = imports(text).into_iter().filter_map(|(line, name)| match layer(&name) {
        Some(other) if other > own => Some(format!("{module}, line {line}: imports {name}, which is above it")),
        Some(_) => None,
        None => Some(format!("{module}, line {line}: {name} has no place in LAYERS")),
    });
    upward.collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_module_imports_from_above() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut all, mut seen) = (Vec::new(), 0);
    for file in files {
        let relative = file.strip_prefix(&src).unwrap();
        let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.strip_suffix(".rs").unwrap_or(first);
        if module == "lib" {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        seen += imports(&text).len();
        all.extend(
            faults(module, &text)
                .into_iter()
                .map(|fault| format!("{}: {fault}", relative.display())),
        );
    }
    assert!(seen > 50, "only {seen} imports were read");
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn an_upward_import_is_found() {
    assert!(faults(
        "plan",
        "use crate::scheme::{Scheme, Shape};\nuse crate::error::Result;\n"
    )
    .is_empty());
    assert!(faults("verify", "use crate::run::Settings;").is_empty());
    for (module, text) in [
        ("kernel", "use crate::checkpoint::Reader;"),
        ("scheme", "fn f() {\n    let plan: crate::plan::Plan;\n}"),
        ("run", "use crate::{\n    error::{Error, Result},\n    verify,\n};"),
        ("error", "pub(crate) use crate::kernel::Level;"),
        ("cli", "use spark_quant::main;"),
        ("tensor", "use crate::nowhere::Thing;"),
    ] {
        assert_eq!(faults(module, text).len(), 1, "{module}: {text}");
    }
    assert_eq!(imports("// crate::cli\n    /// [`crate::cli`]\n$crate::cli!()"), []);
}
