//! An application's connection. Its records are read by a thread of its own, which closes it, too.
//!
//! Whoever connects may pass descriptors of anything. The kernel closes those that nobody takes: in the thread that reads the record, or, of
//! records that nobody has read, in the one that closes the connection. To close a TCP socket takes as long as its owner has set
//! (`SO_LINGER`), hours if need be. So the thread that holds the runtime neither reads nor closes: an application holds up itself alone.

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

use millrace_base::control::{Control, Received};
use millrace_graft::message::wire::{RECORD_MAX, Request, Word};

use super::places::Place;

/// Records that were read and wait.
const AHEAD: usize = 4;
/// Stack of a thread in bytes: a record, and room for reading it.
const STACK: usize = 64 * 1024 + 2 * RECORD_MAX;

/// The broker's side of it. Ends the connection when it is dropped.
pub struct Line {
    control: Arc<Control>,
    requests: Receiver<Received<Request>>,
    /// Dropped last, after which the thread has the last reference of the connection.
    _held: Sender<Infallible>,
}

impl Line {
    /// Begins to read. `place` is taken for as long as the thread is there.
    ///
    /// # Errors
    /// There can be no thread. The connection is given back.
    pub fn start(connection: OwnedFd, place: Place) -> Result<Self, (OwnedFd, io::Error)> {
        let (hand, handed) = channel::<(Arc<Control>, Place)>();
        let (tell, requests) = sync_channel(AHEAD);
        let (held, let_go) = channel::<Infallible>();
        let work = move || {
            let Ok((control, place)) = handed.recv() else { return };
            read(&control, tell);
            // An error: the broker has let go of it.
            let _ = let_go.recv();
            drop(control);
            drop(place);
        };
        let builder = thread::Builder::new().name("application".into()).stack_size(STACK);
        if let Err(error) = builder.spawn(work) {
            return Err((connection, error));
        }
        let control = Arc::new(Control::from(connection));
        // It waits for this.
        let _ = hand.send((control.clone(), place));
        Ok(Self { control, requests, _held: held })
    }

    /// Returns what was read and not returned yet. Never waits.
    pub fn receive(&self) -> Received<Request> {
        match self.requests.try_recv() {
            Ok(received) => received,
            Err(TryRecvError::Empty) => Received::Nothing,
            Err(TryRecvError::Disconnected) => Received::End,
        }
    }

    /// Sends a word, and never waits.
    ///
    /// # Errors
    /// The other end is gone, or does not read (`WouldBlock`).
    pub fn send(&self, word: &Word, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.control.send(word, descriptors)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.control.end();
    }
}

/// Reads until the connection ends, or nobody wants to know.
fn read(control: &Control, tell: SyncSender<Received<Request>>) {
    loop {
        control.wait();
        match control.receive_alone() {
            Received::Nothing => {}
            Received::End => return,
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

    use super::{super::places::Places, *};

    fn begin(own: Control, places: &Places, user: u32) -> Line {
        Line::start(own.into(), places.enter(user).unwrap()).map_err(|(_, error)| error).unwrap()
    }

    #[test]
    fn records_come_in_order_and_then_the_end() {
        let places = Places::of_users(1);
        let (theirs, own) = Control::pair().unwrap();
        let line = begin(own, &places, 7);
        for messages in 0..20 {
            wait_for("room", || theirs.send(&Request::Finish { messages }, &[]).is_ok());
        }
        drop(theirs);
        for wanted in 0..20 {
            let received = wait_for("a record", || match line.receive() {
                Received::Nothing => None,
                other => Some(other),
            });
            assert!(
                matches!(received, Received::Record(Request::Finish { messages }, _) if messages == wanted),
                "{received:?}"
            );
        }
        wait_for("the end", || matches!(line.receive(), Received::End));
        assert!(places.enter(7).is_none(), "the broker has it still");
        drop(line);
        wait_for("the place to be free", || places.enter(7).is_some());
    }

    /// Neither reading a lingering socket, nor letting go of a connection with one, is waited for; and its user's place is taken until it is
    /// over.
    #[test]
    fn lingering_socket_holds_up_its_own_connection_alone() {
        let places = Places::of_users(1);
        let (hostile, own) = Control::pair().unwrap();
        let (near, far) = lingering();
        hostile.send(&Request::Finish { messages: 1 }, &[]).unwrap();
        hostile.send(&Request::Finish { messages: 2 }, &[near.as_fd()]).unwrap();
        // What is in the record is the last descriptor: this one would linger else.
        drop(near);
        let held_up = begin(own, &places, 7);
        let (other, own) = Control::pair().unwrap();
        let heard = begin(own, &places, 8);
        wait_for("the first record", || matches!(held_up.receive(), Received::Record(..)));
        other.send(&Request::Finish { messages: 3 }, &[]).unwrap();
        wait_for("another's record", || matches!(heard.receive(), Received::Record(..)));
        drop(hostile);
        let before = Instant::now();
        drop(held_up);
        assert!(before.elapsed() < LINGER / 2);
        assert!(places.enter(7).is_none(), "it lingers");
        drop(far);
        wait_for("the place to be free", || places.enter(7).is_some());
    }
}
