use super::*;

const MS: Duration = Duration::from_millis(1);

fn shaper(settings: &str) -> Shaper {
    Shaper::new(Impairment::parse(settings).unwrap(), 1)
}

fn counted(shaper: &Shaper) -> FrameCounters {
    shaper.counters() // exact: only the test's own calls change the shaper's frame counters
}

fn frame(number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len];
    frame[..4].copy_from_slice(&number.to_be_bytes());
    frame
}

fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[..4].try_into().unwrap())
}

/// Pops all frames at the shaper's own deadlines. Returns each frame's number and the time since `start`.
fn drain(shaper: &mut Shaper, start: Instant) -> Vec<(Duration, u32)> {
    let mut out = Vec::new();
    while let Some(deadline) = shaper.deadline() {
        while let Some(frame) = shaper.pop(deadline) {
            out.push((deadline - start, number(&frame)));
        }
    }
    out
}

/// Pushes `count` frames of 1000 bytes, one every `gap`, and then pops them all.
fn run(shaper: &mut Shaper, count: u32, gap: Duration) -> Vec<(Duration, u32)> {
    let start = Instant::now();
    for n in 0..count {
        shaper.push(start + gap * n, frame(n, 1000));
    }
    drain(shaper, start)
}

#[test]
fn perfect_wire_passes_frames_at_once_and_in_order() {
    let out = run(&mut shaper(""), 100, MS);
    assert_eq!(out.len(), 100);
    assert!(out.iter().enumerate().all(|(n, got)| *got == (MS * n as u32, n as u32)));
}

#[test]
fn emulated_delay_is_exact() {
    let out = run(&mut shaper("delay=10ms"), 10, MS);
    assert!(out.iter().enumerate().all(|(n, got)| *got == (MS * (10 + n as u32), n as u32)), "{out:?}");
}

#[test]
fn emulated_frames_are_never_early() {
    let mut shaper = shaper("delay=10ms");
    let start = Instant::now();
    shaper.push(start, frame(0, 100));
    assert_eq!(shaper.pop(start + 10 * MS - Duration::from_nanos(1)), None);
    assert!(shaper.pop(start + 10 * MS).is_some());
    assert_eq!(shaper.deadline(), None);
}

#[test]
fn jitter_stays_in_range_and_never_reorders() {
    for (settings, low, high) in [
        ("delay=10ms jitter=4ms", 6 * MS, 14 * MS),
        ("delay=20ms jitter=4ms jitter-shape=normal", 4 * MS, 36 * MS),
        ("jitter=1ms", Duration::ZERO, MS),
    ] {
        let out = run(&mut shaper(settings), 2000, 40 * MS);
        let delays: Vec<Duration> = out.iter().map(|(at, n)| *at - 40 * MS * *n).collect();
        assert!(out.is_sorted_by_key(|got| got.1), "{settings}");
        assert!(delays.iter().all(|delay| (low..=high).contains(delay)), "{settings}");
    }
    let dense = run(&mut shaper("delay=10ms jitter=9ms"), 2000, Duration::from_micros(10));
    assert!(dense.is_sorted_by_key(|got| got.1));
}

#[test]
fn jitter_has_the_requested_uniform_or_normal_distribution() {
    let deviation = |settings| {
        let out = run(&mut shaper(settings), 20_000, 100 * MS);
        let delays: Vec<f64> = out.iter().map(|(at, n)| (*at - 100 * MS * *n).as_secs_f64() * 1e3).collect();
        let mean = delays.iter().sum::<f64>() / delays.len() as f64;
        let variance = delays.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / delays.len() as f64;
        let within = delays.iter().filter(|d| (*d - mean).abs() <= 4.0).count() as f64 / delays.len() as f64;
        (mean, variance.sqrt(), within)
    };
    let (mean, sigma, within) = deviation("delay=40ms jitter=4ms");
    assert!((mean - 40.0).abs() < 0.1 && (sigma - 4.0 / 3f64.sqrt()).abs() < 0.05, "{mean} {sigma}");
    assert!(within > 0.97);
    let (mean, sigma, within) = deviation("delay=40ms jitter=4ms jitter-shape=normal");
    assert!((mean - 40.0).abs() < 0.1 && (sigma - 4.0).abs() < 0.1, "{mean} {sigma}");
    assert!((within - 0.683).abs() < 0.02, "{within}");
}

#[test]
fn random_loss_has_the_requested_probability() {
    for (settings, low, high) in
        [("loss=0", 0, 0), ("loss=10%", 9_500, 10_500), ("loss=100%", 100_000, 100_000)]
    {
        let mut shaper = shaper(settings);
        let out = run(&mut shaper, 100_000, Duration::ZERO);
        let lost = counted(&shaper).lost;
        assert!((low..=high).contains(&lost), "{settings}: {lost}");
        assert_eq!(out.len() as u64 + lost, 100_000);
    }
}

#[test]
fn burst_loss_has_mean_length_and_rate_of_the_gilbert_model() {
    // In Gilbert's model, the stationary loss is p / (p + r) = 1/11, and the mean burst has 1 / r = 5 frames.
    let mut shaper = shaper("burst-start=2% burst-end=20%");
    let out = run(&mut shaper, 200_000, Duration::ZERO);
    let lost = counted(&shaper).lost as f64;
    let bursts = out.windows(2).filter(|pair| pair[1].1 != pair[0].1 + 1).count() as f64;
    assert!((lost / 200_000.0 - 1.0 / 11.0).abs() < 0.005, "{lost}");
    assert!((lost / bursts - 5.0).abs() < 0.25, "{}", lost / bursts);
}

#[test]
fn duplicated_frames_are_delivered_and_counted() {
    let mut shaper = shaper("duplicate=100%");
    assert_eq!(run(&mut shaper, 100, MS).len(), 200);
    assert_eq!(counted(&shaper).duplicated, 100);
    assert_eq!(counted(&shaper).delivered, 200);
}

#[test]
fn reordered_frames_arrive_later_by_the_requested_time_and_are_counted() {
    let mut shaper = shaper("delay=5ms reorder=10% reorder-by=3ms");
    let out = run(&mut shaper, 10_000, MS);
    let late = out.iter().filter(|(at, n)| *at - MS * *n == 8 * MS).count() as u64;
    let on_time = out.iter().filter(|(at, n)| *at - MS * *n == 5 * MS).count();
    assert_eq!(late, counted(&shaper).reordered);
    assert_eq!(late as usize + on_time, 10_000);
    assert!((900..1100).contains(&late), "{late}");
    assert!(!out.is_sorted_by_key(|got| got.1));
}

#[test]
fn emulated_rate_spaces_frames() {
    // 1000 bytes at 8 Mbit/s take 1 ms.
    let out = run(&mut shaper("rate=8mbit delay=5ms"), 10, Duration::ZERO);
    assert!(out.iter().enumerate().all(|(n, got)| *got == (MS * (6 + n as u32), n as u32)), "{out:?}");
}

#[test]
fn full_queue_drops_new_frames() {
    let mut packets = shaper("rate=8mbit queue-packets=4");
    let out = run(&mut packets, 10, Duration::ZERO);
    assert_eq!(out.iter().map(|got| got.1).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(counted(&packets).queue_dropped, 6);

    let mut bytes = shaper("rate=8mbit queue-bytes=2500");
    assert_eq!(run(&mut bytes, 10, Duration::ZERO).len(), 2);
    assert_eq!(counted(&bytes).queue_dropped, 8);

    let mut default = shaper("rate=8mbit");
    assert_eq!(run(&mut default, 1500, Duration::ZERO).len(), DEFAULT_QUEUE_PACKETS);
}

#[test]
fn emulated_queue_drains_while_frames_arrive() {
    let mut shaper = shaper("rate=8mbit queue-packets=1");
    assert_eq!(run(&mut shaper, 10, MS).len(), 10);
    assert_eq!(counted(&shaper).queue_dropped, 0);
}

#[test]
fn new_rate_applies_to_waiting_frames() {
    let mut shaper = shaper("rate=8mbit");
    let start = Instant::now();
    for n in 0..3 {
        shaper.push(start, frame(n, 1000));
    }
    // Half of the first frame was sent at the old rate. The other half takes ten times as long.
    shaper.set(start + MS / 2, Impairment::parse("rate=800kbit").unwrap());
    let out = drain(&mut shaper, start);
    assert_eq!(out.iter().map(|got| got.0).collect::<Vec<_>>(), [MS * 11 / 2, MS * 31 / 2, MS * 51 / 2]);
}

#[test]
fn removing_the_emulated_rate_limit_empties_the_queue() {
    let mut shaper = shaper("rate=8kbit delay=2ms");
    let start = Instant::now();
    for n in 0..3 {
        shaper.push(start, frame(n, 1000));
    }
    shaper.set(start + MS, Impairment::parse("delay=2ms").unwrap());
    assert_eq!(drain(&mut shaper, start), [(3 * MS, 0), (3 * MS, 1), (3 * MS, 2)]);
    assert_eq!(counted(&shaper).queued, 0);
    shaper.push(start + 4 * MS, frame(3, 1000));
    assert_eq!(drain(&mut shaper, start), [(6 * MS, 3)]);
}

#[test]
fn shorter_delay_does_not_reorder_frames() {
    let mut shaper = shaper("delay=50ms");
    let start = Instant::now();
    shaper.push(start, frame(0, 100));
    shaper.set(start, Impairment::parse("delay=1ms").unwrap());
    shaper.push(start + MS, frame(1, 100));
    assert_eq!(drain(&mut shaper, start), [(50 * MS, 0), (50 * MS, 1)]);
}

#[test]
fn packets_over_the_mtu_are_dropped() {
    let mut shaper = shaper("mtu=1280");
    let start = Instant::now();
    shaper.push(start, frame(0, 1280 + 14));
    shaper.push(start, frame(1, 1280 + 15));
    assert_eq!(drain(&mut shaper, start), [(Duration::ZERO, 0)]);
    assert_eq!(counted(&shaper).oversize, 1);
}

#[test]
fn emulated_link_drops_frames_beyond_its_byte_limit() {
    let mut shaper = shaper("delay=10s");
    let start = Instant::now();
    let fit = MAX_HELD_BYTES / (1 << 20);
    for n in 0..fit as u32 + 3 {
        shaper.push(start, frame(n, 1 << 20));
    }
    assert_eq!(counted(&shaper).overrun, 3);
    assert_eq!(counted(&shaper).in_flight, fit as u64);
}

#[test]
fn same_random_seed_gives_the_same_emulated_losses_and_delays() {
    let settings = "delay=9ms jitter=5ms loss=10% duplicate=5% reorder=5%";
    let out = |seed| run(&mut Shaper::new(Impairment::parse(settings).unwrap(), seed), 1000, MS);
    assert_eq!(out(7), out(7));
    assert_ne!(out(7), out(8));
}
