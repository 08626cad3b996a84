//! Redirects TCP connections of this host's applications to the host's tunnel broker, by BPF programs. The applications
//! of client and server see each other's addresses, not the broker's.

pub(super) mod intf;

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::outcomes;
use millrace_kernel::prefix::Prefix;

use super::attachment::CgroupAttachment;
use super::choices::SelectionMaps;
use super::rule::{address, masked, name, remove, text, words};
use super::{CallerRule, Error, namespace};

/// Largest number of rules in a list of redirection rules.
pub const HOOK_RULES: usize = intf::RULES;

const PROGRAMS: [&str; 7] = [
    // The programs that rewrite addresses in getpeername() and getsockname() are attached first, so that the
    // applications of all redirected connections see the true addresses.
    "hook_peer4",
    "hook_peer6",
    "hook_name4",
    "hook_name6",
    "hook_announce",
    "hook_connect4",
    "hook_connect6",
];

outcomes! {
    /// The BPF programs' verdict on a connection that matches a rule and whose server's host has a tunnel broker.
    HookVerdict {
        /// The connection was redirected to the tunnel broker. With all other verdicts it goes directly to its server.
        Redirected = "redirected",
        /// No carrier (a connection that tunnels others) to the peer is connected.
        Cold = "cold",
        /// The server has refused an earlier connection. This connection goes directly to the server, so that the
        /// application gets the server's own error.
        Refused = "refused",
        /// The tunnel broker itself opens the connection.
        Own = "own",
        /// The application's socket is in another network namespace than the tunnel broker.
        Elsewhere = "elsewhere",
        /// The socket is bound to an interface, so it cannot use loopback.
        BoundDevice = "bound-device",
        /// The socket is MPTCP, or another kind of stream.
        NotTcp = "not-tcp",
        /// The tunnel broker does not listen in the connection's address family.
        NoFamily = "no-family",
        /// The kernel had no memory for the socket's state.
        NoMemory = "no-memory",
        /// The learned model in userspace has chosen plain TCP, without the tunnel broker, for connections with this
        /// peer.
        InPlace = "in-place",
        /// The learned model in userspace has not chosen between the tunnel broker and plain TCP for connections with
        /// this peer yet.
        Unknown = "unknown",
    }
}

/// Ports on which the tunnel broker listens for redirected connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Ports at which the tunnel broker accepts connections at once, before it has reached the server.
    pub early: HookPorts,
    /// Ports at which SYNs are held back ([`super::hold`]).
    pub strict: HookPorts,
}

/// Loopback ports of the tunnel broker's listening sockets, one for each address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookPorts {
    /// The tunnel broker's port on 127.0.0.1.
    pub v4: u16,
    /// The tunnel broker's port on `::1`; `None`: only IPv4 connections are redirected.
    pub v6: Option<u16>,
}

/// A rule that selects connections for the tunnel broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedirectRule {
    /// The servers' addresses.
    pub peer: Prefix,
    /// The servers' ports.
    pub ports: RangeInclusive<u16>,
    /// Condition on the connecting process.
    pub caller: CallerRule,
    /// True if connect() may succeed only after the tunnel broker has reached the server.
    pub strict: bool,
    /// Number of the rule in the keys of the map `choices`, in which a learned model chooses between the tunnel broker
    /// and plain TCP for each peer. 0: all connections that match the rule are redirected.
    pub choice: u32,
    /// True if matching connections go directly to their server. Later rules do not change that.
    pub in_place: bool,
}

/// The origin of a connection that was redirected to the tunnel broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedirectedConnection {
    /// The server's address and port, to which the application connects.
    pub server: SocketAddr,
    /// This host's address on the route to the server.
    pub local: IpAddr,
    /// Number of the matching rule in the keys of the map `choices` ([`RedirectRule::choice`]); 0: the rule redirects
    /// all connections.
    pub choice: u32,
    /// Serial number of the learned model's choice that decided about the connection; 0: the model had made no choice.
    pub serial: u32,
    /// True if this connection tried another candidate (the tunnel broker or a congestion control) than the one that
    /// the learned model has chosen.
    pub explored: bool,
    /// Name of the connecting thread in the kernel (`comm`).
    pub command: String,
    /// ID of the cgroup that the rule names; 0: none.
    pub cgroup: u64,
    /// User, group and packet mark of the application's socket.
    pub owner: SocketOwner,
}

/// User, group and packet mark of a socket, by which firewall rules match its packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketOwner {
    /// ID of the user that created the socket.
    pub uid: u32,
    /// ID of the group that created the socket.
    pub gid: u32,
    /// Packet mark that the kernel sets on the socket's outgoing packets (SO_MARK).
    pub mark: u32,
}

/// A connection that the tunnel broker makes to a server on this host. The broker's address and the server's port
/// together identify the socket that the server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guest {
    /// The tunnel broker's address and port in this connection.
    pub broker: SocketAddr,
    /// The server's port.
    pub server_port: u16,
}

/// The loaded programs, which redirect connections of the cgroups that they are attached to.
pub struct HookPrograms {
    object: LoadedObject,
    first_rule: usize,
    maps: HookMaps,
}

/// The maps that userspace reads or writes for single connections.
struct HookMaps {
    peers: MapHandle,
    avoided: MapHandle,
    own: MapHandle,
    arrivals: MapHandle,
    guests: MapHandle,
}

/// The programs of a [`HookPrograms`], attached to one cgroup. When this is dropped, new connections of the cgroup go
/// directly to their servers, and getpeername() and getsockname() return the addresses that the kernel uses.
pub struct HookAttachment(Vec<CgroupAttachment>);

impl Drop for HookAttachment {
    fn drop(&mut self) {
        // The programs are detached in reverse order, so redirection ends before the programs that rewrite addresses
        // are detached. Dropping a vector would detach them from the front.
        while self.0.pop().is_some() {}
    }
}

impl HookPrograms {
    /// Loads the programs for connections of the calling thread's network namespace. `shared` has the maps in which a
    /// learned model chooses between the tunnel broker and direct connections.
    ///
    /// # Errors
    /// The kernel refuses a program. Kernels before 5.14 cannot tell network namespaces apart.
    pub fn load(config: &Config, shared: &SelectionMaps) -> Result<Self, Error> {
        let mut open = embedded!("graft_hook.bpf.o").open()?;
        // This BPF object and that of the TCP programs use the same maps, so that both follow the same choices of the
        // learned model.
        shared.share(&mut open)?;
        open.configure(&intf::Config {
            namespace_cookie: namespace::cookie().map_err(Error::Descriptor)?,
            port4: [config.early.v4, config.strict.v4],
            port6: [config.early, config.strict].map(|ports| ports.v6.unwrap_or_default()),
        })?;
        let mut object = open.load()?;
        let maps = HookMaps {
            peers: object.handle("peers")?,
            avoided: object.handle("avoided")?,
            own: object.handle("own")?,
            arrivals: object.handle("arrivals")?,
            guests: object.handle("guests")?,
        };
        Ok(Self { object, first_rule: 0, maps })
    }

    /// Attaches the programs to a cgroup (version 2), until the returned value is dropped. They act on existing and
    /// later sockets of this cgroup and the cgroups below it. Programs that others attached to the cgroup stay attached.
    pub fn attach(&self, cgroup: &Path) -> Result<HookAttachment, Error> {
        // If one program cannot be attached, the others are detached again.
        let mut attachment = HookAttachment(Vec::new());
        for program in PROGRAMS {
            attachment.0.push(CgroupAttachment::new(&self.object.program(program)?, cgroup)?);
        }
        Ok(attachment)
    }

    /// Replaces the list of rules with one write. A connection that begins during the call follows the old or the new
    /// list.
    pub fn set_rules(&mut self, rules: &[RedirectRule]) -> Result<(), Error> {
        let first = first_rule_after(self.first_rule);
        write_rules(&mut self.object, first, rules)?;
        self.first_rule = first;
        Ok(())
    }

    /// Adds a peer with a tunnel broker, or changes whether it is `warm`. Connections to the peer are redirected only
    /// while it is warm, which means that a carrier (a connection that tunnels others) to the peer is ready. `near` is
    /// this host's address on the route to the peer.
    pub fn set_peer(&self, peer: IpAddr, near: IpAddr, warm: bool) -> Result<(), Error> {
        let value = intf::Peer { near: words(near), warm: u32::from(warm), pad: 0 };
        Ok(write(&self.maps.peers, "peers", &words(peer), value.as_bytes())?)
    }

    /// Removes a peer. Does nothing if the peer was not added.
    pub fn forget_peer(&self, peer: IpAddr) -> Result<(), Error> {
        remove(&self.maps.peers, "peers", &words(peer))
    }

    /// Lets connections go directly to this server for this time, instead of redirecting them to the tunnel broker.
    pub fn avoid(&self, server: SocketAddr, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.avoided, "avoided", end(server).as_bytes(), clock::in_future(time).as_bytes())?)
    }

    /// Exempts a socket of the tunnel broker from redirection. It has to be called before the socket connects.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let descriptor = socket.as_raw_fd().to_ne_bytes();
        Ok(write(&self.maps.own, "own", &descriptor, &1_u32.to_ne_bytes())?)
    }

    /// Returns and removes the origin of a connection that the tunnel broker has accepted from the address `from`.
    /// `None` means that the application connected to the broker's own port, and was not redirected.
    pub fn arrival(&self, from: SocketAddr) -> Result<Option<RedirectedConnection>, Error> {
        let from = end(from);
        let found = self.maps.arrivals.lookup(from.as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "arrivals", source })?;
        // The entry is removed, since another connection may use the same port later.
        remove(&self.maps.arrivals, "arrivals", from.as_bytes())?;
        let Some(raw) = found.and_then(|value| intf::Redirected::from_bytes(&value)) else { return Ok(None) };
        let server = SocketAddr::new(address(raw.server.address), raw.server.port);
        let local = address(raw.local.address);
        let command = text(&raw.command);
        let choice = raw.rule;
        let serial = raw.serial;
        let explored = raw.explored != 0;
        let cgroup = raw.cgroup;
        let owner = SocketOwner { uid: raw.uid, gid: raw.gid, mark: raw.mark };
        Ok(Some(RedirectedConnection { server, local, choice, serial, explored, command, cgroup, owner }))
    }

    /// Stores the origin of a connection again, after [`arrival`](Self::arrival) has removed it. This is needed if the
    /// kernel will deliver the same connection to the tunnel broker a second time.
    pub fn expect(&self, from: SocketAddr, arrival: &RedirectedConnection) -> Result<(), Error> {
        let raw = intf::Redirected {
            server: end(arrival.server),
            local: end(SocketAddr::new(arrival.local, 0)),
            command: name(&arrival.command),
            cgroup: arrival.cgroup,
            rule: arrival.choice,
            serial: arrival.serial,
            explored: u32::from(arrival.explored),
            uid: arrival.owner.uid,
            gid: arrival.owner.gid,
            mark: arrival.owner.mark,
        };
        Ok(write(&self.maps.arrivals, "arrivals", end(from).as_bytes(), raw.as_bytes())?)
    }

    /// Sets the client address that the server's application sees as its peer. It has to be called before the tunnel
    /// broker connects.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> Result<(), Error> {
        Ok(write(&self.maps.guests, "guests", raw_guest(guest).as_bytes(), end(client).as_bytes())?)
    }

    /// Removes the client address that was set for a connection. The server's application then sees the tunnel broker's
    /// address.
    pub fn show_no_more(&self, guest: Guest) -> Result<(), Error> {
        remove(&self.maps.guests, "guests", raw_guest(guest).as_bytes())
    }

    /// Returns the number of connections by verdict, since the programs were loaded.
    pub fn verdicts(&mut self) -> Result<Vec<(HookVerdict, u64)>, Error> {
        let counts = self.object.counters("verdicts")?;
        Ok(HookVerdict::ALL.iter().copied().zip(counts).collect())
    }
}

/// Returns the index of the first rule of the next list, given that the list in force begins at `first`. The map has
/// space for two lists, and the one in force is never written.
pub(super) fn first_rule_after(first: usize) -> usize {
    if first == 0 { HOOK_RULES } else { 0 }
}

/// Writes a list of rules from index `at` on, and then switches to that list with one write.
pub(super) fn write_rules(object: &mut LoadedObject, at: usize, rules: &[RedirectRule]) -> Result<(), Error> {
    const WHAT: &str = "rules";
    if rules.len() > HOOK_RULES {
        return Err(Error::Rules { have: rules.len(), room: HOOK_RULES });
    }
    let map = object.handle(WHAT)?;
    // An empty rule ends a list that does not fill its half of the map.
    let raw = rules.iter().map(raw_rule).chain([intf::Rule::default()]).take(HOOK_RULES);
    for (place, rule) in (at as u32..).zip(raw) {
        write(&map, WHAT, &place.to_ne_bytes(), rule.as_bytes())?;
    }
    Ok(write(&object.handle("in_force")?, WHAT, &0_u32.to_ne_bytes(), &(at as u32).to_ne_bytes())?)
}

pub(super) fn end(at: SocketAddr) -> intf::End {
    intf::End { address: words(at.ip()), port: at.port(), pad: 0 }
}

pub(super) fn raw_guest(guest: Guest) -> intf::Guest {
    intf::Guest { broker: end(guest.broker), server_port: guest.server_port, pad: 0 }
}

fn raw_rule(rule: &RedirectRule) -> intf::Rule {
    let (peer, mask) = masked(rule.peer);
    intf::Rule {
        peer,
        mask,
        first_port: *rule.ports.start(),
        last_port: *rule.ports.end(),
        strict: u32::from(rule.strict),
        choice: rule.choice,
        in_place: u32::from(rule.in_place),
        caller: rule.caller.raw(),
    }
}
