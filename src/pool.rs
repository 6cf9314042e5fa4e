//! A fixed set of workers over an ordered list of tasks.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Mutex;

/// What the caller can see and say while a pool works.
pub trait Watch: Sync {
    /// `bytes` more of the source are done.
    fn advance(&self, bytes: u64);

    /// Whether to stop early: Ctrl-C.
    fn cancelled(&self) -> bool;
}

/// Runs `work` on every task, in order of start, on `threads` workers that each own a state made by `state`.
///
/// Tasks are claimed in order, so of several that fail the first one's error is returned, whatever the threads did.
///
/// # Errors
/// The first failing task's; [`Error::Interrupted`] where `watch` says so.
pub fn run<T: Sync, S>(
    threads: usize,
    tasks: &[T],
    watch: &dyn Watch,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, &T) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let fail = |at: usize, error: Error| {
        stop.store(true, Ordering::Relaxed);
        let mut failed = failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if failed.as_ref().is_none_or(|(first, _)| at < *first) {
            *failed = Some((at, error));
        }
    };
    let worker = || {
        let mut state = state();
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(at) else { return };
            let done = if watch.cancelled() {
                Err(Error::Interrupted)
            } else {
                work(&mut state, task)
            };
            if let Err(error) = done {
                fail(at, error);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, tasks.len().max(1)) {
            // With fewer threads than asked for, the others do the work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    match failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    struct Quiet(AtomicU64, bool);

    impl Watch for Quiet {
        fn advance(&self, bytes: u64) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }

        fn cancelled(&self) -> bool {
            self.1
        }
    }

    #[test]
    fn every_task_runs_once_and_the_first_error_wins() {
        for threads in [1, 2, 3, 8] {
            let watch = Quiet(AtomicU64::new(0), false);
            let tasks: Vec<u64> = (0..100).collect();
            run(
                threads,
                &tasks,
                &watch,
                || (),
                |(), task| {
                    watch.advance(*task);
                    Ok(())
                },
            )
            .unwrap();
            assert_eq!(watch.0.load(Ordering::Relaxed), 4950);
            let failing = run(
                threads,
                &tasks,
                &watch,
                || (),
                |(), task| match task {
                    17.. => Err(Error::BadRequest(task.to_string())),
                    _ => Ok(()),
                },
            );
            assert_eq!(failing.unwrap_err().to_string(), "17");
        }
    }

    #[test]
    fn a_cancelled_pool_says_so() {
        let watch = Quiet(AtomicU64::new(0), true);
        let result = run(2, &[1, 2, 3], &watch, || (), |(), _| Ok(()));
        assert!(matches!(result, Err(Error::Interrupted)));
        assert!(run(2, &[] as &[u8], &watch, || (), |(), _| Ok(())).is_ok());
    }
}
