//! The model's choice for each network path, a congestion control or the tunnel broker, and the kernel's events about
//! the connections to which a choice was applied.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, UnloadedObject, write};

use super::events::Events;
use super::rule::{RuleSide, address, name, remove, text, words};
use super::sockets::SocketState;
use super::{Error, intf, namespace};

/// Maximum number of network paths for which the model's choice of a congestion control is stored.
pub const CHOICES: usize = intf::CHOICES;

/// The congestion control, or the tunnel broker, that a model chose for the connections with a peer that match a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathCandidates {
    /// Serial number of the model's choice, which is never 0 and differs for each choice. Events about connections
    /// contain the number.
    pub serial: u32,
    /// The congestion control that the path's connections use, or the tunnel broker that tunnels them.
    pub candidate: CandidateChoice,
    /// A second candidate that exactly one connection uses, so that its performance is measured.
    pub grant: Option<CandidateChoice>,
}

/// A candidate for connections: a congestion control, or the tunnel broker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CandidateChoice {
    /// Congestion control of a connection that is not tunnelled by the tunnel broker; `None`: the congestion control
    /// that the socket already has.
    pub congestion: Option<String>,
    /// True to redirect the connection to the tunnel broker, if the broker accepts it.
    pub carried: bool,
}

/// The kind of an event about a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectedEventKind {
    /// The handshake of the connection is complete.
    Began,
    /// The connection was closed.
    Ended,
}

/// An event about a connection that goes directly to its server, not to the tunnel broker. The connection matches a
/// rule for which the model chooses the congestion control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedEvent {
    /// The kind of the event.
    pub what: SelectedEventKind,
    /// Whether this host is client or server of the connection.
    pub side: RuleSide,
    /// This host's address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
    /// The kernel's cookie of the socket, which does not change while the socket exists.
    pub cookie: u64,
    /// True if the socket is in another network namespace than this process, so that
    /// [`SocketPrograms`](super::SocketPrograms) does not list it.
    pub is_elsewhere: bool,
    /// Time of the event, ns (`CLOCK_MONOTONIC`).
    pub time_ns: u64,
    /// [`TcpRule::choice`](super::TcpRule::choice) of the rule that the connection matches.
    pub rule: u32,
    /// Serial number of the model's choice that the connection followed; 0: the model had made no choice yet.
    pub serial: u32,
    /// True if this connection used the second candidate (a congestion control or the tunnel broker), which the model's
    /// choice grants to only one connection.
    pub explored: bool,
    /// Congestion control that was chosen for the connection; `None`: the socket's own.
    pub congestion: Option<String>,
    /// Name of the connecting thread in the kernel; `None` if unknown, which is always so at a server.
    pub command: Option<String>,
    /// Time from the SYN to this event.
    pub duration: Duration,
    /// Payload bytes that the peer has acknowledged.
    pub sent: u64,
    /// Payload bytes that this host has received.
    pub received: u64,
    /// Time in which data waited to be sent or acknowledged, with the resolution of a kernel tick. `None` while the
    /// length of a tick is not known.
    pub busy: Option<Duration>,
    /// Time from the SYN to the latest received data, with the resolution of a kernel tick. `None` while the length of
    /// a tick is not known, or if nothing was received.
    pub heard: Option<Duration>,
    /// State of the socket at the time of the event.
    pub socket: SocketState,
}

/// BPF maps that the programs attached to TCP sockets share with those attached to connect(). They may be in different
/// processes, and either may start again with the same maps.
#[derive(Debug)]
pub struct SelectionMaps {
    choices: OwnedFd,
    flows: OwnedFd,
}

impl SelectionMaps {
    /// Returns the maps with these descriptors, which are in the order of [`Self::descriptors`]. Returns `None` if
    /// there are none.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let [choices, flows] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
        Some(Self { choices, flows })
    }

    /// Returns the descriptors of the maps, which another process may use.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.choices.as_fd(), self.flows.as_fd()]
    }

    pub(super) fn from_object(object: &mut LoadedObject) -> Result<Self, Error> {
        let mut map = |name| {
            let handle = object.handle(name)?;
            handle.as_fd().try_clone_to_owned().map_err(Error::Descriptor)
        };
        Ok(Self { choices: map("choices")?, flows: map("flows")? })
    }

    /// Makes the maps of an object that is not loaded yet the same as these.
    pub(super) fn share(&self, open: &mut UnloadedObject) -> Result<(), Error> {
        let refused = |what| move |source| millrace_kernel::Error::Write { what, source };
        open.map("choices")?.reuse_fd(self.choices.as_fd()).map_err(refused("choices"))?;
        Ok(open.map("flows")?.reuse_fd(self.flows.as_fd()).map_err(refused("flows"))?)
    }
}

pub(super) struct Choices {
    map: MapHandle,
    events: Events<intf::Event>,
    namespace_cookie: u64,
    ticks: Ticks,
}

impl Choices {
    pub fn from_object(object: &mut LoadedObject) -> Result<Self, Error> {
        // The TCP programs write events to this ring buffer.
        let events = Events::open_ring(object, "events", intf::Event::from_bytes)?;
        let map = object.handle("choices")?;
        let namespace_cookie = namespace::cookie().map_err(Error::Descriptor)?;
        Ok(Self { map, events, namespace_cookie, ticks: Ticks::default() })
    }

    pub fn set(&self, peer: IpAddr, rule: u32, choice: &PathCandidates) -> Result<(), Error> {
        let raw = raw(choice);
        Ok(write(&self.map, "choices", key(peer, rule).as_bytes(), raw.as_bytes())?)
    }

    pub fn forget(&self, peer: IpAddr, rule: u32) -> Result<(), Error> {
        remove(&self.map, "choices", key(peer, rule).as_bytes())
    }

    pub fn clear(&self) -> Result<(), Error> {
        let keys: Vec<_> = self.map.keys().collect();
        // Keys are collected first, since deleting entries during iteration may skip others.
        keys.iter().try_for_each(|key| remove(&self.map, "choices", key))
    }

    /// Returns whether the model's choice for this peer and rule still lets one connection use its second candidate.
    /// The BPF programs withdraw this permission when a connection uses the candidate.
    pub fn is_granted(&self, peer: IpAddr, rule: u32) -> Result<bool, Error> {
        let found = self.map.lookup(key(peer, rule).as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "choices", source })?;
        Ok(found.and_then(|value| intf::Choice::from_bytes(&value)).is_some_and(|it| it.grant == 1))
    }

    /// Returns the events that arrived since the last call.
    pub fn take(&mut self) -> Result<Vec<SelectedEvent>, Error> {
        let come = self.events.take()?;
        let here = self.namespace_cookie;
        let ticks = &mut self.ticks;
        Ok(come
            .iter()
            .filter_map(|raw| parse_event(raw, here, ticks.note(raw.jiffies, raw.time_ns)))
            .collect())
    }
}

fn key(peer: IpAddr, rule: u32) -> intf::ChoiceKey {
    intf::ChoiceKey { peer: words(peer), rule }
}

fn raw(choice: &PathCandidates) -> intf::Choice {
    let congestion = |candidate: &CandidateChoice| name(candidate.congestion.as_deref().unwrap_or_default());
    let other = choice.grant.as_ref();
    intf::Choice {
        serial: choice.serial,
        redirect: u32::from(choice.candidate.carried),
        other_redirect: u32::from(other.is_some_and(|candidate| candidate.carried)),
        grant: u32::from(other.is_some()),
        congestion: congestion(&choice.candidate),
        other: other.map(congestion).unwrap_or_default(),
    }
}

fn parse_event(raw: &intf::Event, here: u64, tick: Option<Duration>) -> Option<SelectedEvent> {
    let duration = Duration::from_nanos(raw.duration_ns);
    // An empty name means that the connection uses the socket's own congestion control.
    let congestion = Some(text(&raw.congestion)).filter(|name| !name.is_empty());
    let local = SocketAddr::new(address(raw.local), raw.local_port);
    let remote = SocketAddr::new(address(raw.remote), raw.remote_port);
    let since_heard = tick.map(|tick| tick.saturating_mul(raw.heard_jiffies));
    Some(SelectedEvent {
        what: match u32::from(raw.what) {
            intf::EVENT_BEGAN => SelectedEventKind::Began,
            intf::EVENT_ENDED => SelectedEventKind::Ended,
            _ => return None,
        },
        side: if raw.side == intf::CLIENT { RuleSide::Client } else { RuleSide::Server },
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
        // The time in which data waited cannot exceed the connection's duration, but rounding to ticks may exceed it by
        // one tick.
        busy: tick.map(|tick| tick.saturating_mul(raw.busy_jiffies).min(duration)),
        heard: since_heard.filter(|_| raw.received > 0).map(|since| duration.saturating_sub(since)),
        socket: SocketState::from_parts([local, remote], raw.cookie, &raw.congestion, raw.sent, &raw.figures),
    })
}

/// Measures the kernel's tick (`CONFIG_HZ`), which the kernel does not report: the times of two events in ticks and
/// in nanoseconds give its length.
#[derive(Debug, Default)]
struct Ticks {
    first: Option<(u64, u64)>,
    tick: Option<Duration>,
}

impl Ticks {
    /// Ticks per second that Linux can be built with.
    const RATES: [u64; 4] = [100, 250, 300, 1000];
    /// Nanoseconds between two readings of the tick counter that suffice to distinguish 250 from 300 ticks per second,
    /// despite an error of one tick.
    const ENOUGH_NS: u64 = 200_000_000;

    fn note(&mut self, jiffies: u64, time_ns: u64) -> Option<Duration> {
        // The first event only provides the first reading of the tick counter.
        let (first_jiffies, first_ns) = *self.first.get_or_insert((jiffies, time_ns));
        let ticks = jiffies.saturating_sub(first_jiffies);
        let ns = time_ns.saturating_sub(first_ns);
        if self.tick.is_none() && ns >= Self::ENOUGH_NS {
            let rate = u128::from(ticks) * 1_000_000_000 / u128::from(ns);
            // The counted ticks may be off by one, so the nearest tick rate of Linux is taken.
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
    fn kernel_tick_length_follows_from_two_clock_readings() {
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
    fn candidate_choices_are_encoded_as_the_bpf_programs_read_them() {
        let candidate =
            |name: Option<&str>, carried| CandidateChoice { congestion: name.map(str::to_owned), carried };
        let plain = raw(&PathCandidates { serial: 7, candidate: candidate(None, false), grant: None });
        assert_eq!((plain.serial, plain.redirect, plain.grant, plain.congestion), (7, 0, 0, [0; 16]));
        let granted = PathCandidates {
            serial: 8,
            candidate: candidate(Some("bbr"), true),
            grant: Some(candidate(Some("cubic"), false)),
        };
        let both = raw(&granted);
        assert_eq!((both.redirect, both.other_redirect, both.grant), (1, 0, 1));
        assert_eq!((text(&both.congestion), text(&both.other)), ("bbr".to_owned(), "cubic".to_owned()));
    }
}
