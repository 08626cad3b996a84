//! What a packet costs.

use millrace_bpf::relay::Want;
use millrace_proto::quic::keys::Suite;

use crate::net::{Network, root};
use crate::peers::attach;
use crate::quic;
use crate::scene::{STREAMS, Scene, slot, subscriber};

/// `cargo test -p millrace-bpf --test relay -- --ignored --nocapture run_time`, on a machine that does nothing
/// else and with `sysctl kernel.bpf_stats_enabled=1`.
#[test]
#[ignore = "measures, which takes a quiet machine"]
fn run_time_per_packet() {
    if !root("run_time_per_packet") {
        return;
    }
    for suite in quic::SUITES {
        for legs in [0, 1, 8, 32] {
            for ahead in [false, true] {
                let time = measure(suite, legs, ahead);
                println!("{suite:?}, {legs} legs, keystreams ahead {ahead}: {time} ns");
            }
        }
    }
}

/// Mean run time for packets with 1200 bytes of one stream, nanoseconds.
fn measure(suite: Suite, legs: usize, ahead: bool) -> u64 {
    const PACKETS: u64 = 4000;
    let network = Network::new("rt");
    let mut scene = Scene::new(&network, 4, &[4], suite, 0, 1);
    let subscriber = |_| subscriber(&network, &scene.relay, 4, suite, &mut scene.rng);
    scene.subscribers = (0..legs).map(subscriber).collect();
    scene.slots = vec![slot(&scene.upstream, &STREAMS[0], 0, &scene.subscribers)];
    attach(&network, &scene.relay, "west");
    let chunk = scene.chunk(1200);
    let before = run_time();
    for number in 0..PACKETS {
        if ahead && number % 16 == 0 {
            let want = Want { len: 32, text_bytes: 1300 };
            scene.upstream.refill(0, want, scene.publisher.keystreams());
            for subscriber in &mut scene.subscribers {
                subscriber.downstream.refill(want, subscriber.keys.keystreams());
            }
        }
        let packet = scene.publisher.seal((0, number), 2, &chunk.encode());
        assert_eq!(scene.send(&packet).len(), legs);
    }
    let after = run_time();
    (after.0 - before.0) / (after.1 - before.1).max(1)
}

/// Run time and runs of the program, by the kernel's own statistics.
fn run_time() -> (u64, u64) {
    let programs = libbpf_rs::query::ProgInfoIter::default();
    let relay = programs.filter(|program| program.name == "relay_ingress").max_by_key(|program| program.id);
    let relay = relay.expect("the program");
    (relay.run_time_ns, relay.run_cnt)
}
