//! UDP sockets of endpoints: their options, and groups of sockets on one address.
//!
//! An endpoint with several shards has a group of SO_REUSEPORT sockets. A classic BPF program, which needs no privilege,
//! selects the socket for each packet by the packet's destination connection ID ([`share`]).

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    sync::Once,
};

use nix::{
    libc::{self, sock_filter, sock_fprog},
    sys::socket::{setsockopt, sockopt},
};
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};

/// Requested size of the socket buffers, bytes. The kernel may make them smaller.
const SOCKET_BUFFER: usize = 4 << 20;

/// Creates a socket that is bound to `addr`. No other socket may be bound to that address before or afterwards, until
/// [`share`] is called. A socket with an IPv6 address is for IPv6 only.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<UdpSocket> {
    make(addr, |_| Ok(()))
}

/// Makes `first`, which [`bind`] created, the first of `shards` sockets on one address, and returns them all. A packet
/// goes to the socket whose index is the first byte of the packet's destination connection ID, modulo `shards`. Where
/// the kernel cannot do that, a warning is logged, and `first` stays the only socket.
///
/// `first` was bound without SO_REUSEPORT, so no other process was bound to the address before, and none that begins in
/// the same way can be bound to it afterwards. The kernel lets only sockets of the same user join the group. A socket
/// that joins later gets no packets, because the program never selects its index.
pub(crate) fn share(first: UdpSocket, shards: usize) -> io::Result<Vec<UdpSocket>> {
    if shards == 1 {
        return Ok(vec![first]);
    }
    // Until the program is attached, the kernel would select sockets by the packets' addresses. So all packets are
    // dropped meanwhile, and those that `first` has received before.
    SockRef::from(&first).attach_filter(&NOTHING)?;
    while first.recv(&mut [0]).is_ok() {}
    let addr = first.local_addr()?;
    let others = join(&first, addr, shards).or_else(|error| {
        tracing::warn!(%addr, shards, %error, "the kernel cannot share an address between sockets: one receives all packets");
        SockRef::from(&first).set_reuse_port(false)?;
        io::Result::Ok(Vec::new())
    })?;
    let sockets: Vec<_> = std::iter::once(first).chain(others).collect();
    sockets.iter().try_for_each(|socket| SockRef::from(socket).detach_filter())?;
    Ok(sockets)
}

/// Binds further sockets to the address of `first`, and attaches the program. The sockets drop all packets until their
/// filter is detached.
fn join(first: &UdpSocket, addr: SocketAddr, shards: usize) -> io::Result<Vec<UdpSocket>> {
    SockRef::from(first).set_reuse_port(true)?;
    let bind = |_| {
        make(addr, |socket| {
            socket.attach_filter(&NOTHING)?;
            socket.set_reuse_port(true)
        })
    };
    let others = (1..shards).map(bind).collect::<Result<_, _>>()?;
    let mut program = steering(shards as u32);
    let program = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    setsockopt(first, sockopt::AttachReusePortCbpf, &program)?;
    Ok(others)
}

/// A socket filter that drops every packet.
const NOTHING: [SockFilter; 1] = [SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];

/// Returns a program that selects a socket by a packet's destination connection ID (RFC 8999, section 5). It sees the
/// UDP payload. A packet that is too short, or whose ID is empty, goes to the first socket.
fn steering(sockets: u32) -> [sock_filter; 10] {
    const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
    const LONG_HEADER: u32 = 0x80;
    let step = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    [
        step(LOAD_BYTE, 0, 0, 0), // a load from behind the packet's end returns 0
        step(libc::BPF_JMP | libc::BPF_JSET, 2, 0, LONG_HEADER),
        step(LOAD_BYTE, 0, 0, 1),
        step(libc::BPF_JMP | libc::BPF_JA, 0, 0, 3),
        step(LOAD_BYTE, 0, 0, 5), // the ID's length
        step(libc::BPF_JMP | libc::BPF_JEQ, 3, 0, 0),
        step(LOAD_BYTE, 0, 0, 6),
        step(libc::BPF_ALU | libc::BPF_MOD, 0, 0, sockets),
        step(libc::BPF_RET | BPF_A, 0, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
}

/// The accumulator as the value that a program returns.
const BPF_A: u32 = 0x10;

fn make(addr: SocketAddr, prepare: impl FnOnce(&Socket) -> io::Result<()>) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    if addr.is_ipv6() {
        // IPv6-only sockets allow two sockets to listen on 0.0.0.0 and [::] with the same port.
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    grow_receive_buffer(&socket)?;
    // The kernel silently caps the size at net.core.wmem_max.
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    prepare(&socket)?;
    socket.bind(&addr.into())?;
    Ok(socket.into())
}

/// Sets the size of the receive buffer, beyond the system's limit if this process has CAP_NET_ADMIN. Logs a warning
/// once if the buffer is smaller than requested.
fn grow_receive_buffer(socket: &Socket) -> io::Result<()> {
    static WARNED: Once = Once::new();
    if setsockopt(socket, sockopt::RcvBufForce, &SOCKET_BUFFER).is_err() {
        socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    }
    if let Some(warning) = short_buffer(socket.recv_buffer_size()?) {
        WARNED.call_once(|| tracing::warn!("the UDP socket: {warning}"));
    }
    Ok(())
}

/// Returns a warning if the receive buffer is too small. `doubled` is the size that the kernel reports: twice the
/// usable size, to account for its bookkeeping.
fn short_buffer(doubled: usize) -> Option<String> {
    let bytes = doubled / 2;
    let wanted = SOCKET_BUFFER;
    (bytes < wanted).then(|| {
        format!(
            "the receive buffer has {bytes} bytes instead of {wanted}, so bursts are lost: run `sysctl -w \
             net.core.rmem_max={wanted}`, or give this process CAP_NET_ADMIN"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use millrace_testkit::wait_for;

    use super::*;

    #[test]
    fn short_receive_buffer_warning_names_the_limit() {
        let socket = bind(([127, 0, 0, 1], 0).into()).expect("a socket");
        let doubled = socket2::SockRef::from(&socket).recv_buffer_size().expect("a size");
        if nix::unistd::geteuid().is_root() {
            assert_eq!(doubled, 2 * SOCKET_BUFFER);
        }
        assert_eq!(short_buffer(2 * SOCKET_BUFFER), None);
        let warning = short_buffer(425_984).expect("a warning");
        assert!(
            warning.contains(" 212992 bytes") && warning.contains("net.core.rmem_max=4194304"),
            "{warning}"
        );
    }

    /// Waits until the sockets have received `count` packets in all, and returns the packets of each.
    fn received(sockets: &[UdpSocket], count: usize) -> Vec<Vec<Vec<u8>>> {
        let mut received = vec![Vec::new(); sockets.len()];
        wait_for("the packets", || {
            for (socket, received) in sockets.iter().zip(&mut received) {
                let mut buf = [0; 64];
                while let Ok(len) = socket.recv(&mut buf) {
                    received.push(buf[..len].to_vec());
                }
            }
            (received.iter().map(Vec::len).sum::<usize>() >= count).then_some(())
        });
        received
    }

    const HOSTS: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

    #[test]
    fn packets_reach_the_socket_that_their_connection_id_names() {
        for host in HOSTS {
            let sockets = share(bind((host, 0).into()).unwrap(), 3).unwrap();
            let addr = sockets[0].local_addr().unwrap();
            let peer = bind((host, 0).into()).unwrap();
            let mut expected = vec![Vec::new(); 3];
            let short = (0..=255_u8).map(|byte| (vec![0x40, byte, 7, 7], byte % 3));
            let long = (0..=255_u8).map(|byte| (vec![0xc0, 0, 0, 0, 1, 8, byte, 7], byte % 3));
            // No connection ID, or not even its first byte: the empty packet, ends within the header, and length 0.
            let odd =
                [&[][..], &[0x40], &[0xc0, 0, 0, 0, 1], &[0xc0, 0, 0, 0, 1, 8], &[0xc0, 0, 0, 0, 1, 0, 7]];
            let odd = odd.map(|packet| (packet.to_vec(), 0));
            for (packet, socket) in short.chain(long).chain(odd.clone()) {
                assert_eq!(peer.send_to(&packet, addr).unwrap(), packet.len());
                expected[usize::from(socket)].push(packet);
            }
            assert!(received(&sockets, 2 * 256 + odd.len()) == expected, "{host}");
        }
    }

    #[test]
    fn socket_that_joins_the_group_gets_no_packets() {
        for host in HOSTS {
            let sockets = share(bind((host, 0).into()).unwrap(), 2).unwrap();
            let addr = sockets[0].local_addr().unwrap();
            let joined = make(addr, |socket| socket.set_reuse_port(true)).unwrap();
            let peer = bind((host, 0).into()).unwrap();
            for byte in 0..=255 {
                assert_eq!(peer.send_to(&[0x40, byte], addr).unwrap(), 2);
            }
            let received = received(&sockets, 256);
            assert_eq!(received.iter().map(Vec::len).collect::<Vec<_>>(), [128, 128]);
            assert!(joined.recv(&mut [0]).is_err(), "all packets went to the first two sockets");
        }
    }

    #[test]
    fn address_in_use_is_refused_before_and_after_a_group_is_made() {
        for host in HOSTS {
            let first = bind((host, 0).into()).unwrap();
            let addr = first.local_addr().unwrap();
            let refused = |made: io::Result<UdpSocket>| made.unwrap_err().kind() == io::ErrorKind::AddrInUse;
            let joining = || make(addr, |socket| socket.set_reuse_port(true));
            assert!(refused(bind(addr)) && refused(joining()), "{addr}");
            let _sockets = share(first, 4).unwrap();
            assert!(refused(bind(addr)), "{addr}");
        }
    }

    /// The kernel refuses sockets of different users on one address, as it refuses a program that it does not know.
    #[test]
    fn socket_that_no_other_can_join_receives_all_packets_alone() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP socket_that_no_other_can_join_receives_all_packets_alone: needs root");
            return;
        }
        let nobody = || nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65_534));
        // The user of a socket is the one of the thread that creates it.
        let first = std::thread::spawn(move || {
            nobody();
            bind((HOSTS[0], 0).into()).unwrap()
        });
        let first = first.join().unwrap();
        let addr = first.local_addr().unwrap();
        let sockets = share(first, 4).unwrap();
        assert_eq!(sockets.len(), 1);
        let peer = bind((HOSTS[0], 0).into()).unwrap();
        for byte in 0..8 {
            peer.send_to(&[0x40, byte], addr).unwrap();
        }
        assert_eq!(received(&sockets, 8)[0].len(), 8);
        assert_eq!(bind(addr).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn packets_that_arrived_before_the_group_was_made_are_dropped() {
        let first = bind((HOSTS[0], 0).into()).unwrap();
        let addr = first.local_addr().unwrap();
        let peer = bind((HOSTS[0], 0).into()).unwrap();
        peer.send_to(&[0x40, 1], addr).unwrap();
        wait_for("the packet", || first.peek(&mut [0]).ok());
        let sockets = share(first, 2).unwrap();
        peer.send_to(&[0x40, 2], addr).unwrap();
        assert_eq!(received(&sockets, 1), [vec![vec![0x40, 2]], Vec::new()]);
    }
}
