//! Helpers for tests: they wait for a condition, print the logs of a failed test's processes, and make sockets that
//! block on close.
//!
//! A status, a counter, a list of processes or a log is read through [`wait_for`] or [`wait_until`].
//! `scripts/waits.py`, a part of `make lint`, refuses any other read without a comment that says why the state cannot
//! change.
#![deny(missing_docs)]

use std::{
    fmt::Debug,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

pub mod cli;
pub mod documented;
pub mod golden;
#[cfg(feature = "tokio")]
mod in_runtime;
mod lingering;
#[cfg(feature = "net")]
pub mod net;
mod stop;
#[cfg(feature = "tokio")]
pub use in_runtime::{async_wait_for, async_wait_until};
pub use lingering::{LINGER, lingering};
pub use stop::StopOnDrop;

/// Longest time that a test waits for a condition. It is far longer than any condition takes, because the machine may
/// be busy.
pub const BOUND: Duration = Duration::from_secs(300);

/// Time between two checks of a condition that a test waits for.
const PAUSE: Duration = Duration::from_millis(10);

/// Number of lines at the end of a log that a failed test shows.
const LINES: usize = 60;

/// The result of one check of a condition: the value that the test waits for, or a description of the current state.
pub trait StateReading {
    /// The value that [`wait_for`] returns in the end.
    type Found;

    /// Returns the value that the test waits for.
    ///
    /// # Errors
    /// Fails with a description of the present state, for the test's message.
    fn found(self) -> Result<Self::Found, String>;
}

impl StateReading for bool {
    type Found = ();

    fn found(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "it does not hold".to_owned())
    }
}

impl<T> StateReading for Option<T> {
    type Found = T;

    fn found(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing".to_owned())
    }
}

impl<T, E: Debug> StateReading for Result<T, E> {
    type Found = T;

    fn found(self) -> Result<T, String> {
        self.map_err(|seen| format!("{seen:#?}"))
    }
}

/// Calls `look` until it finds a value, and returns the value. `what` completes the sentence "waited in vain for ...".
///
/// # Panics
/// Panics after [`BOUND`]. The message contains the state that was read last.
#[track_caller]
pub fn wait_for<L: StateReading>(what: &str, mut look: impl FnMut() -> L) -> L::Found {
    let start = Instant::now();
    loop {
        match look().found() {
            Ok(found) => return found,
            // The time is compared only after a failed check. So a test that was suspended for longer than `BOUND`
            // checks once more before it fails.
            Err(seen) if start.elapsed() > BOUND => give_up(what, &seen),
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Reads a state until `wanted` accepts it, and returns the state.
///
/// # Panics
/// Panics after [`BOUND`]. The message contains the state that was read last.
#[track_caller]
pub fn wait_until<S: Debug>(
    what: &str,
    mut read: impl FnMut() -> S,
    mut wanted: impl FnMut(&S) -> bool,
) -> S {
    wait_for(what, || {
        let state = read();
        if wanted(&state) { Ok(state) } else { Err(state) }
    })
}

#[track_caller]
fn give_up(what: &str, seen: &str) -> ! {
    panic!("waited in vain for {what}, {} s; last seen: {seen}", BOUND.as_secs())
}

/// Prints the end of a process's log if the test is failing. Call it in the `Drop` that ends the process.
pub fn show_log_on_panic(name: &str, log: &Path) {
    if !thread::panicking() {
        return;
    }
    match fs::read(log) {
        Ok(text) => {
            // A process that was killed may have written only a part of its last character.
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<_> = text.lines().collect();
            let (skipped, last) = lines.split_at(lines.len().saturating_sub(LINES));
            println!("---- log of {name}, {} lines before these ----\n{}", skipped.len(), last.join("\n"));
        }
        // The test is panicking already. A second panic here, in a `drop`, would abort the process and with it all
        // other tests.
        Err(error) => println!("---- log of {name}: {}: {error} ----", log.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn wait_for_repeats_its_check_until_it_finds_a_value() {
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            (looks.get() == 3).then_some("it")
        };
        assert_eq!(wait_for("the third look", look), "it");
        assert_eq!(looks.get(), 3);
    }

    #[test]
    fn wait_until_returns_the_accepted_state() {
        let count = Cell::new(0);
        let read = || count.replace(count.get() + 1);
        assert_eq!(wait_until("a count of 2", read, |count| *count == 2), 2);
    }

    #[test]
    fn wait_that_times_out_reports_the_last_state() {
        assert_eq!(false.found().unwrap_err(), "it does not hold");
        assert_eq!(Err::<(), _>(vec![7]).found().unwrap_err(), "[\n    7,\n]");
    }
}
