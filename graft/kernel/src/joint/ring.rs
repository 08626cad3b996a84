//! Rings of sessions (`bpf/joint_ring.h`): lent to an application, taken back, and what had no room in them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use libbpf_rs::{MapCore, MapFlags, MapType};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Open, write};
use millrace_kernel::xsk;

use super::super::Error;
use super::{Ends, Joint, Joints, intf};

/// The kernel's maps of them.
const RINGS: &str = "rings";
const PLACES: &str = "ring_places";

/// What an application needs of its ring: [`xsk::Reader`] takes it. A packet in it is a payload, and behind it [`FRAME_BYTES`](super::FRAME_BYTES).
pub struct Lent {
    pub descriptors: [OwnedFd; 2],
    /// For so many packets there is room.
    pub frames: u32,
}

/// Of a session.
#[derive(Default)]
pub(super) struct Rings {
    now: Option<xsk::Ring>,
    /// Packets that had no room in those before.
    dropped: u64,
}

impl Rings {
    /// Packets that had no room.
    pub fn dropped(&self) -> u64 {
        self.dropped + self.now.as_ref().and_then(|ring| ring.dropped().ok()).unwrap_or_default()
    }
}

/// A kernel without AF_XDP has no maps of its sockets. The programs do with another kind, in which there is never anything.
pub(super) fn do_without(open: &mut Open) -> Result<(), Error> {
    open.map(RINGS)?.set_type(MapType::Devmap).map_err(Error::Open)
}

impl Joints {
    /// What comes for the session where it came of late goes to a ring from now on, and no longer to its socket, as long as
    /// [`uses_ring`](Self::uses_ring). All else goes on to come by the socket.
    ///
    /// # Errors
    /// There can be no ring: in words.
    pub fn lend_ring(&mut self, ends: &Ends) -> Result<Lent, Error> {
        let index = self.find(ends)?.raw.index;
        self.end_ring(ends)?;
        let mut place = self.ring_place(index)?;
        if place.seen == intf::Place::default() {
            return Err(Error::Ring("nothing has come yet that would tell its queue".to_owned()));
        }
        let intf::Place { ifindex, queue } = place.seen;
        let ring = xsk::Ring::new(ifindex, queue).map_err(Error::Ring)?;
        let descriptors = ring.descriptors().map_err(Error::Descriptor)?;
        let entry = ring.as_fd().as_raw_fd().to_ne_bytes();
        write(&self.object.handle(RINGS)?, RINGS, &index.to_ne_bytes(), &entry)?;
        place.place = place.seen;
        self.put_ring_place(index, &place)?;
        self.rings_of(ends)?.now = Some(ring);
        Ok(Lent { descriptors, frames: xsk::FRAMES })
    }

    /// What comes from now on comes by the socket. What is in the ring whoever has it can still read.
    pub fn end_ring(&mut self, ends: &Ends) -> Result<(), Error> {
        let index = self.find(ends)?.raw.index;
        let rings = self.rings_of(ends)?;
        let Some(ring) = rings.now.take() else { return Ok(()) };
        let place = intf::Ring { place: intf::Place::default(), ..self.ring_place(index)? };
        self.put_ring_place(index, &place)?;
        // It is gone by itself if the interface is.
        let _ = self.object.handle(RINGS)?.delete(&index.to_ne_bytes());
        self.rings_of(ends)?.dropped += ring.dropped().unwrap_or_default();
        Ok(())
    }

    /// Whether a ring would get what comes: no function of its list has a part at TC ingress.
    pub fn uses_ring(&self, ends: &Ends) -> Result<bool, Error> {
        let raw = &self.find(ends)?.raw;
        Ok(raw.lists[usize::from(raw.epoch)][Joint::Repair as usize] == 0)
    }

    pub fn has_ring(&self, ends: &Ends) -> Result<bool, Error> {
        Ok(self.find(ends)?.rings.now.is_some())
    }

    /// Where the latest packet has come in: interface and queue.
    pub fn came_by(&mut self, ends: &Ends) -> Result<Option<(u32, u32)>, Error> {
        let index = self.find(ends)?.raw.index;
        let intf::Place { ifindex, queue } = self.ring_place(index)?.seen;
        Ok((ifindex > 0).then_some((ifindex, queue)))
    }

    /// Another session had the index before.
    pub(super) fn begin_ring(&mut self, index: u32) -> Result<(), Error> {
        self.put_ring_place(index, &intf::Ring::default())
    }

    fn rings_of(&mut self, ends: &Ends) -> Result<&mut Rings, Error> {
        let missing = Error::NoSession { local: ends.local, remote: ends.remote };
        self.sessions.get_mut(ends).map(|open| &mut open.rings).ok_or(missing)
    }

    fn ring_place(&mut self, index: u32) -> Result<intf::Ring, Error> {
        let read = self.object.map(PLACES)?.lookup(&index.to_ne_bytes(), MapFlags::ANY);
        let read = read.map_err(|source| millrace_kernel::Error::Read { what: PLACES, source })?;
        Ok(read.and_then(|bytes| intf::Ring::from_bytes(&bytes)).unwrap_or_default())
    }

    fn put_ring_place(&mut self, index: u32, place: &intf::Ring) -> Result<(), Error> {
        Ok(write(&self.object.handle(PLACES)?, PLACES, &index.to_ne_bytes(), place.as_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::joint::{List, Protocol, Room, Session};

    /// As on a kernel without AF_XDP: all works, but for rings.
    #[test]
    fn joints_do_without_af_xdp() {
        if !nix::unistd::geteuid().is_root() {
            return println!("SKIP joints_do_without_af_xdp: needs root");
        }
        let mut joints = Joints::load_with(Room::default(), false).expect("loaded");
        let address = |text: &str| text.parse().expect("an address");
        let ends = Ends { local: address("10.0.0.1:1"), remote: address("10.0.0.2:1") };
        let session =
            Session { ends, key: [7; 16], list: List::default(), protocol: Protocol::Udp, budget_ns: 0 };
        joints.open(session).expect("a session");
        let index = joints.find(&ends).expect("a session").raw.index;
        let seen = intf::Ring { seen: intf::Place { ifindex: 1, queue: 0 }, ..intf::Ring::default() };
        joints.put_ring_place(index, &seen).expect("a place");
        let refused = joints.lend_ring(&ends).err().map(|error| error.to_string());
        assert!(refused.is_some(), "the map takes no socket");
        assert!(!joints.has_ring(&ends).expect("a session"));
        joints.close(&ends).expect("closed");
    }
}
