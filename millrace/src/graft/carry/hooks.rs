//! Hooks of cgroups: the daemon's own, and those of commands. All lead to the same broker.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::bail;
use millrace_bpf::graft::hook::{Arrival, Config, Guest, Hook, Lead};
use millrace_graft::Side;
use parking_lot::Mutex;
use tracing::warn;

/// Commands at once.
const COMMANDS_MAX: usize = 64;

pub struct Hooks {
    config: Config,
    state: Mutex<State>,
}

struct State {
    own: Hook,
    commands: Vec<Command>,
    /// What each hook is told of hosts with a broker.
    peers: BTreeMap<IpAddr, (IpAddr, bool)>,
    /// What commands had counted that have ended.
    past: BTreeMap<String, u64>,
}

struct Command {
    cgroup: PathBuf,
    hook: Hook,
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
    pub fn attach(config: Config, cgroup: &Path) -> anyhow::Result<Self> {
        let mut own = Hook::load(&config)?;
        own.attach(cgroup)?;
        let (commands, peers, past) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Ok(Self { config, state: Mutex::new(State { own, commands, peers, past }) })
    }

    /// For good.
    pub fn detach(&self) {
        let mut state = self.state.lock();
        state.own.detach();
        state.commands.clear();
    }

    pub fn set_rules(&self, rules: &[Lead]) -> anyhow::Result<()> {
        Ok(self.state.lock().own.set_rules(rules)?)
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
        let mut hook = Hook::load(&self.config)?;
        if side == Side::Client {
            hook.set_rules(&leads)?;
        }
        for (peer, (near, warm)) in &state.peers {
            hook.set_peer(*peer, *near, *warm)?;
        }
        hook.attach(cgroup)?;
        let serves = if side == Side::Server { leads } else { Vec::new() };
        state.commands.push(Command { cgroup: cgroup.to_owned(), hook, serves });
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

    /// Whether a command serves this port to this peer.
    pub fn serves(&self, port: u16, peer: IpAddr) -> bool {
        let fits = |lead: &Lead| lead.ports.contains(&port) && millrace_bpf::graft::covers(lead.peer, peer);
        self.state.lock().commands.iter().flat_map(|command| &command.serves).any(fits)
    }

    pub fn set_peer(&self, peer: IpAddr, near: IpAddr, warm: bool) {
        let mut state = self.state.lock();
        if state.peers.insert(peer, (near, warm)) == Some((near, warm)) {
            return;
        }
        let done = state.all().try_for_each(|hook| hook.set_peer(peer, near, warm));
        said("a peer cannot be told to the kernel", done);
    }

    pub fn forget_peer(&self, peer: IpAddr) {
        let mut state = self.state.lock();
        state.peers.remove(&peer);
        said(
            "a peer cannot be taken from the kernel",
            state.all().try_for_each(|hook| hook.forget_peer(peer)),
        );
    }

    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        said(
            "a server cannot be avoided",
            self.state.lock().all().try_for_each(|hook| hook.avoid(server, time)),
        );
    }

    /// Before it connects.
    pub fn exempt(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        Ok(self.state.lock().all().try_for_each(|hook| hook.exempt(socket))?)
    }

    pub fn arrival(&self, from: SocketAddr) -> Option<Arrival> {
        self.state.lock().all().find_map(|hook| hook.arrival(from).ok().flatten())
    }

    /// It comes once more.
    pub fn expect(&self, from: SocketAddr, arrival: Arrival) {
        said("a connection cannot be expected", self.state.lock().own.expect(from, arrival));
    }

    /// The server sees this client, until the guard is dropped.
    pub fn show(&self, guest: Guest, client: SocketAddr) -> anyhow::Result<Shown<'_>> {
        let state = self.state.lock();
        let shown = Shown { hooks: self, guest };
        let done = state.all().try_for_each(|hook| hook.show(guest, client));
        drop(state);
        done?;
        Ok(shown)
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

pub struct Shown<'a> {
    hooks: &'a Hooks,
    guest: Guest,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let done = self.hooks.state.lock().all().try_for_each(|hook| hook.show_no_more(self.guest));
        said("a client cannot be taken from the kernel", done);
    }
}

fn add_verdicts(sums: &mut BTreeMap<String, u64>, hook: &mut Hook) {
    for (verdict, count) in hook.verdicts().unwrap_or_default() {
        *sums.entry(verdict.name().to_owned()).or_default() += count;
    }
}

fn said(what: &str, done: Result<(), millrace_bpf::graft::Error>) {
    if let Err(error) = done {
        warn!("{what}: {error}");
    }
}
