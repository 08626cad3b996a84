//! Limits the bytes of control messages and object headers that a session has sent only in part. They occupy memory and
//! cannot be processed yet.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// The most bytes of incomplete messages and headers that a session may have.
const LIMIT: usize = 4 << 20;

/// The bytes of incomplete messages and headers of one session, summed over its streams.
#[derive(Default)]
pub struct IncompleteBytes(AtomicUsize);

/// The incomplete bytes of one stream, as a part of the session's sum. Dropping it subtracts them.
pub struct HeldIncomplete {
    sum: Arc<IncompleteBytes>,
    bytes: usize,
}

/// The error if the session's streams together hold more incomplete bytes than [`LIMIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than 4 MiB of messages and object headers that are not complete")]
pub struct TooMuch;

impl IncompleteBytes {
    /// Returns the counter of a new stream, which has no incomplete bytes.
    pub fn stream(self: &Arc<Self>) -> HeldIncomplete {
        HeldIncomplete { sum: Arc::clone(self), bytes: 0 }
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl HeldIncomplete {
    /// Sets the number of incomplete bytes that the stream holds now.
    ///
    /// # Errors
    /// Returns an error if the session's streams together hold more than [`LIMIT`].
    pub fn set(&mut self, bytes: usize) -> Result<(), TooMuch> {
        if bytes == self.bytes {
            return Ok(());
        }
        // If the number of bytes decreases, the difference wraps around, and the wrapping addition below subtracts.
        let grown = bytes.wrapping_sub(self.bytes);
        let sum = self.sum.0.fetch_add(grown, Relaxed).wrapping_add(grown);
        self.bytes = bytes;
        if sum > LIMIT { Err(TooMuch) } else { Ok(()) }
    }
}

impl Drop for HeldIncomplete {
    fn drop(&mut self) {
        self.sum.0.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_messages_of_all_streams_share_one_byte_limit() {
        let sum = Arc::<IncompleteBytes>::default();
        let mut one = sum.stream();
        let mut other = sum.stream();
        assert_eq!(one.set(LIMIT - 10), Ok(()));
        assert_eq!(other.set(10), Ok(()));
        assert_eq!(other.set(11), Err(TooMuch));
        assert_eq!(other.set(4), Ok(()));
        assert_eq!(sum.bytes(), LIMIT - 6);
        drop(one);
        assert_eq!(sum.bytes(), 4);
        drop(other);
        assert_eq!(sum.bytes(), 0);
    }
}
