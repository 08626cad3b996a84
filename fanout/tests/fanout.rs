//! Measures and compares methods to continue a fan-out that is too large for one run of the relay program:
//!
//! `cargo test -p millrace-fanout --test fanout -- --ignored --nocapture`, as root on a machine that does nothing else.
//!
//! The publisher, and so the program, runs on CPU 0; the receiver runs on CPU 1. Packets of a bystander, a flow that
//! has nothing to do with the fan-out, are steered to CPU 0 a moment after each of the publisher's. Their delay tells
//! how long CPU 0 is kept from other work.

#[path = "../../relay/kernel/tests/support/quic.rs"]
#[allow(dead_code)]
mod quic;

use millrace_testkit::net;
use std::io::IoSlice;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use millrace_kernel::crypto::QuicKeys;
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{
    Compute, Config, DownstreamRecord, EgressRecord, Forwarded, PacketPath, Position, RelayProgram,
    WantedRing,
};
use net::{NamespaceNetwork, address, inside};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, sendmmsg};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use quic::{DirectionKeys, StreamPart};

const PORT: u16 = 4443;
const EGRESSES: usize = 512;
const PACKETS: u64 = 100;
const ROUNDS: usize = 3;
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Clone, Copy, Debug)]
enum CopyMethod {
    /// One run of the BPF program makes the copies of a packet for all receivers, however long that takes.
    OneRun,
    /// Further runs of the program make the remaining copies, on the CPU that received the packet.
    FurtherRuns,
    /// Further runs of the program make the remaining copies, spread over both CPUs by RPS.
    FurtherRunsSpread,
    /// One run makes some copies, and userspace sends the others. The first receiver changes with every packet.
    Userspace,
}

const WAYS: [CopyMethod; 4] =
    [CopyMethod::OneRun, CopyMethod::FurtherRuns, CopyMethod::FurtherRunsSpread, CopyMethod::Userspace];

/// Delays that were measured with one [`CopyMethod`], in microseconds.
#[derive(Default)]
struct DelayFigures {
    /// Time from the publisher's send call until the program reported a copy as sent, or userspace sent the copy.
    copies: Vec<u64>,
    /// Time from the publisher's send call until the program reported the last copy of the packet as sent, or userspace
    /// sent the last copy.
    last: Vec<u64>,
    bystander: Vec<u64>,
}

#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn delays_of_each_fan_out_method_are_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP delays_of_each_fan_out_method_are_measured: needs root");
        return;
    }
    println!(
        "{EGRESSES} subscribers, 1200 bytes, {ROUNDS} x {PACKETS} packets; medians over rounds (least, most), us"
    );
    let mut all: Vec<Vec<DelayFigures>> = WAYS.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        WAYS.iter().zip(&mut all).for_each(|(way, rounds)| rounds.push(measure(*way)));
    }
    for (way, rounds) in WAYS.iter().zip(&mut all) {
        let mut row = format!("{way:?}:");
        type Series = fn(&mut DelayFigures) -> &mut Vec<u64>;
        let series: [(&str, Series); 3] = [
            ("copy", |f| &mut f.copies),
            ("last copy", |f| &mut f.last),
            ("bystander", |f| &mut f.bystander),
        ];
        for (name, pick) in series {
            for percent in [50, 99] {
                let mut values: Vec<_> = rounds.iter_mut().map(|f| percentile(pick(f), percent)).collect();
                values.sort_unstable();
                let least = values[0];
                let most = values[ROUNDS - 1];
                row += &format!("  {name} p{percent} {} ({least}, {most})", values[ROUNDS / 2]);
            }
        }
        println!("{row}");
    }
}

fn percentile(values: &mut [u64], percent: usize) -> u64 {
    values.sort_unstable();
    values[(values.len() - 1) * percent / 100]
}

fn now_ns() -> u64 {
    Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock")).as_nanos() as u64
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &set).expect("affinity");
}

struct SealedSubscriber {
    keys: DirectionKeys,
    downstream: DownstreamRecord,
}

fn subscriber(
    relay: &RelayProgram,
    local: SocketAddr,
    remote: SocketAddr,
    rng: &mut Rng,
) -> SealedSubscriber {
    let keys = DirectionKeys::new(KeySuite::ChaCha20Poly1305, 8, rng);
    let path = PacketPath { local, remote, id: keys.id.clone(), traffic_class: 0, flow_label: 0 };
    let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
    downstream.set_keys(0, &keys.kernel_keys(0)).expect("keys");
    downstream.set_max_bytes(u64::MAX / 2);
    downstream.set_max_data(u64::MAX / 2);
    SealedSubscriber { keys, downstream }
}

fn measure(way: CopyMethod) -> DelayFigures {
    let network = NamespaceNetwork::new("fan");
    let mut rng = Rng::with_seed(1);
    let (max_copies_per_run, max_runs) = match way {
        CopyMethod::OneRun => (EGRESSES as u32, 1),
        CopyMethod::FurtherRuns | CopyMethod::FurtherRunsSpread => (64, 64),
        CopyMethod::Userspace => (64, 1),
    };
    let config = Config { ports: vec![PORT], max_copies_per_run, max_runs, ..Config::default() };
    let relay = RelayProgram::load(&config).expect("the relay loads");
    if matches!(way, CopyMethod::FurtherRunsSpread) {
        net::steer(&network.relay, "west", 3);
    }
    // The relay's interface `east`, on which the bystander's packets arrive, hands all its packets to CPU 0.
    net::steer(&network.relay, "east", 1);
    let sink = net::socket(&network.subscriber, SocketAddr::new(address(4, 2, 2), 0));
    let remote = sink.local_addr().expect("address");
    let local = SocketAddr::new(address(4, 2, 1), PORT);
    let from_relay = net::socket(&network.relay, SocketAddr::new(local.ip(), 0));
    from_relay.send_to(&[0], remote).expect("send");
    let publisher = DirectionKeys::new(KeySuite::ChaCha20Poly1305, 8, &mut rng);
    let upstream = relay.upstream(0).expect("an upstream");
    upstream.add_id(&publisher.id).expect("an ID");
    upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
    let subscribers: Vec<_> = (0..EGRESSES).map(|_| subscriber(&relay, local, remote, &mut rng)).collect();
    let mut slot = upstream.slot(2);
    for (tag, subscriber) in (0..).zip(&subscribers) {
        let egress = EgressRecord {
            stream_id: 3,
            shift: 0,
            from: 0,
            max_offset: 1 << 60,
            tag,
            level: 0,
            track: 0,
            group: 0,
        };
        slot.add(&subscriber.downstream, &egress).expect("an egress");
    }
    let ifindex = net::ifindex(&network.relay, "west");
    inside(&network.relay, || relay.attach(ifindex).expect("the relay attaches"));
    let to = net::socket(&network.relay, SocketAddr::new(address(4, 1, 1), PORT));
    let from = net::socket(&network.publisher, SocketAddr::new(address(4, 1, 2), 0));
    from.connect(to.local_addr().expect("address")).expect("connect");

    let chunk = StreamPart { stream: 2, offset: 7, data: quic::bytes(1200, &mut rng), fin: false };
    let packets: Vec<_> = (0..PACKETS).map(|number| publisher.seal(0, number, 2, &chunk.encode())).collect();
    let sent: Vec<AtomicU64> = packets.iter().map(|_| AtomicU64::default()).collect();
    let next = Barrier::new(2);
    let bystander = Bystander::new(&network);
    let mut figures = DelayFigures::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            for (packet, sent) in packets.iter().zip(&sent) {
                next.wait();
                std::thread::sleep(PAUSE); // exact: this pause between two packets sets the sending rate
                sent.store(now_ns(), Ordering::SeqCst);
                from.send(packet).expect("send");
            }
        });
        pin(1);
        let mut outgoing = OutgoingBatches { socket: from_relay, remote, packets: Vec::new() };
        let refill = || {
            for SealedSubscriber { keys, downstream } in &subscribers {
                assert_eq!(
                    downstream.refill(WantedRing { len: 4, text_bytes: 1300 }, keys.keystreams()).len,
                    4
                );
            }
        };
        for (number, (packet, sent)) in packets.iter().zip(&sent).enumerate() {
            refill();
            slot.set_position(&Position::opaque(7));
            next.wait();
            figures.bystander.push(bystander.delay(sent));
            let mut buffer = [0; 2048];
            let len = to.recv(&mut buffer).expect("the original");
            assert_eq!(buffer[..len], *packet);
            let sent = sent.load(Ordering::SeqCst);
            let mut times = [0; EGRESSES];
            relay.drain(|one: Forwarded| times[one.tag as usize] = one.time_ns);
            if matches!(way, CopyMethod::Userspace) {
                outgoing.rest(&subscribers, number * 64 % EGRESSES, &chunk, &mut times);
            }
            assert!(times.iter().all(|time| *time > 0), "a copy is missing");
            let delays = times.iter().map(|time| (time - sent) / 1000);
            figures.last.extend(delays.clone().max());
            figures.copies.extend(delays);
        }
    });
    figures
}

/// A sender in userspace that does as little work as possible. It encrypts and sends packets in batches, and already
/// knows to which subscribers the kernel has sent their copies.
struct OutgoingBatches {
    socket: UdpSocket,
    remote: SocketAddr,
    packets: Vec<Vec<u8>>,
}

impl OutgoingBatches {
    /// Sends the copies that the kernel has not sent, beginning with subscriber `first`.
    fn rest(
        &mut self,
        subscribers: &[SealedSubscriber],
        first: usize,
        chunk: &StreamPart,
        times: &mut [u64],
    ) {
        let frames = StreamPart { stream: 3, ..chunk.clone() }.encode();
        let missing: Vec<_> =
            (first..EGRESSES).chain(0..first).filter(|subscriber| times[*subscriber] == 0).collect();
        for batch in missing.chunks(64) {
            self.packets.clear();
            for subscriber in batch {
                let SealedSubscriber { keys, downstream } = &subscribers[*subscriber];
                let number = downstream.number().fetch_add(1, Ordering::SeqCst);
                self.packets.push(keys.build((0, number), &frames));
            }
            let slices: Vec<_> = self.packets.iter().map(|packet| [IoSlice::new(packet)]).collect();
            let to = vec![Some(SockaddrStorage::from(self.remote)); batch.len()];
            let mut headers = MultiHeaders::preallocate(batch.len(), None);
            let fd = self.socket.as_raw_fd();
            let none = MsgFlags::empty();
            let sent = sendmmsg(fd, &mut headers, &slices, &to, [], none).expect("sent").count();
            assert_eq!(sent, batch.len());
            let now = now_ns();
            batch.iter().for_each(|subscriber| times[*subscriber] = now);
        }
    }
}

/// A flow that has nothing to do with the fan-out, whose small packets CPU 0 receives.
struct Bystander {
    from: UdpSocket,
    to: UdpSocket,
}

impl Bystander {
    fn new(network: &NamespaceNetwork) -> Self {
        let to = net::socket(&network.relay, SocketAddr::new(address(4, 2, 1), 0));
        let from = net::socket(&network.subscriber, SocketAddr::new(address(4, 2, 2), 0));
        from.connect(to.local_addr().expect("address")).expect("connect");
        Self { from, to }
    }

    /// Returns the delay in microseconds of a packet that is sent a moment after one of the publisher's.
    fn delay(&self, publisher: &AtomicU64) -> u64 {
        const MOMENT_NS: u64 = 100_000;
        let due = || publisher.load(Ordering::SeqCst) + MOMENT_NS;
        while due() == MOMENT_NS || now_ns() < due() {
            std::hint::spin_loop();
        }
        let sent = now_ns();
        self.from.send(&[1]).expect("send");
        self.to.recv(&mut [0; 8]).expect("receive");
        (now_ns() - sent) / 1000
    }
}
