//! Tests of trace events about single packets.

use millrace_transport::trace::{OffloadTraceEvent, OffloadTraceKind, PacketFilter};

use super::*;

const ALL: PacketFilter = PacketFilter { every: NonZero::<u32>::MIN, track: None, session: None };

impl ProgramBench {
    /// Runs the program on packet `number`, and returns its events in order of time.
    fn trace(&self, number: u64) -> Vec<OffloadTraceEvent> {
        self.run_packet(&self.publisher.seal(0, number, 4, &stream(1000)));
        let mut events = Vec::new();
        assert_eq!(self.relay.drain_events(|event| events.push(event)), 0, "lost");
        events.sort_by_key(|event| event.time_ns);
        events
    }
}

#[test]
fn trace_reports_the_outcome_of_traced_packets() {
    if !root("trace_reports_the_outcome_of_traced_packets") {
        return;
    }
    let bench = ProgramBench::new();
    assert_eq!(bench.trace(0), [], "nobody asked");

    bench.relay.set_tracing(Some(ALL));
    let events = bench.trace(1);
    let [copy] = events[..] else { panic!("{events:?}") };
    assert!(copy.arrived_ns < copy.time_ns);
    assert_eq!((copy.publisher, copy.received), (PUBLISHER, 1));
    let want = OffloadTraceKind::Copy {
        outcome: EgressOutcome::Before.name(),
        subscriber: SUBSCRIBER,
        sent: None,
        track: EGRESS.track,
        group: EGRESS.group,
        stream_id: EGRESS.stream_id,
        offset: OFFSET + EGRESS.shift as u64,
        len: 1000,
        fin: false,
    };
    assert_eq!(copy.what, want);
    let replayed = bench.trace(1);
    let [replayed] = replayed[..] else { panic!("{replayed:?}") };
    assert_eq!((replayed.publisher, replayed.received), (PUBLISHER, 1));
    let size = bench.publisher.seal(0, 1, 4, &stream(1000)).len() as u16;
    assert_eq!(replayed.what, OffloadTraceKind::Packet { outcome: Outcome::Replayed.name(), size });
    // Packets that belong to no publisher's connection have no trace events.
    bench.run(&ethernet(0x0806, &[0; 46]), 0);
    bench.run_packet(&[0x40; 100]);
    assert_eq!(bench.relay.drain_events(|event| panic!("{event:?}")), 0);

    bench.relay.set_tracing(None);
    assert_eq!(bench.trace(2), [], "off again");
}

#[test]
fn trace_selects_a_sample_of_one_track_or_session() {
    if !root("trace_selects_a_sample_of_one_track_or_session") {
        return;
    }
    let bench = ProgramBench::new();
    let mut number = 0;
    let mut count = |tracing| {
        bench.relay.set_tracing(Some(tracing));
        number += 1;
        bench.trace(number).len()
    };
    let name = NonZero::new;
    for (description, track, session, want) in [
        ("everything", None, None, 1),
        ("the track", name(EGRESS.track), None, 1),
        ("another track", name(EGRESS.track + 1), None, 0),
        ("the publisher", None, name(PUBLISHER), 1),
        ("the subscriber", None, name(SUBSCRIBER), 1),
        ("another session", None, name(SUBSCRIBER + 1), 0),
        ("the track for another session", name(EGRESS.track), name(SUBSCRIBER + 1), 0),
    ] {
        assert_eq!(count(PacketFilter { track, session, ..ALL }), want, "{description}");
    }
    // A packet without frames of the track has an event only for the publisher's session.
    let other = |number, tracing| {
        bench.relay.set_tracing(Some(tracing));
        bench.run_packet(&bench.publisher.seal(0, number, 4, &[1; 20]));
        let mut events = 0;
        bench.relay.drain_events(|_| events += 1);
        events
    };
    assert_eq!(other(100, PacketFilter { track: name(EGRESS.track), ..ALL }), 0);
    assert_eq!(other(101, PacketFilter { session: name(SUBSCRIBER), ..ALL }), 0);
    assert_eq!(other(102, PacketFilter { session: name(PUBLISHER), ..ALL }), 1);

    let every = NonZero::new(4).expect("not 0");
    bench.relay.set_tracing(Some(PacketFilter { every, ..ALL }));
    let traced = (200..300).filter(|number| bench.trace(*number).len() == 1);
    assert!(traced.eq((200..300).step_by(4)));
}

#[test]
fn unread_trace_events_are_counted_as_lost() {
    if !root("unread_trace_events_are_counted_as_lost") {
        return;
    }
    const PACKETS: u64 = 8000;
    let bench = ProgramBench::new();
    bench.relay.set_tracing(Some(ALL));
    for number in 0..PACKETS {
        assert_eq!(bench.run_packet(&bench.publisher.seal(0, number, 4, &stream(1))), Outcome::Forwarded);
    }
    let mut read = 0;
    let lost = bench.relay.drain_events(|_| read += 1);
    assert!(lost > 0 && read > 0, "{read} and {lost}");
    assert_eq!(read + lost, PACKETS);
    assert_eq!(bench.trace(PACKETS).len(), 1, "goes on");
}

/// Run this test with `cargo test -p millrace-relay-kernel -- --ignored --nocapture
/// tracing_cost_per_packet_is_measured` on a quiet machine. It measures the run time for a packet that the program
/// decrypts and then declines as a replay.
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn tracing_cost_per_packet_is_measured() {
    if !root("tracing_cost_per_packet_is_measured") {
        return;
    }
    let bench = ProgramBench::new();
    let packet = bench.publisher.seal(0, 1, 4, &stream(100));
    let frame = ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)));
    let other_port = ethernet(0x0800, &ipv4(0, &udp(PORT + 1, &packet)));
    let run = |frame: &[u8]| {
        let mut rounds: Vec<_> = (0..21).map(|_| bench.repeat(frame)).collect();
        rounds.sort_unstable();
        (rounds[0], rounds[10], rounds[20])
    };
    let not_even = NonZero::new(2).expect("not 0");
    for (what, tracing) in [
        ("off", None),
        ("on, in the sample", Some(ALL)),
        ("on, not in the sample", Some(PacketFilter { every: not_even, ..ALL })),
        ("on, of another session", Some(PacketFilter { session: NonZero::new(1), ..ALL })),
    ] {
        bench.relay.set_tracing(tracing);
        println!("{what}: {:?} ns; for another port: {:?} ns", run(&frame), run(&other_port));
    }
}

impl ProgramBench {
    /// Returns the mean time of one program run in nanoseconds.
    fn repeat(&self, frame: &[u8]) -> u128 {
        let input = ProgramInput { data_in: Some(frame), repeat: 1000, ..ProgramInput::default() };
        let object = lock(&self.relay.object);
        let output = object.program("relay_ingress").expect("the program").test_run(input).expect("test run");
        drop(object);
        self.relay.drain_events(|_| {});
        output.duration.as_nanos()
    }
}
