//! The progress bar: bytes, rate and time left on a terminal, nothing elsewhere.

use crate::pool::Watch;
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar over `total` bytes on stderr, if that is a terminal and `quiet` does not forbid it.
    pub fn new(total: u64, doing: &'static str, quiet: bool) -> Self {
        let show = !quiet && std::io::stderr().is_terminal();
        let target = if show {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(doing);
        Self { bar }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Watch for Progress {
    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn cancelled(&self) -> bool {
        signals::cancelled()
    }
}
