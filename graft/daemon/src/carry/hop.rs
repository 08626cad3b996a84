//! Of one connection: the way between the broker's socket and the application's, where it goes past TCP.
//!
//! TCP's windows know nothing of what is passed on. What the application gives is held back in the kernel, by what this end says
//! that it has taken; what it is given is held back here, by what the kernel says that it has not read.

use std::{sync::Arc, time::Duration};

use millrace_graft_kernel::hop::{Ends, Hop};
use tokio::net::TcpStream;

use super::listeners::canonical;

/// That are passed on to a socket and not taken from there, each way.
pub const WINDOW: u64 = 256 << 10;
/// Taken bytes that are worth telling the kernel of at once.
const WORTH: u64 = 32 << 10;
/// The first of a connection always are: what went by TCP before both ends were entered is behind then.
const FIRST: u64 = 16 << 10;
/// Until the queue of an application that does not read is looked at again.
pub const AGAIN: Duration = Duration::from_millis(1);

pub struct Way {
    hop: Arc<Hop>,
    ends: Ends,
    taken: u64,
    told: u64,
    /// That may be given without a look at the application's queue.
    room: u64,
}

impl Way {
    /// `None`: the socket is not connected any more.
    pub fn new(hop: &Arc<Hop>, local: &TcpStream) -> Option<Self> {
        let (broker, application) = (local.local_addr().ok()?, local.peer_addr().ok()?);
        let ends = Ends { broker: canonical(broker), application: canonical(application) };
        Some(Self { hop: hop.clone(), ends, taken: 0, told: 0, room: WINDOW })
    }

    pub fn took(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        if self.taken <= FIRST || self.taken - self.told >= WORTH {
            self.told = self.taken;
            // What the kernel does not know goes by TCP.
            let _ = self.hop.take(self.ends, self.taken);
        }
    }

    /// Bytes that may be given now.
    pub fn room(&mut self) -> u64 {
        if self.room == 0 {
            self.room = match self.hop.is_both_ways() {
                // Of a socket that is gone there is nothing to be said: the next write hears it.
                true => WINDOW.saturating_sub(self.hop.unread(self.ends).unwrap_or(0)),
                false => WINDOW,
            };
        }
        self.room
    }

    pub fn gave(&mut self, bytes: usize) {
        self.room = self.room.saturating_sub(bytes as u64);
    }
}

impl Drop for Way {
    /// It goes by TCP from now on, but what is on its way.
    fn drop(&mut self) {
        let _ = self.hop.leave(self.ends);
    }
}
