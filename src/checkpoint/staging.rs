//! The writer: a checkpoint is built in a hidden sibling of its destination and renamed there when it is whole.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{fallocate, flock, FallocateFlags, FlockOperation, RenameFlags, CWD};
use rustix::io::{retry_on_intr, Errno};
use tempfile::TempDir;
use twox_hash::XxHash3_128;

use super::destination::{check_space, inspect, resolve, Existing};
use super::header::open_regular;
use super::outfile::{vanished, Handles, OutFile};
use super::sidecars::Sidecar;
use crate::error::{Error, Result};

/// Between the destination's name and the random part of a staging folder's.
const MARK: &str = ".spark-quant-";

/// The same for an old checkpoint that is moved aside. Nothing removes a folder of this name but the run that made it.
const ASIDE_MARK: &str = ".replaced-by-spark-quant-";

const RANDOM_CHARS: usize = 6;

/// A longer destination's name is cut in the hidden names: they have about 30 bytes more, and 255 are allowed in all.
const LONG_NAME: usize = 200;

/// Files are flushed by this many threads: a flush mostly waits.
const FLUSH_THREADS: usize = 4;

/// A checkpoint that is being written. Dropped without [`Staging::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct Staging {
    // In the order in which they must go: the folder before the parents that were made for it.
    folder: TempDir,
    parents: MadeParents,
    target: PathBuf,
    overwrite: bool,
    outputs: Mutex<Vec<Arc<OutFile>>>,
    handles: Arc<Handles>,
    /// Every file that was made, with its length.
    made: Mutex<Vec<(PathBuf, u64)>>,
    /// Held while the run lives: tells its folder from one that a killed run left. `None` where there are no locks.
    lock: Option<File>,
}

impl Staging {
    /// Makes a folder beside `dst`, and `dst`'s parents; removes those that killed runs to the same `dst` left.
    ///
    /// # Errors
    /// [`Error::Io`], and what [`check_destination`](super::check_destination) says of `dst` itself.
    pub fn create(dst: &Path, overwrite: bool) -> Result<Staging> {
        let target = resolve(dst)?;
        inspect(&target, overwrite)?;
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(Error::DestinationNotEmpty { path: target });
        };
        let parents = MadeParents::make(parent)?;
        sweep(parent, name);
        let (folder, lock) = locked_folder(parent, name)?;
        Ok(Staging {
            folder,
            parents,
            overwrite,
            outputs: Mutex::default(),
            handles: Arc::default(),
            made: Mutex::default(),
            lock,
            target,
        })
    }

    /// The folder until it is committed.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Makes a file of `len` bytes and reserves its space. Every byte must be written once before the commit.
    ///
    /// # Errors
    /// [`Error::DiskTooSmall`], [`Error::Io`].
    pub fn create_file(&self, name: impl AsRef<Path>, len: u64) -> Result<Arc<OutFile>> {
        let (path, file) = self.create_new(name.as_ref())?;
        // Asked first: some file systems fill the disk before they say that it is too small.
        check_space(&self.target.join(name.as_ref()), len)?;
        reserve(&path, &file, len)?;
        self.note(&path, len);
        let mut outputs = locked(&self.outputs);
        let out = Arc::new(OutFile::new(path, file, len, outputs.len(), &self.handles)?);
        outputs.push(out.clone());
        Ok(out)
    }

    /// Makes a file of these bytes.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_file(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        let (path, mut file) = self.create_new(name.as_ref())?;
        file.write_all(bytes).map_err(Error::io(&path, "writing"))?;
        self.note(&path, bytes.len() as u64);
        Ok(())
    }

    /// Copies the bytes, not the mode: that follows the umask.
    ///
    /// # Errors
    /// [`Error::SourceChanged`] if the file is no longer as long as when it was listed, [`Error::Io`].
    pub fn copy_sidecar(&self, sidecar: &Sidecar) -> Result<()> {
        let changed = |now| Error::SourceChanged {
            path: sidecar.from.clone(),
            before: sidecar.len,
            now,
        };
        let (mut from, len) = open_regular(&sidecar.from)?;
        if len != sidecar.len {
            return Err(changed(len));
        }
        let (path, mut to) = self.create_new(&sidecar.relative)?;
        match io::copy(&mut from, &mut to).map_err(Error::io(&path, "copying"))? {
            copied if copied == len => {
                self.note(&path, len);
                Ok(())
            }
            copied => Err(changed(copied)),
        }
    }

    /// Flushes every file and folder to disk, then renames the whole into place in one step.
    ///
    /// # Errors
    /// [`Error::IncompleteOutput`] if a file was not written in full, [`Error::OutputVanished`] if one is gone,
    /// [`Error::Io`], and what became of `dst` since [`Staging::create`]. `dst` is then as it was before.
    pub fn commit(mut self) -> Result<()> {
        locked(&self.outputs).iter().try_for_each(|out| out.check_whole())?;
        self.check_present()?;
        self.handles.close_all();
        flush_tree(self.folder.path())?;
        // Flushing can take minutes.
        self.check_present()?;
        match inspect(&self.target, self.overwrite)? {
            Existing::Nothing | Existing::EmptyFolder => {
                std::fs::rename(self.folder.path(), &self.target).map_err(|e| not_renamed(&self.target, e))?;
                self.folder.disable_cleanup(true);
            }
            // The folder then holds the old checkpoint, and goes when it is dropped.
            Existing::Ours => match exchange(self.folder.path(), &self.target) {
                Ok(()) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    swap_by_moving_aside(self.folder.path(), &self.target)?;
                    self.folder.disable_cleanup(true);
                }
                Err(e) => return Err(not_renamed(&self.target, e.into())),
            },
        }
        let made = std::mem::take(&mut self.parents.0);
        // The rename is on disk when the folder it happened in is; the same holds for each parent that was made.
        for path in made.iter().chain([&self.target]) {
            flush(path.parent().unwrap_or(path))?;
        }
        Ok(())
    }

    fn create_new(&self, name: &Path) -> Result<(PathBuf, File)> {
        let path = self.inside(name)?;
        let folder = path.parent().unwrap_or(&path);
        std::fs::create_dir_all(folder).map_err(Error::io(folder, "making"))?;
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(Error::io(&path, "making"))?;
        Ok((path, file))
    }

    fn note(&self, path: &Path, len: u64) {
        locked(&self.made).push((path.to_path_buf(), len));
    }

    /// Whether all that was made is where it was made: cleaners of temporary folders also take those in use. Files are
    /// told by their length, not their inode: some file systems number a file that is not open anew.
    fn check_present(&self) -> Result<()> {
        let at = |path: &Path| {
            std::fs::symlink_metadata(path).map_err(|error| match error.kind() {
                ErrorKind::NotFound => vanished(path),
                _ => Error::io(path, "looking for")(error),
            })
        };
        for (path, len) in locked(&self.made).iter() {
            let there = at(path)?;
            if !there.is_file() || there.len() != *len {
                return Err(vanished(path));
            }
        }
        let path = self.folder.path();
        let there = at(path)?;
        if let Some(lock) = &self.lock {
            let mine = lock.metadata().map_err(Error::io(path, "looking for"))?;
            if (there.dev(), there.ino()) != (mine.dev(), mine.ino()) {
                return Err(vanished(path));
            }
        }
        Ok(())
    }

    fn inside(&self, name: &Path) -> Result<PathBuf> {
        let plain = name.components().all(|part| matches!(part, Component::Normal(_)));
        if !plain || name.as_os_str().is_empty() {
            return Err(Error::io(name, "placing")(io::Error::other(
                "not a path below the destination",
            )));
        }
        Ok(self.folder.path().join(name))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Removing the folder needs descriptors, and want of them may be why it is removed. Another run that takes the
        // folder for a stale one meanwhile does no more than that.
        self.handles.close_all();
        self.lock = None;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parents that were made for the destination; those that are empty go with it.
#[derive(Debug)]
struct MadeParents(Vec<PathBuf>);

impl MadeParents {
    fn make(folder: &Path) -> Result<MadeParents> {
        let mut made = MadeParents(Vec::new());
        let mut missing: Vec<&Path> = folder.ancestors().take_while(|path| !path.exists()).collect();
        while let Some(path) = missing.pop() {
            match DirBuilder::new().create(path) {
                Ok(()) => made.0.push(path.to_path_buf()),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io(path, "making")(e)),
            }
        }
        Ok(made)
    }
}

impl Drop for MadeParents {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let _ = std::fs::remove_dir(path);
        }
    }
}

fn hidden_prefix(name: &OsStr, mark: &str) -> OsString {
    let mut prefix = OsString::from(".");
    if name.len() <= LONG_NAME {
        prefix.push(name);
    } else {
        // Only whole characters, since some file systems take no others; the hash keeps destinations apart.
        let text = name.to_string_lossy();
        let end = text.char_indices().map(|(at, _)| at).find(|at| *at >= LONG_NAME / 2);
        prefix.push(&text[..end.unwrap_or_default()]);
        prefix.push(format!("-{:032x}", XxHash3_128::oneshot(name.as_bytes())));
    }
    prefix.push(mark);
    prefix
}

/// Makes a folder with the umask's mode and locks it.
fn locked_folder(parent: &Path, name: &OsStr) -> Result<(TempDir, Option<File>)> {
    loop {
        let folder = tempfile::Builder::new()
            .prefix(&hidden_prefix(name, MARK))
            .rand_bytes(RANDOM_CHARS)
            .permissions(Permissions::from_mode(0o777))
            .tempdir_in(parent)
            .map_err(Error::io(parent, "making a folder in"))?;
        let path = folder.path();
        let handle = File::open(path).map_err(Error::io(path, "opening"))?;
        // Some network file systems have no locks on folders; there, nobody can take it for a stale one either.
        let Ok(()) = retry_on_intr(|| flock(&handle, FlockOperation::LockExclusive)) else {
            return Ok((folder, None));
        };
        // Another run may have found it unlocked a moment ago, and removed it.
        let mine = handle.metadata().map_err(Error::io(path, "opening"))?;
        if std::fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (mine.dev(), mine.ino())) {
            return Ok((folder, Some(handle)));
        }
    }
}

/// Removes what killed runs to the same destination left: staging folders whose lock is free. What cannot be is left.
fn sweep(parent: &Path, name: &OsStr) {
    let prefix = hidden_prefix(name, MARK);
    let is_ours = |entry: &std::fs::DirEntry| {
        let name = entry.file_name();
        let random = name.as_bytes().strip_prefix(prefix.as_bytes());
        random.is_some_and(|random| random.len() == RANDOM_CHARS && random.iter().all(u8::is_ascii_alphanumeric))
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    for entry in std::fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .filter(is_ours)
    {
        let Ok(handle) = File::open(entry.path()) else { continue };
        if flock(&handle, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Gives the file its length, with its space reserved where the file system can.
fn reserve(path: &Path, file: &File, len: u64) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len).map_err(Error::io(path, "sizing")),
        Err(e) => Err(Error::io(path, "reserving space")(e.into())),
    }
}

/// Flushes every file below `root`, then the folders that name them.
fn flush_tree(root: &Path) -> Result<()> {
    let (mut files, mut folders) = (Vec::new(), vec![root.to_path_buf()]);
    let mut next = 0;
    while let Some(folder) = folders.get(next).cloned() {
        next += 1;
        for entry in std::fs::read_dir(&folder).map_err(Error::io(&folder, "listing"))? {
            let entry = entry.map_err(Error::io(&folder, "listing"))?;
            let kind = entry.file_type().map_err(Error::io(&folder, "listing"))?;
            if kind.is_dir() { &mut folders } else { &mut files }.push(entry.path());
        }
    }
    flush_all(&files)?;
    flush_all(&folders)
}

fn flush_all(paths: &[PathBuf]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            flush(path)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // With fewer threads than asked for, the others do the work.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..FLUSH_THREADS.min(paths.len())).filter_map(spawn).collect();
        let own = work();
        let mut workers = workers.into_iter();
        own.and(workers.try_for_each(|worker| worker.join().unwrap_or_else(|e| std::panic::resume_unwind(e))))
    })
}

fn flush(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::io(path, "opening"))?;
    match file.sync_all() {
        // Some file systems cannot flush a folder by itself; nothing is lost that another call could save.
        Err(e) if e.kind() == ErrorKind::InvalidInput && path.is_dir() => Ok(()),
        flushed => flushed.map_err(Error::io(path, "flushing to disk")),
    }
}

fn exchange(staged: &Path, target: &Path) -> std::result::Result<(), Errno> {
    rustix::fs::renameat_with(CWD, staged, CWD, target, RenameFlags::EXCHANGE)
}

/// Where two folders cannot be exchanged: old aside, new in, old removed; a failure in between puts the old one back.
fn swap_by_moving_aside(staged: &Path, target: &Path) -> Result<()> {
    let parent = target.parent().unwrap_or(target);
    let aside = tempfile::Builder::new()
        .prefix(&hidden_prefix(target.file_name().unwrap_or_default(), ASIDE_MARK))
        .rand_bytes(RANDOM_CHARS)
        .disable_cleanup(true)
        .tempdir_in(parent)
        .map_err(Error::io(parent, "making a folder in"))?;
    let aside = aside.path();
    if let Err(e) = std::fs::rename(target, aside) {
        let _ = std::fs::remove_dir(aside);
        return Err(not_renamed(target, e));
    }
    if let Err(e) = std::fs::rename(staged, target) {
        std::fs::rename(aside, target).map_err(Error::io(aside, "putting the old checkpoint back"))?;
        return Err(not_renamed(target, e));
    }
    // The new one is in place: what cannot be removed of the old one is no failure.
    let _ = std::fs::remove_dir_all(aside);
    Ok(())
}

/// The destination was free when it was looked at; says what it is now.
fn not_renamed(target: &Path, source: io::Error) -> Error {
    let path = target.to_path_buf();
    match source.kind() {
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => Error::DestinationNotEmpty { path },
        ErrorKind::NotADirectory => Error::DestinationIsFile { path },
        ErrorKind::ResourceBusy => Error::DestinationIsMount { path },
        _ => Error::io(target, "renaming the finished folder to it")(source),
    }
}

#[cfg(test)]
mod tests;
