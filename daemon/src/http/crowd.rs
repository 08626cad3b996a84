//! Connections that may be closed in favor of a new one.
//!
//! A connection that has sent no request with the token is closed only when a new client needs its slot. The connection
//! that has been idle longest is closed first. A probe of `/healthz` is therefore answered even if all connection slots
//! are in use. A connection that has shown the token is not closed in favor of new ones: it stays open until it is idle
//! for too long.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::{sync::Notify, task::AbortHandle};

/// The connections of a server that may be closed in favor of new ones.
#[derive(Default)]
pub struct ConnectionCrowd {
    state: Mutex<CrowdState>,
    /// Wakes the task that waits for a connection that may be closed.
    more: Notify,
}

#[derive(Default)]
struct CrowdState {
    next: u64,
    /// Connections in the order in which each arrived or last sent a request.
    may_end: BTreeMap<u64, AbortHandle>,
}

impl ConnectionCrowd {
    /// Closes the connection that has been idle longest. Returns false if there is no connection that may be closed.
    pub fn end_one(&self) -> bool {
        let first = self.state.lock().may_end.pop_first();
        first.inspect(|(_, connection)| connection.abort()).is_some()
    }

    /// Waits until a connection that may be closed was added.
    pub async fn wait_for_activity(&self) {
        self.more.notified().await;
    }
}

/// A connection that may be closed in favor of new ones until it [leaves](Self::leave) the crowd.
pub struct CrowdMember {
    crowd: Arc<ConnectionCrowd>,
    handle: AbortHandle,
    at: Mutex<Option<u64>>,
}

impl CrowdMember {
    /// Adds a connection to the crowd, the connections that may be closed in favor of new ones. `handle` aborts the
    /// connection's task.
    pub fn new(crowd: Arc<ConnectionCrowd>, handle: AbortHandle) -> Self {
        let member = Self { crowd, handle, at: Mutex::default() };
        member.wait();
        member
    }

    /// Records that the connection has just arrived, or sent a request without the token. The connection is then the
    /// last one to be closed in favor of new ones.
    pub fn wait(&self) {
        // Lock order: the lock of one connection (`at`) before the lock of all connections (`state`).
        let at = &mut *self.at.lock();
        let state = &mut *self.crowd.state.lock();
        at.take().and_then(|at| state.may_end.remove(&at));
        state.next += 1;
        state.may_end.insert(state.next, self.handle.clone());
        *at = Some(state.next);
        self.crowd.more.notify_one();
    }

    /// Records that the connection has shown the token. It is not closed in favor of new ones until it sends a request
    /// without the token.
    pub fn leave(&self) {
        if let Some(at) = self.at.lock().take() {
            self.crowd.state.lock().may_end.remove(&at);
        }
    }
}

impl Drop for CrowdMember {
    fn drop(&mut self) {
        self.leave();
    }
}
