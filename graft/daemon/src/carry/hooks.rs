//! Hooks of cgroups: the daemon's own, and those of commands. All lead to the same broker.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::bail;
use millrace_graft::Side;
use millrace_graft_kernel::{
    Caller, Shared, everybody,
    hook::{Arrival, Config, Guest, HOOK_RULES, Hook, Lead},
};
use parking_lot::Mutex;
use tokio::net::TcpSocket;

use super::said;

/// Commands at once.
const COMMANDS_MAX: usize = 64;
/// Cgroups whose place is remembered.
const KNOWN_MAX: usize = 4096;

pub struct Hooks {
    config: Config,
    /// The daemon's own, and whether cgroups are in it, by their numbers, which are used once.
    cgroup: PathBuf,
    inside: Mutex<HashMap<u64, bool>>,
    state: Mutex<State>,
}

struct State {
    own: Hook,
    /// Its rules.
    rules: Vec<Lead>,
    /// Ports to which nothing is led, whatever the rules say.
    plain: Vec<RangeInclusive<u16>>,
    commands: Vec<Command>,
    /// What each hook is told of hosts with a broker.
    peers: BTreeMap<IpAddr, (IpAddr, bool)>,
    /// What commands had counted that have ended.
    past: BTreeMap<String, u64>,
    /// Where a guard shows a client: the broker's end and the server's port.
    shown: HashSet<(SocketAddr, u16)>,
}

struct Command {
    cgroup: PathBuf,
    hook: Hook,
    /// What it is led by, if it is a client.
    rules: Vec<Lead>,
    /// That its servers are reached at.
    serves: Vec<Lead>,
}

impl State {
    fn all(&self) -> impl Iterator<Item = &Hook> {
        std::iter::once(&self.own).chain(self.commands.iter().map(|command| &command.hook))
    }
}

impl Hooks {
    /// Nothing is led before rules and peers are set.
    pub fn attach(config: Config, cgroup: &Path, shared: &Shared) -> anyhow::Result<Self> {
        let mut own = Hook::load(&config, Some(shared))?;
        own.attach(cgroup)?;
        let (commands, peers, past) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let (rules, plain, shown) = (Vec::new(), Vec::new(), HashSet::new());
        let state = State { own, rules, plain, commands, peers, past, shown };
        let (cgroup, inside) = (cgroup.to_owned(), Mutex::default());
        Ok(Self { config, cgroup, inside, state: Mutex::new(state) })
    }

    /// For good.
    pub fn detach(&self) {
        let mut state = self.state.lock();
        state.own.detach();
        state.commands.clear();
    }

    pub fn set_rules(&self, rules: &[Lead]) -> anyhow::Result<()> {
        let state = &mut *self.state.lock();
        state.rules = rules.to_vec();
        Ok(state.own.set_rules(&with_plain(&state.plain, rules))?)
    }

    /// Ports to which nothing is led from now on, whatever the rules say.
    pub fn set_plain(&self, plain: Vec<RangeInclusive<u16>>) -> anyhow::Result<()> {
        let state = &mut *self.state.lock();
        if state.plain == plain {
            return Ok(());
        }
        state.own.set_rules(&with_plain(&plain, &state.rules))?;
        for command in &mut state.commands {
            command.hook.set_rules(&with_plain(&plain, &command.rules))?;
        }
        state.plain = plain;
        Ok(())
    }

    /// Ports of servers to which connections may be led.
    pub fn ports(&self) -> Vec<RangeInclusive<u16>> {
        let state = self.state.lock();
        let rules = state.rules.iter().chain(state.commands.iter().flat_map(|command| &command.rules));
        ports(rules.filter(|rule| !rule.in_place))
    }

    /// Ports of commands that serve.
    pub fn served_ports(&self) -> Vec<RangeInclusive<u16>> {
        ports(self.state.lock().commands.iter().flat_map(|command| &command.serves))
    }

    /// For the processes of this cgroup, until it is gone.
    pub fn add(&self, cgroup: &Path, side: Side, leads: Vec<Lead>) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        if state.commands.len() >= COMMANDS_MAX {
            bail!("{COMMANDS_MAX} commands have a hook already: one more is too many");
        }
        if state.commands.iter().any(|command| command.cgroup == cgroup) {
            bail!("{} has a hook already", cgroup.display());
        }
        let mut hook = Hook::load(&self.config, None)?;
        let (rules, serves) = match side {
            Side::Client => (leads, Vec::new()),
            Side::Server => (Vec::new(), leads),
        };
        hook.set_rules(&with_plain(&state.plain, &rules))?;
        for (peer, (near, warm)) in &state.peers {
            hook.set_peer(*peer, *near, *warm)?;
        }
        hook.attach(cgroup)?;
        state.commands.push(Command { cgroup: cgroup.to_owned(), hook, rules, serves });
        Ok(())
    }

    /// Those whose cgroup is gone, or has no process any more.
    pub fn prune(&self) {
        let mut state = self.state.lock();
        let State { commands, past, .. } = &mut *state;
        commands.retain_mut(|command| {
            let events = std::fs::read_to_string(command.cgroup.join("cgroup.events"));
            let lives = events.is_ok_and(|events| events.lines().any(|line| line == "populated 1"));
            if !lives {
                add_verdicts(past, &mut command.hook);
                let _ = std::fs::remove_dir(&command.cgroup);
            }
            lives
        });
    }

    /// Reports whether a cgroup, by its number, has a hook: its own, or that of one above it.
    pub fn have(&self, cgroup: u64) -> bool {
        let known = self.inside.lock().get(&cgroup).copied();
        let is_inside = known.unwrap_or_else(|| {
            let is_inside = is_in(cgroup, &self.cgroup);
            let mut inside = self.inside.lock();
            if inside.len() >= KNOWN_MAX {
                inside.clear();
            }
            inside.insert(cgroup, is_inside);
            is_inside
        });
        is_inside || self.state.lock().commands.iter().any(|command| is_in(cgroup, &command.cgroup))
    }

    /// Whether a command serves this port to this peer.
    pub fn serves(&self, port: u16, peer: IpAddr) -> bool {
        let fits = |lead: &Lead| lead.ports.contains(&port) && millrace_graft_kernel::covers(lead.peer, peer);
        self.state.lock().commands.iter().flat_map(|command| &command.serves).any(fits)
    }

    /// Hosts with a broker, and whether a carrier to each is warm: these and no others. `near`: by which address this host reaches one, which is
    /// looked up again if `looks`, and matters where connections are led.
    pub fn set_peers(&self, wanted: &BTreeMap<IpAddr, bool>, looks: bool, near: impl Fn(IpAddr) -> IpAddr) {
        let mut state = self.state.lock();
        let gone: Vec<_> = state.peers.keys().copied().filter(|peer| !wanted.contains_key(peer)).collect();
        for peer in gone {
            state.peers.remove(&peer);
            let done = state.all().try_for_each(|hook| hook.forget_peer(peer));
            said("a peer cannot be taken from the kernel", done);
        }
        for (peer, warm) in wanted {
            let told = state.peers.get(peer).copied();
            let near = match told {
                Some((near, was_warm)) if !warm || (was_warm && !looks) => near,
                _ => near(*peer),
            };
            if told == Some((near, *warm)) {
                continue;
            }
            let done = state.all().try_for_each(|hook| hook.set_peer(*peer, near, *warm));
            if done.is_ok() {
                state.peers.insert(*peer, (near, *warm));
            }
            said("a peer cannot be told to the kernel", done);
        }
    }

    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        said(
            "a server cannot be avoided",
            self.state.lock().all().try_for_each(|hook| hook.avoid(server, time)),
        );
    }

    /// To connect from to an address of this family, past the hooks.
    pub fn socket(&self, to: SocketAddr) -> io::Result<TcpSocket> {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        self.exempt(socket.as_fd()).map_err(io::Error::other)?;
        Ok(socket)
    }

    /// Before it connects.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        Ok(self.state.lock().all().try_for_each(|hook| hook.exempt(socket))?)
    }

    pub fn arrival(&self, from: SocketAddr) -> Option<Arrival> {
        self.state.lock().all().find_map(|hook| hook.arrival(from).ok().flatten())
    }

    /// It comes once more.
    pub fn expect(&self, from: SocketAddr, arrival: &Arrival) {
        said("a connection cannot be expected", self.state.lock().own.expect(from, arrival));
    }

    /// The server sees this client, until the guard is dropped.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> anyhow::Result<Shown<'_>> {
        let mut state = self.state.lock();
        let shown = Shown { hooks: self, guest };
        state.shown.insert(key(guest));
        let done = state.all().try_for_each(|hook| hook.show(guest, client));
        drop(state);
        done?;
        Ok(shown)
    }

    /// Whether a server sees a client there.
    pub fn is_shown(&self, guest: Guest) -> bool {
        self.state.lock().shown.contains(&key(guest))
    }

    pub fn verdicts(&self) -> BTreeMap<String, u64> {
        let mut state = self.state.lock();
        let State { own, commands, past, .. } = &mut *state;
        let mut sums = past.clone();
        let hooks = std::iter::once(own).chain(commands.iter_mut().map(|command| &mut command.hook));
        hooks.for_each(|hook| add_verdicts(&mut sums, hook));
        sums
    }
}

fn ports<'a>(rules: impl Iterator<Item = &'a Lead>) -> Vec<RangeInclusive<u16>> {
    let mut ports = Vec::new();
    for rule in rules.filter(|rule| !rule.ports.is_empty()) {
        if !ports.contains(&rule.ports) {
            ports.push(rule.ports.clone());
        }
    }
    ports
}

/// The rules behind those that keep connections to these ports where they are. Where there is no room for both nothing is led.
fn with_plain(plain: &[RangeInclusive<u16>], rules: &[Lead]) -> Vec<Lead> {
    let in_place = |ports: RangeInclusive<u16>| Lead {
        peer: everybody(),
        ports,
        caller: Caller::default(),
        strict: false,
        choice: 0,
        in_place: true,
    };
    match plain.len() + rules.len() <= HOOK_RULES {
        true => plain.iter().cloned().map(in_place).chain(rules.iter().cloned()).collect(),
        false => vec![in_place(0..=u16::MAX)],
    }
}

/// A cgroup's number is that of its directory.
fn is_in(cgroup: u64, top: &Path) -> bool {
    let is_it = std::fs::metadata(top).is_ok_and(|about| about.ino() == cgroup);
    let below = || std::fs::read_dir(top).into_iter().flatten().flatten();
    let is_directory = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    is_it || below().filter(is_directory).any(|entry| is_in(cgroup, &entry.path()))
}

pub struct Shown<'a> {
    hooks: &'a Hooks,
    guest: Guest,
}

fn key(guest: Guest) -> (SocketAddr, u16) {
    (guest.broker, guest.server_port)
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let mut state = self.hooks.state.lock();
        state.shown.remove(&key(self.guest));
        let done = state.all().try_for_each(|hook| hook.show_no_more(self.guest));
        said("a client cannot be taken from the kernel", done);
    }
}

fn add_verdicts(sums: &mut BTreeMap<String, u64>, hook: &mut Hook) {
    for (verdict, count) in hook.verdicts().unwrap_or_default() {
        *sums.entry(verdict.name().to_owned()).or_default() += count;
    }
}
