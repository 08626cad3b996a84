//! Tests of a simulated offload next to the data plane.

use super::*;

/// Simulates live streams whose packets arrive at the offload out of order and with gaps. The offload forwards them as
/// they arrive. The data plane's source of each stream gets all its bytes later, in order.
fn with_an_offload(seed: u64, link: SimLink, credit: ReceiverCredit) -> Sim {
    const OBJECT: u64 = 1000;
    const OBJECTS: u64 = 200;
    let mut sim = Sim::new(seed, link, credit, Config::new(CODES));
    sim.stack_every = 7;
    let sources: Vec<_> = (0..4).map(Mem::new).collect();
    let keys: Vec<_> = sources.iter().map(|source| sim.open(source, 128)).collect();
    for object in 0..OBJECTS {
        for (source, key) in sources.iter().zip(&keys) {
            let at = object * OBJECT;
            let last = object + 1 == OBJECTS;
            match sim.random(10) {
                0 => {}
                // Reorders packets: the offload gets this object of the stream before the previous object.
                1 if object > 0 => {
                    sim.offload_sees(*key, at..at + OBJECT, last);
                    sim.offload_sees(*key, at - OBJECT..at, false);
                }
                _ => sim.offload_sees(*key, at..at + OBJECT, last),
            }
            if sim.random(3) == 0 {
                sim.run_for(Duration::from_micros(100));
            }
            source.push(OBJECT, sim.now);
            if last {
                source.finish(SourceEnd::Fin { at: sim.now });
            }
            sim.down.wake(*key);
            sim.transmit();
            sim.delegate(*key, source);
        }
        sim.run_for(Duration::from_millis(2));
    }
    sim.run_until(120 * SECOND, |sim| sim.all_done(4));
    let whole: Vec<_> = (0..4).map(|tag| (tag, OBJECT * OBJECTS)).collect();
    sim.verify(&whole);
    sim.run_until(120 * SECOND, |sim| sim.down.stats().bytes_in_flight == 0);
    sim
}

#[test]
fn offload_sends_at_least_80_percent_of_the_packets() {
    let sim = with_an_offload(1, SimLink::default(), ReceiverCredit::default());
    let stats = sim.down.stats();
    let percent = stats.offloaded_packets * 100 / 800;
    assert!((80..=120).contains(&percent), "{percent} %, {} declined", sim.offload.declined);
    assert_eq!(stats.recovery.packets_lost, stats.recovery.spurious_losses);
}

#[test]
fn bytes_that_the_offload_loses_or_declines_are_sent_by_data_plane() {
    for seed in 0..8 {
        let link = SimLink {
            loss: [0.0, 0.01, 0.05, 0.2][seed as usize % 4],
            duplicate: 0.02,
            jitter: Duration::from_millis(4),
            ..SimLink::default()
        };
        let tight = ReceiverCredit { data: 20_000, stream_data: 8000, streams: 4 };
        let credit = if seed < 4 { ReceiverCredit::default() } else { tight };
        let sim = with_an_offload(seed, link, credit);
        let offloaded = sim.down.stats().offloaded_packets;
        // At a packet loss rate above 1 % the congestion window is always full, so the data plane sends everything
        // itself, in order of priority.
        assert!(offloaded > if link.loss > 0.01 || seed >= 4 { 0 } else { 50 }, "{seed}: {offloaded}");
        assert!(sim.offload.declined > 0 || seed < 4, "the offload declines bytes beyond its credit");
    }
}

#[test]
fn reset_of_an_offloaded_stream_has_the_final_size_the_offload_reached() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(1);
    source.push(1000, sim.now);
    let key = sim.open(&source, 128);
    sim.transmit();
    sim.delegate(key, &source);
    sim.transmit();
    sim.offload_sees(key, 3000..4000, false);
    sim.down.reset(key, CANCELLED);
    sim.run_until(SECOND, |sim| sim.down.stats().live_streams == 0);
    let stream = sim.peer.streams.values().next().expect("one");
    assert_eq!(stream.reset, Some((CANCELLED, 4000)));
    assert_eq!(sim.down.stats().stream_bytes, 4000, "skipped bytes count against credit");
}

#[test]
fn offload_sends_only_streams_more_urgent_than_waiting_data() {
    let mut sim = sim(SimLink::default());
    let delegated: Vec<_> = [(1, 127), (2, 128), (3, 129)]
        .into_iter()
        .map(|(tag, subscriber)| {
            let source = Mem::new(tag);
            source.push(1000, sim.now);
            (sim.open(&source, subscriber), source)
        })
        .collect();
    sim.transmit();
    sim.run_until(SECOND, |sim| sim.down.stats().bytes_in_flight == 0);
    delegated.iter().for_each(|(key, source)| sim.delegate(*key, source));
    sim.transmit();
    assert_eq!(sim.down.budget().bytes, sim.down.recovery.window() - 2 * 1200);
    assert_eq!(sim.down.waiting(), None);

    let source = Mem::new(4);
    source.push(50_000, sim.now);
    let key = sim.open(&source, 128);
    sim.grant_budget();
    assert_eq!(sim.down.waiting(), Some((128, 0)));
    assert_eq!(sim.down.delegate(key), None, "the stream has data to send");
    for (at, (key, _)) in delegated.iter().enumerate() {
        sim.offload_sees(*key, 1000..1100, false);
        assert_eq!(sim.offload.declined, [0, 1, 2][at]);
    }
    // When a stream becomes less urgent, the offload has to give it back to the data plane.
    sim.down.set_priority(delegated[0].0, Priority { subscriber: 200, ..Priority::default() });
    assert_eq!(sim.down.poll_recall(), Some(delegated[0].0));
}

#[test]
fn flow_control_credit_lent_to_the_offload_is_not_used_twice() {
    let credit = ReceiverCredit { data: 10_000, ..ReceiverCredit::default() };
    let mut sim = Sim::new(1, SimLink::default(), credit, Config::new(CODES));
    sim.down.set_outstanding(OffloadBudget { bytes: 0, data: 9500 });
    sim.open_whole(1, 5000, 128);
    assert_eq!(sim.down.take_max_data(10_000), 500);
    let mut out = Vec::new();
    assert!(sim.down.poll_frames(sim.now, 1000, &mut out).is_none());
    sim.down.set_outstanding(OffloadBudget { bytes: 11_000, data: 0 });
    assert!(sim.down.poll_frames(sim.now, 1000, &mut out).is_none(), "the window is full");
    sim.down.set_outstanding(OffloadBudget { bytes: 10_800, data: 0 });
    assert!(sim.down.poll_frames(sim.now, 1000, &mut out).is_some());
}

fn over(source: &Arc<Mem>) -> NewStream {
    NewStream { priority: Priority { subscriber: 128, ..Priority::default() }, ..stream_of(source) }
}

/// Reports to the data plane that the offload has sent a packet of the stream. Returns the packet's number.
fn report(sim: &mut Sim, key: StreamKey, offset: u64, len: u16, fin: bool) -> u64 {
    let number = sim.number();
    let sent = sim.now;
    let size = usize::from(len) + 40;
    sim.down.on_offloaded_sent(&OffloadedPacket { sent, number, size, key, offset, len, fin });
    number
}

fn acknowledge(sim: &mut Sim, number: u64) {
    let ack = AckRanges { delay: Duration::ZERO, ranges: vec![number..=number], ecn: None };
    sim.down.on_ack(sim.now, &ack).expect("an acknowledgement of what was sent");
}

#[test]
fn bytes_that_the_offload_skipped_are_sent_when_the_stream_has_a_source() {
    let mut sim = sim(SimLink::default());
    let next = sim.down.next_stream();
    let id = next << 2 | sim.down.stream_bits();
    let key = sim.down.opened(1, Label::default(), Some(id));
    assert_eq!(sim.down.next_stream(), next + 1, "no ID is used twice");
    assert_eq!(sim.down.poll_event(), Some(event(key, EventKind::Opened)));
    // The offload sent nothing of the stream's first 100 bytes.
    report(&mut sim, key, 100, 200, false);
    let mut out = Vec::new();
    assert!(sim.down.poll_frames(sim.now, 1000, &mut out).is_none(), "the stream has no source yet");
    let source = Mem::new(7);
    source.push(300, sim.now);
    assert!(sim.down.adopt(key, over(&source)));
    sim.down.poll_frames(sim.now, 1000, &mut out).expect("the hole");
    assert_eq!(stream_frames(&out), [(id, 0, 100, false)]);
    assert_eq!(sim.down.stats().stream_bytes, 300);
    // The next stream that the data plane opens gets the ID after the offload's stream.
    let other = Mem::new(8);
    other.push(10, sim.now);
    sim.down.open(over(&other));
    out.clear();
    sim.down.poll_frames(sim.now, 1000, &mut out).expect("another stream");
    assert_eq!(stream_frames(&out), [(id + 4, 0, 10, false)]);
}

#[test]
fn stream_that_the_offload_finished_is_no_longer_adopted_by_data_plane() {
    let mut sim = sim(SimLink::default());
    let id = sim.down.next_stream() << 2 | sim.down.stream_bits();
    let key = sim.down.opened(1, Label::default(), Some(id));
    let number = report(&mut sim, key, 0, 200, true);
    acknowledge(&mut sim, number);
    assert_eq!(sim.down.owned(1), Owned { opened: 1, live: 0 });
    assert!(!sim.down.adopt(key, over(&Mem::new(7))));
    assert_eq!(sim.down.poll_recall(), Some(key));
}

#[test]
fn stream_opened_by_the_offload_and_not_adopted_is_reset() {
    for known in [true, false] {
        let mut sim = sim(SimLink::default());
        let id = sim.down.next_stream() << 2 | sim.down.stream_bits();
        let key = sim.down.opened(1, Label::default(), known.then_some(id));
        sim.down.abandon(key);
        assert_eq!(sim.down.poll_recall(), Some(key));
        let mut out = Vec::new();
        assert!(
            sim.down.poll_frames(sim.now, 1000, &mut out).is_none(),
            "no reset before the stream is returned"
        );
        sim.down.on_opened(key, id);
        report(&mut sim, key, 0, 200, false);
        sim.down.on_returned(key);
        sim.down.poll_frames(sim.now, 1000, &mut out).expect("RESET_STREAM");
        let frame = Walker::new(&out).next().expect("a frame").expect("well-formed").1;
        assert!(matches!(frame, Frame::ResetStream { final_size: 200, .. }), "{frame:?}");
    }
    // The offload was about to open a stream, but could not, so the stream never gets an ID.
    let mut sim = sim(SimLink::default());
    let key = sim.down.opened(1, Label::default(), None);
    sim.down.abandon(key);
    sim.down.on_returned(key);
    assert_eq!(sim.down.poll_event(), Some(event(key, EventKind::Reset(CODES.gone))));
    assert_eq!(sim.down.stats().live_streams, 0);
}

#[test]
fn stream_that_the_offload_opens_soon_is_not_opened_by_data_plane() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(7);
    source.push(300, sim.now);
    let key = sim.down.opened(1, Label::default(), None);
    assert!(sim.down.adopt(key, over(&source)));
    let mut out = Vec::new();
    assert!(sim.down.poll_frames(sim.now, 1000, &mut out).is_none());
    sim.down.on_returned(key);
    sim.down.poll_frames(sim.now, 1000, &mut out).expect("the plane opens it");
}
