//! The events that a viewer of the HTTP resource `/trace` receives, one on each line.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millrace_quic::plane::{downstream::FrameContent, estimate::Estimate};
use millrace_transport::{PathChange, SentPiece, clock::monotonic_ns, trace};
use serde::{Deserialize, Serialize};

/// One event. Session numbers are the IDs in the status; times are in microseconds since 1970.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TraceEvent {
    /// The first event, which describes the relay.
    Start {
        /// The engine: `user` or `kernel`.
        engine: String,
        /// The reason why the relay uses this engine.
        reason: String,
        /// Hints for the trace's viewer about the events that follow, such as why there are none of some types.
        notes: Vec<String>,
    },
    /// The kernel engine tried to forward a frame of a publisher's packet to one subscriber.
    Copy(Copied),
    /// The kernel engine made no copies of a publisher's packet, or left some to userspace.
    Packet(TracePacket),
    /// Userspace sent a packet. A packet with pieces of several streams yields an event for each piece.
    Sent(TraceUserspace),
    /// The measured state of a session's path has changed.
    Path(TracePath),
    /// Events were dropped because a queue was full.
    Lost {
        /// Number of events that were dropped since the previous event of the type `Lost`.
        count: u64,
        /// The queue that was full.
        place: LossPlace,
    },
}

/// A copy of a frame that the kernel made for one subscriber.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copied {
    /// Time at which the copy was finished, in microseconds since 1970.
    pub time_us: u64,
    /// Time from the packet's arrival until the copy was finished, in nanoseconds.
    pub took_ns: u64,
    /// The ID of the session on which the packet arrived.
    pub publisher: u32,
    /// Packet number on the publisher's connection.
    pub received: u64,
    /// The ID of the session that the copy is for.
    pub subscriber: u32,
    /// `sent`, or the reason why the copy was not sent.
    pub outcome: String,
    /// Packet number on the subscriber's connection. Absent if none was assigned.
    pub number: Option<u64>,
    /// Size of the copy's UDP payload, in bytes. Absent if none was built.
    pub bytes: Option<u16>,
    /// The part of a track that the copy contains.
    #[serde(flatten)]
    pub media: TraceMedia,
}

/// A received packet that the kernel did not copy to subscribers, or for which it left some copies to userspace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracePacket {
    /// Time at which the packet was handled, in microseconds since 1970.
    pub time_us: u64,
    /// The ID of the session on which the packet arrived.
    pub publisher: u32,
    /// Packet number, if it could be decoded.
    pub received: u64,
    /// Size of the packet's UDP payload, in bytes.
    pub bytes: u16,
    /// The BPF program's name for the outcome of the packet.
    pub outcome: String,
}

/// A part of a packet that userspace has sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceUserspace {
    /// Time at which the packet was sent, in microseconds since 1970.
    pub time_us: u64,
    /// The ID of the session on which the packet was sent.
    pub subscriber: u32,
    /// The packet number of the sent packet.
    pub number: u64,
    /// Size of the whole packet's UDP payload, in bytes.
    pub bytes: u16,
    /// The kind of the packet's content, such as new stream bytes, repeated stream bytes or a PING.
    pub carries: Carries,
    /// The part of a track that the packet contains.
    #[serde(flatten)]
    pub media: TraceMedia,
}

/// The measured state of a session's network path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracePath {
    /// Time of the measurement, in microseconds since 1970.
    pub time_us: u64,
    /// The session's ID.
    pub session: u32,
    /// Estimated bandwidth, in bytes per second.
    pub bandwidth: Option<u64>,
    /// Smoothed round-trip time, microseconds.
    pub rtt_us: u64,
    /// The part of `rtt_us` that is caused by queues on the path, in microseconds.
    pub path_queue_us: u64,
    /// How long the oldest unsent live data has waited in the relay, in microseconds.
    pub queue_us: u64,
    /// Share of media packets that were lost, from 0 to 1.
    pub loss: Option<f64>,
}

/// The kind of content of a packet that userspace sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carries {
    /// The packet contains stream bytes that are sent for the first time.
    First,
    /// The packet contains stream bytes that were lost before, or that the kernel did not send.
    Repair,
    /// The packet contains RESET_STREAM, which abandons a stream.
    Reset,
    /// The packet contains an object as a datagram.
    Datagram,
    /// The packet contains a PING, which makes the peer acknowledge.
    Probe,
}

/// A part of a track in a packet. Fields that do not apply are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceMedia {
    /// Name of the track.
    pub track: Option<String>,
    /// Group ID of the media. For a FETCH response, the ID of its first group.
    pub group: Option<u64>,
    /// The ID of the stream on the subscriber's connection.
    pub stream: Option<u64>,
    /// Offset in the stream of the first stream byte that the packet contains.
    pub offset: Option<u64>,
    /// Number of bytes of the stream that the packet contains.
    pub len: Option<u16>,
    /// True if the stream ends with the bytes in the packet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fin: bool,
}

/// The queue that events were dropped from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossPlace {
    /// Events were dropped from the ring buffer between the kernel and the relay.
    Kernel,
    /// Events were dropped from queues inside the relay.
    Relay,
    /// Events were dropped from the queue of this viewer, which reads too slowly.
    Viewer,
}

/// An event as it is collected, with numbers for tracks. The names replace the numbers when the event is shown.
#[derive(Clone, Copy, Debug)]
pub enum RawEvent {
    /// A packet that arrived at the offload (the forwarding engine in the kernel), or a copy that it made.
    Offload(trace::OffloadTraceEvent),
    /// A packet that userspace has sent.
    Userspace(SentPiece),
    /// A change of the measured state of a session's network path.
    Path(PathChange),
}

impl RawEvent {
    /// Returns the time of the event on `CLOCK_MONOTONIC`, in nanoseconds.
    pub fn time_ns(&self) -> u64 {
        match self {
            Self::Offload(event) => event.time_ns,
            Self::Userspace(sent) => sent.time_ns,
            Self::Path(change) => change.time_ns,
        }
    }

    /// Returns the number of the event's track, or 0 if it has none.
    pub fn track(&self) -> u32 {
        match self {
            Self::Offload(trace::OffloadTraceEvent {
                what: trace::OffloadTraceKind::Copy { track, .. },
                ..
            }) => *track,
            Self::Offload(_) | Self::Path(_) => 0,
            Self::Userspace(sent) => sent.piece.label.track,
        }
    }

    /// Reports whether the event passes a viewer's filter.
    pub fn passes(&self, wanted: &trace::PacketFilter) -> bool {
        let (number, one, other) = match self {
            Self::Offload(event) => {
                let subscriber = match event.what {
                    trace::OffloadTraceKind::Copy { subscriber, .. } => subscriber,
                    trace::OffloadTraceKind::Packet { .. } => 0,
                };
                (event.received, event.publisher, subscriber)
            }
            Self::Userspace(sent) => (sent.number, sent.session, sent.session),
            // A path event has no packet number. 0 is a multiple of every divisor, so it is in every sample.
            Self::Path(change) => (0, change.session, change.session),
        };
        number.is_multiple_of(u64::from(wanted.every.get()))
            && wanted.track.is_none_or(|track| track.get() == self.track())
            && wanted.session.is_none_or(|session| session.get() == one || session.get() == other)
    }

    /// Returns the event as it is shown. `track` is the name of its track.
    pub fn describe(&self, clock: TraceClock, track: Option<&str>) -> TraceEvent {
        match self {
            Self::Offload(event) => describe_offload(event, clock, track),
            Self::Userspace(sent) => describe_sent(sent, clock, track),
            Self::Path(change) => describe_path(change, clock),
        }
    }
}

fn describe_offload(event: &trace::OffloadTraceEvent, clock: TraceClock, name: Option<&str>) -> TraceEvent {
    let trace::OffloadTraceEvent { arrived_ns, time_ns, publisher, received, what } = *event;
    match what {
        trace::OffloadTraceKind::Packet { outcome, size } => TraceEvent::Packet(TracePacket {
            time_us: clock.wall_us(arrived_ns),
            publisher,
            received,
            bytes: size,
            outcome: outcome.to_owned(),
        }),
        trace::OffloadTraceKind::Copy {
            outcome,
            subscriber,
            sent,
            group,
            stream_id,
            offset,
            len,
            fin,
            ..
        } => TraceEvent::Copy(Copied {
            time_us: clock.wall_us(time_ns),
            took_ns: time_ns.saturating_sub(arrived_ns),
            publisher,
            received,
            subscriber,
            outcome: outcome.to_owned(),
            number: sent.map(|(number, _)| number),
            bytes: sent.map(|(_, bytes)| bytes),
            media: TraceMedia {
                track: name.map(str::to_owned),
                group: Some(group),
                stream: Some(stream_id),
                offset: Some(offset),
                len: Some(len),
                fin,
            },
        }),
    }
}

fn describe_sent(sent: &SentPiece, clock: TraceClock, name: Option<&str>) -> TraceEvent {
    let SentPiece { time_ns, session, number, size, piece } = *sent;
    // Track number 0 means that this part of the packet belongs to no track.
    let group = (piece.label.track != 0).then_some(piece.label.group);
    let mut media = TraceMedia {
        track: name.map(str::to_owned),
        group,
        stream: piece.stream_id,
        ..TraceMedia::default()
    };
    let carries = match piece.carried {
        FrameContent::Bytes { offset, len, fin, again } => {
            media = TraceMedia { offset: Some(offset), len: Some(len), fin, ..media };
            if again { Carries::Repair } else { Carries::First }
        }
        FrameContent::Reset => Carries::Reset,
        FrameContent::Datagram => Carries::Datagram,
        FrameContent::Ping => Carries::Probe,
    };
    let time_us = clock.wall_us(time_ns);
    TraceEvent::Sent(TraceUserspace { time_us, subscriber: session, number, bytes: size, carries, media })
}

fn describe_path(change: &PathChange, clock: TraceClock) -> TraceEvent {
    let Estimate { bandwidth, rtt, path_queue, queue, loss } = change.estimate;
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    TraceEvent::Path(TracePath {
        time_us: clock.wall_us(change.time_ns),
        session: change.session,
        bandwidth,
        rtt_us: us(rtt),
        path_queue_us: us(path_queue),
        queue_us: us(queue),
        loss,
    })
}

/// Converts times of `CLOCK_MONOTONIC` to the time of day.
#[derive(Clone, Copy, Debug)]
pub struct TraceClock {
    /// Time of day at which `CLOCK_MONOTONIC` was 0, in nanoseconds since 1970.
    offset_ns: u64,
}

impl TraceClock {
    /// Reads the time of day and `CLOCK_MONOTONIC`. The difference between them stays fixed, even if the system time is
    /// set later.
    pub fn start() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
        Self { offset_ns: wall_ns.saturating_sub(monotonic_ns()) }
    }

    fn wall_us(self, monotonic_ns: u64) -> u64 {
        self.offset_ns.saturating_add(monotonic_ns) / 1000
    }
}
