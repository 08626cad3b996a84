use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it is dropped. Threads of a scope that run until the flag is set end with it when the test panics;
/// otherwise the scope would wait for them for ever.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
