//! Finds TCP sockets by their addresses, and closes sockets in TIME_WAIT that block a new connection (sock_diag(7)).
//! All calls act in the network namespace in which the netlink socket was opened.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd};

use millrace_kernel::netlink::{NLMSG_ERROR, attribute, error, next_message};
use nix::libc;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use super::rule::words;

// Constants of linux/sock_diag.h and linux/inet_diag.h. STATE, COOKIE and UID are byte offsets in `struct
// inet_diag_msg`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_REQUEST_ACK: u16 = 5;
const INET_DIAG_MARK: u16 = 15;
const INET_DIAG_CGROUP_ID: u16 = 21;
const INET_DIAG_MSG: usize = 72;
const STATE: usize = 1;
const COOKIE: usize = 44;
const UID: usize = 64;
const QUESTION: usize = 72;
const TIME_WAIT: u8 = 6;
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// A listening TCP socket, as sock_diag reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListeningSocket {
    /// ID of the cgroup in which the socket was created; `None` if the kernel does not report it.
    pub cgroup: Option<u64>,
    /// ID of the user that created the socket.
    pub uid: u32,
    /// Packet mark that the kernel sets on the socket's outgoing packets (SO_MARK).
    pub mark: u32,
}

/// Returns the listening socket that would accept a connection from `from` to `to`; `None` if no socket listens
/// there.
///
/// # Errors
/// The kernel has no sock_diag for TCP, or the netlink socket fails.
pub fn listener(from: SocketAddr, to: SocketAddr) -> io::Result<Option<ListeningSocket>> {
    let answer = Diag::open()?.ask(&question(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, (to, from), NO_COOKIE))?;
    let body = match message(&answer) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        body => body?,
    };
    let about = |kind| body.get(INET_DIAG_MSG..).and_then(|rest| attribute(rest, kind));
    let number =
        |value: Option<&[u8]>| value.and_then(|it| it.first_chunk()).map(|it| u32::from_ne_bytes(*it));
    let cgroup = about(INET_DIAG_CGROUP_ID).and_then(|id| id.first_chunk()).map(|id| u64::from_ne_bytes(*id));
    let uid = number(body.get(UID..)).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Some(ListeningSocket { cgroup, uid, mark: number(about(INET_DIAG_MARK)).unwrap_or_default() }))
}

pub(super) struct Diag(OwnedFd);

/// A socket's local address and its peer's address.
type SocketEnds = (SocketAddr, SocketAddr);

impl Diag {
    pub fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let protocol = SockProtocol::NetlinkSockDiag;
        Ok(Self(socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?))
    }

    /// Closes a socket in the state TIME_WAIT before its timeout. Returns `Ok` if there is no such socket.
    ///
    /// # Errors
    /// The socket is in another state, or the kernel does not support SOCK_DESTROY.
    pub fn end_waiting(&self, ends: SocketEnds) -> io::Result<()> {
        let answer = self.ask(&question(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ends, NO_COOKIE))?;
        let body = match message(&answer) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            body => body?,
        };
        // The cookie makes sure that SOCK_DESTROY closes this socket and no later one with the same addresses.
        let cookie = body.get(COOKIE..).and_then(|rest| rest.first_chunk());
        let (Some(&TIME_WAIT), Some(cookie)) = (body.get(STATE), cookie) else {
            return Err(io::Error::other("the socket is in use, not in TIME_WAIT"));
        };
        match message(&self.ask(&question(SOCK_DESTROY, NLM_F_REQUEST_ACK, ends, *cookie))?) {
            // The socket may have timed out between the two requests.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn ask(&self, question: &[u8]) -> io::Result<Vec<u8>> {
        send(self.0.as_raw_fd(), question, MsgFlags::empty())?;
        let mut buffer = vec![0; 4096];
        let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        buffer.truncate(length);
        Ok(buffer)
    }
}

/// Returns a netlink message with a `struct inet_diag_req_v2`.
fn question(kind: u16, flags: u16, (own, other): SocketEnds, cookie: [u8; 8]) -> Vec<u8> {
    let family = if own.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = Vec::with_capacity(QUESTION);
    bytes.extend((QUESTION as u32).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // The mask selects sockets in all states.
    bytes.extend(u32::MAX.to_ne_bytes());
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(other.port().to_be_bytes());
    for address in [own.ip(), other.ip()] {
        match address {
            IpAddr::V4(v4) => bytes.extend([&v4.octets()[..], &[0; 12]].concat()),
            IpAddr::V6(_) => bytes.extend(words(address)),
        }
    }
    bytes.extend([0; 4]);
    bytes.extend(cookie);
    bytes
}

/// Returns the body of the first netlink message in an answer.
///
/// # Errors
/// The message is a netlink error, or is malformed.
fn message(mut messages: &[u8]) -> io::Result<&[u8]> {
    match next_message(&mut messages) {
        Some((NLMSG_ERROR, body)) if !body.starts_with(&[0; 4]) => Err(error(body)),
        Some((_, body)) => Ok(body),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};

    use millrace_testkit::wait_for;

    use super::*;

    fn connected(at: &str) -> Option<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind(at).ok()?;
        let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a server");
        Some((near, listener.accept().expect("a client").0))
    }

    fn stream_ends(of: &TcpStream) -> SocketEnds {
        (of.local_addr().expect("an address"), of.peer_addr().expect("an address"))
    }

    /// The socket that closes first stays in TIME_WAIT until it is closed through sock_diag. A socket in use is not
    /// closed.
    #[test]
    fn only_socket_in_time_wait_is_closed() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP only_socket_in_time_wait_is_closed: needs root");
            return;
        }
        let diag = Diag::open().expect("netlink");
        let (mut near, far) = connected("127.0.0.1:0").expect("loopback");
        let ends = stream_ends(&far);
        let error = diag.end_waiting(ends).expect_err("it is used");
        assert!(error.to_string().contains("in use"), "{error}");
        drop(far);
        assert_eq!(near.read(&mut [0]).expect("an end"), 0);
        drop(near);
        // The last segments of the closed connection may still be in flight, so the state is polled.
        let is_ended = wait_for("an end that can be ended", || match diag.end_waiting(ends) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
            ended => ended.map(|()| true),
        });
        if !is_ended {
            println!("SKIP only_socket_in_time_wait_is_closed: this kernel cannot");
            return;
        }
        diag.end_waiting(ends).expect("nothing to do");
    }

    /// sock_diag reports a listening socket's cgroup, which is that of the process that created it.
    #[test]
    fn cgroup_of_a_listener_is_that_of_its_process() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let mount = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mount =
            mount.into_iter().find(|fields| fields[2] == "cgroup2").map(|fields| fields[1].to_owned());
        // exact: this process's cgroup does not change while the test runs
        let own = std::fs::read_to_string("/proc/self/cgroup").expect("cgroups");
        let own = own.lines().find_map(|line| line.strip_prefix("0::"));
        let (Some(mount), Some(own)) = (mount, own) else {
            println!("SKIP cgroup_of_a_listener_is_that_of_its_process: no cgroup version 2");
            return;
        };
        let about = std::fs::metadata(format!("{mount}{own}")).expect("a cgroup");
        let from = "127.0.0.1:1".parse().expect("an address");
        for at in ["127.0.0.1:0", "0.0.0.0:0"] {
            let listener = TcpListener::bind(at).expect("bind");
            let port = listener.local_addr().expect("an address").port();
            let to = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), port);
            let found = super::listener(from, to).expect("an answer").expect("a listener");
            assert_eq!(found.cgroup, Some(std::os::unix::fs::MetadataExt::ino(&about)), "{at}");
            assert_eq!(found.uid, nix::unistd::geteuid().as_raw(), "{at}");
            drop(listener);
            assert_eq!(super::listener(from, to).expect("an answer"), None, "{at}");
        }
    }

    #[test]
    fn empty_sock_diag_answer_is_refused() {
        assert!(message(&[]).is_err());
    }
}
