//! Runs the BPF program with BPF_PROG_TEST_RUN, without an interface, and checks its outcome for each kind of packet.

mod forged;
mod judging;
mod keys;
mod keystreams;
mod packets;
#[path = "../../tests/support/quic.rs"]
#[allow(dead_code)]
mod quic;
mod runs;
mod tracing;

use fastrand::Rng;
use libbpf_rs::{MapCore as _, MapFlags, ProgramInput};
use millrace_quic::keys::KeySuite;

use std::cell::RefCell;
use std::num::NonZero;

use millrace_kernel::crypto::QuicKeys;

use super::*;
use quic::{DirectionKeys, StreamPart};

const PORT: u16 = 4443;
const ID_LEN: usize = 8;
const STREAM: u64 = 6;
const OFFSET: u64 = 7;
/// The copy of `STREAM` for the only subscriber. Its first byte to send is out of reach, so the program declines every
/// copy.
const EGRESS: EgressRecord = EgressRecord {
    stream_id: 3,
    shift: 2,
    from: u64::MAX,
    max_offset: 0,
    tag: 0,
    level: 0,
    track: 5,
    group: 1 << 40,
};
const PUBLISHER: u32 = 11;
const SUBSCRIBER: u32 = 12;

const PASS_ON: u32 = -1i32 as u32;
const DROP: u32 = 2;

struct ProgramBench {
    relay: RelayProgram,
    upstream: UpstreamRecord,
    publisher: DirectionKeys,
    slot: RefCell<SlotRecord>,
    downstream: DownstreamRecord,
    rng: Rng,
}

impl ProgramBench {
    /// Loads the program with one publisher's connection. The stream `STREAM` of that connection has one subscriber,
    /// and the program declines every copy for it.
    fn new() -> Self {
        Self::with_config(Config::default())
    }

    fn with_config(config: Config) -> Self {
        let mut rng = Rng::with_seed(3);
        let config = Config { ports: vec![1, PORT], id_len: ID_LEN, ..config };
        let relay = RelayProgram::load(&config).expect("the relay loads");
        let publisher = DirectionKeys::new(KeySuite::ChaCha20Poly1305, ID_LEN, &mut rng);
        let upstream = relay.upstream(0).expect("an upstream");
        upstream.add_id(&publisher.id).expect("an ID");
        upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
        let path = PacketPath {
            local: ([10, 0, 0, 1], PORT).into(),
            remote: ([10, 0, 0, 2], PORT).into(),
            id: vec![1],
            traffic_class: 0,
            flow_label: 0,
        };
        let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
        upstream.set_session(PUBLISHER);
        downstream.set_session(SUBSCRIBER);
        let mut slot = upstream.slot(STREAM);
        slot.add(&downstream, &EGRESS).expect("an egress");
        Self { relay, upstream, publisher, slot: RefCell::new(slot), downstream, rng }
    }

    /// Runs the program on one Ethernet frame, which the program must pass on to userspace. Returns the outcome of the
    /// packet.
    fn run(&self, frame: &[u8], gso_size: u32) -> Outcome {
        self.rewind();
        let before = self.counted();
        assert_eq!(self.test_run(frame, &mut context(gso_size)), PASS_ON);
        let counted = self.counted().since(&before);
        assert_eq!(counted.packets.iter().sum::<u64>(), 1, "{counted:?}");
        Outcome::ALL.into_iter().find(|outcome| counted.packets(*outcome) == 1).expect("an outcome")
    }

    /// Resets the position up to which the program has parsed the stream to the offset of the data in [`stream`].
    fn rewind(&self) {
        self.slot.borrow_mut().set_position(&Position::opaque(OFFSET));
    }

    /// Runs the program, and returns its verdict. `context` has the fields of the skb, and is updated to their values
    /// after the run.
    fn test_run(&self, frame: &[u8], context: &mut [u8]) -> u32 {
        let mut after = vec![0; context.len()];
        let input = ProgramInput {
            data_in: Some(frame),
            context_in: Some(context),
            context_out: Some(&mut after),
            ..ProgramInput::default()
        };
        let verdict = {
            let object = lock(&self.relay.object);
            let program = object.program("relay_ingress").expect("the program");
            program.test_run(input).expect("test run").return_value
        };
        context.copy_from_slice(&after);
        verdict
    }

    /// Runs the program on a QUIC packet in an IPv4 frame.
    fn run_packet(&self, packet: &[u8]) -> Outcome {
        self.run(&ethernet(0x0800, &ipv4(0, &udp(PORT, packet))), 0)
    }

    /// Sets the `busy` word (not 0 while a program run uses the area) of every CPU's scratch memory. Returns the
    /// previous values.
    fn set_busy(&self, busy: u64) -> Vec<u64> {
        let mut object = lock(&self.relay.object);
        let works = object.map("works").expect("a map");
        let key = 0u32.to_ne_bytes();
        let mut areas = works.lookup_percpu(&key, MapFlags::ANY).expect("read").expect("an area");
        let were = areas.iter().filter_map(|area| u64::from_bytes(&area[..8])).collect();
        areas.iter_mut().for_each(|area| area[..8].copy_from_slice(&busy.to_ne_bytes()));
        works.update_percpu(&key, &areas, MapFlags::ANY).expect("written");
        were
    }

    fn egresses_tried(&self) -> u64 {
        self.counted().egresses(EgressOutcome::Before)
    }

    fn counted(&self) -> RelayCounters {
        // exact: the BPF program counts packets only during BPF_PROG_TEST_RUN, which has returned
        self.relay.counters().expect("counters")
    }
}

fn ethernet(protocol: u16, rest: &[u8]) -> Vec<u8> {
    [&[2; 12], protocol.to_be_bytes().as_slice(), rest].concat()
}

fn ipv4(options: usize, rest: &[u8]) -> Vec<u8> {
    let [high, low] = ((20 + options * 4 + rest.len()) as u16).to_be_bytes();
    let header = [0x45 + options as u8, 0, high, low, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    [&header, vec![1; options * 4].as_slice(), rest].concat()
}

fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
    let [high, low] = (rest.len() as u16).to_be_bytes();
    [[0x60, 0, 0, 0, high, low, next, 64].as_slice(), &[0xfd; 32], rest].concat()
}

fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let words = [1111, port, payload.len() as u16 + 8, 0].map(u16::to_be_bytes);
    [words.as_flattened(), payload].concat()
}

/// Returns a `struct __sk_buff` with the two fields that mark a GSO packet in BPF_PROG_TEST_RUN.
fn context(gso_size: u32) -> [u8; 192] {
    const GSO_SEGS: usize = 164;
    const GSO_SIZE: usize = 176;
    let mut context = [0; 192];
    context[GSO_SEGS..GSO_SEGS + 4].copy_from_slice(&u32::from(gso_size > 0).to_ne_bytes());
    context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&gso_size.to_ne_bytes());
    context
}

fn stream(len: usize) -> Vec<u8> {
    StreamPart { stream: STREAM, offset: OFFSET, data: vec![9; len], fin: false }.encode()
}

fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}
