//! Tests whether the host's firewall allows a connection, before the connection exists. The tunnel broker sends or
//! injects a SYN, which passes netfilter as that of a real connection would. BPF programs drop the SYN behind
//! netfilter. A SYN that reaches them shows that the firewall allows the connection.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle, ProgramInput};
use millrace_kernel::fork::{ForkSafeLink, keep_from_children};
use millrace_kernel::intf::Plain as _;
use millrace_kernel::neighbour::NextHop;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::raw::detach;
use millrace_kernel::udp::set;
use nix::libc;

use super::Error;
use super::attachment::CgroupAttachment;
use super::hook::{
    end,
    intf::generated::{OpeningDue as RawDue, OpeningEnds as RawEnds, OpeningSent as RawSent},
};
use super::rule::remove;

/// The verdicts on test packets that netfilter accepted, by their names in status, metrics and documentation.
pub const VERDICTS: [&str; 4] = ["out", "in", "elsewhere", "no-socket"];

const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const LINK_ADDRESS: usize = 6;
/// Bytes of the kernel's `struct __sk_buff`, and the offset of its member `ifindex`.
const SK_BUFF: usize = 192;
const SK_BUFF_IFINDEX: usize = 40;

/// The loaded programs, which stay attached until this value is dropped.
pub struct OpeningPrograms {
    _lookup: Lookup,
    _egress: CgroupAttachment,
    object: Mutex<LoadedObject>,
    sent: MapHandle,
    due: MapHandle,
    ends: MapHandle,
}

/// A BPF program attached to a network namespace. Dropping this detaches the program.
struct Lookup {
    _kept: ForkSafeLink,
    link: Link,
}

impl Drop for Lookup {
    fn drop(&mut self) {
        // Detaching fails only if the network namespace was removed, and its links with it.
        let _ = detach(self.link.as_fd());
    }
}

impl OpeningPrograms {
    /// Attaches the programs to the calling thread's network namespace and to a cgroup (version 2). Sockets that are
    /// passed to [`watch`](Self::watch) have to be created in that cgroup or below it.
    ///
    /// # Errors
    /// The kernel refuses a program or an attachment.
    pub fn load(cgroup: &Path) -> Result<Self, Error> {
        let mut object = embedded!("graft_opening.bpf.o").open()?.load()?;
        let egress = CgroupAttachment::new(&object.program("opening_out")?, cgroup)?;
        let namespace = File::open("/proc/thread-self/ns/net").map_err(Error::Descriptor)?;
        let link = object.program("opening_in")?.attach_netns(namespace.as_raw_fd());
        let link =
            link.map_err(|source| millrace_kernel::Error::Write { what: "the network namespace", source })?;
        let lookup = Lookup { _kept: keep_from_children(&link), link };
        let sent = object.handle("sent")?;
        let due = object.handle("due")?;
        let ends = object.handle("ends")?;
        Ok(Self { _lookup: lookup, _egress: egress, object: Mutex::new(object), sent, due, ends })
    }

    /// Assigns incoming test packets of one address family to this listening TCP socket, which drops them. The socket
    /// accepts no connection from now on.
    pub fn end_at(&self, socket: BorrowedFd<'_>, is_v6: bool) -> Result<(), Error> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        let filter = object.program("opening_end")?.as_fd().as_raw_fd();
        set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &filter).map_err(Error::Descriptor)?;
        // A sockmap expects the socket's descriptor as a value of 8 bytes.
        let descriptor = (socket.as_raw_fd() as u64).to_ne_bytes();
        Ok(write(&self.ends, "ends", &u32::from(is_v6).to_ne_bytes(), &descriptor)?)
    }

    /// Makes the programs record and drop the packets that this socket sends and that netfilter's chain OUTPUT accepts.
    pub fn watch(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let none = RawSent::default();
        Ok(write(&self.sent, "sent", &socket.as_raw_fd().to_ne_bytes(), none.as_bytes())?)
    }

    /// Returns source and destination of the packet that a watched socket sent. `None` means that no packet of the
    /// socket passed netfilter's chain OUTPUT.
    pub fn passed_out(&self, socket: BorrowedFd<'_>) -> Result<Option<(SocketAddr, SocketAddr)>, Error> {
        let found = self.sent.lookup(&socket.as_raw_fd().to_ne_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "sent", source })?;
        let sent = found.and_then(|value| RawSent::from_bytes(&value)).filter(|sent| sent.passed != 0);
        Ok(sent.and_then(|sent| ends_of(&sent.head)))
    }

    /// Announces that a packet from `from` to `to` will be injected at this interface. The announcement ends when the
    /// returned guard is dropped.
    pub fn expect(&self, from: SocketAddr, to: SocketAddr, interface: u32) -> Result<DuePacket<'_>, Error> {
        let key = RawEnds { from: end(from), to: end(to) };
        let due = RawDue { ifindex: interface, passed: 0 };
        write(&self.due, "due", key.as_bytes(), due.as_bytes())?;
        Ok(DuePacket { openings: self, key })
    }

    /// Injects an IP packet into the receive path, as if the next hop had sent it to this host.
    ///
    /// # Errors
    /// The interface does not exist any more, or the kernel refuses to inject the packet.
    pub fn inject(&self, from: &NextHop, packet: &[u8]) -> Result<(), Error> {
        let frame = frame(from, packet);
        let mut context = [0; SK_BUFF];
        // The BPF program redirects the packet to the ingress of the interface in skb->ifindex.
        context[SK_BUFF_IFINDEX..SK_BUFF_IFINDEX + 4].copy_from_slice(&from.interface().to_ne_bytes());
        let input =
            ProgramInput { context_in: Some(&mut context), data_in: Some(&frame), ..ProgramInput::default() };
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        let done = object.program("opening_inject")?.test_run(input);
        let done = done.map_err(|source| millrace_kernel::Error::Read { what: "the way in", source })?;
        match done.return_value.cast_signed() {
            0.. => Ok(()),
            error => Err(Error::Descriptor(std::io::Error::from_raw_os_error(-error))),
        }
    }

    /// Returns the number of packets by verdict, in the order of [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(object.counters("verdicts")?)
    }
}

/// An announced test packet. Dropping this value ends the announcement.
pub struct DuePacket<'a> {
    openings: &'a OpeningPrograms,
    key: RawEnds,
}

impl DuePacket<'_> {
    /// Returns whether netfilter's chain INPUT has accepted the packet.
    pub fn has_passed(&self) -> Result<bool, Error> {
        let found = self.openings.due.lookup(self.key.as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "due", source })?;
        Ok(found.and_then(|value| RawDue::from_bytes(&value)).is_some_and(|due| due.passed != 0))
    }
}

impl Drop for DuePacket<'_> {
    fn drop(&mut self) {
        // If this fails, the entry remains until the programs are unloaded with their map.
        let _ = remove(&self.openings.due, "due", self.key.as_bytes());
    }
}

/// Returns the packet in an Ethernet frame from the next hop to this host. On interfaces without link addresses both
/// addresses are zero, and the kernel removes the Ethernet header.
fn frame(from: &NextHop, packet: &[u8]) -> Vec<u8> {
    let whole = |address: Option<Vec<u8>>| {
        address.and_then(|it| <[u8; LINK_ADDRESS]>::try_from(it).ok()).unwrap_or_default()
    };
    let own = whole(from.own_link_address().ok().flatten());
    let other = whole(from.link_address().ok().flatten());
    let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
    let ethertype = if is_v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
    [&own[..], &other, &ethertype.to_be_bytes(), packet].concat()
}

/// Returns source and destination of a packet, whose IP header has no options or extension headers.
fn ends_of(head: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let is_v6 = head.first()? >> 4 == 6;
    let at = if is_v6 { IPV6_HEADER } else { IPV4_HEADER };
    let ports = head.get(at..at + 4)?;
    let port = |at: usize| u16::from_be_bytes([ports[at], ports[at + 1]]);
    let (from, to): (IpAddr, IpAddr) = if is_v6 {
        let address = |at: usize| head.get(at..).and_then(|rest| rest.first_chunk::<16>().copied());
        (address(8)?.into(), address(24)?.into())
    } else {
        let address = |at: usize| head.get(at..).and_then(|rest| rest.first_chunk::<4>().copied());
        (address(12)?.into(), address(16)?.into())
    };
    Some((SocketAddr::new(from, port(0)), SocketAddr::new(to, port(2))))
}

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use super::*;

    #[test]
    fn firewall_probe_verdicts_are_named_as_in_the_bpf_program() {
        const OBJECT: &str = "graft_opening.bpf.o";
        let names: Vec<_> = VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), OBJECT, "opening_verdict", "opening_"));
    }

    #[test]
    fn opening_addresses_are_read_for_both_families() {
        let v4 = [&[0x45][..], &[0; 11], &[192, 0, 2, 1, 192, 0, 2, 2], &[0x1f, 0x90, 0x01, 0xbb]].concat();
        let wanted = ("192.0.2.1:8080".parse().unwrap(), "192.0.2.2:443".parse().unwrap());
        assert_eq!(ends_of(&v4), Some(wanted));
        let mut v6 = vec![0; IPV6_HEADER];
        (v6[0], v6[23], v6[39]) = (0x60, 1, 2);
        v6.extend([0x1f, 0x90, 0x01, 0xbb]);
        assert_eq!(ends_of(&v6), Some(("[::1]:8080".parse().unwrap(), "[::2]:443".parse().unwrap())));
        for cut in 0..v6.len() {
            assert_eq!(ends_of(&v6[..cut]), None, "{cut}");
        }
    }
}
