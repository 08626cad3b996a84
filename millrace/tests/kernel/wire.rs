//! Tests of the kernel's packets on the wire: address families, VLANs, checksums, how tshark decodes them, and peers
//! that change addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
    process::{Command, Stdio},
};

use millrace_lab::lab::{Lab, Topology};
use millrace_relay_daemon::{
    config::{CipherSuite, Config},
    status::RelaySessionStatus,
};

use crate::{
    frames::{PacketCapture, check_frame},
    life::{OF_A_PHASE, Phases, link, sh},
    needs_root,
    net::{
        GroupStream, KernelNetwork, OF_A_GROUP, PORT, SHOW, assert_forwarded, cast, introduce, play,
        subscribers, until,
    },
};

/// Returns the number of Ethernet frames from the relay, after checking their checksums and lengths.
fn checked(capture: &PacketCapture) -> usize {
    let is_media = |frame: &&Vec<u8>| check_frame(frame) && source_port(frame) == PORT;
    capture.frames().iter().filter(is_media).count()
}

/// Returns the source port of an Ethernet frame with a UDP datagram and no IP options.
fn source_port(frame: &[u8]) -> u16 {
    let at = if frame[12..14] == [0x86, 0xdd] { 14 + 40 } else { 14 + 20 };
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

/// Captures both directions of a subscriber's link.
fn watch(net: &KernelNetwork, name: &str) -> PacketCapture {
    let node = net.lab.node(name).unwrap();
    PacketCapture::on(node.netns().name(), &node.interfaces()[0].device)
}

#[test]
fn checksums_are_right_for_every_mix_of_address_families() {
    needs_root!(checksums_are_right_for_every_mix_of_address_families);
    for (from, mtu) in [(0, 1500), (1, 9000)] {
        let topology = Topology { netem: false, mtu, ..Topology::standard(1, 2) };
        let net = KernelNetwork::from_topology(&topology, |config| {
            config.listen.push(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), PORT));
        });
        let ips: [IpAddr; 2] = [net.relay().addr_v4().into(), net.relay().addr_v6().into()];
        let captures = ["sub1", "sub2"].map(|name| watch(&net, name));
        let subscribers_at = ["sub1", "sub2"].iter().zip(ips).map(|(name, ip)| net.peer_at(name, ip));
        let cast = introduce(&net, net.peer_at("pub", ips[from]), subscribers_at.collect());
        let status = play(&net, cast, &SHOW, |_| {});
        assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
        for (session, capture) in subscribers(&status).zip(captures) {
            let seen = checked(&capture);
            let sent = session.kernel.packets + session.data_plane.packets;
            assert!(seen as u64 >= sent, "{seen} of {sent}");
            // A receiver drops a packet with a wrong checksum. A packet that another CPU's packet overtakes also counts
            // as lost.
            let copies = session.kernel_copies.as_ref().unwrap();
            assert!(!copies.contains_key("not_arriving"), "{session:#?}");
        }
    }
}

/// Makes a VLAN on the link between the relay and a peer's host. From then on they reach each other only through the
/// VLAN.
fn make_vlan(net: &KernelNetwork, name: &str) -> &'static str {
    const VLAN: &str = "vlan100";
    let node = net.lab.node(name).unwrap();
    let near = net.relay().interface(&link(name)).unwrap();
    let far = &node.interfaces()[0];
    for (host, interface, ip) in [(net.relay(), near, "10.88.0.1"), (node, far, "10.88.0.2")] {
        let device = &interface.device;
        sh(host, &format!("ip link add link {device} name {VLAN} type vlan id 100 && ip link set {VLAN} up"));
        sh(
            host,
            &format!("ip address add {ip}/24 dev {VLAN} && ip address del {}/24 dev {device}", interface.v4),
        );
        // Each host's address moves from the link's interface to loopback. So the host is still reached at the same
        // address, but through the VLAN.
        sh(host, &format!("ip address add {}/32 dev lo", interface.v4));
    }
    sh(node, &format!("ip route replace default via 10.88.0.1 dev {VLAN} src 10.88.0.2"));
    VLAN
}

#[test]
fn kernel_forwards_between_vlans() {
    needs_root!(kernel_forwards_between_vlans);
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let mut make = lab.node("relay").unwrap().command("ip");
    make.args(["link", "add", "link", "to-pub", "name", "vlan1", "type", "vlan", "id", "1"]);
    // exact: `status` waits until the `ip` command has ended
    if !make.stderr(Stdio::null()).status().unwrap().success() {
        println!("SKIP kernel_forwards_between_vlans: this kernel has no VLAN devices");
        return;
    }
    for (tagged, attach_below) in [("sub1", false), ("pub", false), ("pub", true)] {
        let net = KernelNetwork::new(2, false, |config| config.interfaces.truncate(1));
        let captures = ["sub1", "sub2"].map(|name| watch(&net, name));
        let vlan = make_vlan(&net, tagged);
        if tagged == "pub" && !attach_below {
            let config = Config { interfaces: vec![vlan.to_owned()], ..net.config.clone() };
            net.server.change_engine(&config).unwrap();
        }
        let cast = cast(&net, &["sub1", "sub2"]);
        let status = play(&net, cast, &SHOW, |_| {});
        assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
        for (session, capture) in subscribers(&status).zip(captures) {
            let seen = checked(&capture);
            let sent = session.kernel.packets + session.data_plane.packets;
            assert!(seen as u64 >= sent, "{seen} of {sent}");
        }
    }
}

/// Moves a peer to another socket, and so to another port and to other connection IDs in both directions (RFC 9000,
/// section 9.5).
fn move_away(net: &KernelNetwork, node: &str, peer: &quinn::Endpoint) {
    let rebind = || {
        let _inside = net.runtime.enter();
        peer.rebind(UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    };
    net.lab.node(node).unwrap().enter(rebind).unwrap();
}

#[test]
fn kernel_follows_peers_to_new_addresses() {
    needs_root!(kernel_follows_peers_to_new_addresses);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let endpoints = [&cast.publisher, &cast.subscribers[0]].map(|peer| peer.session.endpoint().clone());
    let addresses = || {
        // exact: no peer has changed its address yet, and `until` reads the sessions' addresses again later
        let sessions = net.status().relay.sessions;
        sessions.iter().map(|one| (one.id, one.remote)).collect::<BTreeMap<_, _>>()
    };
    let before = addresses();
    let mut phases = Phases(Vec::new());
    let show = GroupStream { groups: 40, objects: 30, ..SHOW };
    let status = play(&net, cast, &show, |group| match group {
        10 => move_away(&net, "pub", &endpoints[0]),
        20 => move_away(&net, "sub1", &endpoints[1]),
        30 => {
            until("both peers to be found at their new addresses", || {
                addresses().iter().filter(|(id, remote)| before.get(id) != Some(remote)).count() == 2
            });
            phases.begin(&net);
        }
        _ => {}
    });
    let by_kernel = phases.by_kernel(&status);
    assert!(by_kernel[0] >= OF_A_PHASE, "{by_kernel:?} {:#?}", status.engine);
}

#[test]
fn route_restricted_to_the_relays_user_id_is_left_to_userspace() {
    needs_root!(route_restricted_to_the_relays_user_id_is_left_to_userspace);
    // A routing rule by user: packets of the relay's user reach sub1. Packets of other users, and those that the
    // relay's BPF programs send, do not.
    const OWNER: u32 = 65_534;
    let topology = Topology { netem: false, ..Topology::standard(1, 2) };
    let net = KernelNetwork::owned_by(&topology, OWNER, |_| {});
    for command in [
        format!("rule add uidrange {OWNER}-{OWNER} lookup 100"),
        "route add 10.77.1.0/24 dev to-sub1 table 100".to_owned(),
        "neighbour add 10.77.1.99 lladdr 02:00:00:00:00:99 dev to-sub1 nud permanent".to_owned(),
        "route add 10.77.1.2/32 via 10.77.1.99 dev to-sub1".to_owned(),
    ] {
        sh(net.relay(), &format!("ip {command}"));
    }
    let cast = cast(&net, &["sub1", "sub2"]);
    // The publisher may be 40 objects ahead of the subscribers, so that the kernel gets enough packets to try the path.
    let show = GroupStream { ahead: Some(40), ..SHOW };
    let status = play(&net, cast, &show, |_| {});
    let (lost, found): (Vec<_>, _) =
        subscribers(&status).partition(|one| one.remote.ip() == IpAddr::from([10, 77, 1, 2]));
    let [lost, found]: [&RelaySessionStatus; 2] = [lost[0], found.into_iter().next().unwrap()];
    assert!(found.kernel.packets >= SHOW.groups * OF_A_GROUP, "{found:#?}");
    // The kernel stops after the bytes of 8 packets of the largest size have not arrived. The packets of this test are
    // smaller, so the kernel may send up to 12.
    assert!((1..=12).contains(&lost.kernel.packets), "the kernel did not try the first packets: {lost:#?}");
    // A relay that gets little CPU time may treat the losses as persistent congestion. Its congestion window is then
    // too small for 8 packets on this path.
    let given_up = lost.kernel_copies.as_ref().unwrap().get("not_arriving").copied().unwrap_or(0);
    assert_eq!(given_up, u64::from(lost.kernel.packets >= 8), "{lost:#?}");
}

/// Writes frames like `tcpdump -w`, all with the same time stamp.
fn write_pcap(path: &Path, frames: &[Vec<u8>]) {
    let mut bytes = Vec::new();
    for word in [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 65_535, 1_u32] {
        bytes.extend(word.to_ne_bytes());
    }
    for frame in frames {
        for word in [0, 0, frame.len() as u32, frame.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(frame);
    }
    fs::write(path, bytes).unwrap();
}

/// Returns these fields of all QUIC packets from the relay, as tshark decodes them.
fn dissect(pcap: &Path, keys: &Path, fields: &[&str]) -> Vec<Vec<String>> {
    let mut tshark = Command::new("tshark");
    tshark.arg("-r").arg(pcap).arg("-o").arg(format!("tls.keylog_file:{}", keys.display()));
    tshark.args(["-d", &format!("udp.port=={PORT},quic"), "-Y", &format!("udp.srcport=={PORT}")]);
    tshark.args(["-T", "fields", "-E", "separator=;"]);
    tshark.args(fields.iter().flat_map(|field| ["-e", field]));
    let output = tshark.stderr(Stdio::null()).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split(';').map(str::to_owned).collect()).collect()
}

#[test]
fn tshark_decrypts_what_the_kernel_sent() {
    needs_root!(tshark_decrypts_what_the_kernel_sent);
    if Command::new("tshark").arg("-v").stdout(Stdio::null()).status().is_err() {
        println!("SKIP tshark_decrypts_what_the_kernel_sent: no tshark");
        return;
    }
    for suite in [CipherSuite::Chacha20Poly1305, CipherSuite::Aes128Gcm, CipherSuite::Aes256Gcm] {
        let dir = tempfile::tempdir().unwrap();
        let pcap = dir.path().join("pcap");
        let keys = dir.path().join("keys");
        let net = KernelNetwork::new(1, false, |config| {
            config.cipher_suites = vec![suite];
            config.key_log_file = Some(keys.clone());
        });
        let capture = watch(&net, "sub1");
        let cast = cast(&net, &["sub1"]);
        let status = play(&net, cast, &SHOW, |_| {});
        let session = subscribers(&status).next().unwrap();
        assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
        write_pcap(&pcap, &capture.frames());

        let mut numbers = BTreeSet::new();
        let mut stream_bytes = 0;
        for packet in dissect(&pcap, &keys, &["quic.short", "quic.packet_number", "quic.stream.length"]) {
            let [short, number, lengths] = &packet[..] else { panic!("{packet:?}") };
            if short.is_empty() {
                continue;
            }
            let number: u64 = number.parse().unwrap_or_else(|_| panic!("not decrypted: {packet:?}"));
            assert!(numbers.insert(number), "number {number} is used twice");
            stream_bytes += lengths.split(',').filter_map(|len| len.parse::<u64>().ok()).sum::<u64>();
        }
        assert!(stream_bytes >= SHOW.groups * SHOW.objects * SHOW.bytes as u64, "{stream_bytes}");
        assert!(numbers.len() as u64 >= session.kernel.packets + session.data_plane.packets);
    }
}
