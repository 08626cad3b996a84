//! Tests of the congestion window, of pacing, and of path changes.

use super::*;
use crate::plane::ecn;

#[test]
fn quic_stack_gets_the_congestion_window_that_the_data_plane_leaves() {
    let mut sim = sim(SimLink::default());
    let window = sim.down.stack_window();
    assert_eq!(window, 12_000);
    sim.open_whole(3, 5000, 1);
    sim.transmit();
    let own = sim.down.stats().bytes_in_flight;
    assert_eq!(sim.down.stack_window(), window - own);
    let number = sim.number();
    sim.down.on_stack_sent(sim.now, number, 500, true);
    assert_eq!(sim.down.stack_window(), window - own, "the stack's own bytes do not reduce its part");
    assert_eq!(sim.down.stats().bytes_in_flight, own + 500);
    sim.open_whole(4, 50_000, 1);
    sim.transmit();
    assert_eq!(sim.down.stack_window(), 2 * MTU as u64);
}

#[test]
fn path_change_resets_congestion_window_and_round_trip() {
    let mut sim = sim(SimLink::default());
    sim.open_whole(3, 500_000, 1);
    sim.run_until(SECOND, |sim| sim.down.stats().window > 50_000);
    sim.down.on_path_change(sim.now);
    assert_eq!(sim.down.stats().window, 12_000);
    assert_eq!(sim.down.stats().smoothed_rtt, Config::new(CODES).initial_rtt);
    sim.run_until(20 * SECOND, |sim| sim.all_done(1));
    sim.verify(&[(3, 500_000)]);
}

#[test]
fn transfer_resumes_after_an_outage_by_probe_packets() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(8);
    let key = sim.open(&source, 1);
    source.push(30_000, sim.now);
    sim.down.wake(key);
    sim.run_for(SECOND);
    sim.link.loss = 1.0;
    source.push(30_000, sim.now);
    source.finish(SourceEnd::Fin { at: sim.now });
    sim.down.wake(key);
    sim.run_for(3 * SECOND);
    let timeouts = sim.down.stats().recovery.probe_timeouts;
    assert!((4..10).contains(&timeouts), "{timeouts} with exponential backoff");
    sim.link.loss = 0.0;
    sim.run_until(10 * SECOND, |sim| sim.all_done(1));
    sim.verify(&[(8, 60_000)]);
}

#[test]
fn bottleneck_is_filled_with_few_losses() {
    let rate = 1_250_000;
    for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno, CongestionAlgorithm::Bbr] {
        let link = SimLink { rate: Some(rate), queue: 40_000, ..SimLink::default() };
        let mut sim = Sim::new(
            1,
            link,
            ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 9 },
            Config { algorithm, ..Config::new(CODES) },
        );
        sim.open_whole(1, 10_000_000, 1);
        let time = sim.run_until(60 * SECOND, |sim| sim.all_done(1));
        let used = 10_000_000.0 / time.as_secs_f64() / rate as f64;
        let stats = sim.down.stats();
        let lost = stats.recovery.packets_lost as f64 / stats.recovery.packets_sent as f64;
        assert!(used > 0.85, "{algorithm:?} uses {used}");
        assert!(lost < 0.03, "{algorithm:?} loses {lost}");
    }
}

/// The offload does not pace: its packets leave as a burst, and queue in front of the bottleneck.
#[test]
fn unpaced_offload_gets_a_smaller_congestion_window_than_paced_data() {
    let rate = 1_000_000;
    let link =
        SimLink { rate: Some(rate), queue: 100_000, delay: Duration::from_millis(30), ..SimLink::default() };
    let config = Config { algorithm: CongestionAlgorithm::Bbr, ..Config::new(CODES) };
    let mut sim =
        Sim::new(1, link, ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 10 }, config);
    sim.open_whole(1, 4_000_000, 1);
    sim.run_until(20 * SECOND, |sim| sim.all_done(1));
    let window = sim.down.window();
    let unpaced = sim.down.unpaced_window();
    assert!(window > 115_000, "{window}");
    assert!((60_000..70_000).contains(&unpaced), "{unpaced}");
    assert_eq!(sim.down.budget().bytes, unpaced - 2 * MTU as u64);
}

#[test]
fn congestion_window_is_paced_over_the_round_trip() {
    for pacing in [true, false] {
        let config = Config { pacing, algorithm: CongestionAlgorithm::Cubic, ..Config::new(CODES) };
        let mut sim = Sim::new(1, SimLink::default(), ReceiverCredit::default(), config);
        let source = Mem::new(6);
        let key = sim.open(&source, 1);
        source.push(400_000, sim.now);
        sim.down.wake(key);
        sim.run_for(SECOND);
        let before = sim.sent.len();
        let window = sim.down.stats().window;
        assert!(window > 200_000, "{window}");
        source.push(150_000, sim.now);
        sim.down.wake(key);
        sim.transmit();
        let burst = sim.sent.len() - before;
        // The pacer sends 1.25 congestion windows in a round trip of 20 ms. A burst is the packets of 2 ms: an eighth
        // of the congestion window.
        let tenth = window as usize / 8 / MTU;
        assert!(if pacing { burst <= tenth + 1 } else { burst > 120 }, "{burst} packets, window {window}");
        sim.run_for(Duration::from_millis(20));
        assert_eq!(sim.down.stats().pending_bytes, 0);
    }
}

#[test]
fn slow_source_does_not_grow_the_congestion_window() {
    let config = Config { algorithm: CongestionAlgorithm::Cubic, ..Config::new(CODES) };
    let mut sim = Sim::new(1, SimLink::default(), ReceiverCredit::default(), config);
    let source = Mem::new(6);
    let key = sim.open(&source, 1);
    for _ in 0..200 {
        source.push(1000, sim.now);
        sim.down.wake(key);
        sim.run_for(Duration::from_millis(10));
    }
    assert_eq!(sim.down.stats().window, 12_000);
}

#[test]
fn ecn_marks_prevent_losses() {
    let rate = 1_250_000;
    for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno, CongestionAlgorithm::Bbr] {
        let link =
            SimLink { rate: Some(rate), queue: 200_000, mark_above: Some(20_000), ..SimLink::default() };
        let run = |ecn| {
            let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 9 };
            let mut sim = Sim::new(1, link, credit, Config { algorithm, ecn, ..Config::new(CODES) });
            sim.open_whole(1, 10_000_000, 1);
            let time = sim.run_until(60 * SECOND, |sim| sim.all_done(1));
            (sim.down.stats(), 10_000_000.0 / time.as_secs_f64() / rate as f64)
        };
        let (without, _) = run(false);
        assert_eq!((without.ecn, without.recovery.marked), (ecn::EcnState::Off, 0));
        let (with, used) = run(true);
        let counts = with.recovery;
        assert_eq!((with.ecn, counts.packets_lost), (ecn::EcnState::Capable, 0), "{algorithm:?}");
        assert!(counts.marked > 0 && counts.congestion_events > 0, "{algorithm:?} {counts:?}");
        assert!(used > 0.8, "{algorithm:?} uses {used}");
    }
}

#[test]
fn path_that_clears_ecn_marks_is_detected() {
    let link = SimLink { bleaches: true, ..SimLink::default() };
    let mut sim = Sim::new(1, link, ReceiverCredit::default(), Config { ecn: true, ..Config::new(CODES) });
    assert!(sim.down.marks());
    sim.open_whole(1, 100_000, 1);
    sim.run_until(60 * SECOND, |sim| sim.all_done(1));
    assert_eq!(sim.down.stats().ecn, ecn::EcnState::Failed);
    assert!(!sim.down.marks());
}

/// The path drops packets larger than the base MTU for a while. Live media uses smaller packets meanwhile, and large
/// ones after the path has recovered.
#[test]
fn packet_size_grows_again_after_the_path_mtu_recovers() {
    let mut sim = sim(SimLink::default());
    sim.find_mtu(1452);
    let source = Mem::new(8);
    let key = sim.open(&source, 1);
    let media = |sim: &mut Sim, seconds: u64| {
        for _ in 0..seconds * 50 {
            source.push(5000, sim.now);
            sim.down.wake(key);
            sim.run_for(Duration::from_millis(20));
        }
    };
    media(&mut sim, 2);
    assert_eq!(sim.down.mtu(), 1452);
    sim.link.largest = 1300;
    media(&mut sim, 30);
    assert_eq!(sim.down.mtu(), 1200);
    sim.link.largest = 1500;
    media(&mut sim, 60);
    assert_eq!(sim.down.mtu(), 1452);
    source.finish(SourceEnd::Fin { at: sim.now });
    sim.down.wake(key);
    sim.run_until(10 * SECOND, |sim| sim.all_done(1));
    sim.verify(&[(8, 92 * 50 * 5000)]);
}

/// A queue overflows repeatedly and drops large packets, while small ones still fit. These losses must not be taken for
/// an MTU black hole.
#[test]
fn overflow_of_a_small_queue_does_not_reduce_the_packet_size() {
    let rate = 250_000;
    let link =
        SimLink { rate: Some(rate), queue: 25_000, delay: Duration::from_millis(30), ..SimLink::default() };
    for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno] {
        let mut lost = 0;
        for seed in 1..20 {
            let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 9 };
            let mut sim = Sim::new(seed, link, credit, Config { algorithm, ..Config::new(CODES) });
            sim.find_mtu(1452);
            sim.stack_every = 3;
            sim.link.rate = Some(4 * rate);
            sim.open_whole(1, 4_000_000, 1);
            for _ in 0..400 {
                sim.run_for(Duration::from_millis(20));
                sim.link.rate = Some(rate);
                assert_eq!(sim.down.mtu(), 1452, "{algorithm:?}, {seed}");
            }
            lost += sim.down.stats().recovery.packets_lost;
        }
        assert!(lost > 100, "{algorithm:?}: {lost}");
    }
}
