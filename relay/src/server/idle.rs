//! Sessions that hold large receive windows and send nothing, while others find no room for theirs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::code;
use tracing::info;

use super::Shared;
use crate::session::Session;

/// Time without a byte of the peer that was read, after which a session is idle.
const IDLE: Duration = Duration::from_secs(30);
/// The least window, in bytes, that a session is closed for.
const LARGE: u64 = 256 << 10;

impl Shared {
    /// Closes the idle session with the largest receive window, if a window has found no room since the last call: what was promised
    /// to a peer cannot be taken back otherwise.
    pub(super) fn reclaim_window(&self, now: Instant) {
        if !self.config.transport.windows.take_pressed() {
            return;
        }
        let Some((held, session)) = self.idle_window(now) else { return };
        info!(
            session = session.id(),
            held, "closing an idle session: others need the room of its receive window"
        );
        self.past.count_reclaimed_window();
        let reason = "nothing came for long, and others need the room of the receive window: connect again";
        session.close(code::Session::DATA_STREAM_TIMEOUT, reason);
    }

    fn idle_window(&self, now: Instant) -> Option<(u64, Arc<Session>)> {
        let sessions = self.sessions.lock();
        let open = sessions
            .values()
            .filter(|session| !session.is_upstream() && session.connection().quic.close_reason().is_none());
        let idle = open.filter_map(|session| {
            let window = session.connection().receive_window(now);
            (window.idle >= IDLE && window.held >= LARGE).then_some((window.held, session))
        });
        idle.max_by_key(|(held, _)| *held).map(|(held, session)| (held, Arc::clone(session)))
    }
}
