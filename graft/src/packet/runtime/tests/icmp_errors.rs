//! Tests of ICMP errors that routers and hosts send about packets of IP protocol 253.

use std::net::IpAddr;
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};

use super::*;

const MTU: usize = 1300;

/// Two hosts with a router between them, whose link to the second host carries packets of 1300 bytes.
struct Routed {
    site: RuntimeSite,
    router: String,
}

impl Routed {
    fn new(test: &str) -> Option<Self> {
        let site = RuntimeSite::new(test)?;
        let router = format!("mr-{}-{test}-r", std::process::id());
        ip(&format!("netns add {router}"));
        ip(&format!("-n {} link del eth", site.0[0]));
        for (side, name) in site.0.iter().enumerate() {
            let port = format!("to{side}");
            ip(&format!("-n {name} link add eth type veth peer name {port} netns {router}"));
            ip(&format!("-n {name} link set eth up"));
            ip(&format!("-n {router} link set {port} up"));
            for (net, host, own, bits) in [("10.97", 254, side + 1, 24), ("fd97:", 254, side + 1, 64)] {
                let end = |of: usize| match bits {
                    24 => format!("{net}.{side}.{of}/24"),
                    _ => format!("{net}{side}::{of:x}/64 nodad"),
                };
                ip(&format!("-n {name} addr add {} dev eth", end(own)));
                ip(&format!("-n {router} addr add {} dev {port}", end(host)));
            }
            ip(&format!("-n {name} route add default via 10.97.{side}.254"));
            ip(&format!("-n {name} -6 route add default via fd97:{side}::fe"));
        }
        let routed = Self { site, router };
        routed.at_router(|| {
            for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                std::fs::write(format!("/proc/sys/net/{file}"), "1").expect("forwarding");
            }
        });
        ip(&format!("-n {} link set to1 mtu {MTU}", routed.router));
        Some(routed)
    }

    fn at_router(&self, work: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            let inside = || {
                let file = std::fs::File::open(format!("/run/netns/{}", self.router)).expect("a namespace");
                setns(file, CloneFlags::CLONE_NEWNET).expect("setns");
                work();
            };
            scope.spawn(inside).join().expect("work at the router");
        });
    }
}

impl Drop for Routed {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["netns", "del", &self.router]).status());
    }
}

fn end(family: u8, side: usize) -> SocketAddr {
    let text = match family {
        4 => format!("10.97.{side}.{}:7000", side + 1),
        _ => format!("[fd97:{side}::{}]:7000", side + 1),
    };
    text.parse().expect("an address")
}

fn host(family: u8, side: usize, line: &str) -> Settings {
    let local = end(family, side);
    let remote = end(family, 1 - side);
    let text = format!(
        "{GRAFTS}\n[[session]]\nname = \"s\"\nlocal = \"{local}\"\nremote = \"{remote}\"\npeer = \"far\"\n\
         graft = \"once\"\nprotocol = \"253\"\n{line}"
    );
    with_peer(side, &text)
}

/// Steps one runtime until it reports an ICMP error whose text contains these words. Returns the text.
fn heard(site: &RuntimeSite, runtime: &mut PacketRuntime, wanted: &str, mut traffic: impl FnMut()) -> String {
    let until = Instant::now() + LONG;
    while Instant::now() < until {
        traffic();
        for event in site.inside(0, || runtime.step(Duration::from_millis(20))).expect("a step") {
            if let PacketEvent::Refused { session, why } = event {
                assert_eq!(session, "s");
                if why.contains(wanted) {
                    return why;
                }
            }
        }
    }
    panic!("nobody said anything");
}

#[test]
fn icmp_errors_report_the_path_mtu_and_a_missing_peer_daemon() {
    for (family, line, around) in
        [(4, "clear = true", 20 + 8 + 16), (4, "", 20 + 8 + 40), (6, "clear = true", 40 + 8 + 16)]
    {
        let Some(routed) = Routed::new("icmp") else { return };
        let site = &routed.site;
        let start = |side| site.inside(side, || PacketRuntime::start(host(family, side, line)));
        let mut runtimes = [0, 1].map(|side| start(side).expect("a runtime"));
        have_keys(site, &mut runtimes);
        let [mut near, far] = runtimes;
        drop(far);
        let socket = |side| {
            let socket = site.inside(side, || UdpSocket::bind(end(family, side)).expect("bind"));
            socket.connect(end(family, 1 - side)).expect("connect");
            socket.set_read_timeout(Some(LONG)).expect("timeout");
            socket
        };
        let from = socket(0);
        let to = socket(1);
        let (router, other): (IpAddr, _) = match family {
            4 => ("10.97.0.254".parse().expect("an address"), end(family, 1).ip()),
            _ => ("fd97:0::fe".parse().expect("an address"), end(family, 1).ip()),
        };
        let said = heard(site, &mut near, "no receiver", || drop(from.send(b"is anybody there?")));
        assert_eq!(said, format!("{other} says by ICMP: the host has no receiver for IP protocol 253"));
        let trouble = now(&mut near).trouble;
        assert!(trouble.contains(&format!("session s: {said}")), "{trouble:?}");

        let mut runtimes = [near, start(1).expect("a runtime")];
        have_keys(site, &mut runtimes);
        let [mut near, _far] = runtimes;
        let most = MTU - around;
        let said = heard(site, &mut near, "more than", || drop(from.send(&vec![7; most + 1])));
        let want = format!(
            "packets of more than {MTU} bytes do not pass, so datagrams may have {most} bytes at most"
        );
        assert_eq!(said, format!("{router} says by ICMP: {want}"));
        let trouble = now(&mut near).trouble;
        assert!(trouble.contains(&format!("session s: {said}")), "{trouble:?}");
        // A datagram of the reported length passes the router.
        let mut buffer = [0; 2048];
        from.send(&vec![9; most]).expect("sent");
        while to.recv(&mut buffer).is_ok_and(|got| buffer[..got] != vec![9; most][..]) {}
        assert_eq!(buffer[..most], vec![9; most]);
    }
}

/// The sender of an ICMP error has to have seen a packet of the session, or to guess the session's ports.
#[test]
fn icmp_error_about_unknown_ports_is_ignored() {
    let Some(routed) = Routed::new("icmpf") else { return };
    let site = &routed.site;
    let mut near = site.inside(0, || PacketRuntime::start(host(4, 0, "clear = true"))).expect("a runtime");
    let kind = || socket(AddressFamily::Inet, SockType::Raw, SockFlag::empty(), SockProtocol::Icmp);
    let stranger = site.inside(1, kind).expect("a socket");
    let (SocketAddr::V4(here), SocketAddr::V4(there)) = (end(4, 0), end(4, 1)) else { unreachable!() };
    let say = |ports: [u16; 2], mtu: u16| {
        let mut packet = vec![3, 4, 0, 0, 0, 0];
        packet.extend(mtu.to_be_bytes());
        packet.extend([0x45, 0, 5, 0, 0, 0, 0, 0, 64, 253, 0, 0]);
        packet.extend([here.ip().octets(), there.ip().octets()].concat());
        packet.extend(ports.map(u16::to_be_bytes).concat());
        packet.extend([0; 4]);
        let sum = packet.chunks(2).fold(0, |sum, two| sum + u32::from(u16::from_be_bytes([two[0], two[1]])));
        let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
        let to = SockaddrIn::from(here);
        sendto(stranger.as_raw_fd(), &packet, &to, MsgFlags::empty()).expect("sent");
    };
    let said = heard(site, &mut near, "more than", || {
        say([7000, 7001], 600);
        say([7001, 7000], 700);
        say([7000, 7000], 800);
    });
    assert!(said.contains("packets of more than 800 bytes do not pass"), "{said}");
}
