//! TCP connections that are led to this host's broker instead, and whom the applications at both ends believe to be talking to.

pub(super) mod intf;

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use millrace_kernel::clock;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded, write};
use millrace_kernel::prefix::Prefix;

use super::attachment::Attachment;
use super::rule::{address, masked, name, remove, text, words};
use super::told::Shared;
use super::{Caller, Error, namespace};

/// Rules that there is room for.
pub const HOOK_RULES: usize = intf::RULES;

const PROGRAMS: [&str; 7] = [
    // Names first: a connection is led when everything else about it is in place.
    "hook_peer4",
    "hook_peer6",
    "hook_name4",
    "hook_name6",
    "hook_announce",
    "hook_connect4",
    "hook_connect6",
];

macro_rules! verdicts {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What became of a connection to a host with a broker that a rule fits.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Verdict { $($(#[$doc])* $name),* }

        impl Verdict {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// As status, metrics and the documentation call it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

verdicts! {
    /// To the broker. All others go where they would have gone.
    Led = "led",
    /// No carrier is warm.
    Cold = "cold",
    /// The server has refused the one before: this one is to hear it from the server.
    Refused = "refused",
    /// The broker's own.
    Own = "own",
    /// Of another network namespace.
    Elsewhere = "elsewhere",
    /// To an interface: loopback is another.
    BoundDevice = "bound-device",
    /// MPTCP, or another kind of stream.
    NotTcp = "not-tcp",
    /// The broker does not listen in its address family.
    NoFamily = "no-family",
    /// There was no memory for the socket's state.
    NoMemory = "no-memory",
    /// That was chosen for its path.
    InPlace = "in-place",
    /// Nothing was chosen for its path yet.
    Unknown = "unknown",
}

/// Where the broker is to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    pub early: Ports,
    /// Where SYNs are held back ([`super::hold`]).
    pub strict: Ports,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// On 127.0.0.1.
    pub v4: u16,
    /// On `::1`; `None`: only IPv4 is led.
    pub v6: Option<u16>,
}

/// Connections that may be led.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lead {
    pub peer: Prefix,
    pub ports: RangeInclusive<u16>,
    pub caller: Caller,
    /// The application hears of success when the server was reached, and not before.
    pub strict: bool,
    /// By which its paths are found among what is chosen; 0: all of them are led.
    pub choice: u32,
    /// It is not led, whatever the rules behind it say.
    pub in_place: bool,
}

/// A connection that was led.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// Where it was to go.
    pub far: SocketAddr,
    /// This host's address towards there.
    pub near: IpAddr,
    /// Of the rule, as [`Lead::choice`] has it, and of what was chosen by it; 0: nothing was.
    pub choice: u32,
    pub serial: u32,
    pub explored: bool,
    /// What the kernel calls the thread that has connected.
    pub command: String,
    /// The cgroup that the rule names, by id; 0: none.
    pub cgroup: u64,
    pub owner: Owner,
}

/// The owner of a socket, as firewalls see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// The user and the group that have made it.
    pub uid: u32,
    pub gid: u32,
    /// That its packets have.
    pub mark: u32,
}

/// A connection of the broker to a server, by which the server's end of it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guest {
    pub broker: SocketAddr,
    pub server_port: u16,
}

/// The programs, loaded. They act from [`attach`](Self::attach) on and until this is dropped.
pub struct Hook {
    /// The last goes first: nothing is led any more when the names go.
    links: Vec<Attachment>,
    object: Loaded,
    first_rule: usize,
    maps: Maps,
}

/// What is used per connection.
struct Maps {
    peers: MapHandle,
    avoided: MapHandle,
    own: MapHandle,
    arrivals: MapHandle,
    guests: MapHandle,
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.detach();
    }
}

impl Hook {
    /// For connections of the calling thread's network namespace. `shared`: what is chosen for their paths, if anything is to be.
    ///
    /// # Errors
    /// The kernel refuses; before 5.14 it does not tell namespaces apart.
    pub fn load(config: &Config, shared: Option<&Shared>) -> Result<Self, Error> {
        let mut open = embedded!("graft_hook.bpf.o").open()?;
        if let Some(shared) = shared {
            let refused = |what| move |source| millrace_kernel::Error::Write { what, source };
            open.map("choices")?.reuse_fd(shared.choices.as_fd()).map_err(refused("choices"))?;
            open.map("flows")?.reuse_fd(shared.flows.as_fd()).map_err(refused("flows"))?;
        }
        open.configure(&intf::Config {
            namespace_cookie: namespace::cookie().map_err(Error::Descriptor)?,
            port4: [config.early.v4, config.strict.v4],
            port6: [config.early, config.strict].map(|ports| ports.v6.unwrap_or_default()),
        })?;
        let mut object = open.load()?;
        let maps = Maps {
            peers: object.handle("peers")?,
            avoided: object.handle("avoided")?,
            own: object.handle("own")?,
            arrivals: object.handle("arrivals")?,
            guests: object.handle("guests")?,
        };
        Ok(Self { links: Vec::new(), object, first_rule: 0, maps })
    }

    /// Sockets that were or are made in the cgroup (version 2), and in those below it. Other programs of the cgroup stay.
    pub fn attach(&mut self, cgroup: &Path) -> Result<(), Error> {
        for program in PROGRAMS {
            self.links.push(Attachment::new(&self.object.program(program)?, cgroup)?);
        }
        Ok(())
    }

    /// Nothing is led any more, and nobody sees other addresses than the kernel's.
    pub fn detach(&mut self) {
        while self.links.pop().is_some() {}
    }

    /// These and no others. A connection that begins at that moment is led by the ones or the others.
    pub fn set_rules(&mut self, rules: &[Lead]) -> Result<(), Error> {
        let first = first_rule_after(self.first_rule);
        write_rules(&mut self.object, first, rules)?;
        self.first_rule = first;
        Ok(())
    }

    /// This address has a broker. `warm`: from now on connections to it are led, or from now on they are not. `near`: this host's
    /// address towards it.
    pub fn set_peer(&self, peer: IpAddr, near: IpAddr, warm: bool) -> Result<(), Error> {
        let value = intf::Peer { near: words(near), warm: u32::from(warm), pad: 0 };
        Ok(write(&self.maps.peers, "peers", &words(peer), value.as_bytes())?)
    }

    /// Nothing is known of it any more. Nothing happens if nothing was.
    pub fn forget_peer(&self, peer: IpAddr) -> Result<(), Error> {
        remove(&self.maps.peers, "peers", &words(peer))
    }

    /// For so long, connections to this server are not led.
    pub fn avoid(&self, server: SocketAddr, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.avoided, "avoided", end(server).as_bytes(), clock::in_future(time).as_bytes())?)
    }

    /// A socket of the broker's, before it connects: it is not led.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let descriptor = socket.as_raw_fd().to_ne_bytes();
        Ok(write(&self.maps.own, "own", &descriptor, &1_u32.to_ne_bytes())?)
    }

    /// Of a connection that the broker has accepted: what it is. `None`: it was not led, somebody has connected to the broker.
    pub fn arrival(&self, from: SocketAddr) -> Result<Option<Arrival>, Error> {
        let from = end(from);
        let found = self.maps.arrivals.lookup(from.as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "arrivals", source })?;
        remove(&self.maps.arrivals, "arrivals", from.as_bytes())?;
        let Some(led) = found.and_then(|value| intf::Led::from_bytes(&value)) else { return Ok(None) };
        let far = SocketAddr::new(address(led.far.address), led.far.port);
        let (near, command) = (address(led.near.address), text(&led.command));
        let (choice, serial, explored) = (led.rule, led.serial, led.explored != 0);
        let (cgroup, owner) = (led.cgroup, Owner { uid: led.uid, gid: led.gid, mark: led.mark });
        Ok(Some(Arrival { far, near, choice, serial, explored, command, cgroup, owner }))
    }

    /// It was told of ([`arrival`](Self::arrival)), and may come once more.
    pub fn expect(&self, from: SocketAddr, arrival: &Arrival) -> Result<(), Error> {
        let led = intf::Led {
            far: end(arrival.far),
            near: end(SocketAddr::new(arrival.near, 0)),
            command: name(&arrival.command),
            cgroup: arrival.cgroup,
            rule: arrival.choice,
            serial: arrival.serial,
            explored: u32::from(arrival.explored),
            uid: arrival.owner.uid,
            gid: arrival.owner.gid,
            mark: arrival.owner.mark,
        };
        Ok(write(&self.maps.arrivals, "arrivals", end(from).as_bytes(), led.as_bytes())?)
    }

    /// Whom the server is to see, at the other end of a connection that the broker is about to make.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> Result<(), Error> {
        Ok(write(&self.maps.guests, "guests", raw_guest(guest).as_bytes(), end(client).as_bytes())?)
    }

    pub fn show_no_more(&self, guest: Guest) -> Result<(), Error> {
        remove(&self.maps.guests, "guests", raw_guest(guest).as_bytes())
    }

    /// Since it was loaded.
    pub fn verdicts(&mut self) -> Result<Vec<(Verdict, u64)>, Error> {
        let counts = self.object.counters("verdicts")?;
        Ok(Verdict::ALL.iter().copied().zip(counts).collect())
    }
}

/// Where the next list begins, after one that begins there: what is in force is not written to.
pub(super) fn first_rule_after(first: usize) -> usize {
    if first == 0 { HOOK_RULES } else { 0 }
}

/// Puts a list in force that begins there.
pub(super) fn write_rules(object: &mut Loaded, first: usize, rules: &[Lead]) -> Result<(), Error> {
    const WHAT: &str = "rules";
    if rules.len() > HOOK_RULES {
        return Err(Error::Rules { have: rules.len(), room: HOOK_RULES });
    }
    let map = object.handle(WHAT)?;
    let raw = rules.iter().map(raw_rule).chain([intf::Rule::default()]).take(HOOK_RULES);
    for (place, rule) in (first as u32..).zip(raw) {
        write(&map, WHAT, &place.to_ne_bytes(), rule.as_bytes())?;
    }
    Ok(write(&object.handle("in_force")?, WHAT, &0_u32.to_ne_bytes(), &(first as u32).to_ne_bytes())?)
}

pub(super) fn end(at: SocketAddr) -> intf::End {
    intf::End { address: words(at.ip()), port: at.port(), pad: 0 }
}

pub(super) fn raw_guest(guest: Guest) -> intf::Guest {
    intf::Guest { broker: end(guest.broker), server_port: guest.server_port, pad: 0 }
}

fn raw_rule(rule: &Lead) -> intf::Rule {
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
