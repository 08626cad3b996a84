//! Tests of datagrams.

use super::*;

#[test]
fn datagrams_are_sent_by_priority_and_never_repeated() {
    let mut sim = sim(SimLink { loss: 1.0, ..SimLink::default() });
    sim.down.send_datagram(datagram(b"second", 20, None)).expect("fits");
    sim.down.send_datagram(datagram(b"first", 10, None)).expect("fits");
    sim.transmit();
    let frames: Vec<_> = Walker::new(&sim.sent[0]).map(|frame| frame.expect("well-formed").1).collect();
    assert_eq!(frames, [Frame::Datagram(b"first"), Frame::Datagram(b"second")]);
    sim.link.loss = 0.0;
    sim.run_for(5 * SECOND);
    assert!(sim.peer.datagrams.is_empty());
    assert_eq!(sim.down.stats().datagrams_sent, 2);
    assert_eq!(sim.down.stats().recovery.packets_lost, 1);
    assert_eq!(sim.down.stats().bytes_in_flight, 0);
}

/// The number of empty datagrams is bounded, too, because their bookkeeping counts as memory.
#[test]
fn waiting_empty_datagrams_are_bounded_by_their_bookkeeping_memory() {
    let config = Config { max_datagram_bytes: 100_000, ..Config::new(CODES) };
    let mut sim = Sim::new(1, SimLink::default(), ReceiverCredit::default(), config);
    for _ in 0..10_000 {
        sim.down.send_datagram(datagram(b"", 1, None)).expect("fits");
    }
    let waiting = sim.down.queued_datagrams();
    assert!(waiting <= 100_000 / size_of::<NewDatagram>(), "{waiting} datagrams");
    assert_eq!(sim.down.stats().datagrams_overflowed, 10_000 - waiting as u64);
    sim.run_for(SECOND);
    assert_eq!((sim.peer.datagrams.len(), sim.down.datagrams.bytes()), (waiting, 0));
}

#[test]
fn datagrams_too_late_too_large_or_over_the_byte_limit_are_dropped() {
    let config = Config { max_datagram_bytes: 1400, ..Config::new(CODES) };
    let mut sim = Sim::new(1, SimLink::default(), ReceiverCredit::default(), config);
    let error = sim.down.send_datagram(datagram(&[0; 1198], 1, None));
    assert_eq!(error, Err(TooLarge { size: 1201, limit: 1200 }));
    let now = sim.now;
    sim.down.send_datagram(datagram(b"late", 1, Some(now))).expect("fits");
    sim.down.send_datagram(datagram(&[1; 600], 2, Some(now + SECOND))).expect("fits");
    sim.down.send_datagram(datagram(&[2; 600], 3, None)).expect("fits");
    sim.run_for(SECOND);
    assert_eq!(sim.peer.datagrams, [vec![1; 600]]);
    let stats = sim.down.stats();
    assert_eq!((stats.datagrams_too_large, stats.datagrams_expired, stats.datagrams_overflowed), (1, 1, 1));
    let mut out = Vec::new();
    sim.down.send_datagram(datagram(&[3; 900], 1, None)).expect("fits the peer");
    assert!(
        sim.down.poll_frames(sim.now, 500, &mut out).is_none(),
        "the datagram does not fit a packet of the path"
    );
    assert_eq!(sim.down.stats().datagrams_too_large, 2);
    assert!(!sim.down.has_work());
}
