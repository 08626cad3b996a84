//! Connections that may be ended when there is no place for one more.
//!
//! Whoever only connects, or asks for what everybody may have, holds a place only as long as nobody else needs it: the one that has done so for
//! longest makes room. So a probe of `/healthz` is answered whatever others hold. A request that was let in is not ended for that.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
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
    /// By when they came, or asked last.
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

/// A connection. It may be ended until it [works](Self::work), and when that is done.
pub struct Member {
    crowd: Arc<Crowd>,
    handle: AbortHandle,
    at: Mutex<Option<u64>>,
}

impl Member {
    pub fn new(crowd: Arc<Crowd>, handle: AbortHandle) -> Arc<Self> {
        let member = Self { crowd, handle, at: Mutex::default() };
        member.wait();
        Arc::new(member)
    }

    /// It has come, or asked for something, just now.
    pub fn wait(&self) {
        let at = &mut *self.at.lock();
        let state = &mut *self.crowd.state.lock();
        at.take().and_then(|at| state.may_end.remove(&at));
        state.next += 1;
        state.may_end.insert(state.next, self.handle.clone());
        *at = Some(state.next);
        self.crowd.more.notify_one();
    }

    /// It is not ended until what is returned is dropped.
    pub fn work(self: &Arc<Self>) -> Work {
        self.leave();
        Work(self.clone())
    }

    fn leave(&self) {
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

/// A request of a connection that is being answered.
pub struct Work(Arc<Member>);

impl Drop for Work {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// The answer to it, which is given when all of it was taken.
pub struct Answer {
    body: Body,
    _work: Option<Work>,
}

impl Answer {
    pub fn new(body: Body, work: Option<Work>) -> Self {
        Self { body, _work: work }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
