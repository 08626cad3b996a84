//! Tests that late data is dropped, whatever it waits for.

use super::*;

/// Returns a link of 1 Mbit/s, on which a megabyte takes eight seconds.
fn narrow() -> SimLink {
    SimLink { rate: Some(125_000), queue: 30_000, ..SimLink::default() }
}

#[test]
fn object_timeout_expires_behind_a_more_urgent_stream() {
    let mut sim = sim(narrow());
    sim.open_whole(1, 1_000_000, 1);
    let source = Mem::new(2);
    source.push(1000, sim.now);
    let key = sim.open_with(&source, |stream| {
        stream.priority.subscriber = 2;
        stream.object_timeout = Some(Duration::from_millis(100));
    });
    sim.run_for(SECOND);
    assert_eq!(sim.down.stats().resets.object_timeout, 1);
    assert!(sim.events.contains(&event(key, EventKind::Reset(CODES.late))));
    assert!(sim.down.has_work(), "the other stream still waits");
}

#[test]
fn datagram_expires_behind_a_more_urgent_stream() {
    let mut sim = sim(narrow());
    sim.open_whole(1, 1_000_000, 1);
    let expires = sim.now + Duration::from_millis(100);
    sim.down.send_datagram(datagram(b"late", 2, Some(expires))).expect("fits");
    sim.run_for(SECOND);
    assert_eq!(sim.down.stats().datagrams_expired, 1);
    assert_eq!((sim.down.queued_datagrams(), sim.down.datagrams.bytes()), (0, 0));
}

#[test]
fn excess_datagrams_drop_the_oldest_of_the_least_urgent() {
    let config = Config { max_datagram_bytes: 10_000, ..Config::new(CODES) };
    let mut sim = Sim::new(1, SimLink::default(), ReceiverCredit::default(), config);
    sim.down.send_datagram(datagram(&[255; 1000], 1, None)).expect("fits");
    for order in [|group| group, |group: u64| !group] {
        for group in 0..50 {
            let mut one = datagram(&[group as u8; 1000], 2, None);
            one.priority.group = order(group);
            sim.down.send_datagram(one).expect("fits");
        }
        sim.run_for(SECOND);
        let mut got: Vec<u8> = sim.peer.datagrams.drain(..).map(|payload| payload[0]).collect();
        got.sort_unstable();
        if got.last() == Some(&255) {
            got.pop();
        }
        let first = 50 - got.len() as u8;
        assert!(got.len() >= 6, "{got:?}");
        assert_eq!(got, (first..50).collect::<Vec<_>>(), "the newest remain, without gaps");
    }
}

const DELAY: Duration = Duration::from_millis(250);
const FRAME: Duration = Duration::from_millis(40);
const FRAMES: u64 = 25;

/// A camera with groups of one second: a key frame of 12 kB and delta frames of 3 kB, together 84 kB per second.
struct LateCamera {
    /// True if delta frames are sent in a separate subgroup that is less urgent than the key frame's.
    subgroups: bool,
    policy: policy::PolicyKind,
    /// Rate of the link, bytes per second.
    rate: u64,
}

/// The simulator and the streams, after all of the camera's frames were simulated.
struct LateOutcome {
    sim: Sim,
    /// The camera's streams, one for each subgroup of each group.
    streams: Vec<SentSubgroup>,
}

struct SentSubgroup {
    group: u64,
    subgroup: u64,
    key: StreamKey,
}

impl LateCamera {
    fn run(&self, groups: u64) -> LateOutcome {
        let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
        let link = SimLink { rate: Some(self.rate), queue: 8000, ..SimLink::default() };
        let config =
            Config { policy: self.policy, algorithm: CongestionAlgorithm::Bbr, ..Config::new(CODES) };
        let mut sim = Sim::new(1, link, credit, config);
        let mut streams = Vec::new();
        for group in 0..groups {
            let mut open: Vec<(StreamKey, Arc<Mem>)> = Vec::new();
            for frame in 0..FRAMES {
                let subgroup = u64::from(self.subgroups && frame > 0);
                if open.len() as u64 <= subgroup {
                    let source = Mem::new(group * 2 + subgroup);
                    let key = sim.open_with(&source, |stream| {
                        stream.priority =
                            Priority { subscriber: 128, publisher: subgroup as u8, group, subgroup };
                        stream.label.group = group;
                        stream.max_delay = Some(DELAY);
                    });
                    streams.push(SentSubgroup { group, subgroup, key });
                    open.push((key, source));
                }
                let (key, source) = &open[subgroup as usize];
                source.push(if frame == 0 { 12_000 } else { 3000 }, sim.now);
                if subgroup == 0 && (frame == FRAMES - 1 || self.subgroups) {
                    source.finish(SourceEnd::Fin { at: sim.now });
                }
                sim.down.wake(*key);
                sim.transmit();
                sim.run_for(FRAME);
            }
            if let Some((key, source)) = open.get(1) {
                source.finish(SourceEnd::Fin { at: sim.now });
                sim.down.wake(*key);
            }
        }
        LateOutcome { sim, streams }
    }
}

impl LateOutcome {
    fn was_reset(&self, sent: &SentSubgroup) -> bool {
        self.sim.events.contains(&event(sent.key, EventKind::Reset(CODES.late)))
    }
}

/// The link carries 47 kB/s of the camera's 84 kB/s. The backlog is then at most one group and the data of a quarter of
/// a second.
#[test]
fn group_that_waits_too_long_is_dropped_unless_it_is_the_newest() {
    let camera = LateCamera { subgroups: false, policy: policy::PolicyKind::Live, rate: 47_000 };
    let outcome = camera.run(20);
    let stats = outcome.sim.down.stats();
    assert!(stats.resets.late >= 15, "{:?}", stats.resets);
    assert!(outcome.was_reset(&outcome.streams[10]) && !outcome.was_reset(&outcome.streams[19]));
    assert_eq!(stats.resets, Resets { late: stats.resets.late, ..stats.resets });
    let delay = outcome.sim.down.queue_delay(outcome.sim.now);
    assert!(delay > DELAY / 4 && delay < SECOND, "{delay:?}");
    // At most one whole group (84 kB) waits to be sent, and a quarter of a second of another group.
    assert!(stats.pending_bytes < 84_000 * 5 / 4, "{}", stats.pending_bytes);
    let behind = LateCamera { policy: policy::PolicyKind::Tail, ..camera }.run(20).sim.down.stats();
    assert_eq!(behind.resets, Resets::default());
    assert!(behind.pending_bytes > 500_000, "{}", behind.pending_bytes);
}

#[test]
fn narrow_path_delivers_key_frames_and_drops_delta_frames() {
    let camera = LateCamera { subgroups: true, policy: policy::PolicyKind::Live, rate: 31_000 };
    let outcome = camera.run(20);
    for sent in outcome.streams.iter().filter(|sent| sent.subgroup == 0) {
        let finished = event(sent.key, EventKind::Finished);
        assert!(outcome.sim.events.contains(&finished), "the key frame of group {}", sent.group);
    }
    let deltas = outcome.streams.iter().filter(|sent| sent.subgroup == 1);
    let gone = deltas.filter(|sent| outcome.was_reset(sent)).count();
    assert!(gone >= 15, "{gone}");
    // At most a third of a second of data waits to be sent, even in the newest group.
    let pending = outcome.sim.down.stats().pending_bytes;
    assert!(pending < 84_000 / 3, "{pending}");
}

#[test]
fn estimate_shows_bandwidth_of_a_narrow_path() {
    let camera = LateCamera { subgroups: true, policy: policy::PolicyKind::Live, rate: 31_000 };
    let outcome = camera.run(20);
    let estimate = outcome.sim.down.estimate(outcome.sim.now);
    let bandwidth = estimate.bandwidth.expect("BBR estimates it");
    assert!((27_000..35_000).contains(&bandwidth), "{bandwidth}");
    assert!(estimate.queue <= 2 * DELAY, "{:?}", estimate.queue);
    assert!(estimate.path_queue <= estimate.rtt, "{estimate:?}");
    let loss = estimate.loss.expect("enough was sent");
    assert!(loss < 0.2, "{loss}");
}

#[test]
fn estimate_shows_loss_of_the_path() {
    let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
    let link = SimLink { loss: 0.02, ..SimLink::default() };
    let mut sim = Sim::new(1, link, credit, Config::new(CODES));
    assert_eq!(sim.down.estimate(sim.now).loss, None);
    sim.open_whole(0, 4 << 20, 128);
    sim.transmit();
    sim.run_until(Duration::from_secs(600), |sim| sim.all_done(1));
    let counts = sim.down.stats().recovery;
    let all = counts.packets_lost as f64 / counts.packets_sent as f64;
    let loss = sim.down.estimate(sim.now).loss.expect("enough was sent");
    assert!((loss - all).abs() < 0.01 && loss > 0.01, "{loss}, {all} of all");
}

#[test]
fn path_with_spare_capacity_drops_nothing() {
    for subgroups in [false, true] {
        let sim = LateCamera { subgroups, policy: policy::PolicyKind::Live, rate: 110_000 }.run(10).sim;
        let stats = sim.down.stats();
        assert_eq!((stats.resets, stats.pending_bytes), (Resets::default(), 0));
        assert_eq!(sim.down.queue_delay(sim.now), Duration::ZERO);
    }
}

/// Sending the requested old data takes two seconds. Neither the old data nor live data that arrives in the meantime
/// counts as late.
#[test]
fn explicitly_requested_old_groups_are_never_dropped_as_late() {
    for asked in [AskedRange::Present, AskedRange::All, AskedRange::Nothing] {
        let mut sim = sim(narrow());
        let old: Vec<_> = (0..10)
            .map(|group| {
                let source = Mem::new(group);
                source.push(25_000, sim.now);
                source.finish(SourceEnd::Fin { at: sim.now });
                sim.open_with(&source, |stream| {
                    stream.label.group = group;
                    stream.priority.group = group;
                    stream.max_delay = Some(DELAY);
                    stream.asked = asked;
                })
            })
            .collect();
        let all = |sim: &Sim| old.iter().all(|key| sim.events.contains(&event(*key, EventKind::Finished)));
        sim.run_for(5 * SECOND);
        assert_eq!(all(&sim), asked != AskedRange::Nothing);
        let resets = sim.down.stats().resets;
        let late = resets.late + resets.hopeless;
        assert!(if asked == AskedRange::Nothing { late >= 7 } else { late == 0 }, "{late}");
    }
}

/// A retransmission takes more than a round trip of 600 ms. So lost data may wait for longer than the limit of 250 ms.
#[test]
fn lost_data_on_a_long_path_is_sent_again_and_not_late() {
    let link = SimLink { delay: Duration::from_millis(300), ..SimLink::default() };
    let mut sim = sim(link);
    let keys = [0, 1].map(|group| {
        let source = Mem::new(group);
        source.push(10_000, sim.now);
        source.finish(SourceEnd::Fin { at: sim.now });
        sim.open_with(&source, |stream| {
            stream.label.group = group;
            stream.max_delay = Some(DELAY);
        })
    });
    sim.link.loss = 0.5;
    sim.transmit();
    sim.link.loss = 0.0;
    sim.run_for(10 * SECOND);
    assert!(keys.iter().all(|key| sim.events.contains(&event(*key, EventKind::Finished))));
    assert_eq!(sim.down.stats().resets, Resets::default());
}

/// Waiting data becomes late and is dropped whatever blocks it: stream credit, connection credit, or the limit of
/// streams.
#[test]
fn data_blocked_by_the_peers_limits_is_dropped_when_late() {
    let plenty = ReceiverCredit { data: 1 << 20, stream_data: 1 << 20, streams: 100 };
    for credit in [
        ReceiverCredit { stream_data: 100, ..plenty },
        ReceiverCredit { data: 100, ..plenty },
        ReceiverCredit { streams: 1, ..plenty },
    ] {
        let mut sim = Sim::new(1, SimLink::default(), credit, Config::new(CODES));
        sim.peer.is_stingy = true;
        for group in 0..5 {
            let source = Mem::new(group);
            source.push(5000, sim.now);
            sim.open_with(&source, |stream| {
                stream.label.group = group;
                stream.max_delay = Some(DELAY);
            });
        }
        sim.transmit();
        sim.run_for(4 * SECOND);
        let stats = sim.down.stats();
        assert_eq!(
            (stats.resets.late + stats.resets.hopeless, stats.live_streams),
            (4, 1),
            "all streams but the newest are late: {credit:?}"
        );
    }
}

/// The offload forwards newer data only if no data of the same priority level waits in the data plane. Before the data
/// plane drops a stream that the offload sends on, it recalls the stream from the offload.
#[test]
fn offload_does_not_overtake_data_of_equal_priority_in_the_data_plane() {
    let mut sim = sim(narrow());
    let group = |sim: &mut Sim, group, bytes| {
        let source = Mem::new(group);
        source.push(bytes, sim.now);
        let key = sim.open_with(&source, |stream| {
            stream.label.group = group;
            stream.priority.group = group;
            stream.max_delay = Some(DELAY);
        });
        (key, source)
    };
    let (first, first_source) = group(&mut sim, 0, 1000);
    sim.transmit();
    sim.run_until(SECOND, |sim| sim.down.stats().bytes_in_flight == 0);
    sim.delegate(first, &first_source);
    let (second, second_source) = group(&mut sim, 1, 1000);
    sim.transmit();
    sim.run_until(SECOND, |sim| sim.down.stats().bytes_in_flight == 0);
    sim.delegate(second, &second_source);
    // The first stream now gets 200 kB of data, of which the offload has sent nothing.
    first_source.push(200_000, sim.now);
    sim.down.wake(first);
    sim.transmit();
    let declined = sim.offload.declined;
    sim.offload_sees(second, 1000..2000, false);
    assert_eq!(sim.offload.declined, declined + 1);
    second_source.push(1000, sim.now);
    sim.down.wake(second);
    sim.run_for(SECOND);
    let resets = sim.down.stats().resets;
    assert_eq!(resets.late + resets.hopeless, 1);
    assert!(sim.events.contains(&event(first, EventKind::Reset(CODES.late))));
    sim.run_until(2 * SECOND, |sim| sim.down.waiting().is_none());
    sim.transmit();
    sim.offload_sees(second, 2000..3000, false);
    assert_eq!(sim.offload.declined, declined + 1, "the offload continues with the newer stream");
    second_source.push(1000, sim.now);
    second_source.finish(SourceEnd::Fin { at: sim.now });
    sim.down.wake(second);
    sim.run_until(SECOND, |sim| sim.events.contains(&event(second, EventKind::Finished)));
    sim.verify(&[(1, 3000)]);
}

#[test]
fn excess_waiting_streams_reset_the_oldest_of_the_least_urgent() {
    let queue = policy::QueueLimits { streams: 16, ..Config::new(CODES).queue };
    let config = Config { queue, ..Config::new(CODES) };
    let credit = ReceiverCredit { streams: 1, ..ReceiverCredit::default() };
    let mut sim = Sim::new(1, SimLink::default(), credit, config);
    let mut open = |tag, publisher| {
        let source = Mem::new(tag);
        source.push(1000, sim.now);
        let key = sim.open_with(&source, |stream| {
            stream.label.group = tag;
            stream.priority.publisher = publisher;
        });
        sim.now += Duration::from_millis(1);
        key
    };
    let urgent: Vec<_> = (0..4).map(|tag| open(tag, 1)).collect();
    let others: Vec<_> = (4..17).map(|tag| open(tag, 2)).collect();
    let expected: Vec<_> =
        others[..3].iter().map(|key| event(*key, EventKind::Reset(CODES.behind))).collect();
    assert_eq!(events(&mut sim), expected, "seven eighths of the streams remain");
    let stats = sim.down.stats();
    assert_eq!((stats.resets.overflow, stats.live_streams), (3, 14));
    drop(urgent);
}

#[test]
fn bytes_waiting_to_be_sent_are_bounded() {
    let queue = policy::QueueLimits { bytes: 100_000, burst: SECOND, ..Config::new(CODES).queue };
    let mut sim = Sim::new(1, narrow(), ReceiverCredit::default(), Config { queue, ..Config::new(CODES) });
    for group in 0..40 {
        let source = Mem::new(group);
        source.push(10_000, sim.now);
        sim.open_with(&source, |stream| {
            stream.label.group = group;
            stream.priority.group = group;
        });
    }
    sim.run_for(Duration::from_millis(100));
    let stats = sim.down.stats();
    assert!(stats.resets.queue_full >= 25 && stats.pending_bytes <= 75_000, "{stats:?}");
    sim.run_for(20 * SECOND);
    assert!(sim.events.iter().all(|event| event.kind != EventKind::Reset(CODES.late)));
}
