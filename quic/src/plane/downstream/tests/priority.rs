//! Tests of the order in which streams are sent.

use super::*;

#[test]
fn streams_are_sent_by_priority() {
    let link = SimLink { rate: Some(125_000), queue: 60_000, ..SimLink::default() };
    let mut sim = sim(link);
    for tag in 0..6 {
        sim.open_whole(tag, 50_000, 6 - tag as u8);
    }
    sim.run_until(60 * SECOND, |sim| sim.all_done(6));
    let mut order: Vec<_> = sim.peer.streams.values().map(|s| (s.complete, s.tag())).collect();
    order.sort_unstable();
    let tags: Vec<_> = order.iter().map(|(_, tag)| *tag).collect();
    assert_eq!(tags, [5, 4, 3, 2, 1, 0]);
}

#[test]
fn urgent_stream_opened_later_is_sent_first() {
    let mut sim = sim(SimLink::default());
    sim.open_whole(1, 1_000_000, 200);
    sim.transmit();
    let low = sim.sent.len();
    sim.open_whole(2, 600, 10);
    sim.run_for(Duration::from_millis(21));
    let next = stream_frames(&sim.sent[low]);
    assert_eq!(next[0], (11, 0, 600, true));
    assert_eq!(next[1].0, 7, "the rest of the packet has other data");
}

#[test]
fn tracks_of_the_same_priority_are_sent_in_turn() {
    let link = SimLink { rate: Some(125_000), queue: 30_000, ..SimLink::default() };
    let mut sim = sim(link);
    for (owner, group) in [(1, 0), (2, 1_000_000), (3, !5)] {
        let source = Mem::new(owner);
        source.push(1_000_000, sim.now);
        sim.open_with(&source, |stream| {
            stream.owner = owner;
            stream.priority = Priority { subscriber: 128, publisher: 128, group, subgroup: 0 };
        });
    }
    sim.run_for(5 * SECOND);
    let got: Vec<_> = sim.peer.streams.values().map(|stream| stream.ranges.total()).collect();
    let least = got.iter().min().expect("three");
    let most = got.iter().max().expect("three");
    assert!(got.len() == 3 && *least > 150_000 && most - least < most / 10, "{got:?}");
}

#[test]
fn datagrams_and_streams_of_the_same_priority_alternate() {
    let mut sim = sim(SimLink::default());
    sim.open_whole(1, 100_000, 0);
    for i in 0..5 {
        sim.down.send_datagram(datagram(&[i; 1000], 0, None)).expect("fits");
    }
    sim.transmit();
    let kinds: Vec<_> = sim
        .sent
        .iter()
        .flat_map(|packet| Walker::new(packet))
        .map(|frame| matches!(frame, Ok((_, Frame::Datagram(_)))))
        .collect();
    let turns = [true, false].repeat(5);
    assert_eq!(kinds[..10], turns);
    assert!(kinds[10..].iter().all(|datagram| !datagram));
}

#[test]
fn waiting_stream_moves_ahead_when_its_priority_changes() {
    let credit = ReceiverCredit { streams: 1, ..ReceiverCredit::default() };
    let mut sim = Sim::new(1, SimLink::default(), credit, Config::new(CODES));
    let first = sim.open_whole(1, 1000, 10);
    let second = sim.open_whole(2, 1000, 20);
    sim.transmit();
    assert!(sim.sent.is_empty(), "the only stream is the QUIC stack's");
    sim.down.set_priority(second, Priority { subscriber: 5, ..Priority::default() });
    sim.down.on_max_streams_uni(2);
    sim.transmit();
    assert_eq!(events(&mut sim), [event(second, EventKind::Opened)]);
    let _ = first;
}
