//! Connections that may be ended when there is no place for one more.
//!
//! Whoever only connects, or asks for what everybody may have, holds a place only as long as nobody else needs it: the one that has done so for
//! longest makes room. So a probe of `/healthz` is answered whatever others hold. A request that was let in is not ended for that.

use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use axum::body::{Body, Bytes};
use hyper::{
    body::{Body as HttpBody, Frame, SizeHint},
    rt::{Read, ReadBufCursor, Write},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::Notify, task::AbortHandle};

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
    /// The answer to its request was taken, and some of it may not have been written.
    is_answered: AtomicBool,
}

impl Member {
    pub fn new(crowd: Arc<Crowd>, handle: AbortHandle) -> Arc<Self> {
        let member = Self { crowd, handle, at: Mutex::default(), is_answered: AtomicBool::new(false) };
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

    /// It is not ended until what is returned is dropped, and what was to be written by then is written.
    pub fn work(self: &Arc<Self>) -> Work {
        self.leave();
        self.is_answered.store(false, Relaxed);
        Work(self.clone())
    }

    fn has_written(&self) {
        if self.is_answered.swap(false, Relaxed) {
            self.wait();
        }
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
        self.0.is_answered.store(true, Relaxed);
    }
}

/// The answer to it, of which no more is wanted when it is dropped.
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

/// A connection's socket, which tells when all is with the kernel that was to be written.
pub struct Watched {
    socket: TokioIo<TcpStream>,
    member: Arc<Member>,
}

impl Watched {
    pub fn new(socket: TcpStream, member: Arc<Member>) -> Self {
        Self { socket: TokioIo::new(socket), member }
    }
}

impl Read for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl Write for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket).poll_flush(context);
        if let Poll::Ready(Ok(())) = flushed {
            self.member.has_written();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, slices)
    }
}
