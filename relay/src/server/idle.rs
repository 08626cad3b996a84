//! Closes idle sessions whose large receive windows occupy memory that other sessions need.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::code;
use tracing::info;

use super::ServerShared;
use crate::session::RelaySession;

/// The time after which a session counts as idle if its peer has sent nothing.
const IDLE: Duration = Duration::from_secs(30);
/// The smallest receive window, in bytes, for which a session is closed.
const LARGE: u64 = 256 << 10;

// Granted QUIC flow control credit cannot be revoked (RFC 9000, section 4.1), so the memory becomes free only when the
// session is closed.
impl ServerShared {
    /// Closes the idle session with the largest receive window. Does nothing unless, since the last call, the window of
    /// another session could not grow for lack of memory.
    pub(super) fn reclaim_window(&self, now: Instant) {
        if !self.config.transport.windows.take_pressed() {
            return;
        }
        let Some((held, session)) = self.idle_window(now) else { return };
        info!(
            session = session.id(),
            held,
            "closing an idle session, since other sessions need the memory of its receive window (bytes in `held`)"
        );
        self.past.count_reclaimed_window();
        let reason = "nothing came for long, and others need the room of the receive window: connect again";
        session.close(code::Session::DATA_STREAM_TIMEOUT, reason);
    }

    fn idle_window(&self, now: Instant) -> Option<(u64, Arc<RelaySession>)> {
        // Sessions that this relay has opened itself are never closed here: an upstream relay may be silent for long.
        let sessions = self.sessions.lock();
        let open = sessions
            .values()
            .filter(|session| !session.is_dialed() && session.connection().quic.close_reason().is_none());
        let idle = open.filter_map(|session| {
            let window = session.connection().receive_window(now);
            (window.idle >= IDLE && window.held >= LARGE).then_some((window.held, session))
        });
        idle.max_by_key(|(held, _)| *held).map(|(held, session)| (held, Arc::clone(session)))
    }
}
