//! Requests and answers of `millrace fanout trace`, which shows what the kernel did with single RTP packets of senders.

use std::{
    fmt,
    net::SocketAddr,
    num::NonZero,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_daemon::render::time_of_day;
use millrace_fanout::kernel::{CopyEvent, CopyEventKind, Fanout, FanoutTraceSelection};
use millrace_kernel::clock;
use serde::{Deserialize, Serialize};

use super::stream::ServedRtpStream;

/// A filter that selects which of the senders' packets, and of their copies for receivers, are traced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FanoutTraceFilter {
    /// The stream to trace. `None`: every stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
    /// The receiver for which copies of packets are traced. `None`: every receiver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<SocketAddr>,
    /// Selects packets whose RTP sequence number is a multiple of this number. `None`: every packet.
    pub every: Option<NonZero<u32>>,
}

/// Traced events since the previous request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceEvents {
    /// Events of the senders' packets and of their copies for receivers.
    pub packets: Vec<FanoutTraceLine>,
    /// Number of events that were lost because the ring buffer or the answer was full.
    pub lost: u64,
}

/// One traced event, as `millrace fanout trace` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FanoutTraceLine {
    /// Time of the event, in microseconds since 1970.
    pub time_us: u64,
    /// Time from the packet's arrival to the event, in nanoseconds.
    pub after_ns: u64,
    /// Name of the stream.
    pub stream: String,
    /// The receiver, if the event is about a copy of the packet for this receiver. `None`: it is about the packet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<String>,
    /// SSRC of the packet, hexadecimal.
    pub ssrc: String,
    /// RTP sequence number.
    pub sequence: u16,
    /// RTP timestamp.
    pub timestamp: u32,
    /// RTP payload type, or RTCP packet type from 192 on.
    pub kind: u8,
    /// Bytes of UDP payload.
    pub bytes: u16,
    /// Name of the kernel's outcome for the packet or copy.
    pub outcome: String,
}

/// The filter of the only `millrace fanout trace` that is served, and the time from which that program counts as gone.
#[derive(Default)]
pub struct FanoutTraceWatch(Option<(FanoutTraceFilter, Instant)>);

/// Time without a request after which a trace ends. The program `millrace fanout trace` asks four times a second.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest number of events in one answer.
const PACKETS_MAX: usize = 20_000;

impl FanoutTraceWatch {
    /// Returns the events since the previous request with the same filter. Starts the trace if it does not run yet.
    pub fn look(
        &mut self,
        fanout: &Fanout,
        streams: &[std::sync::Arc<ServedRtpStream>],
        follow: FanoutTraceFilter,
    ) -> anyhow::Result<TraceEvents> {
        self.expire(fanout);
        let tracing = tracing(streams, &follow)?;
        let begins = match &self.0 {
            Some((now, _)) if *now == follow => false,
            Some(_) => bail!("another `fanout trace` traces other packets: end it first"),
            None => true,
        };
        if begins {
            // Events of an earlier trace may still be in the ring buffer.
            fanout.drain_events(drop);
            fanout.set_tracing(Some(tracing));
        }
        self.0 = Some((follow, Instant::now() + PATIENCE));
        Ok(take_events(fanout, streams))
    }

    /// Stops the trace that was started with this filter.
    pub fn end(&mut self, fanout: &Fanout, follow: &FanoutTraceFilter) {
        if self.0.take_if(|(now, _)| now == follow).is_some() {
            fanout.set_tracing(None);
        }
    }

    /// Stops the trace if `millrace fanout trace` has sent no request for too long.
    pub fn expire(&mut self, fanout: &Fanout) {
        if self.0.take_if(|(_, until)| *until <= Instant::now()).is_some() {
            fanout.set_tracing(None);
        }
    }
}

fn tracing(
    streams: &[std::sync::Arc<ServedRtpStream>],
    follow: &FanoutTraceFilter,
) -> anyhow::Result<FanoutTraceSelection> {
    let named = |name: &String| {
        let found = streams.iter().find(|stream| stream.settings.name == *name);
        found.with_context(|| format!("no stream is called {name:?}"))
    };
    let stream = follow.stream.as_ref().map(named).transpose()?;
    let receiver = match (follow.receiver, stream) {
        (None, _) => None,
        (Some(_), None) => bail!("--receiver needs --stream, which names the receiver's stream"),
        (Some(who), Some(stream)) => {
            let number = stream.receiver_number(who);
            Some(number.with_context(|| format!("{who} has no lease for {:?} now", stream.settings.name))?)
        }
    };
    Ok(FanoutTraceSelection {
        every: follow.every.unwrap_or(NonZero::<u32>::MIN),
        stream: stream.and_then(|stream| NonZero::new(stream.number())),
        receiver: receiver.and_then(NonZero::new),
    })
}

fn take_events(fanout: &Fanout, streams: &[std::sync::Arc<ServedRtpStream>]) -> TraceEvents {
    let since_1970 = clock::unix_ns() - clock::monotonic_ns().cast_signed();
    let mut seen = TraceEvents::default();
    let mut beyond = 0;
    let lost = fanout.drain_events(|event| match seen.packets.len() < PACKETS_MAX {
        true => seen.packets.push(FanoutTraceLine::new(event, streams, since_1970)),
        false => beyond += 1,
    });
    seen.lost = lost + beyond;
    seen
}

impl FanoutTraceLine {
    fn new(event: CopyEvent, streams: &[std::sync::Arc<ServedRtpStream>], since_1970: i64) -> Self {
        let stream = streams.iter().find(|stream| stream.number() == event.stream);
        let (receiver, outcome) = match event.what {
            CopyEventKind::Packet(outcome) => (None, outcome.name()),
            CopyEventKind::Copy(receiver, outcome) => {
                let who = stream.and_then(|stream| stream.receiver(receiver));
                (Some(who.map_or_else(|| format!("#{receiver}"), |who| who.to_string())), outcome.name())
            }
        };
        Self {
            time_us: event.time_ns.saturating_add_signed(since_1970) / 1000,
            after_ns: event.time_ns.saturating_sub(event.arrived_ns),
            stream: stream.map_or_else(String::new, |stream| stream.settings.name.clone()),
            receiver,
            ssrc: format!("{:08x}", event.ssrc),
            sequence: event.sequence,
            timestamp: event.timestamp,
            // An RTP packet has its marker bit and payload type where RTCP has a type from 192 to 223 (RFC 5761,
            // section 4).
            kind: if matches!(event.kind, 192..=223) { event.kind } else { event.kind & 0x7f },
            bytes: event.size,
            outcome: outcome.to_owned(),
        }
    }

    /// The heading above the lines that describe packets.
    pub const HEAD: &str = "TIME, UTC        AFTER us  STREAM    RECEIVER               SSRC      SEQUENCE  TYPE  BYTES  OUTCOME";
}

impl fmt::Display for FanoutTraceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { time_us, after_ns, stream, receiver, ssrc, sequence, kind, bytes, outcome, .. } = self;
        let time = time_of_day(*time_us);
        let after = *after_ns as f64 / 1e3;
        let receiver = receiver.as_deref().unwrap_or("-");
        write!(
            f,
            "{time:<15}  {after:>8.1}  {stream:<8}  {receiver:<21}  {ssrc}  {sequence:>8}  {kind:>4}  {bytes:>5}  {outcome}"
        )
    }
}
