//! Tests that every byte arrives once, whatever the link does.

use super::*;

#[test]
fn one_stream_arrives_over_a_perfect_link() {
    let mut sim = sim(SimLink::default());
    let key = sim.open_whole(7, 100_000, 128);
    let time = sim.run_until(SECOND, |sim| sim.all_done(1));
    sim.verify(&[(7, 100_000)]);
    let stats = sim.down.stats();
    assert_eq!(stats.stream_bytes, 100_000);
    assert_eq!(stats.retransmitted_bytes, 0);
    assert_eq!(stats.recovery.packets_lost, 0);
    assert_eq!(stats.bytes_in_flight, 0);
    assert_eq!(sim.events, [event(key, EventKind::Opened), event(key, EventKind::Finished)]);
    assert_eq!(sim.down.owned(1), Owned { opened: 1, live: 0 });
    // Four round trips of 20 ms carry the stream of 100 kB in slow start: 12 kB, 24 kB, 48 kB and the remaining 16 kB.
    // One ACK delay follows.
    assert!(time < Duration::from_millis(130), "{time:?}");
    assert_eq!(sim.down.timeout(), None);
}

#[test]
fn all_streams_arrive_at_every_packet_loss_rate() {
    for (seed, loss) in [0.0, 0.01, 0.05, 0.1, 0.2].into_iter().enumerate() {
        let link = SimLink { loss, duplicate: 0.02, jitter: Duration::from_millis(4), ..SimLink::default() };
        for algorithm in [CongestionAlgorithm::Cubic, CongestionAlgorithm::NewReno, CongestionAlgorithm::Bbr]
        {
            let config = Config { algorithm, ..Config::new(CODES) };
            let mut sim = Sim::new(seed as u64, link, ReceiverCredit::default(), config);
            sim.stack_every = 5;
            let sources: Vec<_> = (0..40).map(|tag| (tag, 1000 + tag * 777)).collect();
            for (tag, len) in &sources {
                sim.open_whole(*tag, *len, (*tag % 3) as u8);
            }
            sim.run_until(120 * SECOND, |sim| sim.all_done(40));
            sim.verify(&sources);
            assert!(sim.peer.streams.values().all(|stream| stream.fins == 1));
            let counts = sim.down.stats().recovery;
            if loss == 0.0 {
                assert_eq!(counts.packets_lost, counts.spurious_losses, "a link without loss only reorders");
            } else {
                assert!(counts.packets_lost > counts.spurious_losses, "{loss}");
            }
        }
    }
}

#[test]
fn one_kilobyte_live_object_is_sent_at_once_in_one_packet() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(9);
    let key = sim.open(&source, 128);
    for i in 0..500 {
        source.push(1000, sim.now);
        sim.down.wake(key);
        sim.transmit();
        assert_eq!(sim.sent.len(), i + 1, "sent at once");
        sim.run_for(Duration::from_millis(2));
    }
    source.finish(SourceEnd::Fin { at: sim.now });
    sim.down.wake(key);
    sim.run_until(SECOND, |sim| sim.all_done(1));
    sim.verify(&[(9, 500_000)]);
    assert_eq!(stream_frames(sim.sent.last().expect("sent")), [(7, 500_000, 0, true)]);
}

#[test]
fn small_frames_share_a_packet() {
    let mut sim = sim(SimLink::default());
    for tag in 0..10 {
        sim.open_whole(tag, 100, 128);
    }
    sim.transmit();
    assert_eq!(sim.sent.len(), 1);
    assert_eq!(stream_frames(&sim.sent[0]).len(), 10);
    sim.run_until(SECOND, |sim| sim.all_done(10));
}

#[test]
fn frames_polled_for_a_packet_that_was_not_sent_are_sent_later() {
    let mut sim = sim(SimLink::default());
    sim.open_whole(3, 5000, 1);
    let mut out = Vec::new();
    let content = sim.down.poll_frames(sim.now, MTU, &mut out).expect("owed");
    sim.down.on_not_sent(content);
    sim.run_until(SECOND, |sim| sim.all_done(1));
    sim.verify(&[(3, 5000)]);
}

#[test]
fn built_packet_lists_the_data_it_carries() {
    let peer = PeerLimits {
        max_data: 1000,
        max_stream_data_uni: 1000,
        max_streams_uni: 5,
        max_datagram_frame_size: 100,
        ..<_>::default()
    };
    let now = Instant::now();
    let mut down = Downstream::new(Config::new(CODES), peer, now);
    let source = Mem::new(1);
    source.push(50, now);
    let stream = Label { track: 3, group: 1 << 40 };
    let object = Label { track: 4, group: 9 };
    let key = down.open(NewStream {
        source,
        priority: Priority { subscriber: 9, ..Priority::default() },
        owner: 0,
        object_timeout: None,
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: stream,
    });
    down.send_datagram(NewDatagram { label: object, ..datagram(b"x", 0, None) }).expect("small");
    let poll = |down: &mut Downstream| {
        let content = down.poll_frames(now, 1000, &mut Vec::new()).expect("owed");
        (down.pieces(&content).collect::<Vec<_>>(), content)
    };
    let bytes = |again| PacketFrame {
        label: stream,
        stream_id: Some(2),
        carried: FrameContent::Bytes { offset: 0, len: 50, fin: false, again },
    };
    let (pieces, content) = poll(&mut down);
    assert_eq!(
        pieces,
        [PacketFrame { label: object, stream_id: None, carried: FrameContent::Datagram }, bytes(false)]
    );
    down.on_not_sent(content);
    assert_eq!(poll(&mut down).0, [bytes(true)]);
    down.reset(key, 7);
    assert_eq!(
        poll(&mut down).0,
        [PacketFrame { label: stream, stream_id: Some(2), carried: FrameContent::Reset }]
    );
}

#[derive(Clone, Debug)]
enum DeliveryStep {
    Open { len: u64, priority: u8 },
    Push { stream: usize, len: u64 },
    Finish { stream: usize },
    Reset { stream: usize },
    Prioritize { stream: usize, priority: u8 },
    Wait { millis: u64 },
}

fn step() -> impl Strategy<Value = DeliveryStep> {
    let stream = any::<usize>();
    prop_oneof![
        3 => (0u64..5000, any::<u8>()).prop_map(|(len, priority)| DeliveryStep::Open { len, priority }),
        4 => (stream, 0u64..8000).prop_map(|(stream, len)| DeliveryStep::Push { stream, len }),
        2 => stream.prop_map(|stream| DeliveryStep::Finish { stream }),
        1 => stream.prop_map(|stream| DeliveryStep::Reset { stream }),
        1 => (stream, any::<u8>()).prop_map(|(stream, priority)| DeliveryStep::Prioritize { stream, priority }),
        4 => (0u64..60).prop_map(|millis| DeliveryStep::Wait { millis }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Streams are opened, extended, finished and reset at random, and every stream ends with FIN or reset on any link.
    #[test]
    fn every_stream_of_a_random_schedule_ends_with_fin_or_reset(
        seed in any::<u64>(),
        loss in 0.0..0.2f64,
        jitter in 0u64..15,
        credit in (1500u64..20_000, 1200u64..5000, 2u64..6),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let jitter = Duration::from_millis(jitter);
        let link = SimLink { loss, duplicate: 0.05, jitter, ..SimLink::default() };
        let credit = ReceiverCredit { data: credit.0, stream_data: credit.1, streams: credit.2 };
        let mut sim = Sim::new(seed, link, credit, Config::new(CODES));
        sim.stack_every = 7;
        let mut streams: Vec<(StreamKey, Arc<Mem>, bool, bool)> = Vec::new();
        for step in steps {
            let count = streams.len().max(1);
            match step {
                DeliveryStep::Open { len, priority } => {
                    let source = Mem::new(streams.len() as u64);
                    source.push(8 + len, sim.now);
                    streams.push((sim.open(&source, priority), source, false, false));
                }
                DeliveryStep::Push { stream, len } => {
                    let Some((key, source, false, false)) = streams.get(stream % count) else { continue };
                    source.push(len, sim.now);
                    sim.down.wake(*key);
                }
                DeliveryStep::Finish { stream } => {
                    let Some((key, source, finished @ false, _)) = streams.get_mut(stream % count) else {
                        continue;
                    };
                    *finished = true;
                    source.finish(SourceEnd::Fin { at: sim.now });
                    sim.down.wake(*key);
                }
                DeliveryStep::Reset { stream } => {
                    let Some((key, _, _, reset)) = streams.get_mut(stream % count) else { continue };
                    *reset = true;
                    sim.down.reset(*key, CANCELLED);
                }
                DeliveryStep::Prioritize { stream, priority } => {
                    let Some((key, ..)) = streams.get(stream % count) else { continue };
                    let priority = Priority { subscriber: priority, ..Priority::default() };
                    sim.down.set_priority(*key, priority);
                }
                DeliveryStep::Wait { millis } => sim.run_for(Duration::from_millis(millis)),
            }
            sim.transmit();
        }
        for (key, source, ..) in &streams {
            source.finish(SourceEnd::Fin { at: sim.now });
            sim.down.wake(*key);
        }
        sim.run_until(1000 * SECOND, |sim| sim.down.stats().live_streams == 0);
        let stats = sim.down.stats();
        prop_assert_eq!(stats.streams_finished + stats.resets.requested, streams.len() as u64);
        prop_assert_eq!(stats.streams_opened, sim.peer.streams.len() as u64);
        prop_assert_eq!(sim.down.owned(1), Owned { opened: stats.streams_opened, live: 0 });
        let never_reset: Vec<_> = streams
            .iter()
            .filter(|(_, _, _, reset)| !reset)
            .map(|(_, source, ..)| (source.tag, source.len()))
            .collect();
        sim.verify(&never_reset);
        let ended = sim.events.iter().filter(|event| event.kind.is_end());
        prop_assert_eq!(ended.count(), streams.len());
    }
}
