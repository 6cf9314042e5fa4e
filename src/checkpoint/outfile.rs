//! One output file, written at positions by many threads, and the few of them that are open at a time.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Files that stay open between two writes. Work goes through the shards in order, so few are in use at a time, while a
/// checkpoint can have more shards than a process may have descriptors.
const MOST_OPEN: usize = 8;

/// The open files by number, the last one used at the end.
#[derive(Debug, Default)]
pub(super) struct Handles(Mutex<Vec<(usize, Arc<File>)>>);

impl Handles {
    fn lock(&self) -> MutexGuard<'_, Vec<(usize, Arc<File>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file if it is open.
    fn peek(&self, number: usize) -> Option<Arc<File>> {
        let open = self.lock();
        let found = open.iter().rev().find(|(open, _)| *open == number);
        found.map(|(_, file)| file.clone())
    }

    fn get(&self, number: usize, reopen: impl FnOnce() -> Result<File>) -> Result<Arc<File>> {
        let mut open = self.lock();
        if let Some(at) = open.iter().rposition(|(open, _)| *open == number) {
            let file = open[at].1.clone();
            open[at..].rotate_left(1);
            return Ok(file);
        }
        let file = Arc::new(reopen()?);
        open.push((number, file.clone()));
        let oldest = (open.len() > MOST_OPEN).then(|| open.remove(0));
        // Closing can take long where it sends what is left to a server: the others should not wait for it.
        drop(open);
        drop(oldest);
        Ok(file)
    }

    pub fn close_all(&self) {
        self.lock().clear();
    }
}

/// One file that is written at positions, by many threads.
#[derive(Debug)]
pub struct OutFile {
    path: PathBuf,
    len: u64,
    written: AtomicU64,
    number: usize,
    handles: Arc<Handles>,
}

impl OutFile {
    /// `file`: the one that was made at `path`, of `len` bytes; no other has its `number`.
    pub(super) fn new(path: PathBuf, file: File, len: u64, number: usize, handles: &Arc<Handles>) -> Result<OutFile> {
        handles.get(number, || Ok(file))?;
        Ok(OutFile {
            path,
            len,
            written: AtomicU64::new(0),
            number,
            handles: handles.clone(),
        })
    }

    /// Writes all of `buf` at byte `offset`.
    ///
    /// # Errors
    /// [`Error::Io`]; also if it would end beyond the length that the file was made with.
    pub fn write_all_at(&self, buf: &[u8], offset: u64) -> Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.len) {
            let why = format!("{} bytes at {offset} of a file of {}", buf.len(), self.len);
            return Err(Error::io(&self.path, "writing")(io::Error::other(why)));
        }
        self.handle()?
            .write_all_at(buf, offset)
            .map_err(Error::io(&self.path, "writing"))?;
        self.written.fetch_add(buf.len() as u64, Ordering::Release);
        Ok(())
    }

    /// Reads back what was written at byte `offset`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.handle()?
            .read_exact_at(buf, offset)
            .map_err(Error::io(&self.path, "reading back"))
    }

    /// Asks the kernel to begin writing this range to disk, so that the flush at the end finds little left to do.
    pub fn start_writeback(&self, offset: u64, len: u64) {
        // DontNeed begins the writeback of dirty pages and leaves them cached; sync_file_range would need unsafe code.
        // It is advice: a file that was closed meanwhile is not opened for it.
        #[cfg(target_os = "linux")]
        if let (Some(len), Some(file)) = (std::num::NonZeroU64::new(len), self.handles.peek(self.number)) {
            let _ = rustix::fs::fadvise(&file, offset, Some(len), rustix::fs::Advice::DontNeed);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (offset, len);
    }

    fn handle(&self) -> Result<Arc<File>> {
        self.handles.get(self.number, || {
            let file = OpenOptions::new().read(true).write(true).open(&self.path);
            file.map_err(|error| match error.kind() {
                ErrorKind::NotFound => vanished(&self.path),
                _ => Error::io(&self.path, "opening")(error),
            })
        })
    }

    /// # Errors
    /// [`Error::IncompleteOutput`]; [`Error::OutputVanished`] where the file that was written has no name any more.
    pub(super) fn check_whole(&self) -> Result<()> {
        let written = self.written.load(Ordering::Acquire);
        if written != self.len {
            return Err(Error::IncompleteOutput {
                path: self.path.clone(),
                written,
                len: self.len,
            });
        }
        match self.handles.peek(self.number).map(|file| file.metadata()) {
            Some(Ok(file)) if file.nlink() == 0 => Err(vanished(&self.path)),
            _ => Ok(()),
        }
    }
}

pub(super) fn vanished(path: &Path) -> Error {
    Error::OutputVanished {
        path: path.to_path_buf(),
    }
}
