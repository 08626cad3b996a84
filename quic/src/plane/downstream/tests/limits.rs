//! Tests of the peer's limits on flow control and on the number of streams, and of frames that a peer must not send.

use super::*;

#[test]
fn streams_with_small_credit_arrive_without_exceeding_it() {
    let link = SimLink { loss: 0.05, jitter: Duration::from_millis(3), ..SimLink::default() };
    let credit = ReceiverCredit { data: 5000, stream_data: 1500, streams: 3 };
    let mut sim = Sim::new(3, link, credit, Config::new(CODES));
    let sources: Vec<_> = (0..20).map(|tag| (tag, 4000 + tag)).collect();
    for (tag, len) in &sources {
        sim.open_whole(*tag, *len, 128);
    }
    sim.run_until(600 * SECOND, |sim| sim.all_done(20));
    sim.verify(&sources);
}

#[test]
fn retransmissions_need_no_credit() {
    let credit = ReceiverCredit { data: 2000, stream_data: 2000, streams: 2 };
    let mut sim = Sim::new(1, SimLink { loss: 1.0, ..SimLink::default() }, credit, Config::new(CODES));
    sim.open_whole(5, 2000, 128);
    sim.transmit();
    assert_eq!(sim.sent.len(), 2);
    sim.link.loss = 0.0;
    sim.run_until(5 * SECOND, |sim| sim.all_done(1));
    sim.verify(&[(5, 2000)]);
}

#[test]
fn streams_wait_for_ids_in_priority_order() {
    let credit = ReceiverCredit { streams: 2, ..ReceiverCredit::default() };
    let mut sim = Sim::new(1, SimLink::default(), credit, Config::new(CODES));
    for tag in 0..8 {
        sim.open_whole(tag, 500, 100 - tag as u8);
    }
    sim.run_until(10 * SECOND, |sim| sim.all_done(8));
    let tags: Vec<_> = sim.peer.streams.values().map(|stream| stream.tag()).collect();
    assert_eq!(tags, [7, 6, 5, 4, 3, 2, 1, 0]);
}

#[test]
fn tail_drop_policy_resets_the_newest_waiting_streams() {
    let queue = policy::QueueLimits { streams: 10, ..Config::new(CODES).queue };
    let config = Config { queue, policy: policy::PolicyKind::Tail, ..Config::new(CODES) };
    let credit = ReceiverCredit { streams: 1, ..ReceiverCredit::default() };
    let mut sim = Sim::new(1, SimLink::default(), credit, config);
    let keys: Vec<_> = (0..30).map(|tag| sim.open_whole(tag, 1000, tag as u8)).collect();
    let expected: Vec<_> = keys[10..].iter().map(|key| event(*key, EventKind::Reset(CODES.behind))).collect();
    assert_eq!(events(&mut sim), expected);
    let stats = sim.down.stats();
    assert_eq!((stats.resets.overflow, stats.resets.unopened, stats.live_streams), (20, 20, 10));
}

#[test]
fn frame_that_names_an_unsent_packet_or_unopened_stream_is_refused() {
    let mut sim = sim(SimLink::default());
    sim.open_whole(3, 5000, 1);
    sim.transmit();
    let ack = |number| AckRanges { delay: Duration::ZERO, ranges: vec![number..=number], ecn: None };
    let next = sim.next_number;
    assert_eq!(sim.down.on_ack(sim.now, &ack(next)), Err(ProtocolViolation::NeverSent(NeverSent(next))));
    assert_eq!(sim.down.on_max_stream_data(11, 1 << 20), Err(ProtocolViolation::NeverOpened(11)));
    assert_eq!(sim.down.on_stop_sending(11, 1), Err(ProtocolViolation::NeverOpened(11)));
    assert_eq!(sim.down.on_max_stream_data(7, 1 << 20), Ok(()));
    assert_eq!([3, 7, 11, 2, 6].map(|id| sim.down.owns(id)), [false, true, true, false, false]);
}

#[test]
fn stream_of_a_client_has_a_client_stream_id() {
    let peer = PeerLimits { max_data: 100, max_stream_data_uni: 100, max_streams_uni: 5, ..<_>::default() };
    let now = Instant::now();
    let mut down = Downstream::new(Config::new(CODES), peer, now);
    let source = Mem::new(1);
    source.push(50, now);
    let stream = NewStream {
        source,
        priority: Priority::default(),
        owner: 0,
        object_timeout: None,
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: Label::default(),
    };
    down.open(stream);
    let mut out = Vec::new();
    down.poll_frames(now, 1000, &mut out).expect("owed");
    assert_eq!(stream_frames(&out), [(2, 0, 50, false)]);
}
