//! Tests of streams that end otherwise than by FIN.

use super::*;

#[test]
fn source_reset_resets_the_stream() {
    let mut sim = sim(SimLink { loss: 0.3, ..SimLink::default() });
    let source = Mem::new(4);
    source.push(5000, sim.now);
    let key = sim.open(&source, 1);
    sim.transmit();
    source.finish(SourceEnd::Reset(0x12));
    sim.down.wake(key);
    sim.run_until(10 * SECOND, |sim| sim.events.contains(&event(key, EventKind::Reset(0x12))));
    assert_eq!(sim.peer.streams[&7].reset, Some((0x12, 5000)));
    let stats = sim.down.stats();
    assert_eq!((stats.resets.source, stats.resets.unopened, stats.live_streams), (1, 0, 0));
    assert_eq!(Arc::strong_count(&source), 1, "the plane drops the source");
}

#[test]
fn stream_reset_before_it_has_an_id_is_never_sent() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(4);
    let key = sim.open(&source, 1);
    source.push(10, sim.now);
    sim.down.wake(key);
    sim.down.reset(key, CANCELLED);
    assert_eq!(events(&mut sim), [event(key, EventKind::Reset(CANCELLED))]);
    assert!(sim.sent.is_empty());
    let resets = Resets { requested: 1, unopened: 1, ..Resets::default() };
    assert_eq!(sim.down.stats().resets, resets);
    assert_eq!(sim.down.forget_owner(1), Owned { opened: 0, live: 0 });
}

#[test]
fn stop_sending_is_answered_with_a_reset() {
    let mut sim = sim(SimLink { loss: 0.2, ..SimLink::default() });
    let source = Mem::new(4);
    source.push(50_000, sim.now);
    let key = sim.open(&source, 1);
    sim.peer.stop.insert(7, 0x77);
    sim.run_until(20 * SECOND, |sim| sim.events.contains(&event(key, EventKind::Reset(0x77))));
    let stopped = sim.events.iter().filter(|event| matches!(event.kind, EventKind::Stopped(_))).count();
    assert_eq!(stopped, 1);
    assert_eq!(sim.down.stats().resets.stopped, 1);
}

#[test]
fn stream_is_reset_when_its_source_evicts_unsent_bytes() {
    let mut sim = sim(SimLink::default());
    let source = Mem::new(4);
    source.push(100_000, sim.now);
    let key = sim.open(&source, 1);
    sim.transmit();
    source.evict();
    sim.run_until(SECOND, |sim| sim.events.contains(&event(key, EventKind::Reset(CODES.behind))));
    assert_eq!(sim.down.stats().resets.evicted, 1);
    assert!(sim.peer.streams[&7].reset.expect("reset").1 < 100_000);
}

#[test]
fn object_older_than_its_timeout_resets_the_stream() {
    for (age, late) in [(90, false), (110, true)] {
        let mut sim = sim(SimLink::default());
        let source = Mem::new(4);
        source.push(1000, sim.now);
        sim.now += Duration::from_millis(age);
        let key = sim.open_with(&source, |stream| stream.object_timeout = Some(Duration::from_millis(100)));
        source.finish(SourceEnd::Fin { at: sim.now });
        sim.down.wake(key);
        sim.run_for(SECOND);
        assert_eq!(sim.down.stats().resets.object_timeout, u64::from(late));
        assert_eq!(sim.down.stats().streams_finished, u64::from(!late));
    }
}

#[test]
fn subgroup_timeout_runs_from_fin_to_the_last_ack() {
    for (timeout, resets) in [(Duration::from_millis(15), 1), (Duration::from_millis(60), 0)] {
        let mut sim = sim(SimLink::default());
        let source = Mem::new(4);
        source.push(1000, sim.now);
        let key = sim.open_with(&source, |stream| stream.subgroup_timeout = Some(timeout));
        sim.run_for(SECOND);
        assert_eq!(sim.down.stats().resets, Resets::default(), "the timeout does not run before FIN");
        source.finish(SourceEnd::Fin { at: sim.now });
        sim.down.wake(key);
        sim.run_for(SECOND);
        let stats = sim.down.stats();
        assert_eq!((stats.resets.subgroup_timeout, stats.streams_finished), (resets, 1 - resets));
        assert_eq!(stats.live_streams, 0);
        assert_eq!(sim.down.timeout(), None);
    }
}
