//! A BPF program at the TCP sockets of a cgroup. It agrees with peers in TCP options, and applies settings to this
//! host's sockets by rules.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags};
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::outcomes;

use super::attachment::CgroupAttachment;
use super::choices::{Choices, PathCandidates, SelectedEvent, SelectionMaps};
use super::pins::PinDirectory;
use super::rule::{RULES, RuleSide, TcpRule, address, words};
use super::{Error, intf};

/// Name of the map of rules, also used in errors about that map.
const WHAT: &str = "rules";
/// Programs and the names of their pins, in the order of attachment. The programs at connect() store the calling
/// process, so they are attached before the program that applies rules.
const PROGRAMS: [(&str, &str); 3] =
    [("graft_connect4", "tcp-connect4"), ("graft_connect6", "tcp-connect6"), ("graft_tcp", "tcp")];

outcomes! {
    /// The outcome of applying a rule to a connection, or to one of its packets.
    TcpOutcome {
        /// Both hosts apply the rule.
        Agreed = "agreed",
        /// The rule has `agree = false`, so the peer was not asked.
        OneSided = "one-sided",
        /// The peer did not answer. It has no daemon, no matching rule, or SYN cookies in use, or a middlebox removes
        /// the TCP option.
        Absent = "absent",
        /// A peer that agreed to an earlier connection did not answer: a middlebox removes the TCP option now.
        Stripped = "stripped",
        /// The peer uses another version of the TCP option.
        Refused = "refused",
        /// The peer's TCP option is malformed.
        Malformed = "malformed",
        /// The client did not offer an agreement, or did not receive this server's answer.
        Unconfirmed = "unconfirmed",
        /// Other TCP options, such as those of MPTCP, left no space for the option that carries the agreement.
        NoRoom = "no-room",
        /// The server sent a SYN cookie, so the SYN-ACK had no space for an answer.
        Cookies = "cookies",
        /// The server sent an answer in a SYN-ACK. This happens more often than `agreed` if SYNs are repeated or have
        /// forged addresses.
        Answered = "answered",
        /// The rule's congestion control does not exist, so the socket keeps its own.
        NoCongestion = "no-congestion",
        /// The kernel refused another setting of the rule than its congestion control.
        NotSet = "not-set",
        /// The SYN was repeated without the option, because it was lost or a middlebox drops SYNs with the option.
        Resent = "resent",
        /// The option was not offered, because a SYN to this peer was `resent` in the last ten minutes.
        Withheld = "withheld",
        /// The kernel had no memory for the socket's state.
        NoMemory = "no-memory",
        /// The rule has `agree = "bound"`, and at present userspace has not agreed with the peer to use the rule
        /// ([`Tcp::bind`]).
        Unbound = "unbound",
        /// The event about a connection of a rule with `select` was lost, because the ring buffer was full.
        EventLost = "event-lost",
    }
}

/// Whether the latest connection with a peer agreed on a rule, or why it did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpPeer {
    /// The peer's address.
    pub address: IpAddr,
    /// Time of the latest connection, ns (`CLOCK_MONOTONIC`).
    pub time_ns: u64,
    /// Whether the latest connection agreed on the rule, or why it did not.
    pub outcome: TcpOutcome,
    /// Index (from 0) of the rule that matched the latest connection.
    pub rule: u32,
    /// First bytes of the hash that identifies the congestion control that the peer uses; zeros if the peer did not
    /// send it.
    pub graft: [u8; 4],
    /// Number of connections in whose handshake this host and the peer agreed to use the rule.
    pub agreed: u64,
}

/// How the handshake of a connection went, if a rule matches the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpConnection {
    /// The peer's address.
    pub peer: IpAddr,
    /// Whether this host is client or server of the connection.
    pub side: RuleSide,
    /// Sequence numbers of the first data bytes of client and server. They identify the connection at both ends.
    pub first: [u32; 2],
    /// The server's port.
    pub port: u16,
    /// Time at which the connection was established, ns (`CLOCK_MONOTONIC`).
    pub time_ns: u64,
    /// Outcome of the negotiation with the peer.
    pub outcome: TcpOutcome,
    /// True if this host is a client that offered an agreement in its SYN, or a server that answers such offers.
    pub spoke: bool,
    /// First bytes of the hash that identifies the congestion control that this host would use.
    pub own: [u8; 4],
    /// First bytes of the hash, sent by the peer, that identifies the peer's congestion control.
    pub heard: [u8; 4],
}

/// The loaded programs. They act on sockets of a cgroup from [`attach`](Self::attach) on, until this value is dropped.
pub struct Tcp {
    links: Vec<CgroupAttachment>,
    object: LoadedObject,
    /// Index of the first rule of the list in force. The map has space for two lists, and the one in force is never
    /// written.
    first_rule: usize,
    /// True if a program may still be reading the previous list of rules, since the list was replaced while it was
    /// running.
    is_replaced: bool,
    /// Number of the list of rules, which grows with each new list.
    generation: u32,
    choices: Choices,
}

impl Tcp {
    /// Loads the programs. They act on no socket before [`attach`](Self::attach). `shared` has the maps of the model's
    /// choices if programs at connect() use them already: see [`share`](Self::share).
    pub fn load(shared: Option<&SelectionMaps>) -> Result<Self, Error> {
        let mut open = embedded!("graft_tcp.bpf.o").open()?;
        shared.map_or(Ok(()), |shared| shared.share(&mut open))?;
        let mut object = open.load()?;
        let choices = Choices::from_object(&mut object)?;
        Ok(Self { links: Vec::new(), object, first_rule: 0, is_replaced: false, generation: 0, choices })
    }

    /// Attaches the programs to a cgroup (version 2). They act on sockets that are created in it or below it from now
    /// on. Programs that others attached to the cgroup stay attached.
    ///
    /// A server's settings are applied when it begins to listen. Servers that listen already are changed by
    /// [`SocketPrograms`](super::SocketPrograms).
    pub fn attach(&mut self, cgroup: &Path) -> Result<(), Error> {
        for (program, _) in PROGRAMS {
            self.links.push(CgroupAttachment::new(&self.object.program(program)?, cgroup)?);
        }
        Ok(())
    }

    /// Pins the programs together with the rules in force, so that they outlive this process.
    pub fn keep(&mut self, pins: &PinDirectory) -> Result<(), Error> {
        self.links.iter_mut().zip(PROGRAMS).try_for_each(|(link, (_, name))| link.pin(pins, name))
    }

    /// Detaches the programs. Sockets keep the settings that were applied to them.
    pub fn detach(&mut self) {
        self.links.clear();
    }

    /// Replaces the list of rules with one write. Connections whose handshake has begun keep the rule that they offered
    /// to the peer. Every peer that was bound to rules by [`bind`](Self::bind) is no longer bound, since these rules
    /// were in the old list.
    pub fn set_rules(&mut self, rules: &[TcpRule]) -> Result<(), Error> {
        if rules.len() > RULES {
            return Err(Error::Rules { have: rules.len(), room: RULES });
        }
        let map = self.object.handle(WHAT)?;
        // The new list is written to the half of the map that is not in force.
        let first = if self.first_rule == 0 { RULES } else { 0 };
        // The new list overwrites the list before the present one. A program that started while that list was in force
        // may still read it, so wait until such programs have returned.
        if self.is_replaced {
            self.wait_for_runs()?;
        }
        let generation = self.generation.wrapping_add(1);
        // The name of the process is needed for rules with a condition on it, and for events about connections whose
        // congestion control a model chooses.
        let asks = rules.iter().any(|rule| rule.choice > 0 || !rule.caller.is_anybody());
        // The programs at connect() have to store processes before the new list is in force, since connections that
        // begin now may be matched against it.
        if asks {
            self.ask_who(true)?;
        }
        // The list ends at a rule whose field `side` is 0, which means neither client nor server.
        let raw = rules.iter().map(|rule| rule.raw(generation)).chain([intf::Rule::default()]).take(RULES);
        for (place, rule) in (first as u32..).zip(raw) {
            write(&map, WHAT, &place.to_ne_bytes(), rule.as_bytes())?;
        }
        // One write switches to the new list.
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
        // Updating a map in a map makes the kernel wait for all running programs (synchronize_rcu). The content of the
        // map does not matter.
        let nothing = self.object.handle("nothing")?;
        let inner = nothing.as_fd().as_raw_fd().to_ne_bytes();
        Ok(write(&self.object.handle("barrier")?, WHAT, &0_u32.to_ne_bytes(), &inner)?)
    }

    /// Binds a peer for a time to rules that userspace has agreed on with it. The rules are given by their indices in
    /// the list in force.
    pub fn bind(&mut self, peer: IpAddr, rules: &[usize], time: Duration) -> Result<(), Error> {
        let bits = rules.iter().filter(|at| **at < RULES).fold(0, |bits, at| bits | 1_u64 << at);
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let until_ns = clock::monotonic_ns().saturating_add(time_ns);
        // The entry that binds the peer to rules contains the generation of the list, so the entry is invalid once the
        // list is replaced.
        let bound = intf::Bound { until_ns, rules: bits, generation: self.generation, pad: 0 };
        write(&self.object.handle("bound")?, "bound", &words(peer), bound.as_bytes())?;
        Ok(())
    }

    /// Unbinds a peer from the rules that [`bind`](Self::bind) named: rules with `bound` no longer apply to its
    /// connections. Does nothing if the peer is not bound.
    pub fn unbind(&mut self, peer: IpAddr) -> Result<(), Error> {
        let map = self.object.handle("bound")?;
        match map.delete(&words(peer)) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(millrace_kernel::Error::Write { what: "bound", source: error }.into())
            }
            _ => Ok(()),
        }
    }

    /// Sets the candidate (a congestion control or the broker) for later connections with the peer that match a rule
    /// with this [`choice`](TcpRule::choice). A choice may let exactly one connection try a second candidate. A new
    /// choice replaces the earlier one, including a second candidate that no connection has tried yet.
    pub fn choose(&self, peer: IpAddr, rule: u32, choice: &PathCandidates) -> Result<(), Error> {
        self.choices.set(peer, rule, choice)
    }

    /// Removes the model's choice of a congestion control for a peer and a rule. Does nothing if no choice was set.
    pub fn choose_no_more(&self, peer: IpAddr, rule: u32) -> Result<(), Error> {
        self.choices.forget(peer, rule)
    }

    /// Removes the model's choices of a congestion control for all peers and rules.
    pub fn forget_choices(&self) -> Result<(), Error> {
        self.choices.clear()
    }

    /// Returns whether the model's choice of a congestion control for this peer and rule has a second candidate that no
    /// connection has tried yet. Exactly one connection may try it.
    pub fn is_granted(&self, peer: IpAddr, rule: u32) -> Result<bool, Error> {
        self.choices.is_granted(peer, rule)
    }

    /// Returns the events since the last call, about connections that match rules with a [`choice`](TcpRule::choice).
    /// Lost events are counted as [`TcpOutcome::Untold`].
    pub fn take_events(&mut self) -> Result<Vec<SelectedEvent>, Error> {
        self.choices.take()
    }

    /// Returns the maps of the model's choices between congestion controls and the broker, so that a
    /// [`HookPrograms`](super::hook::HookPrograms) can follow the same choices.
    pub fn share(&mut self) -> Result<SelectionMaps, Error> {
        SelectionMaps::from_object(&mut self.object)
    }

    /// Returns how many connections or packets had each [`TcpOutcome`] of applying a rule, since the programs were
    /// loaded.
    pub fn outcomes(&mut self) -> Result<Vec<(TcpOutcome, u64)>, Error> {
        let counts = self.object.counters("outcomes")?;
        Ok(TcpOutcome::ALL.iter().copied().zip(counts).collect())
    }

    /// Returns for each of at most 4096 peers whether the latest connection agreed on a rule, or why it did not.
    pub fn peers(&mut self) -> Result<Vec<TcpPeer>, Error> {
        let map = self.object.handle("peers")?;
        let mut peers = Vec::new();
        for key in map.keys() {
            // The LRU map may have evicted the peer's entry since its key was read.
            let Ok(Some(value)) = map.lookup(&key, MapFlags::ANY) else { continue };
            peers.extend(peer(&key, &value));
        }
        Ok(peers)
    }

    /// Returns records of the latest connections with all peers, at most 4096, the oldest first.
    pub fn connections(&mut self) -> Result<Vec<TcpConnection>, Error> {
        let map = self.object.handle("connections")?;
        let read = |source| millrace_kernel::Error::Read { what: "connections", source };
        let entries = map.lookup_batch(map.max_entries(), MapFlags::ANY, MapFlags::ANY).map_err(read)?;
        let mut connections: Vec<_> = entries.filter_map(|(key, value)| connection(&key, &value)).collect();
        connections.sort_by_key(|connection| connection.time_ns);
        Ok(connections)
    }

    /// Returns whether the latest connection with a peer agreed on a rule, or why it did not. `None` means that there
    /// was no connection yet, or that newer peers evicted the entry.
    pub fn peer(&mut self, address: IpAddr) -> Result<Option<TcpPeer>, Error> {
        let map = self.object.handle("peers")?;
        let key = words(address);
        let value = map.lookup(&key, MapFlags::ANY);
        let value = value.map_err(|source| millrace_kernel::Error::Read { what: "peers", source })?;
        Ok(value.and_then(|value| peer(&key, &value)))
    }
}

fn connection(key: &[u8], value: &[u8]) -> Option<TcpConnection> {
    let key = intf::ConnectionKey::from_bytes(key)?;
    let value = intf::Connection::from_bytes(value)?;
    Some(TcpConnection {
        peer: address(value.peer),
        side: if key.side == u32::from(intf::CLIENT) { RuleSide::Client } else { RuleSide::Server },
        first: [key.client_first, key.server_first],
        port: value.port,
        time_ns: value.time_ns,
        outcome: *TcpOutcome::ALL.get(value.outcome as usize)?,
        spoke: value.spoke != 0,
        own: value.own,
        heard: value.heard,
    })
}

fn peer(key: &[u8], value: &[u8]) -> Option<TcpPeer> {
    let intf::Peer { time_ns, agreed, outcome, rule, graft, .. } = intf::Peer::from_bytes(value)?;
    Some(TcpPeer {
        address: address(key.try_into().ok()?),
        time_ns,
        outcome: *TcpOutcome::ALL.get(outcome as usize)?,
        rule,
        graft,
        agreed,
    })
}
