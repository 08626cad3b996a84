//! Several paths for one session: address pairs that replace the session's own pair on the wire (`bpf/packet_path.h`).

use std::net::IpAddr;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::super::Error;
use super::super::rule::remove;
use super::{PacketHooks, SessionEnds, bytes, intf, key};

/// Largest number of network paths of a session.
pub const PATHS_MAX: usize = intf::PATHS;
/// Largest number of sessions with several network paths.
pub const PATH_SESSIONS: usize = 100;

/// A path: an address pair and an interface by which a session's packets are sent. All paths use the session's ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionPath {
    /// This host's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// Index of the interface that packets are sent by.
    pub ifindex: u32,
    /// Share of the session's packets, relative to the weights of the other paths; 0: only messages of the daemons use
    /// the path.
    pub weight: u32,
}

/// Number of packets that were sent and received by a network path. A received packet counts if its frame was
/// authentic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCount {
    /// Packets that were sent by the path.
    pub sent: u64,
    /// Packets that were received by the path.
    pub came: u64,
}

pub(super) struct PathMaps {
    paths: MapHandle,
    counts: MapHandle,
    keys: MapHandle,
}

impl PathMaps {
    pub fn from_object(object: &mut millrace_kernel::object::LoadedObject) -> Result<Self, Error> {
        let [paths, counts, keys] = ["paths", "path_counts", "path_keys"].map(|name| object.handle(name));
        Ok(Self { paths: paths?, counts: counts?, keys: keys? })
    }
}

impl PacketHooks {
    /// Sets the paths of a session; the first one has to have the session's own addresses. Packets with the addresses
    /// of any of these paths belong to the session if they arrive at that path's interface. With `is_redundant`, every
    /// packet is sent by each path that has a weight.
    pub fn set_paths(
        &mut self,
        ends: &SessionEnds,
        paths: &[SessionPath],
        is_redundant: bool,
    ) -> Result<(), Error> {
        let is_first = self.find(ends)?.raw.paths == 0;
        let others = self.sessions.values().filter(|open| open.raw.paths != 0).count();
        let have = others + 1;
        let room = PATH_SESSIONS;
        // The limit of sessions with several paths is fixed, whatever number of sessions the dispatcher was loaded for.
        if is_first && have > room {
            return Err(Error::Room { what: "sessions with paths", have, room });
        }
        if paths.len() > PATHS_MAX {
            return Err(Error::Room { what: "paths of a session", have: paths.len(), room: PATHS_MAX });
        }
        // The counters are cleared only when a session first gets paths. They continue when the session's paths change
        // later, since the daemons compare the sent and received packets of both hosts.
        if is_first {
            let session = self.find(ends)?.raw.index;
            let none = intf::PathCounts::default();
            write(&self.paths.counts, "path_counts", &session.to_ne_bytes(), none.as_bytes())?;
        }
        // The paths are written to their map before the session's map entry says that the session has paths.
        self.weigh_paths(ends, paths, is_redundant)?;
        // Path 0 has the session's own addresses, so only the other paths need an entry by which the session is found.
        for (number, path) in paths.iter().enumerate().skip(1) {
            let entry = intf::PathIn { session: key(ends)?, ifindex: path.ifindex, path: number as u32 };
            let outside = key(&outside(ends, path))?;
            write(&self.paths.keys, "path_keys", outside.as_bytes(), entry.as_bytes())?;
        }
        self.change(ends, |raw| raw.paths = paths.len() as u8)
    }

    /// Changes the weights of a session's network paths with one write to their map.
    pub fn weigh_paths(
        &self,
        ends: &SessionEnds,
        paths: &[SessionPath],
        is_redundant: bool,
    ) -> Result<(), Error> {
        let session = self.find(ends)?.raw.index;
        let mut raw = intf::Paths { is_redundant: is_redundant.into(), ..Default::default() };
        for (raw, path) in raw.each.iter_mut().zip(paths) {
            let &SessionPath { ifindex, weight, .. } = path;
            let local = bytes(path.local);
            let remote = bytes(path.remote);
            *raw = intf::Path { local, remote, ifindex, weight };
        }
        Ok(write(&self.paths.paths, "paths", &session.to_ne_bytes(), raw.as_bytes())?)
    }

    /// Returns the numbers of packets sent and received by each network path of a session, in the order of the paths.
    pub fn path_counts(&self, ends: &SessionEnds) -> Result<[PathCount; PATHS_MAX], Error> {
        let session = self.find(ends)?.raw.index;
        let found = self.paths.counts.lookup(&session.to_ne_bytes(), MapFlags::ANY).map_err(Error::State)?;
        let raw = found.and_then(|bytes| intf::PathCounts::from_bytes(&bytes)).unwrap_or_default();
        let mut counts = [PathCount::default(); PATHS_MAX];
        for (count, (sent, came)) in counts.iter_mut().zip(raw.sent.into_iter().zip(raw.came)) {
            *count = PathCount { sent, came };
        }
        Ok(counts)
    }

    /// Removes all paths of a closed session from the maps.
    pub(super) fn end_paths(&self, ends: &SessionEnds, index: u32, paths: u8) -> Result<(), Error> {
        let index = index.to_ne_bytes();
        let found = self.paths.paths.lookup(&index, MapFlags::ANY).map_err(Error::State)?;
        let Some(raw) = found.and_then(|bytes| intf::Paths::from_bytes(&bytes)) else { return Ok(()) };
        let own = key(ends)?;
        // Path 0 has the session's own addresses and thus no entry to remove.
        let each = raw.each.iter().take(usize::from(paths)).skip(1);
        for path in each {
            let outside = intf::Key { local: path.local, remote: path.remote, ..own };
            remove(&self.paths.keys, "path_keys", outside.as_bytes())?;
        }
        self.paths.paths.delete(&index).map_err(Error::State)?;
        self.paths.counts.delete(&index).map_err(Error::State)
    }
}

/// Returns the first of eight packet marks (skb->mark) for copies of packets. The lowest three bits of a mark are the
/// number of the path by which the copy is sent. Packets of functions and messages of daemons have other marks.
pub(super) fn mark(mark: u32) -> u32 {
    (mark ^ 1 << 29) & !7
}

/// Returns the addresses and ports that packets of the path have on the wire.
fn outside(ends: &SessionEnds, path: &SessionPath) -> SessionEnds {
    let mut outside = *ends;
    outside.local.set_ip(path.local);
    outside.remote.set_ip(path.remote);
    outside
}
