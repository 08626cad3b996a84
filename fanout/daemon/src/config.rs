//! Settings of a fan-out, as TOML. `docs/guide/fanout.md` documents them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use millrace_base::settings::{Problems, SettingsReader};
use millrace_fanout::kernel::{Cap, Ssrc, StreamConfig};
use millrace_fanout::{breaker, message::NAME_MAX, receivers::ReceiverLimits};
use serde::Deserialize;

/// Settings of a fan-out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Interfaces that senders' packets arrive on.
    pub interface: Vec<String>,
    /// The RTP streams that are forwarded to receivers, at most 256.
    pub stream: Vec<StreamSection>,
}

/// Settings of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StreamSection {
    /// Name of the stream, 1 to 44 bytes long.
    pub name: String,
    /// Address and port of this host that the sender sends to. Copies leave from there, so receivers are of
    /// the same address family.
    pub listen: SocketAddr,
    /// Port of this host that the sender's RTCP arrives at, if it differs from the port for RTP. Receivers get RTP and
    /// RTCP on one port (RFC 5761).
    pub listen_rtcp_port: Option<u16>,
    /// Address and port of the sender. No other packets are fanned out.
    pub sender: SocketAddr,
    /// Source port of the sender's RTCP, which receivers' reports are sent to. Default: the port of `sender`.
    pub sender_rtcp_port: Option<u16>,
    /// SSRC whose packets are forwarded: a number, `"first"` for the first that arrives (and again after 5 s of
    /// silence), or `"any"`, the default.
    #[serde(default)]
    ssrc: NumberOrRule,
    /// True if the stream is SRTP, whose RTCP reports cannot be read because they are encrypted.
    #[serde(default)]
    pub encrypted: bool,
    /// Largest number of receivers that the settings do not name, 1000 by default. All streams together have
    /// at most 65,536.
    #[serde(default = "StreamSection::default_receivers")]
    max_receivers: u32,
    /// Largest number of receivers with one IPv4 address or IPv6 /64, 8 by default. A /24 or a /56 may have 8 times as
    /// many, a /48 64 times.
    #[serde(default = "StreamSection::default_per_address")]
    max_per_address: u32,
    /// Rate limit of each receiver in kbit/s, headers from IP on included; 20,000 by default.
    #[serde(default = "StreamSection::default_kbit")]
    max_kbit_per_s: u64,
    /// Largest burst to one receiver, in KiB: at least 64, and 256 by default.
    #[serde(default = "StreamSection::default_burst")]
    burst_kib: u64,
    /// Longest lease in seconds, 30 by default: a receiver gets the stream for this time after each request. Receivers
    /// may ask for a shorter lease.
    #[serde(default = "StreamSection::default_lease")]
    lease_s: u16,
    /// Seconds that a receiver has to wait after the circuit breaker has cut it off, 60 by default.
    #[serde(default = "StreamSection::default_pause")]
    pause_s: u16,
    /// Longest time between two RTCP reports of a receiver in seconds, 5 by default. A receiver is cut off after three
    /// of these intervals without a report.
    #[serde(default = "StreamSection::default_interval")]
    report_interval_s: u16,
    /// Largest number of RTCP reports per second, from all receivers together, that are passed on to the sender; 100 by
    /// default.
    #[serde(default = "StreamSection::default_reports")]
    pub max_reports_per_s: u32,
    /// Receivers that get the stream without asking for it.
    #[serde(default)]
    pub receiver: Vec<Pinned>,
}

/// An SSRC as a number, or the word `first` or `any`, which selects SSRCs by a rule.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "is \"any\", \"first\" or a number of 32 bits")]
enum NumberOrRule {
    Is(u32),
    Word(SourceWord),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SourceWord {
    Any,
    First,
}

impl Default for NumberOrRule {
    fn default() -> Self {
        Self::Word(SourceWord::Any)
    }
}

/// A receiver that gets the stream without asking for it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Pinned {
    /// Address and port of the receiver.
    pub address: SocketAddr,
    /// Whether the circuit breaker applies to the receiver: it cuts the receiver off for heavy loss, or if reports
    /// stop. Default: true.
    #[serde(default = "yes")]
    pub breaker: bool,
}

fn yes() -> bool {
    true
}

/// Largest number of receivers of all streams together. The kernel's table has an entry for each.
pub const RECEIVERS_MAX: u32 = 1 << 16;
/// Largest number of RTP streams in the settings.
pub const STREAMS_MAX: usize = 256;
/// Smallest allowed burst in KiB: the largest datagram, with headers. A smaller token bucket would never let such a
/// datagram through.
const BURST_KIB_MIN: u64 = 64;

impl Settings {
    /// Reads a settings file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Ok(Self::parse(&text, &path.display().to_string())?)
    }

    /// Parses `text`, which was read from `file`.
    ///
    /// # Errors
    /// The error lists every mistake in `text`.
    pub fn parse(text: &str, file: &str) -> Result<Self, Problems> {
        SettingsReader::file(text, "the settings are", file, |reader, settings: Self| {
            reader.read_each("stream", settings.stream.iter().collect(), |stream| {
                stream.check().map_err(|error| format!("stream {:?}: {error}", stream.name))
            })?;
            reader.check("stream", settings.check())?;
            Some(settings)
        })
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.interface.is_empty(),
            "interface: name at least one interface that senders' packets arrive on, such as [\"eth0\"]"
        );
        ensure!(!self.stream.is_empty(), "there is no [[stream]]: add at least one");
        ensure!(
            self.stream.len() <= STREAMS_MAX,
            "there are more than {STREAMS_MAX} streams: leave some out"
        );
        let mut names = BTreeSet::new();
        let mut places = BTreeSet::new();
        for stream in &self.stream {
            ensure!(names.insert(&stream.name), "two streams are called {:?}: rename one", stream.name);
            for place in stream.places() {
                ensure!(places.insert(place), "two streams arrive at {place}: each needs a port of its own");
            }
        }
        let receivers = self.stream.iter().map(StreamSection::receivers).fold(0, u32::saturating_add);
        ensure!(
            receivers <= RECEIVERS_MAX,
            "all streams together have room for {receivers} receivers; {RECEIVERS_MAX} is the most: lower max-receivers"
        );
        Ok(())
    }
}

impl StreamSection {
    fn default_receivers() -> u32 {
        1000
    }

    fn default_per_address() -> u32 {
        8
    }

    fn default_kbit() -> u64 {
        20_000
    }

    fn default_burst() -> u64 {
        256
    }

    fn default_lease() -> u16 {
        30
    }

    fn default_pause() -> u16 {
        60
    }

    fn default_interval() -> u16 {
        5
    }

    fn default_reports() -> u32 {
        100
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=NAME_MAX).contains(&self.name.len()),
            "name: must be 1 to {NAME_MAX} bytes, to fit a request"
        );
        ensure!(!self.name.contains(char::is_control), "name: remove the control characters");
        let listen = self.listen.ip();
        ensure!(
            !listen.is_unspecified() && !listen.is_multicast(),
            "listen: {listen} is no address of this host; name the one that the sender sends to, since copies come from it"
        );
        ensure!(self.listen.port() != 0, "listen: add a port");
        ensure!(self.listen_rtcp_port != Some(0), "listen-rtcp-port: 0 is no port: choose 1 to 65535");
        ensure!(
            self.listen_rtcp_port != Some(self.listen.port()),
            "listen-rtcp-port: it is the port of listen already; leave it out"
        );
        self.check_host("sender", self.sender)?;
        for pinned in &self.receiver {
            self.check_host("receiver", pinned.address)?;
        }
        for (key, is_zero) in [
            ("max-per-address", self.max_per_address == 0),
            ("max-kbit-per-s", self.max_kbit_per_s == 0),
            ("lease-s", self.lease_s == 0),
            ("report-interval-s", self.report_interval_s == 0),
        ] {
            ensure!(!is_zero, "{key}: must be at least 1");
        }
        ensure!(
            self.burst_kib >= BURST_KIB_MIN,
            "burst-kib: must be at least {BURST_KIB_MIN}, the largest datagram"
        );
        ensure!(self.max_kbit_per_s <= 100_000_000, "max-kbit-per-s: must be at most 100000000");
        ensure!(self.burst_kib <= 1 << 20, "burst-kib: must be at most {}", 1 << 20);
        if self.receivers() == 0 {
            bail!("max-receivers: 0, and no [[stream.receiver]] is named: allow receivers, or name one");
        }
        Ok(())
    }

    fn check_host(&self, key: &str, at: SocketAddr) -> anyhow::Result<()> {
        let ip = at.ip();
        ensure!(at.port() != 0, "{key}: {at} needs a port");
        ensure!(!ip.is_unspecified(), "{key}: {ip} is no host's address");
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        ensure!(!ip.is_multicast() && !is_broadcast, "{key}: {ip} is no single host's address");
        ensure!(
            ip.is_ipv4() == self.listen.is_ipv4(),
            "{key}: {ip} is not of the family of listen, {}; a stream is IPv4 or IPv6: make two",
            self.listen.ip()
        );
        Ok(())
    }

    /// Returns the addresses that the stream's packets arrive at.
    fn places(&self) -> impl Iterator<Item = SocketAddr> {
        let ports = [Some(self.listen.port()), self.listen_rtcp_port];
        ports.into_iter().flatten().map(|port| SocketAddr::new(self.listen.ip(), port))
    }

    /// Returns the address that the sender's RTCP arrives at, if its port differs from that of RTP.
    pub fn listen_rtcp(&self) -> Option<SocketAddr> {
        self.places().nth(1)
    }

    /// Returns the address that the sender's RTCP comes from. Receivers' RTCP reports are passed on to this address.
    pub fn sender_rtcp(&self) -> SocketAddr {
        SocketAddr::new(self.sender.ip(), self.sender_rtcp_port.unwrap_or(self.sender.port()))
    }

    /// Reports whether two settings describe the same stream: they differ only in receivers and limits.
    pub fn is_same_stream(&self, other: &Self) -> bool {
        let key = |it: &Self| (it.name.clone(), it.kernel().without_room(), it.encrypted);
        key(self) == key(other)
    }

    /// Returns the largest number of receivers of the stream, including those that the settings name.
    pub fn receivers(&self) -> u32 {
        self.max_receivers.saturating_add(u32::try_from(self.receiver.len()).unwrap_or(u32::MAX))
    }

    /// Returns the SSRC that is forwarded, or the rule that selects it.
    pub fn ssrc(&self) -> Ssrc {
        match self.ssrc {
            NumberOrRule::Is(ssrc) => Ssrc::Is(ssrc),
            NumberOrRule::Word(SourceWord::Any) => Ssrc::Any,
            NumberOrRule::Word(SourceWord::First) => Ssrc::First,
        }
    }

    /// Returns the kernel's configuration of the stream.
    pub fn kernel(&self) -> StreamConfig {
        StreamConfig {
            listen: self.listen,
            listen_rtcp_port: self.listen_rtcp_port,
            sender: self.sender,
            sender_rtcp_port: self.sender_rtcp_port,
            ssrc: self.ssrc(),
            max_receivers: self.receivers(),
        }
    }

    /// Returns the rate limit of a receiver.
    pub fn cap(&self) -> Cap {
        Cap { bits_per_s: self.max_kbit_per_s * 1000, burst_bytes: self.burst_kib << 10 }
    }

    /// Returns the limits of the stream's receivers: their number, leases and circuit breaker.
    pub fn limits(&self) -> ReceiverLimits {
        let interval = Duration::from_secs(self.report_interval_s.into());
        ReceiverLimits {
            receivers: self.receivers() as usize,
            per_address: self.max_per_address as usize,
            lease: Duration::from_secs(self.lease_s.into()),
            pause: Duration::from_secs(self.pause_s.into()),
            breaker: Some(breaker::Settings { interval }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
interface = ["eth0"]

[[stream]]
name = "live"
listen = "192.0.2.1:5004"
sender = "198.51.100.7:6000"
"#;

    fn error(text: &str) -> String {
        Settings::parse(text, "fanout.toml").expect_err(text).to_string()
    }

    #[test]
    fn omitted_setting_has_a_default() {
        let settings = Settings::parse(GOOD, "fanout.toml").unwrap();
        let stream = &settings.stream[0];
        assert_eq!(stream.ssrc(), Ssrc::Any);
        assert_eq!(stream.sender_rtcp(), stream.sender);
        assert_eq!(stream.cap(), Cap { bits_per_s: 20_000_000, burst_bytes: 256 << 10 });
        let limits = stream.limits();
        assert_eq!((limits.receivers, limits.per_address), (1000, 8));
        assert_eq!((limits.lease, limits.pause), (Duration::from_secs(30), Duration::from_secs(60)));
    }

    #[test]
    fn every_setting_is_read() {
        let more = r#"
listen-rtcp-port = 5005
sender-rtcp-port = 6001
ssrc = "first"
encrypted = true
max-receivers = 5
max-per-address = 2
max-kbit-per-s = 800
burst-kib = 64
lease-s = 10
pause-s = 20
report-interval-s = 1
max-reports-per-s = 7
[[stream.receiver]]
address = "203.0.113.9:7000"
breaker = false
"#;
        let stream = Settings::parse(&(GOOD.to_owned() + more), "fanout.toml").unwrap().stream.remove(0);
        assert_eq!(stream.kernel().max_receivers, 6, "with the one that is named");
        assert_eq!(stream.listen_rtcp(), Some("192.0.2.1:5005".parse().unwrap()));
        assert_eq!(stream.sender_rtcp(), "198.51.100.7:6001".parse().unwrap());
        assert_eq!(stream.ssrc(), Ssrc::First);
        assert_eq!(
            stream.receiver,
            [Pinned { address: "203.0.113.9:7000".parse().unwrap(), breaker: false }]
        );
        let known = GOOD.to_owned() + "ssrc = 0x0a0b0c0d\n";
        assert_eq!(Settings::parse(&known, "fanout.toml").unwrap().stream[0].ssrc(), Ssrc::Is(0x0a0b_0c0d));
    }

    #[test]
    fn invalid_fan_out_setting_is_named_in_the_error() {
        let with = |line: &str| GOOD.to_owned() + line;
        let instead = |old: &str, new: &str| GOOD.replace(old, new);
        for (text, said) in [
            (with("max-reciever = 1"), "stream[0].max-reciever: unknown key; did you mean `max-receivers`?"),
            (with("ssrc = \"last\""), "\"first\" or a number"),
            (with("max-kbit-per-s = 0"), "stream \"live\": max-kbit-per-s: must be at least 1"),
            (with("burst-kib = 1"), "burst-kib: must be at least 64"),
            (with("max-receivers = 0"), "no [[stream.receiver]] is named"),
            (with("max-receivers = 70000"), "65536 is the most"),
            (with("listen-rtcp-port = 5004"), "leave it out"),
            (
                with("[[stream.receiver]]\naddress = \"[2001:db8::1]:9\""),
                "receiver: 2001:db8::1 is not of the family",
            ),
            (with("[[stream.receiver]]\naddress = \"224.0.0.1:9\""), "no single host's address"),
            (instead("192.0.2.1:5004", "0.0.0.0:5004"), "listen: 0.0.0.0 is no address of this host"),
            (instead("192.0.2.1:5004", "[2001:db8::1]:5004"), "sender: 198.51.100.7 is not of the family"),
            (instead("198.51.100.7:6000", "198.51.100.7:0"), "needs a port"),
            (instead("\"eth0\"", ""), "interface: name at least one"),
            (instead("\"live\"", "\"\""), "name: must be 1 to 44 bytes"),
            (with(&GOOD[GOOD.find("[[").unwrap()..]), "two streams are called \"live\""),
            (
                with(&GOOD[GOOD.find("[[").unwrap()..].replace("live", "other")),
                "two streams arrive at 192.0.2.1:5004",
            ),
            ("interface = [\"eth0\"]\nstream = []\n".to_owned(), "there is no [[stream]]"),
        ] {
            let error = error(&text);
            assert!(error.contains(said), "{error}\ninstead of {said}");
        }
    }

    #[test]
    fn every_problem_is_reported_with_its_line() {
        let second = GOOD[GOOD.find("[[").unwrap()..].replace("live", "other");
        for (text, wanted) in [
            (
                format!("intreface = 1{GOOD}ssrc = true\n{second}lease-s = -1\n"),
                [
                    "fanout.toml:1: intreface: unknown key; did you mean `interface`?",
                    "fanout.toml:8: stream[0].ssrc: is \"any\", \"first\" or a number",
                    "fanout.toml:13: stream[1].lease-s: is a number, 0 to 65535",
                ],
            ),
            (
                format!("{GOOD}burst-kib = 1\n{second}lease-s = 0\n{}", second.replace("other", "")),
                [
                    "fanout.toml:4: stream \"live\": burst-kib: must be at least 64",
                    "fanout.toml:9: stream \"other\": lease-s: must be at least 1",
                    "fanout.toml:14: stream \"\": name: must be 1 to",
                ],
            ),
        ] {
            let error = error(&text);
            assert_eq!(error.lines().count(), 4, "{error}");
            assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
        }
    }
}
