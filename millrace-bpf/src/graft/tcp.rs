//! TCP connections of a cgroup: agreement with their peers in options, and settings of this side's sockets.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapType};

use super::rule::{RULES, Rule, address, words};
use super::{Error, intf};
use crate::fork::{Kept, keep_from_children};
use crate::intf::Plain;
use crate::object::{Loaded, embedded, write};
use crate::raw::detach;

/// A map, and what errors call it.
const WHAT: &str = "rules";

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

/// The program, loaded. It acts from [`attach`](Self::attach) on and until it is dropped.
pub struct Tcp {
    links: Vec<Attachment>,
    object: Loaded,
    /// The map of rules that it was loaded with is no longer the one in force.
    is_replaced: bool,
}

struct Attachment {
    _kept: Kept,
    link: Link,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A cgroup that is gone took the link along.
        let _ = detach(self.link.as_fd());
    }
}

impl Tcp {
    pub fn load() -> Result<Self, Error> {
        let object = embedded!("graft_tcp.bpf.o").open()?.load()?;
        Ok(Self { links: Vec::new(), object, is_replaced: false })
    }

    /// Sockets that are made in the cgroup (version 2), and those below it, from now on. Other programs of the cgroup stay.
    ///
    /// A server is asked of when it begins to listen: one that listens already is to be told by
    /// [`Sockets`](super::Sockets).
    pub fn attach(&mut self, cgroup: &Path) -> Result<(), Error> {
        let path = || cgroup.display().to_string();
        let directory = File::open(cgroup).map_err(|source| Error::NoCgroup { path: path(), source })?;
        let program = self.object.program("graft_tcp")?;
        let link = program
            .attach_cgroup(directory.as_fd().as_raw_fd())
            .map_err(|source| Error::Cgroup { path: path(), source })?;
        self.links.push(Attachment { _kept: keep_from_children(&link), link });
        Ok(())
    }

    pub fn detach(&mut self) {
        self.links.clear();
    }

    /// These and no others, at once. Connections that are being made keep what they have offered.
    pub fn set_rules(&mut self, rules: &[Rule]) -> Result<(), Error> {
        if rules.len() > RULES {
            return Err(Error::Rules { have: rules.len(), room: RULES });
        }
        // Nobody reads them yet: to replace them would be to wait for programs that run (an RCU grace period).
        if self.links.is_empty() && !self.is_replaced {
            return fill(&self.object.handle("first_rules")?, rules);
        }
        let options = bpf_map_create_opts {
            sz: size_of::<bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let (key, value) = (size_of::<u32>() as u32, size_of::<intf::Rule>() as u32);
        let next = MapHandle::create(MapType::Array, Some(WHAT), key, value, RULES as u32, &options)
            .map_err(|source| crate::Error::Write { what: WHAT, source })?;
        fill(&next, rules)?;
        let inner = next.as_fd().as_raw_fd().to_ne_bytes();
        write(&self.object.handle(WHAT)?, WHAT, &0_u32.to_ne_bytes(), &inner)?;
        self.is_replaced = true;
        Ok(())
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

    pub fn peer(&mut self, address: IpAddr) -> Result<Option<Peer>, Error> {
        let (map, key) = (self.object.handle("peers")?, words(address));
        let value = map.lookup(&key, MapFlags::ANY);
        let value = value.map_err(|source| crate::Error::Read { what: "peers", source })?;
        Ok(value.and_then(|value| peer(&key, &value)))
    }
}

/// These, and no others behind them.
fn fill(map: &MapHandle, rules: &[Rule]) -> Result<(), Error> {
    let nothing = std::iter::repeat_with(intf::Rule::default);
    for (index, rule) in (0_u32..).zip(rules.iter().map(Rule::raw).chain(nothing).take(RULES)) {
        write(map, WHAT, &index.to_ne_bytes(), rule.as_bytes())?;
    }
    Ok(())
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
