//! Signals: those that ask a run to stop raise a flag, and the one of the file size limit becomes an error of the write.

use std::sync::atomic::{AtomicBool, Ordering};

static CANCELLED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT, SIGTERM and SIGHUP raise the flag that [`cancelled`] reads, and SIGXFSZ no longer end the process.
pub fn listen() {
    dispose(libc::SIGXFSZ, libc::SIG_IGN);
    // A second handler is refused; the first one is the same.
    if let Err(ctrlc::Error::System(_)) = ctrlc::set_handler(|| CANCELLED.store(true, Ordering::Relaxed)) {
        // No thread was to be had for the flag: a signal that ends the run is better than one that does nothing.
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            dispose(signal, libc::SIG_DFL);
        }
    }
}

/// Whether a signal asked to stop.
pub fn cancelled() -> bool {
    CANCELLED.load(Ordering::Relaxed)
}

fn dispose(signal: libc::c_int, how: libc::sighandler_t) {
    // SAFETY: `how` is one of the two constants, not a function; neither can be refused for these signals.
    unsafe { libc::signal(signal, how) };
}
