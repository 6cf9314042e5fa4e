//! Positioned reads. Not a memory map: a file that shrinks under a map kills the process, here it is an error.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use super::header::open_regular;
use super::source::SourceFile;
use crate::error::{Error, Result};

/// Reads from the files of one checkpoint. Each worker has its own; the last file used stays open.
pub struct Reader<'a> {
    files: &'a [SourceFile],
    open: Option<(usize, File)>,
}

impl<'a> Reader<'a> {
    pub fn new(files: &'a [SourceFile]) -> Self {
        Reader { files, open: None }
    }

    /// Fills `buf` from byte `offset` of file number `file`.
    ///
    /// # Errors
    /// [`Error::SourceChanged`] if the file is not as long as when its header was read, or ends inside `buf`.
    ///
    /// # Panics
    /// If there is no file of this number.
    pub fn read_exact_at(&mut self, file: usize, offset: u64, buf: &mut [u8]) -> Result<()> {
        let source = &self.files[file];
        let handle = match &mut self.open {
            Some((open, handle)) if *open == file => handle,
            open => &mut open.insert((file, open_unchanged(source)?)).1,
        };
        handle
            .read_exact_at(buf, offset)
            .map_err(|e| match (e.kind(), handle.metadata()) {
                (ErrorKind::UnexpectedEof, Ok(now)) => changed(source, now.len()),
                _ => Error::io(&source.path, "reading")(e),
            })
    }
}

fn open_unchanged(source: &SourceFile) -> Result<File> {
    let (file, len) = open_regular(&source.path)?;
    if len != source.len {
        return Err(changed(source, len));
    }
    // Read-ahead twice as far; a file system that does not know the hint reads as well without it.
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Sequential);
    Ok(file)
}

fn changed(source: &SourceFile, now: u64) -> Error {
    Error::SourceChanged {
        path: source.path.clone(),
        before: source.len,
        now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Metadata;

    #[test]
    fn reads_from_two_files_and_sees_that_one_changed() {
        let dir = tempfile::tempdir().unwrap();
        let source = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            SourceFile {
                path,
                name: name.into(),
                len: bytes.len() as u64,
                modified: std::time::SystemTime::UNIX_EPOCH,
                data_start: 0,
                metadata: Metadata::default(),
            }
        };
        let files = [source("a", b"0123456789"), source("b", b"abcdef")];
        let mut reader = Reader::new(&files);
        let mut buf = [0; 3];
        for (file, offset, want) in [(0, 2, b"234"), (0, 7, b"789"), (1, 0, b"abc"), (0, 0, b"012")] {
            reader.read_exact_at(file, offset, &mut buf).unwrap();
            assert_eq!(&buf, want);
        }
        let shrink = |path| File::options().write(true).open(path).unwrap().set_len(4).unwrap();
        shrink(&files[0].path);
        let message = reader.read_exact_at(0, 2, &mut buf).unwrap_err().to_string();
        assert!(
            message.contains("/a: was 10 bytes when it was first looked at and is 4 now"),
            "{message}"
        );
        shrink(&files[1].path);
        let message = reader.read_exact_at(1, 0, &mut buf).unwrap_err().to_string();
        assert!(
            message.contains("/b: was 6 bytes when it was first looked at and is 4 now"),
            "{message}"
        );
        std::fs::remove_file(&files[0].path).unwrap();
        let message = Reader::new(&files)
            .read_exact_at(0, 0, &mut buf)
            .unwrap_err()
            .to_string();
        assert!(message.contains("/a: opening: "), "{message}");
    }
}
