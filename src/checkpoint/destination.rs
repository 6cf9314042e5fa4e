//! Where a checkpoint may be written: what is there already, and whether there is room.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::header::open_regular;
use super::sidecars::{DENSE_REPORT, REPORT, SKIPPED_FOLDERS};
use crate::error::{Error, Result};

/// How the `tool` of a `quantization_report.json` that this tool wrote begins; its version follows.
pub const TOOL_MARK: &str = "spark-quant ";

/// What is at the destination now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Existing {
    Nothing,
    EmptyFolder,
    /// A checkpoint that this tool wrote, and that may be replaced.
    Ours,
}

/// Refuses a destination that must not be written, before anything is: see the errors.
///
/// # Errors
/// [`Error::DestinationIsFile`], [`Error::DestinationIsMount`], [`Error::DestinationInSource`],
/// [`Error::SourceInDestination`], [`Error::DestinationNotEmpty`] without `overwrite`, [`Error::NotOurs`] with it.
pub fn check_destination(dst: &Path, src: &Path, overwrite: bool) -> Result<()> {
    let target = resolve(dst)?;
    let real = src.canonicalize().map_err(Error::io(src, "resolving"))?;
    // A file that is a symlink counts where it is and where it leads.
    let parent = src
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let link = match src.file_name() {
        Some(name) => parent
            .canonicalize()
            .map_err(Error::io(parent, "resolving"))?
            .join(name),
        None => real.clone(),
    };
    for place in [&real, &link] {
        if target.starts_with(place) && real.is_dir() {
            return Err(Error::DestinationInSource {
                path: dst.to_path_buf(),
                src: src.to_path_buf(),
            });
        }
        if overwrite && place.starts_with(&target) {
            return Err(Error::SourceInDestination {
                path: dst.to_path_buf(),
                src: src.to_path_buf(),
            });
        }
    }
    inspect(&target, overwrite).map(|_| ())
}

/// The destination as an absolute path without symlinks or dots, whether it is there or not.
pub(super) fn resolve(dst: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(dst).map_err(Error::io(dst, "resolving"))?;
    let mut real = PathBuf::new();
    for part in absolute.components() {
        match part {
            // What is not there yet has no symlinks, and what is there was resolved: `..` is the folder above.
            Component::ParentDir => _ = real.pop(),
            part => real.push(part),
        }
        match real.canonicalize() {
            Ok(path) => real = path,
            Err(e) if e.kind() == ErrorKind::NotFound && !real.is_symlink() => {}
            Err(e) => return Err(Error::io(&real, "resolving")(e)),
        }
    }
    Ok(real)
}

/// What is at a resolved destination, or why it must stay.
pub(super) fn inspect(target: &Path, overwrite: bool) -> Result<Existing> {
    let path = || target.to_path_buf();
    match std::fs::symlink_metadata(target) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Existing::Nothing),
        Err(e) => return Err(Error::io(target, "opening")(e)),
        Ok(metadata) if !metadata.is_dir() => return Err(Error::DestinationIsFile { path: path() }),
        Ok(_) => {}
    }
    if is_mount(target) {
        return Err(Error::DestinationIsMount { path: path() });
    }
    let mut entries = std::fs::read_dir(target).map_err(Error::io(target, "listing"))?;
    match (entries.next(), overwrite) {
        (None, _) => Ok(Existing::EmptyFolder),
        (Some(_), false) => Err(Error::DestinationNotEmpty { path: path() }),
        (Some(_), true) => match foreign(target)? {
            None => Ok(Existing::Ours),
            Some(found) => Err(Error::NotOurs { path: path(), found }),
        },
    }
}

/// What shows that a folder is not just a checkpoint of this tool, or `None`.
fn foreign(folder: &Path) -> Result<Option<String>> {
    // This tool never writes these, so there is work of someone else's in them.
    if let Some(name) = SKIPPED_FOLDERS
        .iter()
        .find(|name| folder.join(name).symlink_metadata().is_ok())
    {
        return Ok(Some(format!("{name}, which this tool does not write")));
    }
    let mut reports = [REPORT, DENSE_REPORT].into_iter().map(|name| (name, folder.join(name)));
    let Some((name, path)) = reports.find(|(_, path)| path.symlink_metadata().is_ok()) else {
        return Ok(Some(format!("no {REPORT}")));
    };
    let mut bytes = Vec::new();
    open_regular(&path)?
        .0
        .read_to_end(&mut bytes)
        .map_err(Error::io(&path, "reading"))?;
    let report: Option<Value> = serde_json::from_slice(&bytes).ok();
    Ok(match report.as_ref().and_then(|report| report.get("tool")?.as_str()) {
        Some(tool) if tool.starts_with(TOOL_MARK) => strangers(folder, report.as_ref(), name)?,
        Some(tool) => Some(format!("a {name} of {tool:?}")),
        None => Some(format!("a {name} that does not name its tool")),
    })
}

/// The files that the report does not name. A folder that holds none is no loss.
fn strangers(folder: &Path, report: Option<&Value>, name: &str) -> Result<Option<String>> {
    let Some(Value::Array(files)) = report.and_then(|report| report.get("files")) else {
        return Ok(Some(format!("a {name} that does not list the files that were written")));
    };
    let known: HashSet<&str> = files.iter().filter_map(Value::as_str).collect();
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(at) = folders.pop() {
        for entry in std::fs::read_dir(&at).map_err(Error::io(&at, "listing"))? {
            let entry = entry.map_err(Error::io(&at, "listing"))?;
            let path = entry.path();
            if entry.file_type().map_err(Error::io(&path, "opening"))?.is_dir() {
                folders.push(path);
                continue;
            }
            // As in the report, where a name that is not UTF-8 cannot be written.
            let relative = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy();
            if !known.contains(relative.as_ref()) {
                found.push(relative.into_owned());
            }
        }
    }
    found.sort();
    Ok(found.first().map(|first| match found.len() {
        1 => format!("{first}, which this tool did not write"),
        count => format!("{count} files that this tool did not write, {first} first"),
    }))
}

/// A mount point (a container's volume, say) cannot be renamed over, not even an empty one.
#[cfg(target_os = "linux")]
fn is_mount(path: &Path) -> bool {
    use rustix::fs::{statx, AtFlags, StatxAttributes, StatxFlags, CWD};
    // Where the kernel cannot tell, the rename will.
    statx(CWD, path, AtFlags::empty(), StatxFlags::empty())
        .is_ok_and(|status| status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(not(target_os = "linux"))]
fn is_mount(_path: &Path) -> bool {
    false
}

/// Bytes free to this user on the file system where `path` is or would be.
///
/// # Errors
/// [`Error::Io`].
pub fn free_bytes(path: &Path) -> Result<u64> {
    let target = resolve(path)?;
    let there = target.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let status = rustix::fs::statvfs(there).map_err(|e| Error::io(there, "asking for free space")(e.into()))?;
    // Some network and overlay file systems count no blocks at all: that is "unknown", not "full".
    Ok(match status.f_blocks {
        0 => u64::MAX,
        _ => status.f_bavail.saturating_mul(status.f_frsize),
    })
}

/// # Errors
/// [`Error::DiskTooSmall`] if fewer than `needed` bytes are free at `path`.
pub fn check_space(path: &Path, needed: u64) -> Result<()> {
    let free = free_bytes(path)?;
    if free < needed {
        return Err(Error::DiskTooSmall {
            path: path.to_path_buf(),
            needed,
            free,
        });
    }
    Ok(())
}
