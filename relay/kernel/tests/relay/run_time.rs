//! Measures the relay BPF program's run time per packet.

use std::time::Duration;

use millrace_kernel::programs::{RunTime, Statistics};
use millrace_moq::data::{Field, Status, encode_object_header};
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{Position, WantedRing};

use crate::net::{NamespaceNetwork, root};
use crate::peers::{KernelSubscriber, attach};
use crate::quic;
use crate::scene::{ID_LEN, OFFSET, RelayScene, STREAMS, slot, subscriber};

const ROUNDS: usize = 5;
const EGRESSES: [usize; 3] = [1, 8, 32];
/// The pause between packets, as in a stream with 500 objects a second. Meanwhile other programs evict the program's
/// data from the CPU caches.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Clone, Copy)]
struct RunTimeCase {
    suite: KeySuite,
    egresses: usize,
    /// Whether keystreams are computed before the packets arrive.
    ahead: bool,
    packets: u64,
    pause: Duration,
}

/// Run this test with `cargo test -p millrace-relay-kernel --test relay -- --ignored --nocapture run_time` on an idle
/// machine. The kernel's statistics add about 30 ns to each run.
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn program_run_time_per_packet_is_measured() {
    if !root("program_run_time_per_packet_is_measured") {
        return;
    }
    let _statistics = Statistics::enable().expect("statistics");
    println!("ns per packet, least / median / most of {ROUNDS} rounds");
    println!("not an upstream's: {}", rounds(nobodys_packets));
    for suite in quic::SUITES {
        for ahead in [false, true] {
            for egresses in [&[0], EGRESSES.as_slice()].concat() {
                let packets = if egresses < 8 { 2000 } else { 500 };
                let case = RunTimeCase { suite, egresses, ahead, packets, pause: Duration::ZERO };
                println!(
                    "{suite:?}, {egresses} egresses, keystreams ahead {ahead}: {}",
                    rounds(|| case.measure())
                );
            }
        }
    }
    for egresses in EGRESSES {
        let case = RunTimeCase {
            suite: KeySuite::ChaCha20Poly1305,
            egresses,
            ahead: true,
            packets: 500,
            pause: PAUSE,
        };
        println!(
            "{egresses} egresses, keystreams ahead, one packet every {PAUSE:?}: {}",
            rounds(|| case.measure())
        );
    }
}

fn rounds(mut measure: impl FnMut() -> u64) -> String {
    let mut times: Vec<_> = (0..ROUNDS).map(|_| measure()).collect();
    times.sort_unstable();
    format!("{} / {} / {}", times[0], times[ROUNDS / 2], times[ROUNDS - 1])
}

impl RunTimeCase {
    /// Returns the mean run time for a packet in nanoseconds. Each packet has one object with 1200 bytes of one stream.
    fn measure(self) -> u64 {
        let Self { suite, egresses, ahead, packets, pause } = self;
        let network = NamespaceNetwork::new("rt");
        let mut object = Vec::new();
        let mut scene = RelayScene::new(&network, 4, &[4], suite, 0, 1);
        let subscriber = |_| subscriber(&network, &scene.relay, 4, suite, &mut scene.rng);
        scene.subscribers = (0..egresses).map(subscriber).collect();
        scene.slots = vec![slot(&scene.upstream, &STREAMS[0], 0, &scene.subscribers)];
        scene.slots[0].set_position(&Position {
            offset: OFFSET,
            field: Field::Object,
            ..Position::default()
        });
        attach(&network, &scene.relay, "west");
        let mut chunk = scene.chunk(1200);
        encode_object_header(Some(0), 1, None, 1197, Status::Normal, &mut object);
        // The header of the MoQ object takes the first 3 bytes of the stream data in each packet.
        chunk.data[..3].copy_from_slice(&object);
        let before = run_time();
        for number in 0..packets {
            if ahead && number % 16 == 0 {
                let want = WantedRing { len: 32, text_bytes: 1300 };
                scene.upstream.refill(0, want, scene.publisher.keystreams());
                for subscriber in &mut scene.subscribers {
                    subscriber.downstream.refill(want, subscriber.keys.keystreams());
                }
            }
            chunk.offset = OFFSET + 1200 * number;
            let packet = scene.publisher.seal(0, number, 2, &chunk.encode());
            assert_eq!(scene.send(&packet).len(), egresses);
            // The copies are read at once, because waiting copies would make the kernel allocate more memory.
            let mut buffer = [0; 2048];
            let mut read =
                |subscriber: &KernelSubscriber| subscriber.socket.recv(&mut buffer).expect("a copy");
            scene.subscribers.iter().for_each(|subscriber| assert!(read(subscriber) > 1200));
            scene.capture.frames();
            std::thread::sleep(pause); // exact: the pause between two packets of the sender
        }
        per_run(before)
    }
}

/// Returns the mean run time for packets of an unknown connection. They are as long as an acknowledgement.
fn nobodys_packets() -> u64 {
    let network = NamespaceNetwork::new("rn");
    let mut scene = RelayScene::new(&network, 4, &[4], KeySuite::ChaCha20Poly1305, 0, 1);
    attach(&network, &scene.relay, "west");
    let packet = [&[0x40; 1 + ID_LEN], quic::bytes(28, &mut scene.rng).as_slice()].concat();
    let before = run_time();
    for _ in 0..2000 {
        assert!(scene.send(&packet).is_empty());
    }
    per_run(before)
}

/// Returns the number and the total time of all runs of this process's BPF programs. This process has loaded only the
/// relay's program.
fn run_time() -> RunTime {
    RunTime::list_functions(std::process::id(), None).expect("statistics")
}

fn per_run(before: RunTime) -> u64 {
    let RunTime { runs, ns } = run_time().since(before);
    ns / runs.max(1)
}
