//! `millrace trace`: traces single packets in a running relay, and prints each as a line.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{BufRead, BufReader, ErrorKind, Write},
    net::{SocketAddr, TcpStream},
    num::NonZero,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use millrace_daemon::address;
use millrace_daemon::{
    http::token::{HttpToken, TokenFile},
    render::time_of_day,
};
use millrace_moq::{Namespace, TrackName};
use millrace_relay::trace::event::{
    Carries, Copied, LossPlace, TraceEvent, TraceMedia, TracePacket, TracePath, TraceUserspace,
};
use millrace_relay_daemon::{config::DurationValue, status::Status, text::typed};

#[derive(Debug, clap::Args)]
pub struct RelayTraceArgs {
    /// Address of the relay's HTTP server
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9184", value_parser = address::ask)]
    http: SocketAddr,
    /// File with the token of the relay's HTTP server [default: the file that a relay of this user creates]
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<TokenFile>,
    /// Trace only packets of this track: NAMESPACE/NAME, or as `millrace status` shows it
    #[arg(long, value_name = "TRACK", value_parser = parse_track)]
    track: Option<TrackName>,
    /// Trace only packets from or to this session, by its number in `millrace status`
    #[arg(long, value_name = "ID")]
    session: Option<NonZero<u32>>,
    /// Trace only packets whose packet number is a multiple of N
    #[arg(long, value_name = "N", default_value = "1")]
    sample: NonZero<u32>,
    /// Stop after this number of traced events
    #[arg(long, value_name = "N")]
    count: Option<NonZero<u64>>,
    /// Stop after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<DurationValue>,
    /// Print traced events as JSON, one per line
    #[arg(long)]
    json: bool,
}

/// Parses a track in its canonical form (`live-cam--video`), or as NAMESPACE/NAME (`live/cam/video`).
fn parse_track(text: &str) -> Result<TrackName, String> {
    if let Ok(track) = text.parse() {
        return Ok(track);
    }
    let (namespace, name) = text.rsplit_once('/').ok_or("a track is NAMESPACE/NAME")?;
    let namespace =
        Namespace::new(namespace.split('/').map(str::to_owned)).map_err(|error| error.to_string())?;
    TrackName::new(namespace, name.to_owned()).map_err(|error| error.to_string())
}

pub fn run(args: RelayTraceArgs) -> anyhow::Result<()> {
    let token = args.http_token_file.clone().unwrap_or_default().read()?;
    if let Some(session) = args.session {
        check(&super::status::ask(args.http, token.as_ref())?, session.get())?;
    }
    let mut lines = AnswerLines::open(args.http, &query(&args), token.as_ref())?;
    let mut out = std::io::stdout().lock();
    let mut sums = TraceSums::default();
    while let Some(line) = lines.next()? {
        let event: TraceEvent =
            serde_json::from_str(&line).with_context(|| format!("not an event of a relay: {line}"))?;
        if args.json {
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "{}", describe(&event))?;
        }
        sums.add(&event);
        if matches!(event, TraceEvent::Start { .. }) {
            lines.end_in(args.duration.as_ref().map(|DurationValue(time)| *time))?;
        }
        if args.count.is_some_and(|count| sums.events >= count.get()) {
            break;
        }
    }
    if !args.json {
        write!(out, "{}", sums.describe())?;
    }
    Ok(())
}

/// Checks that the session exists, since a trace of a session that does not exist would stay empty.
fn check(status: &Status, session: u32) -> anyhow::Result<()> {
    let ids: Vec<_> = status.sessions.iter().map(|session| session.id.to_string()).collect();
    match ids.contains(&session.to_string()) {
        true => Ok(()),
        false if ids.is_empty() => bail!("there is no session {session}; the relay has none"),
        false => bail!("there is no session {session}; the relay has {}", ids.join(", ")),
    }
}

fn query(args: &RelayTraceArgs) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    query.append_pair("sample", &args.sample.to_string());
    if let Some(track) = &args.track {
        query.append_pair("track", &track.to_string());
    }
    if let Some(session) = args.session {
        query.append_pair("session", &session.to_string());
    }
    query.finish()
}

/// The body of an HTTP answer, read line by line until a deadline.
struct AnswerLines {
    reader: BufReader<TcpStream>,
    end: Option<Instant>,
}

impl AnswerLines {
    /// Sends the request and reads the head of the answer. Each read has a time limit of 5 s until
    /// [`end_in`](Self::end_in) is called.
    fn open(addr: SocketAddr, query: &str, token: Option<&HttpToken>) -> anyhow::Result<Self> {
        const TIMEOUT: Duration = Duration::from_secs(5);
        let stream = TcpStream::connect_timeout(&addr, TIMEOUT).with_context(|| {
            format!("no relay answers on http://{addr}/trace; is one running, with this --http?")
        })?;
        // The request is HTTP/1.0, so that the answer is not chunked and ends with the connection.
        let token =
            token.map(|token| format!("Authorization: Bearer {}\r\n", token.text())).unwrap_or_default();
        write!(&stream, "GET /trace?{query} HTTP/1.0\r\nHost: {addr}\r\n{token}\r\n")?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut lines = Self { reader: BufReader::new(stream), end: None };
        let status = lines.next()?.unwrap_or_default();
        while lines.next_raw()?.is_some_and(|line| !line.trim_end().is_empty()) {}
        match status.split(' ').nth(1) {
            Some("200") => {}
            Some(code) => {
                let reason = lines.next()?.unwrap_or_default();
                bail!("http://{addr}/trace answered {code}: {}", reason.trim_end());
            }
            None => bail!("http://{addr}/trace gave no HTTP answer: is --http the address of a relay?"),
        }
        Ok(lines)
    }

    /// Sets how long lines are read, counted from this call; `None` sets no limit. Called when the relay has begun to
    /// trace.
    fn end_in(&mut self, time: Option<Duration>) -> anyhow::Result<()> {
        self.reader.get_ref().set_read_timeout(None)?;
        self.end = time.and_then(|time| Instant::now().checked_add(time));
        Ok(())
    }

    /// Returns the next line that is not empty, or `None` at the end of the answer or at the deadline.
    fn next(&mut self) -> anyhow::Result<Option<String>> {
        while let Some(line) = self.next_raw()? {
            let line = line.trim_end();
            if !line.is_empty() {
                return Ok(Some(line.to_owned()));
            }
        }
        Ok(None)
    }

    /// Returns the next line with its line break, or `None` at the end of the answer or at the deadline.
    fn next_raw(&mut self) -> anyhow::Result<Option<String>> {
        if let Some(end) = self.end {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
        }
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(line)),
            Err(error)
                if self.end.is_some()
                    && matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
            {
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn describe(event: &TraceEvent) -> String {
    match event {
        TraceEvent::Start { engine, reason, notes } => {
            let mut text = format!("# engine {engine}: {reason}");
            notes.iter().for_each(|note| text.extend(["\n# ", note]));
            text
        }
        TraceEvent::Copy(Copied {
            time_us,
            took_ns,
            publisher,
            received,
            subscriber,
            outcome,
            number,
            bytes,
            media,
        }) => {
            let mut text = format!("{} s{publisher} #{received} -> s{subscriber} ", time_of_day(*time_us));
            if let (Some(number), Some(bytes)) = (number, bytes) {
                let _ = write!(text, "#{number} {bytes} B ");
            }
            let _ = match outcome.as_str() {
                "sent" => write!(text, "by kernel in {:.1} us", *took_ns as f64 / 1000.0),
                other => write!(text, "not by kernel: {other}"),
            };
            text + &describe_media(media)
        }
        TraceEvent::Packet(TracePacket { time_us, publisher, received, bytes, outcome }) => {
            format!(
                "{} s{publisher} #{received} {bytes} B left to userspace: {outcome}",
                time_of_day(*time_us)
            )
        }
        TraceEvent::Sent(TraceUserspace { time_us, subscriber, number, bytes, carries, media }) => {
            let what = match carries {
                Carries::First => "by userspace",
                Carries::Repair => "by userspace, repair",
                Carries::Reset => "by userspace, stream reset",
                Carries::Datagram => "by userspace, datagram",
                Carries::Probe => "by userspace, probe",
            };
            format!("{} -> s{subscriber} #{number} {bytes} B {what}", time_of_day(*time_us))
                + &describe_media(media)
        }
        TraceEvent::Path(path) => describe_path(path),
        TraceEvent::Lost { count, place } => {
            let place = match place {
                LossPlace::Kernel => "the kernel's ring was full",
                LossPlace::Relay => "the relay's queue was full",
                LossPlace::Viewer => "this command was too slow",
            };
            format!("# {count} events lost: {place}")
        }
    }
}

fn describe_path(path: &TracePath) -> String {
    let TracePath { time_us, session, bandwidth, rtt_us, path_queue_us, queue_us, loss } = path;
    let ms = |us: u64| us as f64 / 1000.0;
    let mut text = format!("{} s{session} path", time_of_day(*time_us));
    let _ = bandwidth.iter().try_for_each(|bytes| write!(text, " {:.2} Mbit/s,", *bytes as f64 / 125_000.0));
    let _ = write!(text, " RTT {:.1} ms, of it queues {:.1} ms", ms(*rtt_us), ms(*path_queue_us));
    let _ = loss.iter().try_for_each(|share| write!(text, ", {:.1} % lost", share * 100.0));
    let _ = write!(text, ", {:.1} ms waited here", ms(*queue_us));
    text
}

fn describe_media(media: &TraceMedia) -> String {
    let TraceMedia { track, group, stream, offset, len, fin } = media;
    let mut text = String::new();
    let _ = track.iter().try_for_each(|track| write!(text, " {}", typed(track)));
    let _ = group.iter().try_for_each(|group| write!(text, " group {group}"));
    let _ = stream.iter().try_for_each(|stream| write!(text, " stream {stream}"));
    if let (Some(offset), Some(len)) = (offset, len) {
        let _ = write!(text, " {offset}+{len}");
    }
    if *fin {
        text.push_str(" fin");
    }
    text
}

/// Counts of the printed events by type of event, for the summary at the end of the output.
#[derive(Default)]
struct TraceSums {
    events: u64,
    lost: u64,
    kinds: BTreeMap<String, u64>,
}

impl TraceSums {
    fn add(&mut self, event: &TraceEvent) {
        let kind = match event {
            TraceEvent::Start { .. } => return,
            TraceEvent::Lost { count, .. } => {
                self.lost += count;
                return;
            }
            TraceEvent::Copy(copy) if copy.outcome == "sent" => "by kernel".to_owned(),
            TraceEvent::Copy(copy) => format!("not by kernel: {}", copy.outcome),
            TraceEvent::Path(_) => "path changed".to_owned(),
            TraceEvent::Packet(packet) => format!("left to userspace: {}", packet.outcome),
            TraceEvent::Sent(sent) => match sent.carries {
                Carries::First => "by userspace".to_owned(),
                other => format!("by userspace: {other:?}").to_lowercase(),
            },
        };
        self.events += 1;
        *self.kinds.entry(kind).or_default() += 1;
    }

    fn describe(&self) -> String {
        let mut text = format!("# {} events, {} lost\n", self.events, self.lost);
        for (kind, count) in &self.kinds {
            let _ = writeln!(text, "# {count:>9} {kind}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn track_is_parsed_in_canonical_form_and_as_path() {
        let track = parse_track("live/cam/video").unwrap();
        assert_eq!(track.to_string(), "live-cam--video");
        assert_eq!(parse_track("live-cam--video").unwrap(), track);
        assert!(parse_track("video").is_err());
    }

    #[test]
    fn trace_events_are_printed_as_lines() {
        let media = TraceMedia {
            track: Some("live--v".into()),
            group: Some(7),
            stream: Some(11),
            offset: Some(2000),
            len: Some(1000),
            fin: true,
        };
        let copy = Copied {
            time_us: 3_723_000_004,
            took_ns: 2500,
            publisher: 1,
            received: 40,
            subscriber: 2,
            outcome: "sent".into(),
            number: Some(90),
            bytes: Some(1050),
            media: media.clone(),
        };
        let declined = Copied { outcome: "window".into(), number: None, bytes: None, ..copy.clone() };
        let repair = TraceUserspace {
            time_us: 1,
            subscriber: 2,
            number: 91,
            bytes: 1050,
            carries: Carries::Repair,
            media: TraceMedia { fin: false, ..media },
        };
        let packet =
            TracePacket { time_us: 0, publisher: 1, received: 41, bytes: 99, outcome: "no_slot".into() };
        let table = [
            (
                TraceEvent::Copy(copy),
                "01:02:03.000004 s1 #40 -> s2 #90 1050 B by kernel in 2.5 us live/v group 7 stream 11 2000+1000 fin",
            ),
            (
                TraceEvent::Copy(declined),
                "01:02:03.000004 s1 #40 -> s2 not by kernel: window live/v group 7 stream 11 2000+1000 fin",
            ),
            (
                TraceEvent::Sent(repair),
                "00:00:00.000001 -> s2 #91 1050 B by userspace, repair live/v group 7 stream 11 2000+1000",
            ),
            (TraceEvent::Packet(packet), "00:00:00.000000 s1 #41 99 B left to userspace: no_slot"),
            (
                TraceEvent::Path(TracePath {
                    time_us: 0,
                    session: 2,
                    bandwidth: Some(1_000_000),
                    rtt_us: 40_100,
                    path_queue_us: 20_000,
                    queue_us: 35_000,
                    loss: Some(0.0125),
                }),
                "00:00:00.000000 s2 path 8.00 Mbit/s, RTT 40.1 ms, of it queues 20.0 ms, 1.2 % lost, 35.0 ms waited here",
            ),
            (
                TraceEvent::Lost { count: 3, place: LossPlace::Kernel },
                "# 3 events lost: the kernel's ring was full",
            ),
        ];
        let mut sums = TraceSums::default();
        for (event, want) in &table {
            assert_eq!(describe(event), *want);
            let json = serde_json::to_string(event).unwrap();
            assert_eq!(serde_json::from_str::<TraceEvent>(&json).unwrap(), *event, "{json}");
            sums.add(event);
        }
        let text = sums.describe();
        for part in ["# 5 events, 3 lost\n", "1 path changed\n", "1 by kernel\n", "1 by userspace: repair\n"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
