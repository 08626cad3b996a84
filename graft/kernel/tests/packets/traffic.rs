//! Tests of packet functions (BPF) on a path that loses, duplicates and reorders packets. The path is a wire between
//! two hosts, which a script controls.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millrace_graft_kernel::packet::{FunctionList, PacketHooks, PacketReason, SessionEnds, TalkMessage};
use millrace_kernel::xdp::XdpMode;
use millrace_testkit::{wait_for, wait_until};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use crate::net::{
    NamespaceNetwork, PacketCapture, RawSender, ifindex, inside, ip, link_address, root,
    set_checksum_offload, socket, stay_on_this_cpu,
};
use crate::{count, ends, hooks, hooks_of, list, open, other_side};

/// Time limit for the arrival of a packet, or for free space in the window.
pub const LONG: Duration = millrace_testkit::BOUND;

/// Sets a flag when it is dropped, so that a failing test stops its threads before it waits for them.
pub struct AtEnd<'a>(pub &'a AtomicBool, pub bool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Relaxed);
    }
}

/// A script of the wire decides what happens to a datagram, given how many datagrams came before it in the same
/// direction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DatagramFate {
    Pass,
    Lose,
    Double,
    /// The wire holds this datagram back, and delivers it behind the one that follows it.
    Hold,
}

pub struct PacketHook {
    pub network: NamespaceNetwork,
    pub ends: SessionEnds,
    pub mode: XdpMode,
    pub family: u8,
}

impl PacketHook {
    pub fn new(name: &str, family: u8) -> Self {
        let network = NamespaceNetwork::new(name);
        for (namespace, host) in [(&network.publisher, 1), (&network.subscriber, 2)] {
            let address =
                if family == 4 { format!("10.99.0.{host}/24") } else { format!("fd99::{host}/64 nodad") };
            ip(&format!("-n {namespace} addr add {address} dev eth"));
            // The wire forwards frames through packet sockets, so checksums have to be complete.
            set_checksum_offload(namespace, "eth", false);
        }
        // Link addresses are set by hand, so no packet is dropped while a neighbour is being resolved.
        for (namespace, other, host) in
            [(&network.publisher, &network.subscriber, 2), (&network.subscriber, &network.publisher, 1)]
        {
            let address = if family == 4 { format!("10.99.0.{host}") } else { format!("fd99::{host}") };
            let link = link_address(other, "eth").map(|byte| format!("{byte:02x}")).join(":");
            ip(&format!("-n {namespace} neigh replace {address} lladdr {link} dev eth nud permanent"));
        }
        let ends = match family {
            4 => ends("10.99.0.1:7000", "10.99.0.2:6000"),
            _ => ends("[fd99::1]:7000", "[fd99::2]:6000"),
        };
        Self { network, ends, mode: XdpMode::Auto, family }
    }

    pub fn sockets(&self) -> (UdpSocket, UdpSocket) {
        let SessionEnds { local, remote } = self.ends;
        let near = socket(&self.network.publisher, local);
        let far = socket(&self.network.subscriber, remote);
        near.connect(remote).expect("connected");
        far.connect(local).expect("connected");
        setsockopt(&far, sockopt::RcvBufForce, &(64 << 20)).expect("room");
        (near, far)
    }

    fn hooks(&self, functions: &[&str]) -> [PacketHooks; 2] {
        self.made(functions, hooks)
    }

    /// Creates hosts and wire, and loads only these functions.
    pub fn hooks_of(&self, functions: &[&str], parameters: &[(&str, &str, u64)]) -> [PacketHooks; 2] {
        self.made(functions, || hooks_of(functions, parameters))
    }

    fn made(&self, functions: &[&str], make: impl Fn() -> PacketHooks) -> [PacketHooks; 2] {
        let sides =
            [(&self.network.publisher, self.ends), (&self.network.subscriber, other_side(&self.ends))];
        sides.map(|(namespace, ends)| {
            let mut hooks = make();
            open(&mut hooks, ends, functions);
            self.attach(namespace, &mut hooks);
            hooks
        })
    }

    pub fn attach(&self, namespace: &str, hooks: &mut PacketHooks) {
        let eth = ifindex(namespace, "eth");
        inside(namespace, || hooks.attach(eth, self.mode).expect("attached"));
    }

    /// Returns the wire between both hosts, which forwards frames only while it runs.
    pub fn wire(&self) -> PacketWire {
        let relay = &self.network.relay;
        let way = |from: &str, to: &str, host: &str| WireDirection {
            from: PacketCapture::on(relay, from),
            to: RawSender::new(relay, to),
            source: link_address(host, "eth"),
            count: 0,
            held: None,
        };
        PacketWire([
            way("west", "east", &self.network.publisher),
            way("east", "west", &self.network.subscriber),
        ])
    }
}

pub struct PacketWire([WireDirection; 2]);

impl PacketWire {
    /// Forwards frames in both directions until `is_done` is true.
    pub fn run(mut self, stop: &AtomicBool, fate: impl Fn(u64) -> DatagramFate) {
        stay_on_this_cpu();
        while !stop.load(Ordering::Relaxed) {
            let mut waiting: Vec<_> =
                self.0.iter().map(|way| PollFd::new(way.from.as_fd(), PollFlags::POLLIN)).collect();
            poll(&mut waiting, PollTimeout::from(10u8)).expect("poll");
            drop(waiting);
            self.0.iter_mut().for_each(|way| way.carry(&fate));
        }
    }
}

struct WireDirection {
    from: PacketCapture,
    to: RawSender,
    source: [u8; 6],
    count: u64,
    held: Option<Vec<u8>>,
}

impl WireDirection {
    fn carry(&mut self, fate: impl Fn(u64) -> DatagramFate) {
        for frame in self.from.frames() {
            // The capture also contains the frames that the wire itself has sent in this direction.
            if frame[6..12] != self.source {
                continue;
            }
            if !is_datagram(&frame) {
                // Other frames, such as neighbour discovery, are forwarded at once, even while a datagram is held back.
                self.to.send(&frame);
                continue;
            }
            let fate = fate(self.count);
            self.count += 1;
            match fate {
                DatagramFate::Lose => {}
                DatagramFate::Hold if self.held.is_none() => self.held = Some(frame),
                DatagramFate::Double => {
                    self.to.send(&frame);
                    self.to.send(&frame);
                }
                _ => self.to.send(&frame),
            }
            if fate != DatagramFate::Hold
                && let Some(held) = self.held.take()
            {
                self.to.send(&held);
            }
        }
    }
}

/// Returns whether the frame is a datagram of UDP.
pub fn is_datagram(frame: &[u8]) -> bool {
    const UDP: u8 = 17;
    match &frame[12..14] {
        [8, 0] => frame[23] == UDP,
        [0x86, 0xdd] => frame[20] == UDP,
        _ => false,
    }
}

fn message(number: u32) -> Vec<u8> {
    let len = 4 + (number as usize * 37) % 1200;
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.extend((0..len).map(|at| (at as u32 ^ number) as u8));
    bytes
}

pub fn number_of(bytes: &[u8]) -> u32 {
    let number = u32::from_be_bytes(*bytes.first_chunk().expect("a number"));
    let sent = message(number);
    let differs = bytes.iter().zip(&sent).position(|(one, other)| one != other);
    assert!(
        bytes == sent,
        "message {number} is not as it was sent: {} bytes of {}, from {differs:?} on",
        bytes.len(),
        sent.len()
    );
    number
}

/// Returns received messages in the order of arrival. Receiving ends when `enough` messages have arrived, or when no
/// message arrives within the time limit.
pub fn receive(far: &UdpSocket, enough: usize) -> Vec<u32> {
    let mut buffer = [0; 2048];
    let mut got = Vec::new();
    let mut until = Instant::now() + LONG;
    while got.len() < enough && Instant::now() < until {
        if let Ok(bytes) = far.recv(&mut buffer) {
            got.push(number_of(&buffer[..bytes]));
            until = Instant::now() + LONG;
        }
    }
    got
}

/// Sends the messages in batches, since an interface queues only some 250 packets.
pub fn send(near: &UdpSocket, numbers: std::ops::Range<u32>) {
    for number in numbers {
        near.send(&message(number)).expect("sent");
        if number % 20 == 19 {
            // exact: this pause between two batches of messages limits the sending rate
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A sender that is at most `ahead` packets ahead of the receiver, so that functions' windows and interfaces' queues
/// suffice, however slow the machine is.
pub struct TrafficPace {
    ahead: u32,
    sent: AtomicU32,
    received: AtomicU32,
}

impl Default for TrafficPace {
    fn default() -> Self {
        Self::ahead(200)
    }
}

impl TrafficPace {
    /// Time limit of a test. It is long, so that a test does not fail because the machine is busy.
    const LONG: Duration = Duration::from_secs(400);

    pub fn ahead(ahead: u32) -> Self {
        Self { ahead, sent: AtomicU32::default(), received: AtomicU32::default() }
    }

    /// Sends each message once, since retransmission is the task of the functions.
    pub fn send(&self, near: &UdpSocket, count: u32) {
        stay_on_this_cpu();
        let until = Instant::now() + Self::LONG;
        for number in 0..count {
            while number > self.received.load(Ordering::Relaxed) + self.ahead {
                assert!(Instant::now() < until, "what is missing does not come");
                // exact: the pause between two checks of how many messages have arrived
                thread::sleep(Duration::from_millis(1));
            }
            near.send(&message(number)).expect("sent");
            self.sent.store(number + 1, Ordering::Relaxed);
        }
    }

    /// Receives messages in the order of arrival. The sender waits whenever it is more than `ahead` messages beyond the
    /// first missing message.
    pub fn receive(&self, far: &UdpSocket, enough: u32) -> Vec<u32> {
        let mut got = Vec::new();
        let mut missing: BTreeSet<u32> = (0..enough).collect();
        let until = Instant::now() + Self::LONG;
        while !missing.is_empty() && Instant::now() < until {
            let messages = receive(far, 1);
            for number in &messages {
                missing.remove(number);
            }
            got.extend(messages);
            self.received.store(missing.first().copied().unwrap_or(enough), Ordering::Relaxed);
        }
        got
    }

    /// Receives `enough` messages in the order of arrival, while other messages may be lost for good. The sender waits
    /// whenever it is more than `ahead` messages beyond the newest received message.
    pub fn receive_some(&self, far: &UdpSocket, enough: usize) -> Vec<u32> {
        let mut got = Vec::new();
        while got.len() < enough {
            let messages = receive(far, 1);
            let Some(newest) = messages.last() else { break };
            self.received.fetch_max(newest + 1, Ordering::Relaxed);
            got.extend(messages);
        }
        got
    }

    /// Returns the message GRAFT_LAST, by which the receiver notices that the latest packets were lost.
    pub fn last(&self) -> TalkMessage {
        TalkMessage::Last(self.sent.load(Ordering::Relaxed))
    }
}

/// Waits until both hosts know each other's link address. Until then packets are queued before they reach the wire's
/// script.
pub fn get_to_know(site: &PacketHook, sender: &PacketHooks, receiver: &mut PacketHooks) {
    let say = || {
        inside(&site.network.publisher, || sender.say(&site.ends, TalkMessage::Last(0)).expect("said"));
        count(receiver, &other_side(&site.ends), PacketReason::Answered)
    };
    wait_until("a message", say, |answered| *answered > 0);
}

/// Sends messages, and waits while the window is full. Returns how often the window refused a datagram.
pub fn send_into_window(near: &UdpSocket, numbers: std::ops::Range<u32>) -> u64 {
    let mut refused = 0;
    for number in numbers {
        let until = Instant::now() + LONG;
        while let Err(error) = near.send(&message(number)) {
            assert_eq!(error.raw_os_error(), Some(nix::libc::ENOBUFS), "{error}");
            assert!(Instant::now() < until, "there is no room for message {number}");
            refused += 1;
            // exact: the pause between two attempts to send into a full send window
            thread::sleep(Duration::from_micros(200));
        }
    }
    refused
}

pub fn assert_all_once(got: &[u32], sent: u32) {
    let mut times = BTreeMap::<u32, u32>::new();
    got.iter().for_each(|number| *times.entry(*number).or_default() += 1);
    let missing: Vec<_> = (0..sent).filter(|number| !times.contains_key(number)).collect();
    assert!(
        missing.is_empty(),
        "{} of {sent} are missing: {:?}",
        missing.len(),
        &missing[..missing.len().min(9)]
    );
    assert!(times.values().all(|count| *count == 1), "some came twice");
}

/// The wire loses retransmission requests and retransmissions as often as other packets.
#[test]
fn lost_packets_are_sent_again() {
    const SENT: u32 = 3000;
    if !root("lost_packets_are_sent_again") {
        return;
    }
    for family in [4, 6] {
        let site = PacketHook::new("repair", family);
        assert_eq!(site.family, family);
        let (near, far) = site.sockets();
        let [mut sender, mut receiver] = site.hooks(&["number", "repair"]);
        let stop = AtomicBool::new(false);
        let pace = TrafficPace::default();
        let lossy = |count: u64| {
            if count % 7 == 3 || count % 61 < 3 { DatagramFate::Lose } else { DatagramFate::Pass }
        };
        let wire = site.wire();
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            let receiving = scope.spawn(|| pace.receive(&far, SENT));
            scope.spawn(|| pace.send(&near, SENT));
            while !receiving.is_finished() {
                inside(&site.network.publisher, || sender.say(&site.ends, pace.last()).expect("said"));
                // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
                thread::sleep(Duration::from_millis(20));
            }
            stop.store(true, Ordering::Relaxed);
            receiving.join().expect("messages")
        });
        assert_all_once(&got, SENT);
        let resent = count(&mut sender, &site.ends, PacketReason::Resent);
        assert!(resent >= u64::from(SENT) / 7, "{resent} were sent again");
        assert_eq!(count(&mut sender, &site.ends, PacketReason::Sent), u64::from(SENT));
        assert_eq!(count(&mut receiver, &other_side(&site.ends), PacketReason::Delivered), u64::from(SENT));
        assert_eq!(count(&mut receiver, &other_side(&site.ends), PacketReason::Forged), 0);
    }
}

/// The function list drops packets that arrive after a packet with a higher number. It does so only if its functions
/// run in the right order.
#[test]
fn packets_after_one_with_a_higher_number_are_dropped() {
    const SENT: u32 = 2000;
    if !root("packets_after_one_with_a_higher_number_are_dropped") {
        return;
    }
    let site = PacketHook::new("order", 4);
    let (near, far) = site.sockets();
    let [_sender, mut receiver] = site.hooks(&["number", "order"]);
    let stop = AtomicBool::new(false);
    // The wire loses none of the last datagrams, so that the receiver knows when all messages have arrived that can
    // arrive.
    let unruly = |count: u64| match count % 10 {
        _ if count > u64::from(SENT) - 20 => DatagramFate::Pass,
        3 => DatagramFate::Lose,
        5 => DatagramFate::Hold,
        7 => DatagramFate::Double,
        _ => DatagramFate::Pass,
    };
    let rounds = u64::from(SENT - 20) / 10;
    let pace = TrafficPace::ahead(20);
    let wire = site.wire();
    let got = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| wire.run(&stop, unruly));
        scope.spawn(|| pace.send(&near, SENT));
        let got = pace.receive_some(&far, (u64::from(SENT) - 2 * rounds) as usize);
        stop.store(true, Ordering::Relaxed);
        got
    });
    assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "out of order");
    let there = other_side(&site.ends);
    let late = count(&mut receiver, &there, PacketReason::Late);
    let duplicates = count(&mut receiver, &there, PacketReason::Duplicate);
    assert!(late >= rounds && duplicates >= rounds, "{late} late, {duplicates} twice");
    assert_eq!(got.len() as u64 + late, u64::from(SENT) - rounds, "what is not lost comes, or comes late");
}

/// Both hosts swap between two lists of functions, back and forth, while packets are sent.
#[test]
fn function_lists_change_during_traffic_without_packet_loss() {
    const SENT: u32 = 20_000;
    if !root("function_lists_change_during_traffic_without_packet_loss") {
        return;
    }
    let site = PacketHook::new("swap", 4);
    let (near, far) = site.sockets();
    let [mut sender, mut receiver] = site.hooks(&["number", "order"]);
    let stop = AtomicBool::new(false);
    let lists: [FunctionList; 2] = [list(&["number", "repair"]), list(&["number", "order"])];
    let there = other_side(&site.ends);
    let pace = TrafficPace::ahead(20);
    let wire = site.wire();
    let got = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| wire.run(&stop, |_| DatagramFate::Pass));
        let receiving = scope.spawn(|| pace.receive(&far, SENT));
        let sending = scope.spawn(|| pace.send(&near, SENT));
        let mut rounds = 0;
        while !sending.is_finished() || rounds < 2 {
            let next = &lists[rounds % 2];
            let epoch = receiver.accept(&there, next).expect("ready");
            assert_eq!(sender.accept(&site.ends, next).expect("ready"), epoch);
            sender.switch(&site.ends, epoch).expect("switched");
            receiver.switch(&there, epoch).expect("switched");
            // Waits until no packet that was sent before the swap of function lists is in flight. One packet may be on
            // its way through the sender's functions during the swap, so the test waits until two more packets are
            // counted as sent.
            let mut sent = || count(&mut sender, &site.ends, PacketReason::Sent);
            let before = sent();
            let sent = wait_until("packets", sent, |sent| *sent >= before + 2 || sending.is_finished());
            let delivered = || count(&mut receiver, &there, PacketReason::Delivered);
            wait_until("what was sent", delivered, |delivered| *delivered >= sent);
            sender.retire(&site.ends, epoch ^ 1).expect("retired");
            receiver.retire(&there, epoch ^ 1).expect("retired");
            rounds += 1;
        }
        sending.join().expect("sent");
        let got = receiving.join().expect("messages");
        stop.store(true, Ordering::Relaxed);
        got
    });
    assert_all_once(&got, SENT);
    for reason in [PacketReason::Stale, PacketReason::NoFunction, PacketReason::Late, PacketReason::Old] {
        assert_eq!(count(&mut receiver, &there, reason), 0, "{reason:?}");
    }
}

pub const SELECTIVE: &[&str] = &["window", "number", "repair", "acknowledge"];
pub const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];
pub const PARTIAL: &[&str] = &["window", "number", "partial", "acknowledge"];

/// Every message arrives once, in order if the list of functions promises that, and a refused sender is notified.
#[test]
fn function_lists_with_a_send_window_deliver_each_message_once() {
    const SENT: u32 = 1500;
    if !root("function_lists_with_a_send_window_deliver_each_message_once") {
        return;
    }
    // The wire forwards nothing until the window is full, however slow the machine is.
    let is_still = AtomicBool::new(false);
    let unruly = |count: u64| {
        while is_still.load(Ordering::Relaxed) {
            // exact: the pause between two checks; the test's link forwards no packet until the send window is full
            thread::sleep(Duration::from_millis(1));
        }
        match count % 37 {
            3 | 4 | 20 => DatagramFate::Lose,
            9 => DatagramFate::Hold,
            13 => DatagramFate::Double,
            _ => DatagramFate::Pass,
        }
    };
    for (family, functions, packets) in [
        (4, SELECTIVE, 64),
        (6, SELECTIVE, 256),
        (4, GO_BACK, 64),
        (6, GO_BACK, 16),
        (4, GO_BACK, 1),
        (4, SELECTIVE, 256),
        (6, SELECTIVE, 64),
        (4, GO_BACK, 16),
        (6, GO_BACK, 64),
        (6, GO_BACK, 1),
        (4, PARTIAL, 64),
    ] {
        let site = PacketHook::new("window", family);
        let (near, far) = site.sockets();
        match family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        let parameters = [
            ("window", "packets", packets),
            ("repair", "retry_us", 20_000),
            ("repair", "tries", 0),
            ("gobackn", "retry_us", 20_000),
            ("partial", "retry_us", 20_000),
            ("partial", "give_up_permille", 0),
        ];
        let [mut sender, mut receiver] = site.hooks_of(functions, &parameters);
        let stop = AtomicBool::new(false);
        let ends = site.ends;
        let sent = if packets == 1 { SENT / 10 } else { SENT };
        let wire = site.wire();
        let (got, refused) = thread::scope(|scope| {
            let _end = (AtEnd(&stop, true), AtEnd(&is_still, false));
            scope.spawn(|| wire.run(&stop, unruly));
            get_to_know(&site, &sender, &mut receiver);
            is_still.store(true, Ordering::Relaxed);
            let receiving = scope.spawn(|| receive(&far, sent as usize));
            let sending = scope.spawn(|| send_into_window(&near, 0..sent));
            wait_until(
                "a full window",
                || count(&mut sender, &ends, PacketReason::WindowFull),
                |full| *full > 0,
            );
            is_still.store(false, Ordering::Relaxed);
            // The daemon sends GRAFT_LAST when it receives nothing, which reveals that the latest packets were lost.
            while !receiving.is_finished() || !sending.is_finished() {
                // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
                thread::sleep(Duration::from_millis(20));
                let known = sender.progress(&ends).expect("progress");
                assert!(known.next.wrapping_sub(known.delivered) <= packets as u32, "{known:?}");
                assert!(known.next.wrapping_sub(known.acked) <= 512, "{known:?}");
                inside(&site.network.publisher, || {
                    sender.say(&ends, TalkMessage::Last(known.next)).expect("said")
                });
            }
            stop.store(true, Ordering::Relaxed);
            (receiving.join().expect("messages"), sending.join().expect("sent"))
        });
        assert_all_once(&got, sent);
        assert!(functions != GO_BACK || got.is_sorted(), "out of order");
        assert!(refused > 0 && count(&mut sender, &ends, PacketReason::WindowFull) == refused, "{refused}");
        assert_eq!(count(&mut sender, &ends, PacketReason::Sent), u64::from(sent));
        for reason in
            [PacketReason::Forged, PacketReason::Malformed, PacketReason::NoRoom, PacketReason::NoFunction]
        {
            assert_eq!(count(&mut sender, &ends, reason), 0, "{reason:?}");
            assert_eq!(count(&mut receiver, &other_side(&ends), reason), 0, "{reason:?}");
        }
        let known = sender.progress(&ends).expect("progress");
        assert!(known.round_trip.is_some() && (known.losses > 0 || packets == 1), "{known:?}");
    }
}

/// Under the new list of functions, packets that were lost before the swap are retransmitted. Selective Repeat and
/// Go-Back-N alternate.
#[test]
fn change_between_go_back_n_and_selective_repeat_loses_no_packet() {
    const SENT: u32 = 3000;
    const PARTS: u32 = 5;
    if !root("change_between_go_back_n_and_selective_repeat_loses_no_packet") {
        return;
    }
    let site = PacketHook::new("swapw", 4);
    let (near, far) = site.sockets();
    setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors");
    let parameters =
        [("repair", "retry_us", 20_000), ("repair", "tries", 0), ("gobackn", "retry_us", 20_000)];
    let functions: Vec<_> = SELECTIVE.iter().chain(GO_BACK).copied().collect();
    let [mut sender, mut receiver] = site.made(SELECTIVE, || hooks_of(&functions, &parameters));
    let here = site.ends;
    let there = other_side(&site.ends);
    let stop = AtomicBool::new(false);
    let wire = site.wire();
    let swapped = AtomicU32::new(0);
    let (got, rounds) = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| {
            wire.run(&stop, |count| if count % 23 < 2 { DatagramFate::Lose } else { DatagramFate::Pass })
        });
        get_to_know(&site, &sender, &mut receiver);
        let receiving = scope.spawn(|| receive(&far, SENT as usize));
        // The sender waits for each of the first swaps of function lists, and then sends a part of the messages.
        let sending = scope.spawn(|| {
            let part = SENT / PARTS;
            for at in 0..PARTS {
                wait_for("a swap", || swapped.load(Ordering::Relaxed) >= at);
                send_into_window(&near, at * part..(at + 1) * part);
            }
        });
        let mut rounds = 0;
        while !receiving.is_finished() {
            let next = list([GO_BACK, SELECTIVE][rounds % 2]);
            let epoch = receiver.accept(&there, &next).expect("ready");
            assert_eq!(sender.accept(&here, &next).expect("ready"), epoch);
            sender.switch(&here, epoch).expect("switched");
            receiver.switch(&there, epoch).expect("switched");
            // Waits until no packet that was sent before the swap of function lists is in flight.
            let sent = sender.progress(&here).expect("progress").next;
            let known = || {
                let last = TalkMessage::Last(sender.progress(&here).expect("progress").next);
                inside(&site.network.publisher, || sender.say(&here, last).expect("said"));
                sender.progress(&here).expect("progress")
            };
            wait_until("what was sent", known, |known| (known.acked as i32).wrapping_sub(sent as i32) >= 0);
            sender.retire(&here, epoch ^ 1).expect("retired");
            receiver.retire(&there, epoch ^ 1).expect("retired");
            rounds += 1;
            swapped.fetch_add(1, Ordering::Relaxed);
        }
        sending.join().expect("sent");
        stop.store(true, Ordering::Relaxed);
        (receiving.join().expect("messages"), rounds)
    });
    assert_all_once(&got, SENT);
    assert!(rounds > 3, "{rounds}");
}

/// If an application does not read, the sender stops before the receiver's socket overflows. When the application
/// reads, all messages arrive.
#[test]
fn sender_stops_while_the_receiver_does_not_read() {
    const SENT: u32 = 1000;
    if !root("sender_stops_while_the_receiver_does_not_read") {
        return;
    }
    let site = PacketHook::new("room", 4);
    let (near, far) = site.sockets();
    setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors");
    setsockopt(&far, sockopt::RcvBuf, &(64 << 10)).expect("a small buffer");
    let [mut sender, mut receiver] = site.hooks_of(SELECTIVE, &[("window", "packets", 256)]);
    let stop = AtomicBool::new(false);
    let wire = site.wire();
    let got = thread::scope(|scope| {
        let _end = AtEnd(&stop, true);
        scope.spawn(|| wire.run(&stop, |_| DatagramFate::Pass));
        get_to_know(&site, &sender, &mut receiver);
        let sending = scope.spawn(|| send_into_window(&near, 0..SENT));
        // The sender stops long before its window of packets in flight is full: its datagrams are refused again and
        // again, and the number of its next packet does not change.
        let mut before = (0, 0);
        let before = wait_for("its end", || {
            let now = (next(&sender, &site.ends), count(&mut sender, &site.ends, PacketReason::WindowFull));
            if now.0 > 0 && now.0 == before.0 && now.1 >= before.1 + 20 {
                return Ok(now.0);
            }
            if now.0 != before.0 {
                before = now;
            }
            Err(now)
        });
        assert!(before < 150, "{before} packets are more than there is room for");
        let receiving = scope.spawn(|| receive(&far, SENT as usize));
        while !receiving.is_finished() || !sending.is_finished() {
            // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
            thread::sleep(Duration::from_millis(5));
            let last = TalkMessage::Last(next(&sender, &site.ends));
            inside(&site.network.publisher, || sender.say(&site.ends, last)).expect("said");
        }
        stop.store(true, Ordering::Relaxed);
        sending.join().expect("sent");
        receiving.join().expect("messages")
    });
    assert_all_once(&got, SENT);
}

fn next(sender: &PacketHooks, ends: &SessionEnds) -> u32 {
    sender.progress(ends).expect("progress").next
}

/// Parity packets recover single losses, so nearly all messages arrive without a retransmission.
#[test]
fn parity_recovers_single_losses() {
    const SENT: u32 = 2000;
    if !root("parity_recovers_single_losses") {
        return;
    }
    for family in [4, 6] {
        let site = PacketHook::new("fec", family);
        let (near, far) = site.sockets();
        let [mut sender, mut receiver] = site.hooks_of(&["number", "fec"], &[("fec", "packets", 8)]);
        let stop = AtomicBool::new(false);
        // The wire loses at most one of the 9 packets of a block, parity packets included.
        let lossy =
            |count: u64| if count % 9 == count / 9 % 9 { DatagramFate::Lose } else { DatagramFate::Pass };
        let pace = TrafficPace::ahead(20);
        let wire = site.wire();
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, lossy));
            scope.spawn(|| pace.send(&near, SENT));
            let got = pace.receive(&far, SENT);
            stop.store(true, Ordering::Relaxed);
            got
        });
        assert_all_once(&got, SENT);
        let there = other_side(&site.ends);
        assert_eq!(count(&mut sender, &site.ends, PacketReason::Protected), u64::from(SENT) / 8);
        // The application may receive a recovered packet before the kernel has counted it as recovered.
        let come =
            || [PacketReason::Delivered, PacketReason::Recovered].map(|it| count(&mut receiver, &there, it));
        let all = u64::from(SENT);
        let [_, recovered] = wait_until("all counts", come, |come| come.iter().sum::<u64>() == all);
        assert!(recovered >= u64::from(SENT) / 8 * 8 / 9 - 9, "{recovered} were recovered");
    }
}
