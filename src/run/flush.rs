//! Sends what is written to the disk while the rest is encoded, so that the flush before the rename finds little to do.
//! A thread of its own, since asking for it blocks where the disk's queue is full, and workers should not.

use crate::checkpoint::OutFile;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;

/// A long copy is sent in steps of this many bytes.
pub(super) const FLUSH_STEP: u64 = 8 << 20;

/// Smaller ranges are left to the flush at the end.
const LEAST: u64 = 1 << 20;

/// Bytes of a file that are written and will not be read again.
pub(super) struct Range {
    file: Arc<OutFile>,
    offset: u64,
    len: u64,
}

/// The workers' end.
pub(super) struct Flush(Sender<Range>);

impl Flush {
    pub fn channel() -> (Flush, Receiver<Range>) {
        let (sender, receiver) = channel();
        (Flush(sender), receiver)
    }

    pub fn send(&self, file: &Arc<OutFile>, offset: u64, len: u64) {
        if len >= LEAST {
            let file = file.clone();
            // It is only advice: without the other end the flush before the rename does all.
            let _ = self.0.send(Range { file, offset, len });
        }
    }
}

/// The other end: runs until every [`Flush`] is gone.
pub(super) fn flush_ranges(ranges: Receiver<Range>) {
    for range in ranges {
        range.file.start_writeback(range.offset, range.len);
    }
}
