//! The control connection of an application. Each connection has a thread that reads the application's requests, one in
//! each record of the Unix socket, and closes the connection.
//!
//! An application may pass descriptors of any kind with its records. The kernel closes descriptors that the daemon does
//! not accept: in the thread that reads the record, or for unread records in the thread that closes the connection.
//! Closing a TCP socket can block for its owner's linger time (`SO_LINGER`), which may be hours. So the thread that
//! holds the runtime neither reads nor closes, and an application blocks only its own thread.

use std::{
    convert::Infallible,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel},
    },
    thread,
};

use millrace_base::control::{ControlEnd, ControlReceived};
use millrace_messages::wire::{BrokerReply, BrokerRequest, RECORD_MAX};

use super::places::ClientPlace;

/// Limit of requests that were read from the connection and that the session broker has not handled yet.
const AHEAD: usize = 4;
/// Stack size in bytes of a thread that reads requests. The stack holds one request and the buffers for reading it.
const STACK: usize = 64 * 1024 + 2 * RECORD_MAX;

/// The session broker's side of a connection. Dropping it closes the connection.
pub struct ClientLine {
    control: Arc<ControlEnd>,
    requests: Receiver<ControlReceived<BrokerRequest>>,
    /// This field is dropped after `control`. The drop wakes the reading thread, which then holds the last reference to
    /// the connection.
    _held: Sender<Infallible>,
}

impl ClientLine {
    /// Starts the thread that reads requests. The connection counts towards its user's limit (`place`) until the thread
    /// ends.
    ///
    /// # Errors
    /// The thread cannot be started. The connection is handed back.
    pub fn start(connection: OwnedFd, place: ClientPlace) -> Result<Self, (OwnedFd, io::Error)> {
        let (hand, handed) = channel::<(Arc<ControlEnd>, ClientPlace)>();
        let (tell, requests) = sync_channel(AHEAD);
        let (held, let_go) = channel::<Infallible>();
        let work = move || {
            let Ok((control, place)) = handed.recv() else { return };
            read(&control, tell);
            // Waits until the session broker drops its side of the connection, which makes this receive fail.
            let _ = let_go.recv();
            drop(control);
            drop(place);
        };
        let builder = thread::Builder::new().name("application".into()).stack_size(STACK);
        if let Err(error) = builder.spawn(work) {
            return Err((connection, error));
        }
        // The thread gets the connection only after it has started, so that a failed start leaves the connection with
        // the caller.
        let control = Arc::new(ControlEnd::from(connection));
        // The thread is waiting to receive the connection from this channel, so the send cannot fail.
        let _ = hand.send((control.clone(), place));
        Ok(Self { control, requests, _held: held })
    }

    /// Returns the next request that the thread has read. Never blocks.
    pub fn receive(&self) -> ControlReceived<BrokerRequest> {
        match self.requests.try_recv() {
            Ok(received) => received,
            Err(TryRecvError::Empty) => ControlReceived::Nothing,
            Err(TryRecvError::Disconnected) => ControlReceived::End,
        }
    }

    /// Sends a message without blocking.
    ///
    /// # Errors
    /// The application has disconnected, or does not read (`WouldBlock`).
    pub fn send(&self, reply: &BrokerReply, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.control.send(reply, descriptors)
    }
}

impl Drop for ClientLine {
    fn drop(&mut self) {
        // The shutdown wakes the thread up, which then reads the end of the connection.
        self.control.end();
    }
}

/// Reads until the connection ends, or the session broker has dropped its side.
fn read(control: &ControlEnd, tell: SyncSender<ControlReceived<BrokerRequest>>) {
    loop {
        control.wait();
        match control.receive_alone() {
            ControlReceived::Nothing => {}
            ControlReceived::End => return,
            received => {
                if tell.send(received).is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd as _, time::Instant};

    use millrace_testkit::{LINGER, lingering, wait_for};

    use super::{super::places::ClientPlaces, *};

    fn begin(own: ControlEnd, places: &ClientPlaces, user: u32) -> ClientLine {
        ClientLine::start(own.into(), places.enter(user).unwrap()).map_err(|(_, error)| error).unwrap()
    }

    #[test]
    fn records_arrive_in_order_before_the_connection_end_is_reported() {
        let places = ClientPlaces::for_users(1);
        let (theirs, own) = ControlEnd::pair().unwrap();
        let line = begin(own, &places, 7);
        for messages in 0..20 {
            wait_for("room", || theirs.send(&BrokerRequest::Finish { messages }, &[]).is_ok());
        }
        drop(theirs);
        for wanted in 0..20 {
            let received = wait_for("a record", || match line.receive() {
                ControlReceived::Nothing => None,
                other => Some(other),
            });
            assert!(
                matches!(received, ControlReceived::Record(BrokerRequest::Finish { messages }, _) if messages == wanted),
                "{received:?}"
            );
        }
        wait_for("the end", || matches!(line.receive(), ControlReceived::End));
        assert!(places.enter(7).is_none(), "the broker has it still");
        drop(line);
        wait_for("the place to be free", || places.enter(7).is_some());
    }

    /// Requests carry a descriptor of a socket whose close blocks (`SO_LINGER`). The session broker must not be blocked
    /// when such a request is read, or when a connection with such an unread request is closed. The connection counts
    /// towards its user's limit until the socket has stopped lingering.
    #[test]
    fn socket_with_so_linger_blocks_only_the_connection_that_sent_the_socket() {
        let places = ClientPlaces::for_users(1);
        let (hostile, own) = ControlEnd::pair().unwrap();
        let (near, far) = lingering();
        hostile.send(&BrokerRequest::Finish { messages: 1 }, &[]).unwrap();
        hostile.send(&BrokerRequest::Finish { messages: 2 }, &[near.as_fd()]).unwrap();
        // The test closes its descriptor while the sent record still holds one. Closing the socket's last descriptor
        // would block the test.
        drop(near);
        let held_up = begin(own, &places, 7);
        let (other, own) = ControlEnd::pair().unwrap();
        let heard = begin(own, &places, 8);
        wait_for("the first record", || matches!(held_up.receive(), ControlReceived::Record(..)));
        other.send(&BrokerRequest::Finish { messages: 3 }, &[]).unwrap();
        wait_for("another's record", || matches!(heard.receive(), ControlReceived::Record(..)));
        drop(hostile);
        let before = Instant::now();
        drop(held_up);
        assert!(before.elapsed() < LINGER / 2);
        assert!(places.enter(7).is_none(), "it lingers");
        drop(far);
        wait_for("the place to be free", || places.enter(7).is_some());
    }
}
