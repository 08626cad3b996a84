//! The BPF programs that redirect connections to the tunnel broker: those of the daemon's cgroup, and those of single
//! commands that users run with redirected connections.

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

use anyhow::{Context as _, bail};
use millrace_graft::SideSetting;
use millrace_graft_kernel::{
    CGROUP_LEVELS, CallerRule, SelectionMaps, cgroup_id, covers, everybody,
    hook::{Config, Guest, HOOK_RULES, HookAttachment, HookPrograms, RedirectRule, RedirectedConnection},
};
use parking_lot::Mutex;
use tokio::net::TcpSocket;

use super::warnings::warn_on_error;

/// Limit of concurrent commands with redirected connections.
const COMMANDS_MAX: usize = 64;
/// Limit of entries in the cache `inside`, which remembers whether cgroups are in the cgroup of the daemon's hook.
const KNOWN_MAX: usize = 4096;

/// The BPF programs that redirect connections, with the rules and peers that they must have.
pub struct Hooks {
    /// Cgroup of the daemon's hook.
    cgroup: PathBuf,
    /// ID of that cgroup.
    id: u64,
    /// Cache, by cgroup ID: true if the cgroup is `cgroup` or below it. The kernel never uses a cgroup ID twice.
    inside: Mutex<HashMap<u64, bool>>,
    state: Mutex<HookState>,
}

struct HookState {
    programs: HookPrograms,
    /// Attachment to the daemon's cgroup. `None` once the hook was detached.
    attachment: Option<HookAttachment>,
    /// Rules of the settings.
    rules: Vec<RedirectRule>,
    /// Ports whose connections are never redirected, whatever the rules say.
    plain: Vec<RangeInclusive<u16>>,
    commands: Vec<HookCommand>,
    /// Hosts with a tunnel broker, as the programs know them: the local address of the route to each, and whether a
    /// carrier to it is ready ("warm").
    peers: BTreeMap<IpAddr, (IpAddr, bool)>,
    /// Connections from the tunnel broker to servers of this host, in which the server sees the client's address, and
    /// not the broker's, as the remote address. A connection is identified by the broker's address and the server's
    /// port.
    shown: HashSet<(SocketAddr, u16)>,
}

struct HookCommand {
    cgroup: PathBuf,
    id: u64,
    /// Attachment to the command's cgroup, if that is outside of the daemon's.
    attachment: Option<HookAttachment>,
    /// Rules for redirecting the command's connections, if the command is a client.
    rules: Vec<RedirectRule>,
    /// Rules for connections of peers to the command's servers, if it has any.
    serves: Vec<RedirectRule>,
}

impl HookState {
    /// Returns the rules for the programs: first those that exclude the `plain` ports from redirection, then those of
    /// commands, and then those of the settings. The latter hold in the daemon's cgroup, which has the ID `own`.
    fn all_rules(&self, own: u64) -> Vec<RedirectRule> {
        let in_place = |ports: RangeInclusive<u16>| RedirectRule {
            peer: everybody(),
            ports,
            caller: CallerRule::default(),
            strict: false,
            choice: 0,
            in_place: true,
        };
        let is_wider = self.commands.iter().any(|command| command.attachment.is_some());
        let within = |rule: &RedirectRule| {
            let mut rule = rule.clone();
            rule.caller.cgroup = rule.caller.cgroup.or_else(|| is_wider.then_some(own));
            rule
        };
        let plain = self.plain.iter().cloned().map(in_place);
        let commands = self.commands.iter().flat_map(|command| command.rules.iter().cloned());
        let all: Vec<_> = plain.chain(commands).chain(self.rules.iter().map(within)).collect();
        // If the kernel's table has no space for all of them, nothing is redirected.
        if all.len() <= HOOK_RULES { all } else { vec![in_place(0..=u16::MAX)] }
    }

    fn write_rules(&mut self, own: u64) -> anyhow::Result<()> {
        let rules = self.all_rules(own);
        Ok(self.programs.set_rules(&rules)?)
    }
}

impl Hooks {
    /// Loads the programs and attaches them to a cgroup. No connection is redirected before rules and peers are set.
    pub fn attach(config: &Config, cgroup: &Path, shared: &SelectionMaps) -> anyhow::Result<Self> {
        let programs = HookPrograms::load(config, shared)?;
        let state = HookState {
            attachment: Some(programs.attach(cgroup)?),
            programs,
            rules: Vec::new(),
            plain: Vec::new(),
            commands: Vec::new(),
            peers: BTreeMap::new(),
            shown: HashSet::new(),
        };
        let id = cgroup_id(cgroup).with_context(|| format!("cgroup {}", cgroup.display()))?;
        Ok(Self { cgroup: cgroup.to_owned(), id, inside: Mutex::default(), state: Mutex::new(state) })
    }

    /// Detaches all hooks.
    pub fn detach(&self) {
        let mut state = self.state.lock();
        state.attachment = None;
        state.commands.clear();
    }

    pub fn set_rules(&self, rules: &[RedirectRule]) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        state.rules = rules.to_vec();
        state.write_rules(self.id)
    }

    /// Sets the server ports to which connections are not redirected from now on, whatever the rules say.
    pub fn set_plain(&self, plain: Vec<RangeInclusive<u16>>) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        if state.plain == plain {
            return Ok(());
        }
        let before = std::mem::replace(&mut state.plain, plain);
        // If the kernel's table cannot be updated, the next call tries again.
        state.write_rules(self.id).inspect_err(|_| state.plain = before)
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

    /// Adds rules for the processes of this cgroup, which stay until the cgroup is removed or empty.
    pub fn add(&self, cgroup: &Path, side: SideSetting, mut rules: Vec<RedirectRule>) -> anyhow::Result<()> {
        let id = cgroup_id(cgroup).with_context(|| format!("cgroup {}", cgroup.display()))?;
        if cgroup.components().count() > CGROUP_LEVELS {
            bail!("cgroup {} lies more than {CGROUP_LEVELS} directories deep", cgroup.display());
        }
        let is_inside = is_in(id, &self.cgroup);
        let mut state = self.state.lock();
        if state.commands.len() >= COMMANDS_MAX {
            bail!("{COMMANDS_MAX} commands already run with a hook, and that is the limit");
        }
        if state.commands.iter().any(|command| command.cgroup == cgroup) {
            bail!("cgroup {} already has a hook", cgroup.display());
        }
        rules.iter_mut().for_each(|rule| rule.caller.cgroup = Some(id));
        let (rules, serves) = match side {
            SideSetting::Client => (rules, Vec::new()),
            SideSetting::Server => (Vec::new(), rules),
        };
        let taken = state.all_rules(self.id).len();
        if taken + rules.len() > HOOK_RULES {
            bail!(
                "the rules of the settings and of other commands have {taken} pairs of a port and a peer, and this command's \
                 {}: the limit is {HOOK_RULES}",
                rules.len()
            );
        }
        let attachment = if is_inside { None } else { Some(state.programs.attach(cgroup)?) };
        state.commands.push(HookCommand { cgroup: cgroup.to_owned(), id, attachment, rules, serves });
        let done = state.write_rules(self.id);
        if done.is_err() {
            state.commands.pop();
        }
        done
    }

    /// Removes the rules of cgroups that were removed or have no process any more.
    pub fn prune(&self) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        let count = state.commands.len();
        state.commands.retain(|command| is_populated(&command.cgroup));
        if state.commands.len() == count { Ok(()) } else { state.write_rules(self.id) }
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

    /// Updates the hosts with a tunnel broker in the kernel: `wanted` has all hosts, and whether a carrier to each is
    /// ready ("warm"). `near` returns the local address of the route to a host, and is called again for known hosts if
    /// `looks` is set.
    pub fn set_peers(&self, wanted: &BTreeMap<IpAddr, bool>, looks: bool, near: impl Fn(IpAddr) -> IpAddr) {
        let state = &mut *self.state.lock();
        let HookState { programs, peers, .. } = state;
        peers.retain(|peer, _| {
            let stays = wanted.contains_key(peer);
            if !stays {
                warn_on_error(
                    "a peer cannot be removed from the kernel's table",
                    programs.forget_peer(*peer),
                );
            }
            stays
        });
        for (peer, warm) in wanted {
            let told = peers.get(peer).copied();
            let near = match told {
                // The local address is needed only for a host whose carrier is ready.
                Some((near, was_warm)) if !warm || (was_warm && !looks) => near,
                _ => near(*peer),
            };
            if told == Some((near, *warm)) {
                continue;
            }
            // If the kernel's table cannot be updated, the next call tries again.
            match programs.set_peer(*peer, near, *warm) {
                Ok(()) => drop(peers.insert(*peer, (near, *warm))),
                failed => warn_on_error("a peer cannot be written to the kernel's table", failed),
            }
        }
    }

    /// Makes the kernel leave connections to this server alone for some time, so that they are plain TCP.
    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        let done = self.state.lock().programs.avoid(server, time);
        warn_on_error("a server cannot be excluded from tunnelling", done);
    }

    /// Creates a socket for a connection to `to` that the hooks ignore.
    pub fn socket(&self, to: SocketAddr) -> io::Result<TcpSocket> {
        let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        self.exempt(socket.as_fd()).map_err(io::Error::other)?;
        Ok(socket)
    }

    /// Makes the hooks ignore this socket. Must be called before it connects.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        Ok(self.state.lock().programs.exempt(socket)?)
    }

    /// Returns what the kernel has recorded about the redirected connection that comes from this address.
    pub fn arrival(&self, from: SocketAddr) -> Option<RedirectedConnection> {
        let state = self.state.lock();
        let mut arrival = state.programs.arrival(from).ok().flatten()?;
        // Only a cgroup that the settings name belongs to the class of a connection.
        let is_unnamed = arrival.cgroup == self.id || state.commands.iter().any(|it| it.id == arrival.cgroup);
        if is_unnamed {
            arrival.cgroup = 0;
        }
        Some(arrival)
    }

    /// Tells the kernel that the connection from this address will be redirected to the tunnel broker again when its
    /// SYN is repeated.
    pub fn expect(&self, from: SocketAddr, arrival: &RedirectedConnection) {
        let done = self.state.lock().programs.expect(from, arrival);
        warn_on_error("a repeated SYN cannot be announced to the kernel", done);
    }

    /// Makes the server see this client's address, not the tunnel broker's, as the connection's remote address, until
    /// the returned guard is dropped.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> anyhow::Result<ShownClient<'_>> {
        let mut state = self.state.lock();
        state.programs.show(guest, client)?;
        state.shown.insert(key(guest));
        Ok(ShownClient { hooks: self, guest })
    }

    /// Reports whether the server of a connection sees its client's address instead of this address of the tunnel
    /// broker.
    pub fn is_shown(&self, guest: Guest) -> bool {
        self.state.lock().shown.contains(&key(guest))
    }

    /// Returns the number of connections by the programs' verdict.
    pub fn verdicts(&self) -> BTreeMap<String, u64> {
        let counts = self.state.lock().programs.verdicts().unwrap_or_default();
        counts.into_iter().map(|(verdict, count)| (verdict.name().to_owned(), count)).collect()
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

/// Reports whether a process is in the cgroup or below it.
pub fn is_populated(cgroup: &Path) -> bool {
    let events = std::fs::read_to_string(cgroup.join("cgroup.events"));
    events.is_ok_and(|events| events.lines().any(|line| line == "populated 1"))
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
        let done = state.programs.show_no_more(self.guest);
        warn_on_error("a shown client cannot be removed from the kernel's table", done);
    }
}
