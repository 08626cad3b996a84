//! BPF hooks on cgroups: the daemon's own hook, and hooks for single commands that users run with redirected
//! connections. All of them redirect connections to the same broker.

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
use millrace_graft::SideSetting;
use millrace_graft_kernel::{
    CallerRule, SelectionMaps, covers, everybody,
    hook::{Config, Guest, HOOK_RULES, HookPrograms, RedirectRule, RedirectedConnection},
};
use parking_lot::Mutex;
use tokio::net::TcpSocket;

use super::warn_on_error;

/// Limit of concurrent hooks for single commands.
const COMMANDS_MAX: usize = 64;
/// Limit of entries in the cache `inside`, which remembers whether cgroups are in the cgroup of the daemon's own hook.
const KNOWN_MAX: usize = 4096;

/// The BPF hooks that redirect connections, with the rules and peers that each of them must have.
pub struct Hooks {
    config: Config,
    /// Cgroup of the daemon's own hook.
    cgroup: PathBuf,
    /// Cache, by cgroup ID: true if the cgroup is `cgroup` or below it. The kernel never uses a cgroup ID twice.
    inside: Mutex<HashMap<u64, bool>>,
    state: Mutex<HookState>,
}

struct HookState {
    own: HookPrograms,
    /// Rules of the daemon's own hook.
    rules: Vec<RedirectRule>,
    /// Ports whose connections are never redirected, whatever the rules say.
    plain: Vec<RangeInclusive<u16>>,
    commands: Vec<HookCommand>,
    /// Hosts with a tunnel broker, as each hook knows them: the local address of the route to each, and whether a
    /// carrier to it is ready ("warm").
    peers: BTreeMap<IpAddr, (IpAddr, bool)>,
    /// Sums of the counters of hooks whose commands have ended.
    past: BTreeMap<String, u64>,
    /// Connections from the tunnel broker to servers of this host, in which the server sees the client's address, and
    /// not the broker's, as the remote address. A connection is identified by the broker's address and the server's
    /// port.
    shown: HashSet<(SocketAddr, u16)>,
}

struct HookCommand {
    cgroup: PathBuf,
    hook: HookPrograms,
    /// Rules for redirecting the command's connections, if the command is a client.
    rules: Vec<RedirectRule>,
    /// Rules for connections of peers to the command's servers, if it has any.
    serves: Vec<RedirectRule>,
}

impl HookState {
    fn all(&self) -> impl Iterator<Item = &HookPrograms> {
        std::iter::once(&self.own).chain(self.commands.iter().map(|command| &command.hook))
    }
}

impl Hooks {
    /// Attaches the daemon's own hook. No connection is redirected before rules and peers are set.
    pub fn attach(config: Config, cgroup: &Path, shared: &SelectionMaps) -> anyhow::Result<Self> {
        let mut own = HookPrograms::load(&config, Some(shared))?;
        own.attach(cgroup)?;
        let commands = Vec::new();
        let peers = BTreeMap::new();
        let past = BTreeMap::new();
        let rules = Vec::new();
        let plain = Vec::new();
        let shown = HashSet::new();
        let state = HookState { own, rules, plain, commands, peers, past, shown };
        let cgroup = cgroup.to_owned();
        let inside = Mutex::default();
        Ok(Self { config, cgroup, inside, state: Mutex::new(state) })
    }

    /// Detaches all hooks.
    pub fn detach(&self) {
        let mut state = self.state.lock();
        state.own.detach();
        state.commands.clear();
    }

    pub fn set_rules(&self, rules: &[RedirectRule]) -> anyhow::Result<()> {
        let state = &mut *self.state.lock();
        state.rules = rules.to_vec();
        Ok(state.own.set_rules(&with_plain(&state.plain, rules))?)
    }

    /// Sets the server ports to which connections are not redirected from now on, whatever the rules say.
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

    /// Returns the server ports to which connections may be redirected.
    pub fn ports(&self) -> Vec<RangeInclusive<u16>> {
        let state = self.state.lock();
        let rules = state.rules.iter().chain(state.commands.iter().flat_map(|command| &command.rules));
        ports(rules.filter(|rule| !rule.in_place))
    }

    /// Returns the server ports of the commands that have a hook.
    pub fn served_ports(&self) -> Vec<RangeInclusive<u16>> {
        ports(self.state.lock().commands.iter().flat_map(|command| &command.serves))
    }

    /// Adds a hook for the processes of this cgroup, which stays until the cgroup is removed or empty.
    pub fn add(&self, cgroup: &Path, side: SideSetting, rules: Vec<RedirectRule>) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        if state.commands.len() >= COMMANDS_MAX {
            bail!("{COMMANDS_MAX} commands already run with a hook, and that is the limit");
        }
        if state.commands.iter().any(|command| command.cgroup == cgroup) {
            bail!("cgroup {} already has a hook", cgroup.display());
        }
        let mut hook = HookPrograms::load(&self.config, None)?;
        let (rules, serves) = match side {
            SideSetting::Client => (rules, Vec::new()),
            SideSetting::Server => (Vec::new(), rules),
        };
        // The new hook gets the present rules and peers before it is attached, so that it redirects correctly at once.
        hook.set_rules(&with_plain(&state.plain, &rules))?;
        for (peer, (near, warm)) in &state.peers {
            hook.set_peer(*peer, *near, *warm)?;
        }
        hook.attach(cgroup)?;
        state.commands.push(HookCommand { cgroup: cgroup.to_owned(), hook, rules, serves });
        Ok(())
    }

    /// Removes the hooks of cgroups that were removed or have no process any more.
    pub fn prune(&self) {
        let mut state = self.state.lock();
        let HookState { commands, past, .. } = &mut *state;
        commands.retain_mut(|command| {
            // The kernel reports `populated 1` while a process is in the cgroup or below it.
            let events = std::fs::read_to_string(command.cgroup.join("cgroup.events"));
            let is_populated = events.is_ok_and(|events| events.lines().any(|line| line == "populated 1"));
            if !is_populated {
                add_verdicts(past, &mut command.hook);
                // The cgroup's directory was made for the command, and is empty now.
                let _ = std::fs::remove_dir(&command.cgroup);
            }
            is_populated
        });
    }

    /// Reports whether the cgroup with this ID, or one above it, has a hook.
    pub fn have(&self, cgroup: u64) -> bool {
        let known = self.inside.lock().get(&cgroup).copied();
        let is_inside = known.unwrap_or_else(|| {
            let is_inside = is_in(cgroup, &self.cgroup);
            let mut inside = self.inside.lock();
            if inside.len() >= KNOWN_MAX {
                // The cache is rarely full, so it is emptied as a whole.
                inside.clear();
            }
            inside.insert(cgroup, is_inside);
            is_inside
        });
        is_inside || self.state.lock().commands.iter().any(|command| is_in(cgroup, &command.cgroup))
    }

    /// Reports whether a command's rules let this peer connect to the command's server at this port.
    pub fn serves(&self, port: u16, peer: IpAddr) -> bool {
        let fits = |rule: &RedirectRule| rule.ports.contains(&port) && covers(rule.peer, peer);
        self.state.lock().commands.iter().flat_map(|command| &command.serves).any(fits)
    }

    /// Updates the hosts with a tunnel broker in all hooks: `wanted` has all hosts, and whether a carrier to each is
    /// ready ("warm"). `near` returns the local address of the route to a host, and is called again for known hosts if
    /// `looks` is set.
    pub fn set_peers(&self, wanted: &BTreeMap<IpAddr, bool>, looks: bool, near: impl Fn(IpAddr) -> IpAddr) {
        let mut state = self.state.lock();
        let gone: Vec<_> = state.peers.keys().copied().filter(|peer| !wanted.contains_key(peer)).collect();
        for peer in gone {
            state.peers.remove(&peer);
            let done = state.all().try_for_each(|hook| hook.forget_peer(peer));
            warn_on_error("a peer cannot be removed from the kernel's table", done);
        }
        for (peer, warm) in wanted {
            let told = state.peers.get(peer).copied();
            let near = match told {
                // The local address is needed only for a host whose carrier is ready.
                Some((near, was_warm)) if !warm || (was_warm && !looks) => near,
                _ => near(*peer),
            };
            if told == Some((near, *warm)) {
                continue;
            }
            let done = state.all().try_for_each(|hook| hook.set_peer(*peer, near, *warm));
            // If a hook cannot be updated, the next call tries again.
            if done.is_ok() {
                state.peers.insert(*peer, (near, *warm));
            }
            warn_on_error("a peer cannot be written to the kernel's table", done);
        }
    }

    /// Makes the kernel leave connections to this server alone for some time, so that they are plain TCP.
    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        warn_on_error(
            "a server cannot be excluded from tunnelling",
            self.state.lock().all().try_for_each(|hook| hook.avoid(server, time)),
        );
    }

    /// Creates a socket for a connection to `to` that the hooks ignore.
    pub fn socket(&self, to: SocketAddr) -> io::Result<TcpSocket> {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        self.exempt(socket.as_fd()).map_err(io::Error::other)?;
        Ok(socket)
    }

    /// Makes the hooks ignore this socket. Must be called before it connects.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        Ok(self.state.lock().all().try_for_each(|hook| hook.exempt(socket))?)
    }

    /// Returns what the kernel has recorded about the redirected connection that comes from this address.
    pub fn arrival(&self, from: SocketAddr) -> Option<RedirectedConnection> {
        self.state.lock().all().find_map(|hook| hook.arrival(from).ok().flatten())
    }

    /// Tells the kernel that the connection from this address will be redirected to the tunnel broker again when its
    /// SYN is repeated.
    pub fn expect(&self, from: SocketAddr, arrival: &RedirectedConnection) {
        warn_on_error(
            "a repeated SYN cannot be announced to the kernel",
            self.state.lock().own.expect(from, arrival),
        );
    }

    /// Makes the server see this client's address, not the tunnel broker's, as the connection's remote address, until
    /// the returned guard is dropped.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> anyhow::Result<ShownClient<'_>> {
        let mut state = self.state.lock();
        let shown = ShownClient { hooks: self, guest };
        state.shown.insert(key(guest));
        let done = state.all().try_for_each(|hook| hook.show(guest, client));
        // On an error the guard `shown` is dropped, which locks `state` again, so this function releases its lock
        // first.
        drop(state);
        done?;
        Ok(shown)
    }

    /// Reports whether the server of a connection sees its client's address instead of this address of the tunnel
    /// broker.
    pub fn is_shown(&self, guest: Guest) -> bool {
        self.state.lock().shown.contains(&key(guest))
    }

    pub fn verdicts(&self) -> BTreeMap<String, u64> {
        let mut state = self.state.lock();
        let HookState { own, commands, past, .. } = &mut *state;
        let mut sums = past.clone();
        let hooks = std::iter::once(own).chain(commands.iter_mut().map(|command| &mut command.hook));
        hooks.for_each(|hook| add_verdicts(&mut sums, hook));
        sums
    }
}

fn ports<'a>(rules: impl Iterator<Item = &'a RedirectRule>) -> Vec<RangeInclusive<u16>> {
    let mut ports = Vec::new();
    for rule in rules.filter(|rule| !rule.ports.is_empty()) {
        if !ports.contains(&rule.ports) {
            ports.push(rule.ports.clone());
        }
    }
    ports
}

/// Returns the rules for a hook: first rules that exclude the `plain` ports from redirection, then `rules`. If the
/// hook's table has no space for all of them, nothing is redirected.
fn with_plain(plain: &[RangeInclusive<u16>], rules: &[RedirectRule]) -> Vec<RedirectRule> {
    let in_place = |ports: RangeInclusive<u16>| RedirectRule {
        peer: everybody(),
        ports,
        caller: CallerRule::default(),
        strict: false,
        choice: 0,
        in_place: true,
    };
    match plain.len() + rules.len() <= HOOK_RULES {
        true => plain.iter().cloned().map(in_place).chain(rules.iter().cloned()).collect(),
        false => vec![in_place(0..=u16::MAX)],
    }
}

/// Reports whether the cgroup is `top` or below it. A cgroup's ID is the inode number of its directory.
fn is_in(cgroup: u64, top: &Path) -> bool {
    let is_it = std::fs::metadata(top).is_ok_and(|about| about.ino() == cgroup);
    let below = || std::fs::read_dir(top).into_iter().flatten().flatten();
    let is_directory = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    is_it || below().filter(is_directory).any(|entry| is_in(cgroup, &entry.path()))
}

/// Guard for one connection: while this value exists, the server sees the client's address, not the tunnel broker's, as
/// the connection's remote address.
pub struct ShownClient<'a> {
    hooks: &'a Hooks,
    guest: Guest,
}

fn key(guest: Guest) -> (SocketAddr, u16) {
    (guest.broker, guest.server_port)
}

impl Drop for ShownClient<'_> {
    fn drop(&mut self) {
        let mut state = self.hooks.state.lock();
        state.shown.remove(&key(self.guest));
        let done = state.all().try_for_each(|hook| hook.show_no_more(self.guest));
        warn_on_error("a shown client cannot be removed from the kernel's table", done);
    }
}

fn add_verdicts(sums: &mut BTreeMap<String, u64>, hook: &mut HookPrograms) {
    for (verdict, count) in hook.verdicts().unwrap_or_default() {
        *sums.entry(verdict.name().to_owned()).or_default() += count;
    }
}
