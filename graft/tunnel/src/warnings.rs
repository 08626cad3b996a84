//! Logs errors that the kernel has returned, and that have no other effect.

use tracing::warn;

/// Logs an error. `what` is what could not be done.
pub fn warn_on_error(what: &str, done: Result<(), millrace_graft_kernel::Error>) {
    if let Err(error) = done {
        warn!("{what}: {error}");
    }
}
