//! `--include` and `--exclude`: fnmatch patterns on a module's name (the tensor's name less `.weight`). With includes,
//! only what one of them matches is quantized; what an exclude matches never is.

use crate::error::{Error, Result};
use globset::{GlobBuilder, GlobMatcher};
use std::cell::Cell;

struct Pattern {
    option: &'static str,
    text: String,
    matcher: GlobMatcher,
    used: Cell<bool>,
}

impl Pattern {
    /// As Python's fnmatch: `*` crosses every separator, and a backslash is a character.
    fn new(option: &'static str, text: &str) -> Result<Self> {
        let glob = GlobBuilder::new(text)
            .literal_separator(false)
            .backslash_escape(false)
            .build();
        let glob = glob.map_err(|error| Error::BadRequest(format!("--{option} {text:?}: {}", error.kind())))?;
        Ok(Self {
            option,
            text: text.to_string(),
            matcher: glob.compile_matcher(),
            used: Cell::new(false),
        })
    }

    fn matches(&self, names: &[&str]) -> bool {
        let hit = names.iter().any(|name| self.matcher.is_match(name));
        self.used.set(self.used.get() || hit);
        hit
    }
}

pub(super) struct Patterns {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

impl Patterns {
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self> {
        let compile = |option, texts: &[String]| -> Result<Vec<Pattern>> {
            texts.iter().map(|text| Pattern::new(option, text)).collect()
        };
        Ok(Self {
            include: compile("include", include)?,
            exclude: compile("exclude", exclude)?,
        })
    }

    /// Why a module that goes by any of `names` is left dense. Every pattern is tried, so that an unused one is seen.
    pub fn refuse(&self, names: &[&str]) -> Option<String> {
        let excluded = self.exclude.iter().filter(|pattern| pattern.matches(names)).last();
        let included = self.include.iter().filter(|pattern| pattern.matches(names)).count() > 0;
        match excluded {
            Some(pattern) => Some(format!("--exclude {:?}", pattern.text)),
            None if !self.include.is_empty() && !included => Some("no --include names it".to_string()),
            None => None,
        }
    }

    /// # Errors
    /// [`Error::PatternMatchesNothing`] for the first pattern that no name matched.
    pub fn check_used(&self) -> Result<()> {
        match self
            .include
            .iter()
            .chain(&self.exclude)
            .find(|pattern| !pattern.used.get())
        {
            Some(unused) => Err(Error::PatternMatchesNothing {
                option: unused.option,
                pattern: unused.text.clone(),
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(include: &[&str], exclude: &[&str]) -> Patterns {
        let own = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        Patterns::new(&own(include), &own(exclude)).unwrap()
    }

    #[test]
    fn star_crosses_dots_and_slashes() {
        let patterns = patterns(&["blocks.*"], &["*proj_out*", "blocks.[01].ff"]);
        assert_eq!(patterns.refuse(&["blocks.0.attn/x.to_q"]), None);
        assert_eq!(
            patterns.refuse(&["blocks.0.proj_out"]).unwrap(),
            "--exclude \"*proj_out*\""
        );
        assert_eq!(
            patterns.refuse(&["blocks.1.ff"]).unwrap(),
            "--exclude \"blocks.[01].ff\""
        );
        assert_eq!(patterns.refuse(&["head"]).unwrap(), "no --include names it");
        assert!(patterns.check_used().is_ok());
    }

    #[test]
    fn an_unused_pattern_is_named() {
        let patterns = patterns(&[], &["nothing*"]);
        patterns.refuse(&["model.layers.0.mlp.up_proj"]);
        assert!(patterns.check_used().unwrap_err().to_string().contains("nothing*"));
        assert!(Patterns::new(&[], &["[".to_string()]).is_err());
    }
}
