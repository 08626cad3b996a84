//! Requests to rtnetlink and nfnetlink, which read and change the calling thread's network namespace.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

// Constants from linux/netlink.h.
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_REQUEST_ACK: u16 = 0x5;
/// Flags of a request that creates an object, and that fails if the object exists.
pub const CREATE: u16 = 0x600;
/// Flags of a request that creates or replaces the object.
pub const REPLACE: u16 = 0x500;
const NLMSG_DONE: u16 = 3;
/// Message type of errors and acknowledgements (linux/netlink.h).
pub const NLMSG_ERROR: u16 = 2;
const HEADER: usize = 16;

// Constants from linux/rtnetlink.h.
/// Message type of routes.
pub const RTM_NEWROUTE: u16 = 24;
/// Message type that asks for routes.
pub const RTM_GETROUTE: u16 = 26;
/// Attribute: index of the output interface.
pub const RTA_OIF: u16 = 4;

/// Requests all objects of a kind from rtnetlink, and calls `each` with the body of every answer of type `wanted`.
pub fn dump(kind: u16, body: &[u8], wanted: u16, each: impl FnMut(&[u8])) -> io::Result<()> {
    dump_by(SockProtocol::NetlinkRoute, kind, body, wanted, each)
}

/// Requests all objects of a kind from a netlink protocol, and calls `each` with the body of every answer of type
/// `wanted`.
pub fn dump_by(
    protocol: SockProtocol,
    kind: u16,
    body: &[u8],
    wanted: u16,
    mut each: impl FnMut(&[u8]),
) -> io::Result<()> {
    let socket = ask(protocol, kind, NLM_F_REQUEST_DUMP, body)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut messages = buffer.get(..len).unwrap_or_default();
        while let Some((kind, body)) = next_message(&mut messages) {
            match kind {
                kind if kind == wanted => each(body),
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => return Err(error(body)),
                _ => {}
            }
        }
    }
}

/// Requests one object from rtnetlink. Returns the body of the answer, which must have type `wanted`.
pub fn get(kind: u16, body: &[u8], wanted: u16) -> io::Result<Vec<u8>> {
    get_by(SockProtocol::NetlinkRoute, kind, body, wanted)
}

/// Requests one object from a netlink protocol. Returns the body of the answer, which must have type `wanted`.
pub fn get_by(protocol: SockProtocol, kind: u16, body: &[u8], wanted: u16) -> io::Result<Vec<u8>> {
    let socket = ask(protocol, kind, NLM_F_REQUEST, body)?;
    match answer(&socket, &mut [0; 4096])? {
        (kind, body) if kind == wanted => Ok(body.to_vec()),
        (NLMSG_ERROR, body) => Err(error(body)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Requests a change from rtnetlink, and waits until it is done. `flags` is 0, [`CREATE`] or [`REPLACE`].
pub fn change(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let socket = ask(SockProtocol::NetlinkRoute, kind, NLM_F_REQUEST_ACK | flags, body)?;
    match answer(&socket, &mut [0; 4096])? {
        // An acknowledgement is an error message with code 0.
        (NLMSG_ERROR, body) if body.starts_with(&[0; 4]) => Ok(()),
        (NLMSG_ERROR, body) => Err(error(body)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn answer<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> io::Result<(u16, &'a [u8])> {
    let len = recv(socket.as_raw_fd(), buffer, MsgFlags::empty())?;
    let mut messages = buffer.get(..len).unwrap_or_default();
    next_message(&mut messages).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn ask(protocol: SockProtocol, kind: u16, flags: u16, body: &[u8]) -> io::Result<OwnedFd> {
    let mut request = Vec::with_capacity(HEADER + body.len());
    request.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    request.extend(kind.to_ne_bytes());
    request.extend(flags.to_ne_bytes());
    request.extend([0; 8]);
    request.extend(body);
    let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    Ok(socket)
}

/// Returns the error in the body of a message of type NLMSG_ERROR.
pub fn error(body: &[u8]) -> io::Error {
    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    io::Error::from_raw_os_error(-code)
}

/// Returns the bytes of an attribute, with its header and padding.
pub fn attribute_of(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((4 + value.len() as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the bytes of an address, in network byte order.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Takes the next message, and returns its type and body. Returns `None` if no complete message is left.
pub fn next_message<'a>(messages: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let len = u32::from_ne_bytes(*messages.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*messages.get(4..)?.first_chunk()?);
    let body = messages.get(HEADER..len)?;
    *messages = messages.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body))
}

/// Returns an iterator over types and values of attributes. The iterator ends at an attribute that is cut off.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    // The upper two bits of an attribute's type are flags.
    const TYPE: u16 = 0x3fff;
    std::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?);
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & TYPE, value))
    })
}

/// Returns the value of the first attribute of a kind.
pub fn attribute(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find_map(|(kind, value)| (kind == wanted).then_some(value))
}
