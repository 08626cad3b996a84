//! The driver: one task per shard for the data plane's timers, and for work that must not be done while quinn's lock
//! is held.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use quinn::VarInt;
use tracing::debug;

use crate::{
    alarm::Alarm,
    connection::Connection,
    registry::Registry,
    send::{BatchSender, PacketBatch},
    shared::attention,
};

/// Interval at which the driver's tasks query quinn for the peer's address and for newer keys, which quinn does not
/// report by itself.
const INTERVAL: Duration = Duration::from_millis(50);

/// Registers a connection of the endpoint, and makes the driver serve it.
pub(crate) fn add(registry: &Registry<Connection>, connection: &Arc<Connection>) {
    let turn = &connection.shared.turn;
    registry.add(turn.number(), connection);
    // The driver ignores wake-up requests of connections that are not registered, so the connection requests a wake-up
    // again.
    turn.begin();
    turn.wake_by(0);
}

/// The connections that the driver has to serve, each with the time of its earliest deadline.
#[derive(Default)]
struct DriverAgenda {
    times: HashMap<u64, u64>,
    /// Pairs of the time by which to serve a connection and the connection's number, the earliest first.
    order: BTreeSet<(u64, u64)>,
}

impl DriverAgenda {
    /// Notes that a connection has to be served by `time`.
    fn put(&mut self, number: u64, time: u64) {
        let known = self.times.get(&number).copied();
        if known.is_none_or(|known| time < known) {
            if let Some(known) = known {
                self.order.remove(&(known, number));
            }
            self.times.insert(number, time);
            self.order.insert((time, number));
        }
    }

    /// Removes the connections whose time has passed, and returns their numbers.
    fn take_due(&mut self, now: u64) -> Vec<u64> {
        // Time 0 means at once, so a connection with time 0 is due even if `now` is 0.
        let later = self.order.split_off(&(now.max(1), 0));
        let due = std::mem::replace(&mut self.order, later);
        for (_, number) in &due {
            self.times.remove(number);
        }
        due.into_iter().map(|(_, number)| number).collect()
    }

    /// Returns the earliest time at which a connection has to be served, or `u64::MAX` if there is none.
    fn next(&self) -> u64 {
        self.order.first().map_or(u64::MAX, |(time, _)| *time)
    }
}

/// Serves connections that have asked for it, or whose deadline has passed, until the endpoint is dropped.
pub(crate) async fn run(alarm: Arc<Alarm>, registry: Weak<Registry<Connection>>, sender: Arc<BatchSender>) {
    let mut batch = PacketBatch::default();
    let mut agenda = DriverAgenda::default();
    loop {
        alarm.wait().await;
        let Some(registry) = registry.upgrade() else { return };
        // The alarm is reset before the requests are read, so that no request made in between is missed.
        alarm.reset();
        alarm.take_asked().into_iter().for_each(|(number, time)| agenda.put(number, time));
        for number in agenda.take_due(alarm.time(Instant::now())) {
            let Some(connection) = registry.get(number) else { continue };
            let turn = &connection.shared.turn;
            turn.begin();
            attend(&connection);
            let next = fire(&connection, &alarm, &mut batch);
            if turn.put(next) {
                agenda.put(number, next);
            }
        }
        sender.flush(&mut batch);
        alarm.lower(agenda.next());
    }
}

/// Runs the connection's timers if they are due. Returns the tick at which they are due next.
fn fire(connection: &Connection, alarm: &Alarm, batch: &mut PacketBatch) -> u64 {
    let shared = &connection.shared;
    let now = Instant::now();
    // `time` rounds up to a whole tick, so the current tick has not passed yet: only earlier ticks are due.
    if shared.deadline.load(Ordering::SeqCst) < alarm.time(now) {
        match connection.quic.close_reason() {
            Some(_) => shared.close(),
            None => shared.on_timeout(now, batch),
        }
    }
    shared.deadline.load(Ordering::SeqCst)
}

fn attend(connection: &Arc<Connection>) {
    let wanted = connection.shared.take_attention();
    if wanted & attention::ADDRESS != 0 && connection.look_up_address() && connection.shared.begin_following()
    {
        tokio::spawn(follow_address(Arc::downgrade(connection)));
    }
    if wanted & attention::WINDOW != 0 {
        connection.resize_window();
    }
    if wanted & attention::KEY_UPDATE != 0 && connection.renew_keys() {
        tokio::spawn(follow_keys(Arc::downgrade(connection)));
    }
    if wanted & attention::KEYS_EXHAUSTED != 0 {
        close(connection, "too many key updates");
    }
    if wanted & attention::UNANSWERED != 0 {
        close(connection, "the peer acknowledges no packets");
    }
}

fn close(connection: &Connection, reason: &str) {
    debug!(remote = %connection.quic.remote_address(), reason, "closing a QUIC connection");
    connection.quic.close(VarInt::from_u32(0), reason.as_bytes());
}

/// Reads the peer's address from quinn repeatedly until quinn has validated that address, or has gone back to the old
/// one. A connection has at most one such task, however often its peer moves.
async fn follow_address(connection: Weak<Connection>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(connection) = connection.upgrade() else { return };
        // The flag `follows`, which tells that this task runs, is cleared before quinn is queried. So if the peer moves
        // after the query, another task begins.
        connection.shared.end_following();
        if !connection.look_up_address() || !connection.shared.begin_following() {
            return;
        }
    }
}

/// Requests a key update from quinn at each [`INTERVAL`] until the data plane has newer keys. quinn ignores a request
/// that comes too soon after an update.
async fn follow_keys(connection: Weak<Connection>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        match connection.upgrade() {
            Some(connection) if connection.renew_keys() => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connections_with_a_due_timer_are_served() {
        let mut agenda = DriverAgenda::default();
        for (number, time) in [(1, 30), (2, 10), (3, 20), (2, 40), (1, 5), (4, 0)] {
            agenda.put(number, time);
        }
        assert_eq!(agenda.next(), 0);
        assert_eq!(agenda.take_due(0), [4], "at once");
        assert!(agenda.take_due(5).is_empty());
        assert_eq!(agenda.take_due(11), [1, 2]);
        assert_eq!((agenda.next(), agenda.times.len()), (20, 1));
        assert_eq!(agenda.take_due(100), [3]);
        assert_eq!((agenda.next(), agenda.times.len()), (u64::MAX, 0));
    }
}
