//! The names of weight files: `STEM.safetensors`, and `STEM-00001-of-00003.safetensors` for one shard of three.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Result};

pub(super) const EXTENSION: &str = ".safetensors";

/// The parts of a numbered shard's name. Widths vary in the wild (`model-00001-of-000163`), so they are not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbered<'a> {
    pub stem: &'a str,
    pub number: u64,
    pub total: u64,
}

impl<'a> Numbered<'a> {
    /// `None` for a name without numbers.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rest, total) = name.strip_suffix(EXTENSION)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            text.bytes()
                .all(|b| b.is_ascii_digit())
                .then(|| text.parse().ok())
                .flatten()
        };
        Some(Numbered {
            stem,
            number: digits(number)?,
            total: digits(total)?,
        })
    }
}

/// A weight file's name without numbers and extension; also that of `model.safetensors-00001-of-00002.safetensors`.
pub(super) fn stem_of(name: &str) -> &str {
    let stem = match Numbered::parse(name) {
        Some(shard) => shard.stem,
        None => name.strip_suffix(EXTENSION).unwrap_or(name),
    };
    stem.strip_suffix(EXTENSION).unwrap_or(stem)
}

/// Every numbered set among `names` has all its members. Numbers may begin at 0 or at 1.
pub(super) fn check_numbers(folder: &Path, names: &[String]) -> Result<()> {
    let mut sets: BTreeMap<(&str, u64), Vec<u64>> = BTreeMap::new();
    for shard in names.iter().filter_map(|name| Numbered::parse(name)) {
        sets.entry((shard.stem, shard.total)).or_default().push(shard.number);
    }
    for ((stem, total), mut numbers) in sets {
        numbers.sort_unstable();
        numbers.dedup();
        let first = numbers[0].min(1);
        let expected = first..first.saturating_add(total);
        // Compared with the files that are there, so that an absurd total costs nothing.
        let missing = expected
            .clone()
            .zip(numbers.iter().map(Some).chain(std::iter::repeat(None)));
        let missing = missing
            .into_iter()
            .find(|(number, found)| *found != Some(number))
            .map(|(number, _)| number);
        if let Some(number) = missing {
            return Err(Error::MissingNumberedShard {
                folder: folder.to_path_buf(),
                stem: stem.to_string(),
                number,
                total,
            });
        }
    }
    Ok(())
}

/// Byte order, but a run of digits compares as the number it is.
pub(super) fn natural_order(a: &str, b: &str) -> Ordering {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    while let (Some(&p), Some(&q)) = (x.first(), y.first()) {
        let (n, m) = (digits(x), digits(y));
        let step = if n > 0 && m > 0 {
            let trim = |run: &[u8]| run.iter().take_while(|&&byte| byte == b'0').count();
            let (u, v) = (&x[trim(&x[..n])..n], &y[trim(&y[..m])..m]);
            let order = u.len().cmp(&v.len()).then_with(|| u.cmp(v));
            (x, y) = (&x[n..], &y[m..]);
            order
        } else {
            (x, y) = (&x[1..], &y[1..]);
            p.cmp(&q)
        };
        if step != Ordering::Equal {
            return step;
        }
    }
    x.len().cmp(&y.len()).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_names() {
        let parse = |name| Numbered::parse(name).map(|s| (s.stem, s.number, s.total));
        assert_eq!(parse("model-00001-of-00003.safetensors"), Some(("model", 1, 3)));
        assert_eq!(parse("a-b-00001-of-000163.safetensors"), Some(("a-b", 1, 163)));
        assert_eq!(parse("model-of-3.safetensors"), None);
        assert_eq!(parse("model--of-3.safetensors"), None);
        assert_eq!(parse("model-1-of-.safetensors"), None);
        assert_eq!(parse("model-+1-of-3.safetensors"), None);
        assert_eq!(parse("model-1-of-99999999999999999999.safetensors"), None);
        assert_eq!(parse("model-00001-of-00003.bin"), None);
    }

    #[test]
    fn stems() {
        assert_eq!(stem_of("model.safetensors"), "model");
        assert_eq!(
            stem_of("diffusion_pytorch_model-00001-of-00002.safetensors"),
            "diffusion_pytorch_model"
        );
        assert_eq!(stem_of("model.safetensors-00001-of-00002.safetensors"), "model");
    }

    #[test]
    fn shard_2_comes_before_shard_10() {
        let mut names = ["m-10-of-12", "m-2-of-12", "m-02-of-12", "m", "m-a", "l-10", "m-1-of-12"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(
            names,
            ["l-10", "m", "m-1-of-12", "m-02-of-12", "m-2-of-12", "m-10-of-12", "m-a"]
        );
    }

    #[test]
    fn a_hole_in_the_numbers_is_found() {
        let check = |numbers: &[u64], total: u64| {
            let names: Vec<_> = numbers
                .iter()
                .map(|n| format!("m-{n:05}-of-{total:05}.safetensors"))
                .collect();
            check_numbers(Path::new("dir"), &names).map_err(|e| e.to_string())
        };
        assert_eq!(check(&[1, 2, 3], 3), Ok(()));
        assert_eq!(check(&[0, 1, 2], 3), Ok(()));
        assert!(check(&[1, 3], 3)
            .unwrap_err()
            .starts_with("dir: shard 2 of 3 of m is missing"));
        assert!(check(&[2, 3], 3)
            .unwrap_err()
            .starts_with("dir: shard 1 of 3 of m is missing"));
        assert!(check(&[1, 2], 3)
            .unwrap_err()
            .starts_with("dir: shard 3 of 3 of m is missing"));
        assert!(check(&[1], u64::MAX)
            .unwrap_err()
            .starts_with("dir: shard 2 of 18446744073709551615 of m"));
    }
}
