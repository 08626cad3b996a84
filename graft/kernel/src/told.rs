//! What is chosen for the connections of paths, and what the kernel tells of each of them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, write};

use super::events::Events;
use super::rule::{Side, address, name, remove, text, words};
use super::sockets::Socket;
use super::{Error, intf, namespace};

/// Paths that there is room for.
pub const CHOICES: usize = intf::CHOICES;

/// By what the connections of a path go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Another each time that something is chosen, and not 0.
    pub serial: u32,
    pub arm: Arm,
    /// One connection, and no more, goes by this.
    pub grant: Option<Arm>,
}

/// A way to go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Arm {
    /// In place, or where the broker does not have it; `None`: the socket's own.
    pub congestion: Option<String>,
    /// To the broker, if it would have it.
    pub carried: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Began,
    Ended,
}

/// A connection in place, of a rule that has arms chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    pub what: What,
    pub side: Side,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The same as long as the socket lives.
    pub cookie: u64,
    /// In another network namespace than this process: it is not among [`Sockets`](super::Sockets).
    pub is_elsewhere: bool,
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// As [`Rule::choice`](super::Rule::choice) has it.
    pub rule: u32,
    /// Of the choice; 0: nothing was chosen yet.
    pub serial: u32,
    pub explored: bool,
    /// That it was to have; `None`: the socket's own.
    pub congestion: Option<String>,
    /// That has connected, as the kernel calls its thread; `None`: not known, as at a server.
    pub command: Option<String>,
    /// Since the SYN.
    pub duration: Duration,
    /// Bytes, as the peer has acknowledged them.
    pub sent: u64,
    pub received: u64,
    /// In which there was something to be sent or acknowledged, to the kernel's tick. `None`: the length of that is not known yet.
    pub busy: Option<Duration>,
    /// From the SYN until data came last, likewise.
    pub heard: Option<Duration>,
    /// As TCP knew it at that moment.
    pub socket: Socket,
}

/// Maps that the programs at sockets and at `connect()` share.
#[derive(Debug)]
pub struct Shared {
    pub(super) choices: MapHandle,
    pub(super) flows: MapHandle,
}

pub(super) struct Choices {
    map: MapHandle,
    events: Events<intf::Told>,
    namespace_cookie: u64,
    ticks: Ticks,
}

impl Choices {
    pub fn of(object: &mut Loaded) -> Result<Self, Error> {
        let events = Events::of(object, "told", intf::Told::from_bytes)?;
        let map = object.handle("choices")?;
        let namespace_cookie = namespace::cookie().map_err(Error::Descriptor)?;
        Ok(Self { map, events, namespace_cookie, ticks: Ticks::default() })
    }

    pub fn set(&self, peer: IpAddr, rule: u32, choice: &Choice) -> Result<(), Error> {
        let raw = raw(choice);
        Ok(write(&self.map, "choices", key(peer, rule).as_bytes(), raw.as_bytes())?)
    }

    pub fn forget(&self, peer: IpAddr, rule: u32) -> Result<(), Error> {
        remove(&self.map, "choices", key(peer, rule).as_bytes())
    }

    pub fn clear(&self) -> Result<(), Error> {
        let keys: Vec<_> = self.map.keys().collect();
        keys.iter().try_for_each(|key| remove(&self.map, "choices", key))
    }

    /// What grants were taken is not said: one that was given is a connection that may have gone that way.
    pub fn is_granted(&self, peer: IpAddr, rule: u32) -> Result<bool, Error> {
        let found = self.map.lookup(key(peer, rule).as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "choices", source })?;
        Ok(found.and_then(|value| intf::Choice::from_bytes(&value)).is_some_and(|it| it.grant == 1))
    }

    /// All that was told since.
    pub fn take(&mut self) -> Result<Vec<Told>, Error> {
        let come = self.events.take()?;
        let (here, ticks) = (self.namespace_cookie, &mut self.ticks);
        Ok(come.iter().filter_map(|raw| told(raw, here, ticks.note(raw.jiffies, raw.time_ns))).collect())
    }
}

fn key(peer: IpAddr, rule: u32) -> intf::ChoiceKey {
    intf::ChoiceKey { peer: words(peer), rule }
}

fn raw(choice: &Choice) -> intf::Choice {
    let congestion = |arm: &Arm| name(arm.congestion.as_deref().unwrap_or_default());
    let other = choice.grant.as_ref();
    intf::Choice {
        serial: choice.serial,
        lead: u32::from(choice.arm.carried),
        other_lead: u32::from(other.is_some_and(|arm| arm.carried)),
        grant: u32::from(other.is_some()),
        congestion: congestion(&choice.arm),
        other: other.map(congestion).unwrap_or_default(),
    }
}

fn told(raw: &intf::Told, here: u64, tick: Option<Duration>) -> Option<Told> {
    let duration = Duration::from_nanos(raw.duration_ns);
    let congestion = Some(text(&raw.congestion)).filter(|name| !name.is_empty());
    let (local, remote) = (
        SocketAddr::new(address(raw.local), raw.local_port),
        SocketAddr::new(address(raw.remote), raw.remote_port),
    );
    let since_heard = tick.map(|tick| tick.saturating_mul(raw.heard_jiffies));
    Some(Told {
        what: match u32::from(raw.what) {
            intf::TOLD_BEGAN => What::Began,
            intf::TOLD_ENDED => What::Ended,
            _ => return None,
        },
        side: if raw.side == intf::CLIENT { Side::Client } else { Side::Server },
        local,
        remote,
        cookie: raw.cookie,
        is_elsewhere: raw.netns_cookie != here,
        time_ns: raw.time_ns,
        rule: raw.rule,
        serial: raw.serial,
        explored: raw.explored != 0,
        congestion,
        command: Some(text(&raw.command)).filter(|name| !name.is_empty()),
        duration,
        sent: raw.sent,
        received: raw.received,
        busy: tick.map(|tick| tick.saturating_mul(raw.busy_jiffies).min(duration)),
        heard: since_heard.filter(|_| raw.received > 0).map(|since| duration.saturating_sub(since)),
        socket: Socket::of([local, remote], raw.cookie, &raw.congestion, raw.sent, &raw.figures),
    })
}

/// How long a tick of the kernel is (`CONFIG_HZ`), which it does not say: found out from two moments that are told in ticks and in
/// nanoseconds.
#[derive(Debug, Default)]
struct Ticks {
    first: Option<(u64, u64)>,
    tick: Option<Duration>,
}

impl Ticks {
    /// As many in a second as kernels have.
    const RATES: [u64; 4] = [100, 250, 300, 1000];
    /// Before, 250 and 300 are not told apart for certain.
    const ENOUGH_NS: u64 = 200_000_000;

    fn note(&mut self, jiffies: u64, time_ns: u64) -> Option<Duration> {
        let (first_jiffies, first_ns) = *self.first.get_or_insert((jiffies, time_ns));
        let (ticks, ns) = (jiffies.saturating_sub(first_jiffies), time_ns.saturating_sub(first_ns));
        if self.tick.is_none() && ns >= Self::ENOUGH_NS {
            let rate = u128::from(ticks) * 1_000_000_000 / u128::from(ns);
            let nearest = Self::RATES.into_iter().min_by_key(|known| u128::from(*known).abs_diff(rate));
            self.tick = nearest.map(|rate| Duration::from_nanos(1_000_000_000 / rate));
        }
        self.tick
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_what_two_moments_say() {
        for rate in Ticks::RATES {
            for error in [0, 1] {
                let mut ticks = Ticks::default();
                assert_eq!(ticks.note(4_294_900_000, 5_000), None);
                assert_eq!(ticks.note(4_294_900_000 + 1, 10_000), None, "too early");
                let tick = ticks.note(4_294_900_000 + rate / 5 + error, 200_005_000);
                assert_eq!(tick, Some(Duration::from_nanos(1_000_000_000 / rate)), "{rate}");
                assert_eq!(ticks.note(0, 0), tick, "it does not change");
            }
        }
    }

    #[test]
    fn choices_are_written_as_the_programs_read_them() {
        let arm = |name: Option<&str>, carried| Arm { congestion: name.map(str::to_owned), carried };
        let plain = raw(&Choice { serial: 7, arm: arm(None, false), grant: None });
        assert_eq!((plain.serial, plain.lead, plain.grant, plain.congestion), (7, 0, 0, [0; 16]));
        let granted =
            Choice { serial: 8, arm: arm(Some("bbr"), true), grant: Some(arm(Some("cubic"), false)) };
        let both = raw(&granted);
        assert_eq!((both.lead, both.other_lead, both.grant), (1, 0, 1));
        assert_eq!((text(&both.congestion), text(&both.other)), ("bbr".to_owned(), "cubic".to_owned()));
    }
}
