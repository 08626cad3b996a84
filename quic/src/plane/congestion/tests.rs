use super::link::{self, SimulatedLink};
use super::*;

const MTU: u64 = 1000;
const RTT: Duration = Duration::from_millis(100);

fn acked(bytes: u64, sent: Instant, rtt: Duration) -> Acked {
    Acked { bytes, sent, rtt, smoothed_rtt: rtt, app_limited: false }
}

/// Acknowledges a whole window packet by packet, evenly over one round trip. Returns the time when that round trip
/// ends.
fn round(controller: &mut dyn Controller, start: Instant, rtt: Duration) -> Instant {
    let packets = controller.window() / MTU;
    for packet in 1..=packets {
        let now = start + rtt.mul_f64(packet as f64 / packets as f64);
        controller.on_ack(now, &acked(MTU, now - rtt, rtt));
    }
    start + rtt
}

/// Returns a CUBIC flow that has left slow start, and whose window was reduced once, from `window` packets.
fn reduced(window: u64, now: Instant) -> Cubic {
    let mut cubic = Cubic::new(MTU, now);
    cubic.on_ack(now, &acked(window * MTU - cubic.window(), now - RTT, RTT));
    assert_eq!(cubic.window(), window * MTU);
    cubic.on_congestion(now);
    cubic
}

#[test]
fn initial_window_matches_rfc_9002() {
    for (mtu, window) in [(1200, 12_000), (1472, 14_720), (1500, 14_720), (9000, 18_000)] {
        assert_eq!(initial_window(mtu), window);
        assert_eq!(NewReno::new(mtu).window(), window);
    }
}

#[test]
fn slow_start_doubles_the_window_per_round_trip() {
    let now = Instant::now();
    for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno] {
        let mut controller = algorithm.start(MTU, now);
        let start = controller.window();
        let later = round(controller.as_mut(), now + RTT, RTT);
        round(controller.as_mut(), later, RTT);
        assert_eq!(controller.window(), 4 * start, "{algorithm:?}");
    }
}

#[test]
fn application_limited_flow_does_not_grow_its_window() {
    let now = Instant::now();
    for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno] {
        let mut controller = algorithm.start(MTU, now);
        for reductions in 0..2 {
            let window = controller.window();
            for i in 0..1000u64 {
                let now = now + Duration::from_millis(i);
                let acked = Acked { app_limited: true, ..acked(MTU, now, RTT) };
                controller.on_ack(now, &acked);
            }
            assert_eq!(controller.window(), window, "{algorithm:?} after {reductions} reductions");
            controller.on_congestion(now);
        }
    }
}

#[test]
fn reno_grows_by_a_packet_per_round_and_halves() {
    let now = Instant::now();
    let mut reno = NewReno::new(MTU);
    reno.on_congestion(now);
    assert_eq!(reno.window(), 5 * MTU);
    round(&mut reno, now, RTT);
    assert_eq!(reno.window(), 6 * MTU);
    for _ in 0..10 {
        reno.on_congestion(now);
    }
    assert_eq!(reno.window(), 2 * MTU);
}

#[test]
fn cubic_reduces_to_seven_tenths_and_never_under_two_packets() {
    let now = Instant::now();
    let mut cubic = reduced(100, now);
    assert_eq!(cubic.window(), 70 * MTU);
    for _ in 0..20 {
        cubic.on_congestion(now);
    }
    assert_eq!(cubic.window(), 2 * MTU);
}

/// The window is reduced from 1000 packets to 700: K = cbrt(300 / 0.4) = 9.0856 s. The curve is 0.4 (t - K)^3 + 1000
/// and the window follows it one round trip ahead. Reno, which adds one packet in about 100 ms, stays below the curve.
#[test]
fn cubic_window_follows_its_cubic_function_of_time() {
    let start = Instant::now();
    let mut cubic = reduced(1000, start);
    let mut now = start;
    let mut next = 0;
    let expected = [(3.0, 909.85), (6.0, 988.24), (9.0, 1000.0), (12.0, 1009.90), (15.0, 1082.76)];
    while let Some((at, packets)) = expected.get(next) {
        now = round(&mut cubic, now, RTT);
        if now.duration_since(start).as_secs_f64() >= *at {
            let window = cubic.window() as f64 / MTU as f64;
            assert!((window - packets).abs() < packets * 0.01, "{window} instead of {packets} after {at} s");
            next += 1;
        }
    }
}

/// At short round trips Reno grows faster than the cubic curve, so the window grows by ALPHA packets per round trip.
#[test]
fn cubic_grows_as_fast_as_reno_at_short_round_trips() {
    let mut now = Instant::now();
    let mut cubic = reduced(20, now);
    let rtt = Duration::from_millis(5);
    for _ in 0..8 {
        now = round(&mut cubic, now, rtt);
    }
    let grown = cubic.window() as f64 / MTU as f64 - 14.0;
    assert!((grown - 8.0 * 0.529).abs() < 0.3, "grew by {grown} packets");
}

#[test]
fn cubic_lowers_its_plateau_when_reduced_below_it() {
    let start = Instant::now();
    let mut cubic = reduced(1000, start);
    cubic.on_congestion(start);
    assert_eq!(cubic.window().div_ceil(MTU), 490);
    // The cubic curve's plateau is now 700 * 0.85 = 595 packets. The window (490 packets) reaches it after
    // cbrt(105 / 0.4) = 6.4 s.
    let mut now = start;
    while now < start + Duration::from_millis(6400) {
        now = round(&mut cubic, now, RTT);
    }
    let window = cubic.window() as f64 / MTU as f64;
    assert!((window - 595.0).abs() < 6.0, "{window}");
}

#[test]
fn cubic_epoch_excludes_time_without_data() {
    let start = Instant::now();
    let mut cubic = reduced(1000, start);
    let now = round(&mut cubic, start, RTT);
    let mut idle = now;
    while idle < now + Duration::from_secs(60) {
        idle += RTT;
        cubic.on_ack(idle, &Acked { app_limited: true, ..acked(MTU, idle, RTT) });
    }
    let before = cubic.window();
    round(&mut cubic, idle, RTT);
    assert!(cubic.window() < before + 15 * MTU, "{} to {}", before, cubic.window());
}

#[test]
fn spurious_congestion_is_undone_but_persistent_congestion_is_not() {
    let now = Instant::now();
    let mut controllers: [Box<dyn Controller>; 2] =
        [Box::new(reduced(100, now)), Box::new(NewReno::new(MTU))];
    for controller in &mut controllers {
        let window = controller.window();
        controller.on_congestion(now);
        controller.on_spurious_congestion();
        assert_eq!(controller.window(), window);
        controller.on_congestion(now);
        let reduced = controller.window();
        controller.on_persistent_congestion(now);
        assert_eq!(controller.window(), 2 * MTU);
        controller.on_spurious_congestion();
        assert!(controller.window() < reduced);
    }
}

#[test]
fn hystart_leaves_slow_start_when_the_round_trip_grows() {
    let mut now = Instant::now();
    let mut cubic = Cubic::new(MTU, now);
    for millis in [20, 20, 20] {
        now = round(&mut cubic, now, Duration::from_millis(millis));
    }
    let before = cubic.window();
    for _ in 0..7 {
        now = round(&mut cubic, now, Duration::from_millis(30));
    }
    let after = cubic.window();
    // The window grows by at most (1 + 1/4)^5 = 3.1 in five rounds of conservative slow start, then in congestion
    // avoidance. Plain slow start would grow it 128 times.
    assert!(after < 9 * before, "{before} to {after}");
    now = round(&mut cubic, now, Duration::from_millis(30));
    assert!(cubic.window() < after + after / 2 + MTU, "{after} to {}", cubic.window());
    let _ = now;
}

#[test]
fn pacing_rate_is_five_quarters_of_the_window_per_round_trip() {
    let reno = NewReno::new(MTU);
    assert_eq!(reno.pacing_rate(RTT), 125_000);
    assert!(reno.pacing_rate(Duration::ZERO) > 0);
}

fn bbr(now: Instant, seed: u64) -> Bbr {
    Bbr::new(link::MTU, now, seed)
}

/// Returns a link whose queue is `queue` times the bandwidth-delay product, with random `loss`.
fn path(rtt_ms: u64, mbit: u64, queue: f64, loss: f64) -> SimulatedLink {
    let rate = mbit * 125_000;
    let holds = rate as f64 * rtt_ms as f64 / 1000.0;
    SimulatedLink { rate, rtt: Duration::from_millis(rtt_ms), queue: (holds * queue) as u64, loss }
}

/// Runs BBR with and without tolerance of random path loss, each alone on the path.
fn alone(path: &SimulatedLink) -> [link::FlowOutcome; 2] {
    let now = Instant::now();
    [bbr(now, 3), bbr(now, 3).over_lossy_paths()].map(|controller| {
        path.run(now, vec![Box::new(controller)], Duration::from_secs(5), Duration::from_secs(35)).remove(0)
    })
}

#[test]
fn bbr_for_lossy_paths_uses_80_percent_of_a_link_with_random_loss() {
    for (rtt_ms, mbit, queue, loss) in [
        (100, 100, 1.0, 0.05),
        (20, 20, 1.0, 0.05),
        (600, 20, 1.0, 0.05),
        (100, 50, 0.3, 0.08),
        (100, 20, 1.0, 0.01),
    ] {
        let [plain, lossy] = alone(&path(rtt_ms, mbit, queue, loss));
        assert!(lossy.share > 0.8, "{rtt_ms} ms, {mbit} Mbit/s, {queue}, {loss}: {lossy:?}");
        assert!(plain.share < lossy.share, "{rtt_ms} ms, {mbit} Mbit/s, {queue}, {loss}: {plain:?}");
    }
}

/// A policer drops packets above a rate, without a queue. Such losses must not count as the path's own.
#[test]
fn bbr_for_lossy_paths_keeps_losses_at_a_policer_below_five_percent() {
    for packets in [3, 10, 30] {
        let path = SimulatedLink { queue: packets * link::MTU, ..path(40, 20, 0.0, 0.0) };
        let [plain, lossy] = alone(&path);
        assert!(lossy.share > 0.6, "{packets}: {plain:?} {lossy:?}");
        assert!(lossy.lost < 0.05, "{packets}: {plain:?} {lossy:?}");
    }
}

#[test]
fn bbr_for_lossy_paths_shares_a_full_queue_fairly_with_cubic_and_bbr() {
    let now = Instant::now();
    for (rtt_ms, queue) in [(40, 0.1), (40, 0.25), (40, 1.0), (40, 4.0), (100, 0.25), (100, 1.0)] {
        let path = path(rtt_ms, 20, queue, 0.0);
        let beside: [Box<dyn Controller>; 2] = [Box::new(Cubic::new(link::MTU, now)), Box::new(bbr(now, 7))];
        for theirs in beside {
            let ours = Box::new(bbr(now, 3).over_lossy_paths());
            let shares = path.run(now, vec![ours, theirs], Duration::from_secs(10), Duration::from_secs(70));
            let share = shares[0].share / (shares[0].share + shares[1].share);
            assert!((0.35..0.65).contains(&share), "{rtt_ms} ms, {queue}: {shares:?}");
        }
    }
}
