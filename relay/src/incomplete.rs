//! What a session has sent of messages and object headers that are not complete yet: held, and of no use so far.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Bytes of that kind that a session may have.
const LIMIT: usize = 4 << 20;

/// The sum of a session.
#[derive(Default)]
pub struct Incomplete(AtomicUsize);

/// The part of one stream, given back when dropped.
pub struct Held {
    sum: Arc<Incomplete>,
    bytes: usize,
}

/// The session has more than it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than 4 MiB of messages and object headers that are not complete")]
pub struct TooMuch;

impl Incomplete {
    /// For a stream that holds nothing yet.
    pub fn stream(self: &Arc<Self>) -> Held {
        Held { sum: Arc::clone(self), bytes: 0 }
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.0.load(Relaxed)
    }
}

impl Held {
    /// The stream holds so many bytes now.
    ///
    /// # Errors
    /// With them, the session holds more than it may.
    pub fn set(&mut self, bytes: usize) -> Result<(), TooMuch> {
        if bytes == self.bytes {
            return Ok(());
        }
        let grown = bytes.wrapping_sub(self.bytes);
        let sum = self.sum.0.fetch_add(grown, Relaxed).wrapping_add(grown);
        self.bytes = bytes;
        if sum > LIMIT { Err(TooMuch) } else { Ok(()) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.sum.0.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_share_one_limit() {
        let sum = Arc::<Incomplete>::default();
        let (mut one, mut other) = (sum.stream(), sum.stream());
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
