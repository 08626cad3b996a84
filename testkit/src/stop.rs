use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when this value is dropped. Use it in a thread scope whose threads run until the flag is set. If the
/// test panics, the flag ends the threads, for which the scope would otherwise wait for ever.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        // The flag passes no other data to the threads, and the end of their scope waits for them. So relaxed ordering
        // is enough for the flag.
        self.0.store(true, Ordering::Relaxed);
    }
}
