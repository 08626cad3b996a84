//! Tests that no forged or altered packet is forwarded.

use libbpf_rs::ProgramMut;

use super::*;

/// Number of genuine packets that each publisher sends. Forged packets are made from them.
const MODELS: u64 = 64;

/// A publisher and the genuine packets that it has sent.
struct ForgedPublisher {
    keys: DirectionKeys,
    packets: Vec<Vec<u8>>,
    _upstream: UpstreamRecord,
    _slot: SlotRecord,
}

impl ForgedPublisher {
    fn new(bench: &mut ProgramBench, suite: KeySuite) -> Self {
        let keys = DirectionKeys::new(suite, ID_LEN, &mut bench.rng);
        let upstream = bench.relay.upstream(0).expect("an upstream");
        upstream.add_id(&keys.id).expect("an ID");
        for generation in [0, 1] {
            upstream.set_keys(generation, &keys.kernel_keys(generation)).expect("keys");
        }
        let mut slot = upstream.slot(STREAM);
        slot.set_position(&Position::opaque(0));
        slot.add(&bench.downstream, &EGRESS).expect("an egress");
        let mut offset = 0;
        let packets = (0..MODELS).map(|number| {
            let len = bench.rng.usize(20..1300);
            let chunk =
                StreamPart { stream: STREAM, offset, data: quic::bytes(len, &mut bench.rng), fin: false };
            offset += len as u64;
            keys.seal(0, number, bench.rng.usize(2..=4), &chunk.encode())
        });
        let packets = packets.collect();
        Self { keys, packets, _upstream: upstream, _slot: slot }
    }
}

/// How a packet is forged from genuine packets.
#[derive(Clone, Copy, Debug)]
enum Forgery {
    Flipped,
    Truncated,
    Extended,
    Replayed,
    /// The packet has the connection ID of another connection.
    SwappedId,
    /// The packet has the beginning of one genuine packet and the end of another.
    Spliced,
    /// The bytes after the connection ID are random.
    Garbage,
    /// The packet is encrypted with another connection's keys.
    OthersKeys,
}

const FORGERIES: [Forgery; 8] = [
    Forgery::Flipped,
    Forgery::Truncated,
    Forgery::Extended,
    Forgery::Replayed,
    Forgery::SwappedId,
    Forgery::Spliced,
    Forgery::Garbage,
    Forgery::OthersKeys,
];

impl Forgery {
    /// Makes a forged packet from genuine packets of one of the publishers. Forgeries that combine two packets, or a
    /// packet and keys, also use packets or keys of another publisher. `number` is an unused packet number.
    fn make(self, publishers: &[ForgedPublisher], number: u64, rng: &mut Rng) -> Vec<u8> {
        let which = rng.usize(..publishers.len());
        let one = &publishers[which];
        let other = &publishers[(which + rng.usize(1..publishers.len())) % publishers.len()];
        let mut packet = one.packets[rng.usize(..one.packets.len())].clone();
        match self {
            Self::Flipped => {
                let bits = rng.usize(1..9);
                (0..bits).for_each(|_| {
                    let at = rng.usize(..packet.len() * 8);
                    packet[at / 8] ^= 1 << (at % 8);
                });
            }
            Self::Truncated => packet.truncate(rng.usize(..packet.len())),
            Self::Extended => {
                let bytes = rng.usize(1..64);
                packet.extend(quic::bytes(bytes, rng));
            }
            Self::Replayed => {}
            Self::SwappedId => packet[1..=ID_LEN].copy_from_slice(&other.keys.id),
            Self::Spliced => {
                let end = &other.packets[rng.usize(..other.packets.len())];
                let at = rng.usize(1 + ID_LEN..packet.len().min(end.len()));
                packet.truncate(at);
                packet.extend(&end[at..]);
            }
            Self::Garbage => packet[1 + ID_LEN..].fill_with(|| rng.u8(..)),
            Self::OthersKeys => {
                let data = vec![1; rng.usize(20..100)];
                let chunk = StreamPart { stream: STREAM, offset: 0, data, fin: false };
                packet = other.keys.seal(rng.u16(..2), number, 4, &chunk.encode());
                packet[1..=ID_LEN].copy_from_slice(&one.keys.id);
            }
        }
        packet
    }
}

fn pass(program: &ProgramMut<'_>, packet: &[u8]) {
    let frame = ethernet(0x0800, &ipv4(0, &udp(PORT, packet)));
    let input = ProgramInput { data_in: Some(&frame), ..ProgramInput::default() };
    assert_eq!(program.test_run(input).expect("test run").return_value, PASS_ON);
}

/// Sends `count` forged packets, and checks that none is copied to subscribers and that all are passed on to userspace.
/// Returns the counted outcomes.
fn forge(count: u64) -> Vec<(&'static str, u64)> {
    let mut bench = ProgramBench::new();
    let publishers = quic::SUITES.map(|suite| ForgedPublisher::new(&mut bench, suite));
    let object = lock(&bench.relay.object);
    let program = object.program("relay_ingress").expect("the program");
    let genuine: Vec<_> = publishers.iter().flat_map(|publisher| &publisher.packets).collect();
    genuine.iter().for_each(|packet| pass(&program, packet));
    let mut rng = Rng::with_seed(count);
    let mut made = 0;
    while made < count {
        let packet = FORGERIES[made as usize % FORGERIES.len()].make(&publishers, MODELS + made, &mut rng);
        // Two bit flips may cancel each other out. The packet is then unchanged, and is declined as a replay.
        pass(&program, &packet);
        made += 1;
    }
    drop(object);
    let counters = bench.counted();
    let genuine = genuine.len() as u64;
    assert_eq!(counters.packets(Outcome::Forwarded), genuine, "{counters:?}");
    assert_eq!(bench.egresses_tried(), genuine);
    assert_eq!(counters.egresses.iter().sum::<u64>(), genuine);
    let all = Outcome::ALL.map(|outcome| (outcome.name(), counters.packets(outcome)));
    assert_eq!(all.iter().map(|(_, packets)| packets).sum::<u64>(), genuine + count);
    all.into_iter().filter(|(_, packets)| *packets > 0).collect()
}

#[test]
fn no_forged_packet_is_forwarded() {
    if root("no_forged_packet_is_forwarded") {
        forge(10_000);
    }
}

/// This test runs in `make soak`, or with `cargo test -p millrace-relay-kernel --lib -- --ignored --nocapture
/// ten_million_forged`. The test takes ten minutes.
#[test]
#[ignore = "soak: takes minutes"]
fn ten_million_forged_packets_are_not_forwarded() {
    if !root("ten_million_forged_packets_are_not_forwarded") {
        return;
    }
    let begin = std::time::Instant::now();
    let counted = forge(10_000_000);
    println!("10000000 forged packets in {:.0?}, none forwarded: {counted:?}", begin.elapsed());
}
