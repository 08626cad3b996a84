//! Tests of live media under BBR: single losses do not slow the sender down, and queues drain.

use super::*;

const OBJECT: u64 = 1200;
const RTT: Duration = Duration::from_millis(40);

fn sim_with(algorithm: CongestionAlgorithm, seed: u64, link: SimLink) -> Sim {
    let credit = ReceiverCredit { data: 1 << 40, stream_data: 1 << 40, streams: 9 };
    Sim::new(seed, SimLink { delay: RTT / 2, ..link }, credit, Config { algorithm, ..Config::new(CODES) })
}

/// Sends an object every `interval`, as a camera does. Returns how many objects after the first second could not be
/// sent at once.
fn live(sim: &mut Sim, objects: u64, interval: Duration) -> u64 {
    let source = Mem::new(1);
    let key = sim.open(&source, 1);
    let mut held_up = 0;
    let warm = sim.now + SECOND;
    for _ in 0..objects {
        source.push(OBJECT, sim.now);
        sim.down.wake(key);
        sim.transmit();
        held_up += u64::from(sim.now > warm && sim.down.has_work());
        sim.run_for(interval);
    }
    source.finish(SourceEnd::Fin { at: sim.now });
    sim.down.wake(key);
    sim.run_until(20 * SECOND, |sim| sim.all_done(1));
    sim.verify(&[(1, objects * OBJECT)]);
    held_up
}

#[test]
fn live_media_under_bbr_is_not_delayed_by_random_loss() {
    for loss in [0.005, 0.02, 0.05] {
        let mut sim = sim_with(CongestionAlgorithm::Bbr, 1, SimLink { loss, ..SimLink::default() });
        let held_up = live(&mut sim, 1000, Duration::from_millis(4));
        assert!(held_up <= 10, "{held_up} of 1000 at {loss}");
    }
    // For comparison: CUBIC delays many objects at the same loss rate.
    let mut sim = sim_with(CongestionAlgorithm::Cubic, 1, SimLink { loss: 0.02, ..SimLink::default() });
    assert!(live(&mut sim, 1000, Duration::from_millis(4)) > 200);
}

#[test]
fn bbr_uses_most_of_a_bottleneck_despite_random_loss() {
    let rate = 1_250_000;
    for seed in 1..3 {
        let mut sim = sim_with(
            CongestionAlgorithm::Bbr,
            seed,
            SimLink { rate: Some(rate), loss: 0.01, ..SimLink::default() },
        );
        sim.open_whole(1, 8_000_000, 1);
        let time = sim.run_until(120 * SECOND, |sim| sim.all_done(1));
        let used = 8_000_000.0 / time.as_secs_f64() / rate as f64;
        assert!(used > 0.8, "{used}, seed {seed}");
    }
}

/// A loss-based algorithm such as CUBIC would fill the queue.
#[test]
fn congestion_control_keeps_the_queue_of_a_deep_buffer_short() {
    let rate = 600_000;
    let mut sim = sim_with(
        CongestionAlgorithm::Bbr,
        1,
        SimLink { rate: Some(rate), queue: 1 << 20, ..SimLink::default() },
    );
    sim.open_whole(1, 20_000_000, 1);
    sim.run_for(3 * SECOND);
    let mut worst = Duration::ZERO;
    for _ in 0..700 {
        sim.run_for(Duration::from_millis(10));
        worst = worst.max(sim.down.stats().smoothed_rtt);
    }
    assert!(worst < 3 * RTT, "{worst:?}");
    let before = sim.down.stats().recovery.bytes_sent;
    sim.run_for(2 * SECOND);
    let used = (sim.down.stats().recovery.bytes_sent - before) as f64 / 2.0 / rate as f64;
    assert!(used > 0.85, "{used}");
}

#[test]
fn rate_follows_a_path_that_narrows_and_widens() {
    let mut sim = sim_with(
        CongestionAlgorithm::Bbr,
        1,
        SimLink { rate: Some(500_000), queue: 100_000, ..SimLink::default() },
    );
    sim.open_whole(1, 40_000_000, 1);
    sim.run_for(4 * SECOND);
    for rate in [150_000, 500_000] {
        sim.link.rate = Some(rate);
        sim.run_for(8 * SECOND);
        let stats = sim.down.stats();
        assert!(stats.smoothed_rtt < 3 * RTT, "{rate}: {:?}", stats.smoothed_rtt);
        let sent = stats.recovery.bytes_sent;
        sim.run_for(3 * SECOND);
        let used = (sim.down.stats().recovery.bytes_sent - sent) as f64 / 3.0 / rate as f64;
        assert!((0.8..1.1).contains(&used), "{rate}: {used}");
    }
}

/// A sender that never fills the path measures the shortest round trip all the time, and needs no ProbeRTT.
#[test]
fn live_media_does_not_pause_to_probe_the_round_trip() {
    let mut sim =
        sim_with(CongestionAlgorithm::Bbr, 1, SimLink { rate: Some(1_250_000), ..SimLink::default() });
    assert_eq!(live(&mut sim, 2_000, Duration::from_millis(4)), 0);
}

/// A key frame is sent each second, at the rate of the path.
#[test]
fn bbr_sends_key_frames_at_the_rate_of_the_path() {
    let mut sim =
        sim_with(CongestionAlgorithm::Bbr, 1, SimLink { rate: Some(2_500_000), ..SimLink::default() });
    let source = Mem::new(1);
    let key = sim.open(&source, 1);
    let mut last = Duration::ZERO;
    let mut pushed = 0;
    for frame in 0..30 * 20 {
        let bytes = if frame % 30 == 0 { 60_000 } else { 4_000 };
        pushed += bytes;
        source.push(bytes, sim.now);
        sim.down.wake(key);
        let began = sim.now;
        sim.run_until(SECOND, |sim| sim.down.stats().stream_bytes == pushed);
        last = if frame % 30 == 0 { sim.now - began } else { last };
        let left = Duration::from_millis(33).saturating_sub(sim.now - began);
        sim.run_for(left);
    }
    // At the path's rate, a key frame of 60 kB takes 24 ms.
    assert!(last < Duration::from_millis(30), "{last:?}");
}
