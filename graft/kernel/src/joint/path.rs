//! Several paths for one session: pairs of addresses that stand for its own on the wire (`bpf/joint_path.h`).

use std::net::IpAddr;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::super::Error;
use super::super::rule::remove;
use super::{Ends, Joints, bytes, intf, key};

/// Of one session.
pub const PATHS_MAX: usize = intf::PATHS;
/// Sessions that have paths.
pub const PATH_SESSIONS: usize = 100;

/// By which a session's packets go, with its ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    pub local: IpAddr,
    pub remote: IpAddr,
    pub ifindex: u32,
    /// How much of the session it carries, beside the others; 0: nothing but words of the daemons.
    pub weight: u32,
}

/// Packets of a path: those that left by it, and those that came by it and were believed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCount {
    pub sent: u64,
    pub came: u64,
}

pub(super) struct Maps {
    paths: MapHandle,
    counts: MapHandle,
    keys: MapHandle,
}

impl Maps {
    pub fn of(object: &mut millrace_kernel::object::Loaded) -> Result<Self, Error> {
        let [paths, counts, keys] = ["paths", "path_counts", "path_keys"].map(|name| object.handle(name));
        Ok(Self { paths: paths?, counts: counts?, keys: keys? })
    }
}

impl Joints {
    /// Has a session's packets go by these paths from now on: the first one has the addresses of its ends. What comes with the addresses
    /// of another, by its interface, is the session's. `is_redundant`: everything goes by all that have a weight.
    pub fn set_paths(&mut self, ends: &Ends, paths: &[Path], is_redundant: bool) -> Result<(), Error> {
        let is_first = self.find(ends)?.raw.paths == 0;
        let others = self.sessions.values().filter(|open| open.raw.paths != 0).count();
        let (have, room) = (others + 1, PATH_SESSIONS);
        if is_first && have > room {
            return Err(Error::Room { what: "sessions with paths", have, room });
        }
        if paths.len() > PATHS_MAX {
            return Err(Error::Room { what: "paths of a session", have: paths.len(), room: PATHS_MAX });
        }
        // The other end knows what has come: later it goes on from there.
        if is_first {
            let (session, none) = (self.find(ends)?.raw.index, intf::PathCounts::default());
            write(&self.paths.counts, "path_counts", &session.to_ne_bytes(), none.as_bytes())?;
        }
        self.weigh_paths(ends, paths, is_redundant)?;
        for (number, path) in paths.iter().enumerate().skip(1) {
            let entry = intf::PathIn { session: key(ends)?, ifindex: path.ifindex, path: number as u32 };
            let outside = key(&outside(ends, path))?;
            write(&self.paths.keys, "path_keys", outside.as_bytes(), entry.as_bytes())?;
        }
        self.change(ends, |raw| raw.paths = paths.len() as u8)
    }

    /// The same paths, with other weights: one write.
    pub fn weigh_paths(&self, ends: &Ends, paths: &[Path], is_redundant: bool) -> Result<(), Error> {
        let session = self.find(ends)?.raw.index;
        let mut raw = intf::Paths { is_redundant: is_redundant.into(), ..Default::default() };
        for (raw, path) in raw.each.iter_mut().zip(paths) {
            let &Path { ifindex, weight, .. } = path;
            let (local, remote) = (bytes(path.local), bytes(path.remote));
            *raw = intf::Path { local, remote, ifindex, weight };
        }
        Ok(write(&self.paths.paths, "paths", &session.to_ne_bytes(), raw.as_bytes())?)
    }

    /// In their order.
    pub fn path_counts(&self, ends: &Ends) -> Result<[PathCount; PATHS_MAX], Error> {
        let session = self.find(ends)?.raw.index;
        let found = self.paths.counts.lookup(&session.to_ne_bytes(), MapFlags::ANY).map_err(Error::State)?;
        let raw = found.and_then(|bytes| intf::PathCounts::from_bytes(&bytes)).unwrap_or_default();
        let mut counts = [PathCount::default(); PATHS_MAX];
        for (count, (sent, came)) in counts.iter_mut().zip(raw.sent.into_iter().zip(raw.came)) {
            *count = PathCount { sent, came };
        }
        Ok(counts)
    }

    /// Of a session that is no more.
    pub(super) fn end_paths(&self, ends: &Ends, index: u32, paths: u8) -> Result<(), Error> {
        let index = index.to_ne_bytes();
        let found = self.paths.paths.lookup(&index, MapFlags::ANY).map_err(Error::State)?;
        let Some(raw) = found.and_then(|bytes| intf::Paths::from_bytes(&bytes)) else { return Ok(()) };
        let own = key(ends)?;
        let each = raw.each.iter().take(usize::from(paths)).skip(1);
        for path in each {
            let outside = intf::Key { local: path.local, remote: path.remote, ..own };
            remove(&self.paths.keys, "path_keys", outside.as_bytes())?;
        }
        self.paths.paths.delete(&index).map_err(Error::State)?;
        self.paths.counts.delete(&index).map_err(Error::State)
    }
}

/// Copies that leave by a path have one of the numbers from here on, which are no others' marks.
pub(super) fn mark(mark: u32) -> u32 {
    (mark ^ 1 << 29) & !7
}

/// As its packets are on the wire.
fn outside(ends: &Ends, path: &Path) -> Ends {
    let mut outside = *ends;
    outside.local.set_ip(path.local);
    outside.remote.set_ip(path.remote);
    outside
}
