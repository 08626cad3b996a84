//! One task per endpoint: timers of the data plane, and what must not be done inside quinn's lock.

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quinn::VarInt;
use tracing::debug;

use crate::{
    alarm::Alarm,
    connection::Connection,
    send::{Batch, Sender},
    shared::attention,
};

/// How often quinn is asked whether it has finished what it does not tell.
const INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Registry(Mutex<Vec<Weak<Connection>>>);

impl Registry {
    pub fn add(&self, connection: &Arc<Connection>) {
        self.0.lock().push(Arc::downgrade(connection));
    }

    /// The connections that are still held by someone.
    fn live(&self) -> Vec<Arc<Connection>> {
        let mut all = self.0.lock();
        all.retain(|connection| connection.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Runs until the endpoint is gone.
pub(crate) async fn run(alarm: Arc<Alarm>, registry: Weak<Registry>, sender: Arc<Sender>) {
    let mut batch = Batch::default();
    loop {
        alarm.wait().await;
        let Some(registry) = registry.upgrade() else { return };
        // Before the deadlines are read, so that none set meanwhile is missed.
        alarm.reset();
        let mut next = u64::MAX;
        for connection in registry.live() {
            attend(&connection);
            next = next.min(fire(&connection, &alarm, &mut batch));
        }
        sender.flush(&mut batch);
        alarm.lower(next);
    }
}

/// Runs the connection's timers if they are due; returns when they are next.
fn fire(connection: &Connection, alarm: &Alarm, batch: &mut Batch) -> u64 {
    let shared = &connection.shared;
    let now = Instant::now();
    // `time` rounds up: one tick less has passed for certain.
    if shared.deadline.load(Ordering::Acquire) < alarm.time(now) {
        match connection.quic.close_reason() {
            Some(_) => shared.close(),
            None => shared.on_timeout(now, batch),
        }
    }
    shared.deadline.load(Ordering::Acquire)
}

fn attend(connection: &Arc<Connection>) {
    let wanted = connection.shared.take_attention();
    if wanted & attention::ADDRESS != 0 && connection.look_up_address() && connection.shared.begin_following()
    {
        tokio::spawn(follow_address(Arc::downgrade(connection)));
    }
    if wanted & attention::WINDOW != 0 {
        connection.widen();
    }
    if wanted & attention::KEY_UPDATE != 0 && connection.renew_keys() {
        tokio::spawn(follow_keys(Arc::downgrade(connection)));
    }
    if wanted & attention::KEYS_EXHAUSTED != 0 {
        close(connection, "too many key updates");
    }
    if wanted & attention::UNANSWERED != 0 {
        close(connection, "nothing is acknowledged");
    }
}

fn close(connection: &Connection, reason: &str) {
    debug!(remote = %connection.quic.remote_address(), reason, "closed");
    connection.quic.close(VarInt::from_u32(0), reason.as_bytes());
}

/// Asks quinn where the peer is until it has answered from there, or quinn has gone back to the old address. A connection has one such
/// task, however often its peer moves on meanwhile.
async fn follow_address(connection: Weak<Connection>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(connection) = connection.upgrade() else { return };
        // Before quinn is asked: if the peer moves on behind that, another one begins.
        connection.shared.end_following();
        if !connection.look_up_address() || !connection.shared.begin_following() {
            return;
        }
    }
}

/// Until quinn uses newer keys: it cannot update them again right after it did.
async fn follow_keys(connection: Weak<Connection>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        match connection.upgrade() {
            Some(connection) if connection.renew_keys() => {}
            _ => return,
        }
    }
}
