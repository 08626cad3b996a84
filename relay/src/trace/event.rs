//! The lines of `/trace`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millrace_quic::plane::{downstream::Carried, estimate::Estimate};
use millrace_transport::{PathChange, Sent, clock::monotonic_ns, trace};
use serde::{Deserialize, Serialize};

/// One line. Sessions are numbered as in the status; times are microseconds since 1970.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The first line.
    Start {
        /// `user` or `kernel`, and why this one.
        engine: String,
        reason: String,
        /// What the viewer should know about what it will see.
        notes: Vec<String>,
    },
    /// The kernel engine tried to send a frame of a publisher's packet on to one subscriber.
    Copy(Copied),
    /// The kernel engine did not, or not only, make copies of a publisher's packet.
    Packet(Packet),
    /// Userspace sent a packet, or one piece of it.
    Sent(Userspace),
    /// What the network carries for a session has changed.
    Path(Path),
    /// There was no room for so many events.
    Lost { count: u64, place: Place },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copied {
    pub time_us: u64,
    /// From the packet's arrival to when the copy had been dealt with, nanoseconds.
    pub took_ns: u64,
    pub publisher: u32,
    /// Packet number on the publisher's connection.
    pub received: u64,
    pub subscriber: u32,
    /// `sent`, or why not.
    pub outcome: String,
    /// Packet number and UDP payload on the subscriber's connection, if it got that far.
    pub number: Option<u64>,
    pub bytes: Option<u16>,
    #[serde(flatten)]
    pub media: Media,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Packet {
    pub time_us: u64,
    pub publisher: u32,
    /// As far as it could be told.
    pub received: u64,
    pub bytes: u16,
    pub outcome: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Userspace {
    pub time_us: u64,
    pub subscriber: u32,
    pub number: u64,
    pub bytes: u16,
    pub carries: Carries,
    #[serde(flatten)]
    pub media: Media,
}

/// As in the status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Path {
    pub time_us: u64,
    pub session: u32,
    /// Bytes per second.
    pub bandwidth: Option<u64>,
    pub rtt_us: u64,
    /// What of that is queues on the path.
    pub path_queue_us: u64,
    /// How long the oldest of what is sent live has waited here.
    pub queue_us: u64,
    /// Share of media packets, 0 to 1.
    pub loss: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carries {
    /// Stream bytes for the first time.
    First,
    /// Stream bytes that were lost, or that the kernel had left out.
    Repair,
    Reset,
    Datagram,
    Probe,
}

/// Bytes of a stream to a subscriber; what does not apply is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Media {
    /// As in the status.
    pub track: Option<String>,
    /// Of a FETCH response the one that it begins with.
    pub group: Option<u64>,
    pub stream: Option<u64>,
    pub offset: Option<u64>,
    pub len: Option<u16>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fin: bool,
}

/// Where events were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Between the kernel and the relay.
    Kernel,
    /// In the relay.
    Relay,
    /// This viewer was too slow.
    Viewer,
}

/// What is known about an event before it is put into words.
#[derive(Clone, Copy, Debug)]
pub enum Raw {
    Offload(trace::Event),
    Userspace(Sent),
    Path(PathChange),
}

impl Raw {
    pub fn time_ns(&self) -> u64 {
        match self {
            Self::Offload(event) => event.time_ns,
            Self::Userspace(sent) => sent.time_ns,
            Self::Path(change) => change.time_ns,
        }
    }

    /// The number of its track; 0 for none.
    pub fn track(&self) -> u32 {
        match self {
            Self::Offload(trace::Event { what: trace::What::Copy { track, .. }, .. }) => *track,
            Self::Offload(_) | Self::Path(_) => 0,
            Self::Userspace(sent) => sent.piece.label.track,
        }
    }

    /// Whether a viewer wants it.
    pub fn passes(&self, wanted: &trace::Filter) -> bool {
        let (number, one, other) = match self {
            Self::Offload(event) => {
                let subscriber = match event.what {
                    trace::What::Copy { subscriber, .. } => subscriber,
                    trace::What::Packet { .. } => 0,
                };
                (event.received, event.publisher, subscriber)
            }
            Self::Userspace(sent) => (sent.number, sent.session, sent.session),
            // No packet, so in every sample.
            Self::Path(change) => (0, change.session, change.session),
        };
        number.is_multiple_of(u64::from(wanted.every.get()))
            && wanted.track.is_none_or(|track| track.get() == self.track())
            && wanted.session.is_none_or(|session| session.get() == one || session.get() == other)
    }

    /// In words; `track` is the name of its track.
    pub fn describe(&self, clock: Clock, track: Option<&str>) -> Event {
        match self {
            Self::Offload(event) => describe_offload(event, clock, track),
            Self::Userspace(sent) => describe_sent(sent, clock, track),
            Self::Path(change) => describe_path(change, clock),
        }
    }
}

fn describe_offload(event: &trace::Event, clock: Clock, name: Option<&str>) -> Event {
    let trace::Event { arrived_ns, time_ns, publisher, received, what } = *event;
    match what {
        trace::What::Packet { outcome, size } => Event::Packet(Packet {
            time_us: clock.wall_us(arrived_ns),
            publisher,
            received,
            bytes: size,
            outcome: outcome.to_owned(),
        }),
        trace::What::Copy { outcome, subscriber, sent, group, stream_id, offset, len, fin, .. } => {
            Event::Copy(Copied {
                time_us: clock.wall_us(time_ns),
                took_ns: time_ns.saturating_sub(arrived_ns),
                publisher,
                received,
                subscriber,
                outcome: outcome.to_owned(),
                number: sent.map(|(number, _)| number),
                bytes: sent.map(|(_, bytes)| bytes),
                media: Media {
                    track: name.map(str::to_owned),
                    group: Some(group),
                    stream: Some(stream_id),
                    offset: Some(offset),
                    len: Some(len),
                    fin,
                },
            })
        }
    }
}

fn describe_sent(sent: &Sent, clock: Clock, name: Option<&str>) -> Event {
    let Sent { time_ns, session, number, size, piece } = *sent;
    let group = (piece.label.track != 0).then_some(piece.label.group);
    let mut media =
        Media { track: name.map(str::to_owned), group, stream: piece.stream_id, ..Media::default() };
    let carries = match piece.carried {
        Carried::Bytes { offset, len, fin, again } => {
            media = Media { offset: Some(offset), len: Some(len), fin, ..media };
            if again { Carries::Repair } else { Carries::First }
        }
        Carried::Reset => Carries::Reset,
        Carried::Datagram => Carries::Datagram,
        Carried::Ping => Carries::Probe,
    };
    let time_us = clock.wall_us(time_ns);
    Event::Sent(Userspace { time_us, subscriber: session, number, bytes: size, carries, media })
}

fn describe_path(change: &PathChange, clock: Clock) -> Event {
    let Estimate { bandwidth, rtt, path_queue, queue, loss } = change.estimate;
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Event::Path(Path {
        time_us: clock.wall_us(change.time_ns),
        session: change.session,
        bandwidth,
        rtt_us: us(rtt),
        path_queue_us: us(path_queue),
        queue_us: us(queue),
        loss,
    })
}

/// Tells the time of day from `CLOCK_MONOTONIC`, as of when it was started.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Time of day when the other clock was 0, nanoseconds since 1970.
    offset_ns: u64,
}

impl Clock {
    pub fn start() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
        Self { offset_ns: wall_ns.saturating_sub(monotonic_ns()) }
    }

    fn wall_us(self, monotonic_ns: u64) -> u64 {
        self.offset_ns.saturating_add(monotonic_ns) / 1000
    }
}
