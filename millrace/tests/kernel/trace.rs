//! Tests that compare the output of `millrace trace` with the relay's counters.

use std::{
    collections::{BTreeMap, HashSet},
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use millrace_relay::trace::event::{Carries, TraceEvent, TraceMedia};
use millrace_relay_daemon::{
    config::EngineChoice,
    http,
    status::{RelaySessionStatus, StatusSource},
};

use crate::{
    needs_root,
    net::{Cast, GroupStream, KernelNetwork, SHOW, cast, play, subscribers, until},
};

/// A running `millrace trace --json`. Dropping this kills it.
struct TraceViewerProcess {
    process: Child,
    events: Arc<Mutex<Vec<TraceEvent>>>,
    reader: Option<JoinHandle<()>>,
}

impl TraceViewerProcess {
    /// Starts the command. Returns when it sees every event from now on.
    fn new(http: SocketAddr, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["trace", "--json", &format!("--http={http}")]).args(args);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let event =
            |line: std::io::Result<String>| serde_json::from_str::<TraceEvent>(&line.unwrap()).unwrap();
        let events = Arc::new(Mutex::new(vec![event(lines.next().expect("a start line"))]));
        let sink = Arc::clone(&events);
        let reader =
            std::thread::spawn(move || lines.map(event).for_each(|event| sink.lock().unwrap().push(event)));
        Self { process, events, reader: Some(reader) }
    }

    fn events(&self) -> Vec<TraceEvent> {
        self.events.lock().unwrap().clone()
    }

    /// Waits until the command ends by itself, and returns its events.
    fn all(mut self) -> Vec<TraceEvent> {
        self.reader.take().unwrap().join().unwrap();
        assert!(self.process.wait().unwrap().success());
        self.events()
    }
}

impl Drop for TraceViewerProcess {
    fn drop(&mut self) {
        let _ = self.process.kill(); // the process may already have ended
        let _ = self.process.wait();
    }
}

fn serve_http(net: &KernelNetwork) -> http::HttpServer {
    let source = Arc::clone(&net.server) as Arc<dyn StatusSource>;
    let tracer = Arc::clone(net.server.tracer());
    net.run(http::start(([127, 0, 0, 1], 0).into(), source, tracer, http::HttpAccess::default())).unwrap()
}

fn session_of(net: &KernelNetwork, node: &str) -> RelaySessionStatus {
    let ip = net.lab.node(node).unwrap().addr_v4();
    // exact: callers reread the session's counters until they match the trace, or use values that do not change
    net.status().relay.sessions.into_iter().find(|session| session.remote.ip() == ip).unwrap()
}

/// Numbers of the events in a trace, summed in the same way as the relay's counters.
#[derive(Debug, Default, PartialEq)]
struct CountedEvents {
    copies: BTreeMap<String, u64>,
    by_kernel: u64,
    by_userspace: u64,
}

impl CountedEvents {
    fn from_events(events: &[TraceEvent]) -> Self {
        let mut counted = Self::default();
        let mut numbers = HashSet::new();
        for event in events {
            match event {
                TraceEvent::Copy(copy) => {
                    counted.by_kernel += u64::from(copy.number.is_some());
                    *counted.copies.entry(copy.outcome.clone()).or_default() += 1;
                }
                TraceEvent::Sent(sent) => drop(numbers.insert(sent.number)),
                _ => {}
            }
        }
        counted.by_userspace = numbers.len() as u64;
        counted
    }

    /// Returns how much a session's counters have grown since `before`, its status when the trace began.
    fn by(session: &RelaySessionStatus, before: &RelaySessionStatus) -> Self {
        Self {
            copies: session.kernel_copies.clone().unwrap_or_default(),
            by_kernel: session.kernel.packets - before.kernel.packets,
            by_userspace: session.data_plane.packets - before.data_plane.packets,
        }
    }
}

/// Returns the packet number of a packet to a subscriber, and the track data (object or stream bytes) in it, from an
/// event of the trace. The number is `None` if the packet was not sent. Returns `None` for other events.
fn sending(event: &TraceEvent) -> Option<(Option<u64>, &TraceMedia)> {
    match event {
        TraceEvent::Copy(copy) => Some((copy.number, &copy.media)),
        TraceEvent::Sent(sent) => Some((Some(sent.number), &sent.media)),
        _ => None,
    }
}

/// Checks that no packet number occurs twice, except in consecutive events about the frames of one packet that
/// userspace sent.
fn assert_unique(events: &[TraceEvent]) {
    let mut numbers = HashSet::new();
    let mut last = None;
    for event in events {
        let Some((Some(number), _)) = sending(event) else { continue };
        let same_packet = matches!(event, TraceEvent::Sent(_)) && last == Some(number);
        assert!(numbers.insert(number) || same_packet, "{number} again: {event:?}");
        last = matches!(event, TraceEvent::Sent(_)).then_some(number);
    }
}

/// Returns the byte ranges that were sent on each stream, in the order of their offsets.
fn sent_ranges(events: &[TraceEvent]) -> BTreeMap<u64, Vec<(u64, u64, bool)>> {
    let mut streams = BTreeMap::<u64, Vec<_>>::new();
    for (number, media) in events.iter().filter_map(sending) {
        if let (Some(_), Some(stream), Some(offset), Some(len)) =
            (number, media.stream, media.offset, media.len)
        {
            streams.entry(stream).or_default().push((offset, offset + u64::from(len), media.fin));
        }
    }
    streams.values_mut().for_each(|ranges| ranges.sort_unstable());
    streams
}

/// Checks that each stream was sent from its beginning to its FIN without a gap.
fn assert_complete(events: &[TraceEvent], streams: u64) {
    let sent = sent_ranges(events);
    assert_eq!(sent.len() as u64, streams);
    for (stream, ranges) in sent {
        let end = ranges.iter().fold(0, |end, (from, to, _)| {
            assert!(*from <= end, "stream {stream}: nothing of {end} to {from}");
            end.max(*to)
        });
        let fin = ranges.iter().find(|(_, _, fin)| *fin).map(|(_, to, _)| *to);
        assert_eq!(fin, Some(end), "stream {stream}");
    }
}

/// Checks that each repair (retransmission by userspace) covers bytes of a stream after which later bytes had been
/// sent. Returns how many repairs repeated bytes whose first sending is in the trace.
fn check_repairs(events: &[TraceEvent]) -> usize {
    let mut again = 0;
    for (at, event) in events.iter().enumerate() {
        let TraceEvent::Sent(repair) = event else { continue };
        let (Carries::Repair, Some(from), Some(len)) =
            (repair.carries, repair.media.offset, repair.media.len)
        else {
            continue;
        };
        let earlier = events[..at].iter().filter_map(sending).filter_map(|(number, media)| {
            let from = media.offset.filter(|_| number.is_some() && media.stream == repair.media.stream)?;
            Some((from, from + u64::from(media.len?)))
        });
        let earlier: Vec<_> = earlier.collect();
        assert!(earlier.iter().any(|(_, to)| *to >= from + u64::from(len)), "no hole: {repair:?}");
        again += usize::from(earlier.iter().any(|(begin, to)| *begin <= from && *to > from));
    }
    again
}

#[test]
fn events_in_a_session_trace_equal_the_sessions_counters() {
    needs_root!(events_in_a_session_trace_equal_the_sessions_counters);
    for engine in [EngineChoice::Kernel, EngineChoice::User] {
        let net = KernelNetwork::new(2, true, |config| config.engine = engine);
        let http = serve_http(&net);
        let Cast { publisher, subscribers, _requests } = cast(&net, &["sub1", "sub2"]);
        let quiet = || session_of(&net, "sub1").in_flight == 0 && session_of(&net, "sub1").pending == 0;
        until("packets are in flight already", quiet);
        let before = session_of(&net, "sub1");
        let viewer = TraceViewerProcess::new(http.local_addr, &["--session", &before.id.to_string()]);
        net.impair("relay-sub1", "loss=5%");
        let show = GroupStream { groups: 6, ..SHOW };
        let _subscribers = net.run(show.play(&publisher, subscribers, |_| {}));
        let counted = || {
            (
                CountedEvents::from_events(&viewer.events()),
                CountedEvents::by(&session_of(&net, "sub1"), &before),
            )
        };
        until("everything acknowledged", quiet);
        until("the trace as complete as the counters", || {
            let (trace, counters) = counted();
            trace == counters
        });

        let events = viewer.events();
        let TraceEvent::Start { engine: name, notes, .. } = &events[0] else { panic!("{:?}", events[0]) };
        assert_eq!(*name, net.status().engine.name); // exact: kernel or userspace is chosen at the start
        assert_eq!(notes.is_empty(), engine == EngineChoice::Kernel, "{notes:?}");
        let lost = events.iter().filter(|event| matches!(event, TraceEvent::Lost { .. })).count();
        assert_eq!(lost, 0);
        assert_unique(&events);
        assert_complete(&events, show.groups);
        assert!(check_repairs(&events) > 0, "5 % were lost");
        let publisher = session_of(&net, "pub").id as u32;
        for event in &events {
            let (subscriber, media) = match event {
                TraceEvent::Copy(copy) => {
                    assert_eq!(copy.publisher, publisher);
                    (copy.subscriber, &copy.media)
                }
                TraceEvent::Sent(sent) if sent.media.stream.is_some() => (sent.subscriber, &sent.media),
                _ => continue,
            };
            assert_eq!(u64::from(subscriber), before.id);
            assert_eq!(media.track.as_deref(), Some("live-cam--video"));
            assert!(media.group.unwrap() < show.groups);
        }
        let counted = CountedEvents::from_events(&events);
        let kernel = engine == EngineChoice::Kernel;
        assert_eq!(counted.by_kernel > 20, kernel, "{counted:?}");

        // A killed trace must be switched off in the relay.
        // exact: the relay counts a trace viewer before the viewer prints its first line, which has appeared
        assert_eq!(net.status().trace_viewers, 1);
        drop(viewer);
        until("nobody watching", || net.status().trace_viewers == 0);
    }
}

#[test]
fn each_trace_has_its_own_filter_and_end() {
    needs_root!(each_trace_has_its_own_filter_and_end);
    let net = KernelNetwork::new(2, false, |_| {});
    let http = serve_http(&net);
    let cast = cast(&net, &["sub1", "sub2"]);
    let ids = ["sub1", "sub2"].map(|node| session_of(&net, node).id as u32);
    let view = |args: &[&str]| TraceViewerProcess::new(http.local_addr, args);
    let sampled = view(&["--track=live/cam/video", "--sample=4", "--count=60"]);
    let other = view(&["--track=live/cam/audio", "--duration=1"]);
    let status = play(&net, cast, &SHOW, |_| {});
    assert!(subscribers(&status).all(|session| session.kernel_unregistered == 0), "{status:#?}");

    let events = sampled.all();
    let shown =
        events.iter().filter(|event| !matches!(event, TraceEvent::Start { .. } | TraceEvent::Lost { .. }));
    assert_eq!(shown.count(), 60);
    let mut seen = HashSet::new();
    for event in &events {
        match event {
            TraceEvent::Copy(copy) => {
                assert_eq!(copy.received % 4, 0);
                seen.insert(copy.subscriber);
            }
            TraceEvent::Sent(sent) => assert_eq!(sent.number % 4, 0),
            TraceEvent::Start { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, ids.into(), "both subscribers, by their numbers in the status");

    let events = other.all();
    let [TraceEvent::Start { notes, .. }] = &events[..] else { panic!("{events:?}") };
    assert!(notes[0].contains("live/cam/audio"), "{notes:?}");
}
