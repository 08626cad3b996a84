//! Tests datagrams between two hosts (network namespaces) whose packets are IP protocol 253.
//!
//! Tier: test-all, since it is no part of the product.

#![allow(clippy::unwrap_used)]

use std::{
    fs::File,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
    process::Command,
    thread,
    time::Duration,
};

use millrace_study_protocol253::{Conversion, PROTOCOL};
use millrace_testkit::wait_for;
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket},
};

const UDP: u8 = 17;
const FAMILIES: [[&str; 2]; 2] = [["10.97.0.1", "10.97.0.2"], ["fd97::1", "fd97::2"]];
/// Time after which a missing datagram fails a test.
const LONG: Duration = Duration::from_secs(60);

/// Two network namespaces with a link. They are removed when this value is dropped.
struct Hosts([String; 2]);

impl Hosts {
    /// Makes two hosts, whose names begin with `short`.
    fn new(short: &str, test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {test}: needs root");
            return None;
        }
        let hosts = Self(["a", "b"].map(|host| format!("{short}-{}-{host}", std::process::id())));
        for name in &hosts.0 {
            ip(&format!("netns add {name}"));
        }
        let [a, b] = &hosts.0;
        ip(&format!("-n {a} link add eth type veth peer name eth netns {b}"));
        for (at, name) in hosts.0.iter().enumerate() {
            ip(&format!("-n {name} addr add {}/24 dev eth", FAMILIES[0][at]));
            ip(&format!("-n {name} addr add {}/64 dev eth nodad", FAMILIES[1][at]));
            ip(&format!("-n {name} link set eth up"));
        }
        Some(hosts)
    }

    /// Runs `work` in the namespace of a host.
    fn inside<T: Send>(&self, side: usize, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.0[side])).unwrap();
        thread::scope(|scope| {
            let entered = scope.spawn(move || {
                setns(namespace, CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            entered.join().unwrap()
        })
    }

    fn convert(&self, side: usize) -> Conversion {
        let conversion = self.inside(side, || {
            let index = nix::net::if_::if_nametoindex("eth").unwrap();
            Conversion::attach(index as i32).unwrap()
        });
        for family in FAMILIES {
            let [local, remote] = [side, 1 - side].map(|at| family[at].parse().unwrap());
            conversion.add(local, remote).unwrap();
        }
        conversion
    }

    fn socket(&self, side: usize, family: [&str; 2], port: u16) -> UdpSocket {
        let [local, remote] =
            [side, 1 - side].map(|at| SocketAddr::new(family[at].parse::<IpAddr>().unwrap(), port));
        let socket = self.inside(side, || UdpSocket::bind(local).unwrap());
        socket.connect(remote).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket
    }

    /// Opens a packet socket that sees all frames of a host's interface, those that arrive before TC has changed them.
    fn capture(&self, side: usize) -> OwnedFd {
        self.inside(side, || {
            let flags = SockFlag::SOCK_NONBLOCK;
            socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap()
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Returns the IP protocols of the captured frames so far.
fn protocols(capture: &OwnedFd) -> Vec<u8> {
    let mut protocols = Vec::new();
    let mut frame = [0; 2048];
    while let Ok(bytes) = recv(capture.as_raw_fd(), &mut frame, MsgFlags::empty()) {
        match frame[..bytes].get(12..14) {
            Some([8, 0]) => protocols.push(frame[23]),
            Some([0x86, 0xdd]) => protocols.push(frame[20]),
            _ => {}
        }
    }
    protocols
}

#[test]
fn datagrams_are_protocol_253_between_hosts_and_udp_at_both() {
    let Some(hosts) = Hosts::new("p253w", "datagrams_are_protocol_253_between_hosts_and_udp_at_both") else {
        return;
    };
    let _conversions = [0, 1].map(|side| hosts.convert(side));
    for family in FAMILIES {
        let capture = hosts.capture(1);
        let [near, far] = [0, 1].map(|side| hosts.socket(side, family, 7000));
        let mut buffer = [0; 2048];
        for length in [0, 1, 40, 511, 512, 513, 1024, 1400] {
            let sent: Vec<_> = (0..length).map(|at: u32| at as u8).collect();
            for (from, to) in [(&near, &far), (&far, &near)] {
                from.send(&sent).unwrap();
                let got = to.recv(&mut buffer).unwrap();
                assert_eq!(buffer[..got], sent, "{family:?} {length}");
            }
        }
        let seen = protocols(&capture);
        assert!(!seen.contains(&UDP), "{family:?} {seen:?}");
        assert!(seen.iter().filter(|protocol| **protocol == PROTOCOL).count() >= 8, "{family:?} {seen:?}");
    }
}

#[test]
fn host_without_the_programs_refuses_the_protocol() {
    let Some(hosts) = Hosts::new("p253r", "host_without_the_programs_refuses_the_protocol") else { return };
    let _conversion = hosts.convert(0);
    let [near, far] = [0, 1].map(|side| hosts.socket(side, FAMILIES[0], 7000));
    let capture = hosts.capture(0);
    near.send(b"a datagram").unwrap();
    const ICMP: u8 = 1;
    wait_for("the other host to answer by ICMP", || protocols(&capture).contains(&ICMP).then_some(()));
    far.set_nonblocking(true).unwrap();
    assert_eq!(far.recv(&mut [0; 2048]).unwrap_err().kind(), ErrorKind::WouldBlock);
}
