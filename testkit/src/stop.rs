use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it is dropped. Use it in a thread scope whose threads run until the flag is set: if the test
/// panics, they end. Otherwise the scope would wait for them for ever.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
