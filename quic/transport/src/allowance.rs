//! How many streams the peer may open. quinn allocates table entries for each stream that a peer may open, whether it
//! does or not. So a new client may open only a few, and as many as the settings allow once it opens many.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Numbers of bidirectional and of unidirectional streams that a new client may have open at a time.
pub(crate) const FIRST: [u32; 2] = [32, 64];
/// Time in which a client that needs more streams opens half of the first ones.
const BURST: Duration = Duration::from_secs(1);

/// Counts of the streams of one direction: those that a client has open, and those that it has opened lately.
///
/// The limit grows once, to the largest one. It has to grow for a client that keeps many streams open. It also has to
/// grow for a client that opens many short streams: each time that the limit is reached, the client waits a round trip
/// for more.
#[derive(Debug, Default)]
pub(crate) struct StreamUse {
    open: u32,
    /// Streams that were opened since `since`.
    begun: u32,
    since: Option<Instant>,
    grown: bool,
}

impl StreamUse {
    /// Counts a stream that the peer has opened. Returns true if the limit, at first `limit`, has to grow now.
    fn begin(&mut self, now: Instant, limit: u32) -> bool {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) > BURST) {
            (self.since, self.begun) = (Some(now), 0);
        }
        (self.open, self.begun) = (self.open.saturating_add(1), self.begun.saturating_add(1));
        self.open.max(self.begun) > limit / 2 && !std::mem::replace(&mut self.grown, true)
    }
}

/// Counts a stream of the peer as open until it is dropped.
pub struct OpenStream(Arc<Mutex<StreamUse>>);

impl OpenStream {
    /// Counts a stream that the peer has opened in `used`. Also returns whether the limit, at first `limit`, has to grow
    /// now.
    pub(crate) fn begin(used: &Arc<Mutex<StreamUse>>, now: Instant, limit: u32) -> (Self, bool) {
        let grows = used.lock().begin(now, limit);
        (Self(Arc::clone(used)), grows)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_limit_grows_once_for_a_client_that_keeps_streams_open_or_opens_many_at_once() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut patient = StreamUse::default();
        let grown: Vec<_> = (1..=40).filter(|number| patient.begin(at(*number), 32)).collect();
        assert_eq!(grown, [17], "none was closed");
        let mut quick = StreamUse::default();
        let mut begin_and_end = |at| {
            let grows = quick.begin(at, 32);
            quick.open -= 1;
            grows
        };
        assert!((1..=100).all(|number| !begin_and_end(at(number))), "a stream from time to time");
        assert_eq!((1..=40).filter(|_| begin_and_end(at(200))).collect::<Vec<_>>(), [17]);
    }
}
