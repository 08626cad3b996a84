//! What `millrace fanout trace` asks for and gets: what became of single packets of senders.

use std::{
    fmt,
    net::SocketAddr,
    num::NonZero,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_daemon::render::time_of_day;
use millrace_fanout::kernel::{Event, Fanout, Tracing, What};
use millrace_kernel::clock;
use serde::{Deserialize, Serialize};

use super::stream::Stream;

/// Which packets are followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<SocketAddr>,
    /// Those whose sequence number is a multiple of it.
    pub every: Option<NonZero<u32>>,
}

/// What came since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub packets: Vec<Packet>,
    /// For want of room, or beyond what one answer has room for.
    pub lost: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packet {
    /// Since 1970.
    pub time_us: u64,
    /// Since the packet had arrived.
    pub after_ns: u64,
    pub stream: String,
    /// Of a copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receiver: Option<String>,
    pub ssrc: String,
    /// Of RTP, as is the timestamp.
    pub sequence: u16,
    pub timestamp: u32,
    /// Payload type; of RTCP its packet type, from 192 on.
    pub kind: u8,
    /// UDP payload.
    pub bytes: u16,
    pub outcome: String,
}

/// Who follows, until nobody asks any more.
#[derive(Default)]
pub struct Watch(Option<(Follow, Instant)>);

/// A viewer asks four times a second.
const PATIENCE: Duration = Duration::from_secs(2);
/// In one answer.
const PACKETS_MAX: usize = 20_000;

impl Watch {
    /// What came since the same was asked the last time; begins to follow when it was not.
    pub fn look(
        &mut self,
        fanout: &Fanout,
        streams: &[std::sync::Arc<Stream>],
        follow: Follow,
    ) -> anyhow::Result<Seen> {
        self.expire(fanout);
        let tracing = tracing(streams, &follow)?;
        let begins = match &self.0 {
            Some((now, _)) if *now == follow => false,
            Some(_) => bail!("somebody else follows other packets; one can at a time"),
            None => true,
        };
        if begins {
            fanout.drain_events(drop);
            fanout.set_tracing(Some(tracing));
        }
        self.0 = Some((follow, Instant::now() + PATIENCE));
        Ok(seen(fanout, streams))
    }

    /// Ends what this viewer has followed.
    pub fn end(&mut self, fanout: &Fanout, follow: &Follow) {
        if self.0.take_if(|(now, _)| now == follow).is_some() {
            fanout.set_tracing(None);
        }
    }

    /// Ends what nobody asks for any more.
    pub fn expire(&mut self, fanout: &Fanout) {
        if self.0.take_if(|(_, until)| *until <= Instant::now()).is_some() {
            fanout.set_tracing(None);
        }
    }
}

fn tracing(streams: &[std::sync::Arc<Stream>], follow: &Follow) -> anyhow::Result<Tracing> {
    let named = |name: &String| {
        let found = streams.iter().find(|stream| stream.settings.name == *name);
        found.with_context(|| format!("there is no stream {name:?}"))
    };
    let stream = follow.stream.as_ref().map(named).transpose()?;
    let leg = match (follow.receiver, stream) {
        (None, _) => None,
        (Some(_), None) => bail!("a receiver is one of a stream: name it with --stream"),
        (Some(who), Some(stream)) => {
            let number = stream.receiver_number(who);
            Some(number.with_context(|| format!("{who} does not receive {:?} now", stream.settings.name))?)
        }
    };
    Ok(Tracing {
        every: follow.every.unwrap_or(NonZero::<u32>::MIN),
        stream: stream.and_then(|stream| NonZero::new(stream.number())),
        leg: leg.and_then(NonZero::new),
    })
}

fn seen(fanout: &Fanout, streams: &[std::sync::Arc<Stream>]) -> Seen {
    let since_1970 = clock::unix_ns() - clock::monotonic_ns().cast_signed();
    let mut seen = Seen::default();
    let mut beyond = 0;
    let lost = fanout.drain_events(|event| match seen.packets.len() < PACKETS_MAX {
        true => seen.packets.push(Packet::new(event, streams, since_1970)),
        false => beyond += 1,
    });
    seen.lost = lost + beyond;
    seen
}

impl Packet {
    fn new(event: Event, streams: &[std::sync::Arc<Stream>], since_1970: i64) -> Self {
        let stream = streams.iter().find(|stream| stream.number() == event.stream);
        let (receiver, outcome) = match event.what {
            What::Packet(outcome) => (None, outcome.name()),
            What::Copy(leg, outcome) => {
                let who = stream.and_then(|stream| stream.receiver(leg));
                (Some(who.map_or_else(|| format!("#{leg}"), |who| who.to_string())), outcome.name())
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
            kind: if matches!(event.kind, 192..=223) { event.kind } else { event.kind & 0x7f },
            bytes: event.size,
            outcome: outcome.to_owned(),
        }
    }

    /// Above lines of packets.
    pub const HEAD: &str = "TIME, UTC        AFTER us  STREAM    RECEIVER               SSRC      SEQUENCE  TYPE  BYTES  OUTCOME";
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { time_us, after_ns, stream, receiver, ssrc, sequence, kind, bytes, outcome, .. } = self;
        let (time, after) = (time_of_day(*time_us), *after_ns as f64 / 1e3);
        let receiver = receiver.as_deref().unwrap_or("-");
        write!(
            f,
            "{time:<15}  {after:>8.1}  {stream:<8}  {receiver:<21}  {ssrc}  {sequence:>8}  {kind:>4}  {bytes:>5}  {outcome}"
        )
    }
}
