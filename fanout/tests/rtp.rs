//! RTP through the fan-out, from a sender over real interfaces to receivers. The same bytes arrive in the same order,
//! with correct checksums. Needs root.

use millrace_testkit::net;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use millrace_fanout::kernel::{
    Cap, Config, CopyOutcome, Fanout, FanoutCounters, FurtherRun, Outcome, ReceiverCopy, SenderStream, Ssrc,
    StreamConfig,
};
use millrace_kernel::clock::monotonic_ns;
use millrace_testkit::wait_until;
use net::{NamespaceNetwork, PacketCapture, RawSender, address, inside, root};

const PORT: u16 = 5004;
const PLENTY: Cap = Cap { bits_per_s: 10_000_000_000, burst_bytes: 10_000_000 };
const FAR: u64 = u64::MAX;

struct RtpScene<'a> {
    network: &'a NamespaceNetwork,
    fanout: Fanout,
    from: UdpSocket,
    /// The relay's socket, which is bound to the stream's address.
    own: UdpSocket,
}

impl<'a> RtpScene<'a> {
    fn new(network: &'a NamespaceNetwork, family: u8, max_receivers: u32, config: Config) -> Self {
        let own = net::socket(&network.relay, SocketAddr::new(address(family, 1, 1), PORT));
        let from = net::socket(&network.publisher, SocketAddr::new(address(family, 1, 2), 0));
        let listen = own.local_addr().expect("an address");
        from.connect(listen).expect("connect");
        let sender = from.local_addr().expect("an address");
        let stream = StreamConfig {
            listen,
            listen_rtcp_port: None,
            sender,
            sender_rtcp_port: None,
            ssrc: Ssrc::Any,
            max_receivers,
        };
        let fanout = Fanout::load(&Config { streams: vec![stream], ..config }).expect("it loads");
        let ifindex = net::ifindex(&network.relay, "west");
        inside(&network.relay, || fanout.attach(ifindex).expect("it attaches"));
        Self { network, fanout, from, own }
    }

    fn stream(&self) -> &Arc<SenderStream> {
        &self.fanout.streams()[0]
    }

    fn receiver(&self, family: u8, cap: Cap) -> (ReceiverCopy, UdpSocket) {
        let socket = net::socket(&self.network.subscriber, SocketAddr::new(address(family, 2, 2), 0));
        let to = socket.local_addr().expect("an address");
        // Sending a datagram makes the relay's host learn the receiver's link address.
        self.own.send_to(&[0], to).expect("send");
        assert_eq!(receive(&socket).0, [0]);
        (self.stream().add(to, cap, FAR).expect("room"), socket)
    }

    /// Waits until the counter of packets has this value. Receivers get copies before the packet itself is counted.
    fn counted(&self, what: &str, packets: u64, count: impl Fn(&FanoutCounters) -> u64) -> FanoutCounters {
        wait_until(what, || self.fanout.counters().expect("counters"), |counters| count(counters) == packets)
    }

    fn forwarded(&self, packets: u64) -> FanoutCounters {
        self.counted("all packets", packets, |counters| counters.packets(Outcome::Forwarded))
    }

    /// Returns the number of copies for receivers with this outcome.
    fn copies(&self, outcome: CopyOutcome) -> u64 {
        // exact: the program counts a packet's copies before it passes on the packet, which callers have waited for
        self.fanout.counters().expect("counters").copies(outcome)
    }
}

fn packet(sequence: u16, len: usize) -> Vec<u8> {
    let payload = (0..len).map(|at| (at as u16).wrapping_mul(sequence | 1) as u8);
    let head = [&[0x80, 96][..], &sequence.to_be_bytes(), &[0, 0, 0, 9, 1, 2, 3, 4]].concat();
    head.into_iter().chain(payload).collect()
}

/// Receives a datagram. A host that is halted for a moment interrupts a read with a time-out (signal(7)), so this
/// tries again.
fn receive(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = vec![0; 4096];
    loop {
        match socket.recv_from(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => {
                let (len, from) = received.expect("a datagram");
                buffer.truncate(len);
                return (buffer, from);
            }
        }
    }
}

/// Receives a datagram, and asserts that it equals the expected one.
fn expect(socket: &UdpSocket, want: &[u8]) {
    let (packet, from) = receive(socket);
    assert_eq!(packet, want);
    assert_eq!(from.port(), PORT, "it comes from where it was asked for");
}

/// Covers both address families, sizes that are odd or that Ethernet pads, and checksums by the sender or by its
/// interface.
#[test]
fn every_receiver_gets_the_same_bytes_in_order() {
    if !root("every_receiver_gets_the_same_bytes_in_order") {
        return;
    }
    let network = NamespaceNetwork::new("rtp");
    for offload in [true, false] {
        net::set_checksum_offload(&network.publisher, "eth", offload);
        for family in [4, 6] {
            let scene = RtpScene::new(&network, family, 8, Config::default());
            let receivers: Vec<_> = (0..8).map(|_| scene.receiver(family, PLENTY)).collect();
            // With offload the sending network card would complete the checksum, and a veth does not.
            let capture = (!offload).then(|| PacketCapture::on(&network.subscriber, "eth"));
            let sizes = [0, 1, 2, 7, 100, 999, 1200];
            for (sequence, len) in (0..).zip(sizes.into_iter().cycle().take(50)) {
                let packet = packet(sequence, len);
                scene.from.send(&packet).expect("send");
                receivers.iter().for_each(|(_, socket)| expect(socket, &packet));
            }
            if let Some(capture) = capture {
                assert_eq!(capture.check(), 50 * receivers.len(), "whose checksums are right");
            }
            let counters = scene.forwarded(50);
            assert_eq!(counters.copies(CopyOutcome::Sent), 400);
            assert!(receivers.iter().all(|(receiver, _)| receiver.sent().0 == 50));
            // Userspace gets none of the sender's packets.
            scene.own.set_nonblocking(true).expect("non-blocking");
            assert!(scene.own.recv(&mut [0; 2048]).is_err());
        }
    }
}

/// The test sends 300 copies of a packet, 40 in each run.
#[test]
fn fan_out_beyond_40_copies_per_bpf_run_continues_in_further_runs() {
    if !root("fan_out_beyond_40_copies_per_bpf_run_continues_in_further_runs") {
        return;
    }
    let network = NamespaceNetwork::new("runs");
    let scene = RtpScene::new(&network, 4, 300, Config { max_copies_per_run: 40, ..Config::default() });
    let receivers: Vec<_> = (0..300).map(|_| scene.receiver(4, PLENTY)).collect();
    for sequence in 0..5 {
        let packet = packet(sequence, 1000);
        scene.from.send(&packet).expect("send");
        receivers.iter().for_each(|(_, socket)| expect(socket, &packet));
    }
    let counters = scene.counted("all last runs", 5, |counters| counters.runs(FurtherRun::Last));
    assert_eq!((counters.packets(Outcome::Continued), counters.packets(Outcome::Forwarded)), (5, 0));
    assert_eq!((counters.runs(FurtherRun::Continued), counters.runs(FurtherRun::Last)), (30, 5));
    assert_eq!(counters.copies(CopyOutcome::Sent), 1500);
    assert_eq!(scene.stream().media().packets, 5, "counted once");

    drop(scene);
    let scene =
        RtpScene::new(&network, 4, 300, Config { max_copies_per_run: 40, max_runs: 2, ..Config::default() });
    let receivers: Vec<_> = (0..100).map(|_| scene.receiver(4, PLENTY)).collect();
    let packet = packet(9, 1000);
    scene.from.send(&packet).expect("send");
    receivers.iter().take(80).for_each(|(_, socket)| expect(socket, &packet));
    let counters = scene.counted("the last run", 1, |counters| counters.runs(FurtherRun::Left));
    assert_eq!(counters.copies(CopyOutcome::Sent), 80);
}

#[test]
fn receiver_over_its_rate_limit_or_past_its_lease_is_sent_nothing() {
    if !root("receiver_over_its_rate_limit_or_past_its_lease_is_sent_nothing") {
        return;
    }
    let network = NamespaceNetwork::new("cap");
    let scene = RtpScene::new(&network, 4, 8, Config::default());
    // The rate limit allows a burst of three packets of 1000 bytes with their headers, and then a byte each second.
    let three = Cap { bits_per_s: 8, burst_bytes: 3 * 1040 };
    let (capped, capped_socket) = scene.receiver(4, three);
    let (leased, leased_socket) = scene.receiver(4, PLENTY);
    for sequence in 0..10 {
        if sequence == 6 {
            leased.renew(monotonic_ns());
        }
        let packet = packet(sequence, 1000);
        scene.from.send(&packet).expect("send");
        if sequence < 3 {
            expect(&capped_socket, &packet);
        }
        if sequence < 6 {
            expect(&leased_socket, &packet);
        }
    }
    scene.forwarded(10);
    for socket in [&capped_socket, &leased_socket] {
        socket.set_read_timeout(Some(Duration::from_millis(1))).expect("a time-out");
        assert!(socket.recv(&mut [0; 2048]).is_err(), "nothing more");
    }
    assert_eq!((capped.sent().0, capped.copies(CopyOutcome::Rate)), (3, 7));
    assert_eq!((leased.sent().0, leased.copies(CopyOutcome::Ended)), (6, 4));
    leased.renew(FAR);
    let packet = packet(11, 10);
    scene.from.send(&packet).expect("send");
    leased_socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
    expect(&leased_socket, &packet);
    scene.forwarded(11);
    drop((capped, leased));
    let sent = scene.copies(CopyOutcome::Sent);
    scene.from.send(&packet).expect("send");
    assert_eq!(scene.forwarded(12).copies(CopyOutcome::Sent), sent);
}

/// Packets from other senders, and packets while the program is not attached, are left to userspace.
#[test]
fn packets_that_are_not_fanned_out_reach_userspace() {
    if !root("packets_that_are_not_fanned_out_reach_userspace") {
        return;
    }
    let network = NamespaceNetwork::new("rest");
    let scene = RtpScene::new(&network, 4, 8, Config::default());
    let (_receiver, _socket) = scene.receiver(4, PLENTY);
    let mine = packet(1, 100);
    let stranger = net::socket(&network.publisher, SocketAddr::new(address(4, 1, 2), 0));
    stranger.send_to(&mine, scene.own.local_addr().expect("an address")).expect("send");
    assert_eq!(receive(&scene.own).0, mine, "a stranger's");
    assert_eq!(scene.copies(CopyOutcome::Sent), 0);
    scene.fanout.detach();
    scene.from.send(&mine).expect("send");
    assert_eq!(receive(&scene.own).0, mine, "the sender's");
    assert_eq!(scene.copies(CopyOutcome::Sent), 0);
}

/// Covers a receiver whose link address is not known, one on this host, and one behind a link whose MTU is too small.
#[test]
fn copy_that_cannot_be_sent_is_counted() {
    if !root("copy_that_cannot_be_sent_is_counted") {
        return;
    }
    let network = NamespaceNetwork::new("count");
    let scene = RtpScene::new(&network, 4, 8, Config::default());
    let add = |to: SocketAddr| scene.stream().add(to, PLENTY, FAR).expect("room");
    let stranger = add(SocketAddr::new(address(4, 2, 77), 9));
    let here = add(SocketAddr::new(address(4, 2, 1), 9));
    let (narrow, socket) = scene.receiver(4, PLENTY);
    net::ip(&format!("-n {} link set east mtu 500", network.relay));
    scene.from.send(&packet(1, 600)).expect("send");
    scene.from.send(&packet(2, 300)).expect("send");
    expect(&socket, &packet(2, 300));
    scene.forwarded(2);
    let strangers = [CopyOutcome::TooLarge, CopyOutcome::NoNeighbour].map(|outcome| stranger.copies(outcome));
    assert_eq!(strangers, [1, 1]);
    assert_eq!(here.copies(CopyOutcome::NoRoute), 2);
    assert_eq!((narrow.copies(CopyOutcome::TooLarge), narrow.copies(CopyOutcome::Sent)), (1, 1));
}

/// Checks that copies of frames without a checksum, with a wrong one, and with a VLAN tag keep the checksum and lose
/// the tag.
#[test]
fn copies_keep_checksums_and_lose_vlan_tags() {
    if !root("copies_keep_checksums_and_lose_vlan_tags") {
        return;
    }
    let network = NamespaceNetwork::new("raw");
    let scene = RtpScene::new(&network, 4, 8, Config::default());
    let (receiver, socket) = scene.receiver(4, PLENTY);
    let raw = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    let ends = (scene.from.local_addr().expect("an address"), scene.own.local_addr().expect("an address"));
    let mut damaged = net::frame(to, None, ends.0, ends.1, &packet(1, 100));
    damaged[40..42].copy_from_slice(&[0x12, 0x34]);
    raw.send(&damaged);
    raw.send(&net::frame(to, None, ends.0, ends.1, &packet(2, 100)));
    expect(&socket, &packet(2, 100));
    raw.send(&net::frame(to, Some(7), ends.0, ends.1, &packet(3, 100)));
    expect(&socket, &packet(3, 100));
    // The receiver's host has already dropped the damaged packets.
    scene.forwarded(3);
    assert_eq!(receiver.sent().0, 3);
}
