//! What applications and the broker of their host say to each other, passed on past TCP and loopback (sockmap).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore as _, MapHandle};
use millrace_kernel::intf::{Plain as _, mirror};
use millrace_kernel::object::{Loaded, embedded, write};

use super::attachment::Attachment;
use super::diag::Diag;
use super::hook::{Guest, Ports, end, intf, raw_guest};
use super::rule::remove;
use super::{Error, namespace};

mirror!(RawConfig = "hop_config" {
    namespace_cookie: u64, window_bytes: u64, port4: [u16; 2], port6: [u16; 2], both_ways: u32, pad: u32
});

mirror!(Key = "hop_key" { near: intf::End, far: intf::End });

/// What becomes of what a socket sends, and of sockets, as status, metrics and the documentation call it.
pub const VERDICTS: [&str; 9] =
    ["passed-on", "full", "behind", "alone", "one-way", "unknown", "entered", "no-room", "early"];

/// `HOP_SOCKETS`: that there is room for.
const SOCKETS: usize = 131_072;

/// Since when the kernel counts what was passed on to a socket and is not read.
const COUNTS_UNREAD: (u32, u32) = (6, 13);

/// The programs, loaded. What is entered stays so until it is closed, or this is dropped.
pub struct Hop {
    object: Mutex<Loaded>,
    sockets: MapHandle,
    sent: MapHandle,
    taken: MapHandle,
    expected: MapHandle,
    diag: Mutex<Diag>,
    both_ways: bool,
}

/// Sockets of a cgroup are entered, until this is dropped.
pub struct Attached(#[allow(dead_code, reason = "dropped, it detaches")] Attachment);

/// A socket of the broker's, and its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    pub broker: SocketAddr,
    pub application: SocketAddr,
}

impl Hop {
    /// For the calling thread's network namespace. `window_bytes`: that an application may have given and the broker not taken.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn load(early: Ports, strict: Ports, window_bytes: u64) -> Result<Self, Error> {
        let both_ways = release().is_some_and(|release| release >= COUNTS_UNREAD);
        let mut open = embedded!("graft_hop.bpf.o").open()?;
        open.configure(&RawConfig {
            namespace_cookie: namespace::cookie().map_err(Error::Descriptor)?,
            window_bytes,
            port4: [early.v4, strict.v4],
            port6: [early, strict].map(|ports| ports.v6.unwrap_or_default()),
            both_ways: u32::from(both_ways),
            pad: 0,
        })?;
        let mut object = open.load()?;
        let sockets = object.handle("sockets")?;
        let map = sockets.as_fd().as_raw_fd();
        let attached = object.program("hop_send")?.attach_sockmap(map);
        attached.map_err(|source| millrace_kernel::Error::Write { what: "sockets", source })?;
        Ok(Self {
            sockets,
            sent: object.handle("sent")?,
            taken: object.handle("taken")?,
            expected: object.handle("expected")?,
            diag: Mutex::new(Diag::open().map_err(Error::Descriptor)?),
            object: Mutex::new(object),
            both_ways,
        })
    }

    /// Sockets that are connected from now on, in the cgroup (version 2) and in those below it.
    pub fn attach(&self, cgroup: &Path) -> Result<Attached, Error> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Attached(Attachment::new(&object.program("hop_enter")?, cgroup)?))
    }

    /// Whether what the broker sends is passed on, too. Before Linux 6.13 nobody can tell how much of it is not read.
    pub fn is_both_ways(&self) -> bool {
        self.both_ways
    }

    /// The broker is about to make this connection.
    pub fn expect(&self, guest: Guest) -> Result<(), Error> {
        Ok(write(&self.expected, "expected", raw_guest(guest).as_bytes(), &1_u32.to_ne_bytes())?)
    }

    pub fn expect_no_more(&self, guest: Guest) -> Result<(), Error> {
        remove(&self.expected, "expected", raw_guest(guest).as_bytes())
    }

    /// The broker has taken so many bytes of the application's by now.
    pub fn take(&self, ends: Ends, bytes: u64) -> Result<(), Error> {
        Ok(write(&self.taken, "taken", ends.of_application().as_bytes(), bytes.as_bytes())?)
    }

    /// What is sent from now on goes by TCP, both ways.
    pub fn leave(&self, ends: Ends) -> Result<(), Error> {
        remove(&self.sent, "sent", ends.of_application().as_bytes())?;
        remove(&self.sent, "sent", ends.of_broker().as_bytes())?;
        remove(&self.taken, "taken", ends.of_application().as_bytes())
    }

    /// Bytes in the queue of the application's socket, which it has not read: more than nothing only from Linux 6.13 on.
    ///
    /// # Errors
    /// The kernel says nothing of the socket; it may be gone.
    pub fn unread(&self, ends: Ends) -> io::Result<u64> {
        let diag = self.diag.lock().unwrap_or_else(PoisonError::into_inner);
        diag.unread((ends.application, ends.broker))
    }

    /// Sockets that are entered now; while they come and go, about so many.
    pub fn sockets(&self) -> u64 {
        // A walk begins anew where the socket at which it stands is closed.
        self.sockets.keys().take(SOCKETS).count() as u64
    }

    /// By [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(object.counters("verdicts")?)
    }
}

impl Ends {
    fn of_application(self) -> Key {
        Key { near: end(self.application), far: end(self.broker) }
    }

    fn of_broker(self) -> Key {
        Key { near: end(self.broker), far: end(self.application) }
    }
}

/// The running kernel's, as far as it counts here.
fn release() -> Option<(u32, u32)> {
    let name = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut parts = name.split(|it: char| !it.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};
    use millrace_testkit::wait_for;

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(env!("OUT_DIR"), "graft_hop.bpf.o", &[RawConfig::LAYOUT, Key::LAYOUT]);
        let names: Vec<_> = VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hop.bpf.o", "hop_verdict", "hop_"));
    }

    /// The map holds the program and the program the map: neither holds the other for ever.
    #[test]
    fn nothing_is_left_of_it() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP nothing_is_left_of_it: needs root");
            return;
        }
        let ports = Ports { v4: 1, v6: None };
        let hop = Hop::load(ports, ports, 1).expect("programs");
        let ids = hop.object.lock().expect("an object").program_ids();
        assert_eq!((ids.len(), hop.sockets()), (2, 0));
        drop(hop);
        wait_for("the end of its programs", || {
            let left: Vec<_> = ids.iter().filter(|id| libbpf_rs::Program::fd_from_id(**id).is_ok()).collect();
            if left.is_empty() { Ok(()) } else { Err(left) }
        });
    }
}
