//! The functions that wait for a condition, for tests inside an async runtime, where blocking the thread would stop
//! other tasks.

use std::{fmt::Debug, time::Instant};

use tokio::time;

use crate::{BOUND, PAUSE, StateReading, give_up};

/// Calls `look` until it finds a value, and returns the value, as [`wait_for`](crate::wait_for) does.
///
/// # Panics
/// Panics after [`BOUND`]. The message contains the state that was read last.
pub async fn async_wait_for<L: StateReading>(what: &str, mut look: impl FnMut() -> L) -> L::Found {
    let start = Instant::now();
    loop {
        match look().found() {
            Ok(found) => return found,
            Err(seen) if start.elapsed() > BOUND => give_up(what, &seen),
            Err(_) => time::sleep(PAUSE).await,
        }
    }
}

/// Reads a state until `wanted` accepts it, and returns the state, as [`wait_until`](crate::wait_until) does.
///
/// # Panics
/// Panics after [`BOUND`]. The message contains the state that was read last.
pub async fn async_wait_until<S: Debug>(
    what: &str,
    mut read: impl FnMut() -> S,
    mut wanted: impl FnMut(&S) -> bool,
) -> S {
    async_wait_for(what, || {
        let state = read();
        if wanted(&state) { Ok(state) } else { Err(state) }
    })
    .await
}
