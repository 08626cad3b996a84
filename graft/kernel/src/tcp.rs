//! TCP connections of a cgroup: agreement with their peers in options, and settings of this side's sockets.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded, write};

use super::attachment::Attachment;
use super::pins::Pins;
use super::rule::{RULES, Rule, Side, address, words};
use super::told::{Choice, Choices, Shared, Told};
use super::{Error, intf};

/// A map, and what errors call it.
const WHAT: &str = "rules";
/// Programs, and how their attachments are called where they stay. Who connects is known before the rules are looked at.
const PROGRAMS: [(&str, &str); 3] =
    [("graft_connect4", "tcp-connect4"), ("graft_connect6", "tcp-connect6"), ("graft_tcp", "tcp")];

macro_rules! outcomes {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What became of a connection that a rule fits, or of one of its packets.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Outcome { $($(#[$doc])* $name),* }

        impl Outcome {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// As status, metrics and the documentation call it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

outcomes! {
    /// Both sides have it.
    Agreed = "agreed",
    /// The rule asks nobody.
    OneSided = "one-sided",
    /// No answer: the peer has no grafts, or the option was taken off.
    Absent = "absent",
    /// No answer from a peer that has agreed before: the option was taken off.
    Stripped = "stripped",
    /// The peer speaks another version.
    Refused = "refused",
    /// An option that is not as it should be.
    Malformed = "malformed",
    /// Of a server: the client offered nothing, or did not get the answer.
    Unconfirmed = "unconfirmed",
    /// TCP had no room for the option.
    NoRoom = "no-room",
    /// SYN cookies are in use, with which nothing is answered.
    Cookies = "cookies",
    /// SYN-ACKs with an answer.
    Answered = "answered",
    /// The congestion control is not there: the socket keeps the one that it has.
    NoCongestion = "no-congestion",
    /// The kernel has refused another setting.
    NotSet = "not-set",
    /// The SYN came through only without the option, or was lost by chance.
    Resent = "resent",
    /// Nothing was offered, since that happened with this peer in the last ten minutes.
    Withheld = "withheld",
    /// There was no memory for a socket's state.
    NoMemory = "no-memory",
    /// Nothing was offered or answered: the rule wants a peer that is bound, and this one is not.
    Unbound = "unbound",
    /// What came of it is lost: nobody has read fast enough. Of connections of rules that have arms chosen.
    Untold = "untold",
}

/// What is known of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub address: IpAddr,
    /// `CLOCK_MONOTONIC`, of the latest connection.
    pub time_ns: u64,
    /// Of the latest connection.
    pub outcome: Outcome,
    /// By which it came about, from 0.
    pub rule: u32,
    /// First bytes of the identity of what the peer uses, where it told.
    pub graft: [u8; 4],
    /// Connections with it that agreed.
    pub agreed: u64,
}

/// How a connection with a peer began, that a rule fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    pub peer: IpAddr,
    pub side: Side,
    /// Numbers of the first bytes of data, the client's and the server's: by these the peer knows it, too.
    pub first: [u32; 2],
    /// The server's.
    pub port: u16,
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    pub outcome: Outcome,
    /// Of a client: it has offered. Of a server: it would have answered an offer.
    pub spoke: bool,
    /// First bytes of the identity of what this side would use.
    pub own: [u8; 4],
    /// What the peer said that it uses.
    pub heard: [u8; 4],
}

/// The program, loaded. It acts from [`attach`](Self::attach) on and until it is dropped.
pub struct Tcp {
    links: Vec<Attachment>,
    object: Loaded,
    /// Where the list of rules in force begins, of two.
    first_rule: usize,
    /// Programs that ran when the list was replaced may still read the one before.
    is_replaced: bool,
    /// Of the list of rules.
    generation: u32,
    choices: Choices,
}

impl Tcp {
    pub fn load() -> Result<Self, Error> {
        let mut object = embedded!("graft_tcp.bpf.o").open()?.load()?;
        let choices = Choices::of(&mut object)?;
        Ok(Self { links: Vec::new(), object, first_rule: 0, is_replaced: false, generation: 0, choices })
    }

    /// Sockets that are made in the cgroup (version 2), and those below it, from now on. Other programs of the cgroup stay.
    ///
    /// A server is asked of when it begins to listen: one that listens already is to be told by
    /// [`Sockets`](super::Sockets).
    pub fn attach(&mut self, cgroup: &Path) -> Result<(), Error> {
        for (program, _) in PROGRAMS {
            self.links.push(Attachment::new(&self.object.program(program)?, cgroup)?);
        }
        Ok(())
    }

    /// Its attachment stays when this process ends, with the rules that are in force then.
    pub fn keep(&mut self, pins: &Pins) -> Result<(), Error> {
        self.links.iter_mut().zip(PROGRAMS).try_for_each(|(link, (_, name))| link.pin(pins, name))
    }

    pub fn detach(&mut self) {
        self.links.clear();
    }

    /// These and no others, at once. Connections that are being made keep what they have offered. Nobody is bound any more: what
    /// was agreed on were other rules.
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<(), Error> {
        if rules.len() > RULES {
            return Err(Error::Rules { have: rules.len(), room: RULES });
        }
        let map = self.object.handle(WHAT)?;
        let first = if self.first_rule == 0 { RULES } else { 0 };
        // A program that began before the latest change may still read what is to be written now.
        if self.is_replaced {
            self.wait_for_runs()?;
        }
        let generation = self.generation.wrapping_add(1);
        // What is told of connections that are chosen for says whose they were, too.
        let asks = rules.iter().any(|rule| rule.choice > 0 || !rule.caller.is_anybody());
        // A connection that begins before the list is in force may be judged by it.
        if asks {
            self.ask_who(true)?;
        }
        // One of no side ends the list.
        let raw = rules.iter().map(|rule| rule.raw(generation)).chain([intf::Rule::default()]).take(RULES);
        for (place, rule) in (first as u32..).zip(raw) {
            write(&map, WHAT, &place.to_ne_bytes(), rule.as_bytes())?;
        }
        write(&self.object.handle("in_force")?, WHAT, &0_u32.to_ne_bytes(), &(first as u32).to_ne_bytes())?;
        if !asks {
            self.ask_who(false)?;
        }
        (self.first_rule, self.generation) = (first, generation);
        self.is_replaced = !self.links.is_empty();
        Ok(())
    }

    fn ask_who(&mut self, asks: bool) -> Result<(), Error> {
        let map = self.object.handle("asks_who")?;
        Ok(write(&map, "asks_who", &0_u32.to_ne_bytes(), &u32::from(asks).to_ne_bytes())?)
    }

    fn wait_for_runs(&mut self) -> Result<(), Error> {
        let nothing = self.object.handle("nothing")?;
        let inner = nothing.as_fd().as_raw_fd().to_ne_bytes();
        Ok(write(&self.object.handle("barrier")?, WHAT, &0_u32.to_ne_bytes(), &inner)?)
    }

    /// The peer has agreed on these of the rules in force, by their places, for so long.
    pub fn bind(&mut self, peer: IpAddr, rules: &[usize], time: Duration) -> Result<(), Error> {
        let bits = rules.iter().filter(|at| **at < RULES).fold(0, |bits, at| bits | 1_u64 << at);
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = clock::monotonic_ns().saturating_add(time_ns);
        let bound = intf::Bound { until_ns, rules: bits, generation: self.generation, pad: 0 };
        write(&self.object.handle("bound")?, "bound", &words(peer), bound.as_bytes())?;
        Ok(())
    }

    /// It is bound by nothing. Nothing happens if it was not.
    pub fn unbind(&mut self, peer: IpAddr) -> Result<(), Error> {
        let map = self.object.handle("bound")?;
        match map.delete(&words(peer)) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(millrace_kernel::Error::Write { what: "bound", source: error }.into())
            }
            _ => Ok(()),
        }
    }

    /// For connections with the peer that begin from now on, and that a rule with this [`choice`](Rule::choice) fits. A grant that
    /// nobody has taken before is none any more.
    pub fn choose(&self, peer: IpAddr, rule: u32, choice: &Choice) -> Result<(), Error> {
        self.choices.set(peer, rule, choice)
    }

    /// Nothing is chosen for it any more. Nothing happens if nothing was.
    pub fn choose_no_more(&self, peer: IpAddr, rule: u32) -> Result<(), Error> {
        self.choices.forget(peer, rule)
    }

    /// Nothing is chosen for anybody.
    pub fn forget_choices(&self) -> Result<(), Error> {
        self.choices.clear()
    }

    /// Whether a grant waits for a connection.
    pub fn is_granted(&self, peer: IpAddr, rule: u32) -> Result<bool, Error> {
        self.choices.is_granted(peer, rule)
    }

    /// Of connections that rules with a [`choice`](Rule::choice) fit, since the last time. What was not taken in time is counted
    /// ([`Outcome::Untold`]).
    pub fn take_told(&mut self) -> Result<Vec<Told>, Error> {
        self.choices.take()
    }

    /// For a [`Hook`](super::hook::Hook) that chooses with it.
    pub fn share(&mut self) -> Result<Shared, Error> {
        Ok(Shared { choices: self.object.handle("choices")?, flows: self.object.handle("flows")? })
    }

    /// Since it was loaded.
    pub fn outcomes(&mut self) -> Result<Vec<(Outcome, u64)>, Error> {
        let counts = self.object.counters("outcomes")?;
        Ok(Outcome::ALL.iter().copied().zip(counts).collect())
    }

    /// The latest, at most 4096.
    pub fn peers(&mut self) -> Result<Vec<Peer>, Error> {
        let map = self.object.handle("peers")?;
        let mut peers = Vec::new();
        for key in map.keys() {
            let Ok(Some(value)) = map.lookup(&key, MapFlags::ANY) else { continue };
            peers.extend(peer(&key, &value));
        }
        Ok(peers)
    }

    /// The latest, of all peers, at most 4096; the oldest first.
    pub fn connections(&mut self) -> Result<Vec<Connection>, Error> {
        let map = self.object.handle("connections")?;
        let read = |source| millrace_kernel::Error::Read { what: "connections", source };
        let entries = map.lookup_batch(map.max_entries(), MapFlags::ANY, MapFlags::ANY).map_err(read)?;
        let mut connections: Vec<_> = entries.filter_map(|(key, value)| connection(&key, &value)).collect();
        connections.sort_by_key(|connection| connection.time_ns);
        Ok(connections)
    }

    pub fn peer(&mut self, address: IpAddr) -> Result<Option<Peer>, Error> {
        let (map, key) = (self.object.handle("peers")?, words(address));
        let value = map.lookup(&key, MapFlags::ANY);
        let value = value.map_err(|source| millrace_kernel::Error::Read { what: "peers", source })?;
        Ok(value.and_then(|value| peer(&key, &value)))
    }
}

fn connection(key: &[u8], value: &[u8]) -> Option<Connection> {
    let key = intf::ConnectionKey::from_bytes(key)?;
    let value = intf::Connection::from_bytes(value)?;
    Some(Connection {
        peer: address(value.peer),
        side: if key.side == u32::from(intf::CLIENT) { Side::Client } else { Side::Server },
        first: [key.client_first, key.server_first],
        port: value.port,
        time_ns: value.time_ns,
        outcome: *Outcome::ALL.get(value.outcome as usize)?,
        spoke: value.spoke != 0,
        own: value.own,
        heard: value.heard,
    })
}

fn peer(key: &[u8], value: &[u8]) -> Option<Peer> {
    let intf::Peer { time_ns, agreed, outcome, rule, graft, .. } = intf::Peer::from_bytes(value)?;
    Some(Peer {
        address: address(key.try_into().ok()?),
        time_ns,
        outcome: *Outcome::ALL.get(outcome as usize)?,
        rule,
        graft,
        agreed,
    })
}
