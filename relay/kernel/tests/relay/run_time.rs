//! What a packet costs.

use std::time::Duration;

use millrace_kernel::programs::{RunTime, Statistics};
use millrace_moq::data::{Field, Status, encode_object_header};
use millrace_quic::keys::Suite;
use millrace_relay_kernel::program::{PositionRecord, Want};

use crate::net::{Network, root};
use crate::peers::{Subscriber, attach};
use crate::quic;
use crate::scene::{ID_LEN, OFFSET, STREAMS, Scene, slot, subscriber};

const ROUNDS: usize = 5;
const EGRESSES: [usize; 3] = [1, 8, 32];
/// What a stream of 500 objects a second looks like: between two packets others use the caches.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Clone, Copy)]
struct Case {
    suite: Suite,
    egresses: usize,
    ahead: bool,
    packets: u64,
    pause: Duration,
}

/// `cargo test -p millrace-relay-kernel --test relay -- --ignored --nocapture run_time`, on a machine that does nothing
/// else. The kernel's statistics add some 30 ns to every run.
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn run_time_per_packet() {
    if !root("run_time_per_packet") {
        return;
    }
    let _statistics = Statistics::enable().expect("statistics");
    println!("ns per packet, least / median / most of {ROUNDS} rounds");
    println!("not an upstream's: {}", rounds(nobodys_packets));
    for suite in quic::SUITES {
        for ahead in [false, true] {
            for egresses in [&[0], EGRESSES.as_slice()].concat() {
                let packets = if egresses < 8 { 2000 } else { 500 };
                let case = Case { suite, egresses, ahead, packets, pause: Duration::ZERO };
                println!(
                    "{suite:?}, {egresses} egresses, keystreams ahead {ahead}: {}",
                    rounds(|| case.measure())
                );
            }
        }
    }
    for egresses in EGRESSES {
        let case = Case { suite: Suite::ChaCha20Poly1305, egresses, ahead: true, packets: 500, pause: PAUSE };
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

impl Case {
    /// Mean run time for packets with an object of one stream each, 1200 bytes with its header, nanoseconds.
    fn measure(self) -> u64 {
        let Self { suite, egresses, ahead, packets, pause } = self;
        let (network, mut object) = (Network::new("rt"), Vec::new());
        let mut scene = Scene::new(&network, 4, &[4], suite, 0, 1);
        let subscriber = |_| subscriber(&network, &scene.relay, 4, suite, &mut scene.rng);
        scene.subscribers = (0..egresses).map(subscriber).collect();
        scene.slots = vec![slot(&scene.upstream, &STREAMS[0], 0, &scene.subscribers)];
        scene.slots[0].set_position(&PositionRecord {
            offset: OFFSET,
            field: Field::Object as u8,
            ..PositionRecord::default()
        });
        attach(&network, &scene.relay, "west");
        let mut chunk = scene.chunk(1200);
        encode_object_header(Some(0), 1, None, 1197, Status::Normal, &mut object);
        chunk.data[..3].copy_from_slice(&object);
        let before = run_time();
        for number in 0..packets {
            if ahead && number % 16 == 0 {
                let want = Want { len: 32, text_bytes: 1300 };
                scene.upstream.refill(0, want, scene.publisher.keystreams());
                for subscriber in &mut scene.subscribers {
                    subscriber.downstream.refill(want, subscriber.keys.keystreams());
                }
            }
            chunk.offset = OFFSET + 1200 * number;
            let packet = scene.publisher.seal((0, number), 2, &chunk.encode());
            assert_eq!(scene.send(&packet).len(), egresses);
            // Copies that pile up would make the kernel look for new memory.
            let mut buffer = [0; 2048];
            let mut read = |subscriber: &Subscriber| subscriber.socket.recv(&mut buffer).expect("a copy");
            scene.subscribers.iter().for_each(|subscriber| assert!(read(subscriber) > 1200));
            scene.capture.frames();
            std::thread::sleep(pause); // exact: paces the sender
        }
        per_run(before)
    }
}

/// The same for what is as long as an acknowledgement, of a connection that is no upstream.
fn nobodys_packets() -> u64 {
    let network = Network::new("rn");
    let mut scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 0, 1);
    attach(&network, &scene.relay, "west");
    let packet = [&[0x40; 1 + ID_LEN], quic::bytes(28, &mut scene.rng).as_slice()].concat();
    let before = run_time();
    for _ in 0..2000 {
        assert!(scene.send(&packet).is_empty());
    }
    per_run(before)
}

/// Of all programs of this process, which has one.
fn run_time() -> RunTime {
    RunTime::of_process(std::process::id()).expect("statistics")
}

fn per_run(before: RunTime) -> u64 {
    let RunTime { runs, ns } = run_time().since(before);
    ns / runs.max(1)
}
