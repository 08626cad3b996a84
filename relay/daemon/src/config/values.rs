//! Types of settings' values, which have the same form in flags and in the settings file.

use std::{
    net::{SocketAddr, UdpSocket},
    num::NonZero,
    str::FromStr,
    time::Duration,
};

use millrace_daemon::address;
use millrace_moq::{Draft, UnknownDraft};
use millrace_transport::{Dscp, MAX_SHARDS};
use url::Url;

use super::{CongestionControl, EngineChoice, GateChoice, Gso};
pub use millrace_daemon::words::{deserialize, name};

/// An amount of memory in bytes, such as `268435456` or `256MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteCount(pub u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match text[digits.len()..].trim() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            unit => return Err(format!("`{unit}` is not a unit: use KiB, MiB or GiB")),
        };
        let number: u64 = digits.parse().map_err(|_| format!("`{text}` is not a number of bytes"))?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(|| format!("`{text}` is too large"))
    }
}

/// A duration, as a plain number of seconds (`30`, `0.5`) or with a unit (`250ms`, `10m`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationValue(pub Duration);

impl FromStr for DurationValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A year is longer than any useful setting, and adding it to a clock cannot overflow.
        const MAX: f64 = 365.0 * 86_400.0;
        let with_unit = || millrace_daemon::duration::parse(text).ok();
        let plain = text.parse().ok().filter(|seconds| (0.0..=MAX).contains(seconds));
        let time = plain.map(Duration::from_secs_f64).or_else(with_unit);
        let time = time.filter(|time| *time <= Duration::from_secs_f64(MAX));
        time.map(Self).ok_or_else(|| {
            format!("`{text}` is not a time up to 365d, such as 250ms, 1.5s or 10m, or a number of seconds")
        })
    }
}

/// Addresses to listen on: a single one, or all addresses of this machine with `:4443`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenOn(pub Vec<SocketAddr>);

impl FromStr for ListenOn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        address::listen(text).map(Self)
    }
}

impl ListenOn {
    /// Returns the addresses whose family this machine has. A single address is returned even if this machine lacks its
    /// family.
    pub fn there(self) -> Vec<SocketAddr> {
        // Binding a socket shows whether this machine supports the address family.
        let is_there = |addr: &&SocketAddr| UdpSocket::bind((addr.ip(), 0)).is_ok();
        match self.0[..] {
            [_] => self.0,
            ref all => Some(all.iter().filter(is_there).copied().collect::<Vec<_>>())
                .filter(|there| !there.is_empty())
                .unwrap_or_else(|| all.to_vec()),
        }
    }
}

impl From<SocketAddr> for ListenOn {
    fn from(addr: SocketAddr) -> Self {
        Self(vec![addr])
    }
}

/// A DSCP as a number or a name, such as `46` or `ef`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CodePoint(pub Dscp);

impl FromStr for CodePoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

/// The number of a draft of MoQ Transport, such as `22`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftNumber(pub Draft);

impl FromStr for DraftNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: UnknownDraft| format!("`{text}`: {error}"))
    }
}

/// A number of shards: a number, or `auto` for one for each CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardCount(pub usize);

impl ShardCount {
    /// The largest number of shards that `auto` chooses.
    const MOST: usize = 16;

    /// Returns one shard for each CPU that this process may use, but at most 16.
    pub fn auto() -> Self {
        Self(std::thread::available_parallelism().map_or(1, NonZero::get).min(Self::MOST))
    }
}

impl FromStr for ShardCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|count| (1..=MAX_SHARDS).contains(count));
        match text {
            "auto" => Ok(Self::auto()),
            _ => number(text)
                .map(Self)
                .ok_or_else(|| format!("`{text}` is neither auto nor a number from 1 to {MAX_SHARDS}")),
        }
    }
}

/// A relay's URL: `moqt://HOST:PORT`, or `https://HOST:PORT` for WebTransport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayUrl(pub Url);

/// Returns an invalid URL's text without a possible user and password, since errors go into logs.
fn without_user(text: &str) -> String {
    match (text.split_once("//"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) => format!("{scheme}//...@{rest}"),
        _ => text.to_owned(),
    }
}

impl FromStr for RelayUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|error| format!("`{}`: {error}", without_user(text)))?;
        if millrace_relay::has_user(&url) {
            // The error message must not show the URL, because the URL has a password.
            return Err(
                "a relay's address has no user and no password: the token is in upstream-token".to_owned()
            );
        }
        if !millrace_relay::is_of_a_relay(&url) {
            return Err(format!("`{text}` is not of the form moqt://HOST:PORT or https://HOST:PORT"));
        }
        Ok(Self(url))
    }
}

deserialize!(parsed: ByteCount, CodePoint, DraftNumber, ListenOn, DurationValue, RelayUrl, ShardCount);
deserialize!(chosen: EngineChoice, GateChoice, CongestionControl, Gso);
