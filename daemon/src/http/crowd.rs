//! Connections that may be ended when there is no place for one more.
//!
//! Whoever only connects, or asks for what everybody may have, holds a place only as long as nobody else needs it: the one that has done so for
//! longest makes room. So a probe of `/healthz` is answered whatever others hold. Whoever has shown the token is not ended for that: it keeps its
//! place until it is idle for as long as anybody may be.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::{sync::Notify, task::AbortHandle};

#[derive(Default)]
pub struct Crowd {
    state: Mutex<State>,
    /// There is one more that may be ended.
    more: Notify,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Connections by when they came, or asked last.
    may_end: BTreeMap<u64, AbortHandle>,
}

impl Crowd {
    /// Ends the connection that waits for longest. Returns whether there was one.
    pub fn end_one(&self) -> bool {
        let first = self.state.lock().may_end.pop_first();
        first.inspect(|(_, connection)| connection.abort()).is_some()
    }

    /// Waits until another connection may be ended.
    pub async fn more(&self) {
        self.more.notified().await;
    }
}

/// A connection. It may be ended until it [leaves](Self::leave).
pub struct Member {
    crowd: Arc<Crowd>,
    handle: AbortHandle,
    at: Mutex<Option<u64>>,
}

impl Member {
    pub fn new(crowd: Arc<Crowd>, handle: AbortHandle) -> Self {
        let member = Self { crowd, handle, at: Mutex::default() };
        member.wait();
        member
    }

    /// Notes that the connection has come, or asked for something without the token, just now: others are ended before it.
    pub fn wait(&self) {
        let at = &mut *self.at.lock();
        let state = &mut *self.crowd.state.lock();
        at.take().and_then(|at| state.may_end.remove(&at));
        state.next += 1;
        state.may_end.insert(state.next, self.handle.clone());
        *at = Some(state.next);
        self.crowd.more.notify_one();
    }

    /// Notes that the connection has shown the token: it is not ended to make room, until it asks for something without the token.
    pub fn leave(&self) {
        if let Some(at) = self.at.lock().take() {
            self.crowd.state.lock().may_end.remove(&at);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}
