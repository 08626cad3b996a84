//! Two hosts and two cgroups. This process is in one cgroup at a time: tests of one process take turns. Those of others run beside them,
//! but for the host's one list of congestion controls.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_graft_kernel::{Caller, Outcome, Rule, Settings, Side, Tcp};
use millrace_kernel::prefix::Prefix;
use nix::fcntl::{Flock, FlockArg};

use crate::net::{self, Network, inside};

pub const LONG: Duration = Duration::from_secs(60);
pub const PORT: u16 = 7000;

static TURN: Mutex<()> = Mutex::new(());
/// Tests that load congestion controls: the host has one list of them, and no daemon of grafts starts meanwhile.
const WITH_CONTROLS: [&str; 5] = ["carry", "replace", "known", "once", "leftover"];

pub struct Site {
    network: Network,
    pub clients: Cgroup,
    pub servers: Cgroup,
    _controls: Option<Flock<File>>,
    _turn: MutexGuard<'static, ()>,
}

impl Site {
    /// `None`: not here, which was said.
    pub fn new(test: &str) -> Option<Self> {
        if !net::root(test) {
            return None;
        }
        let Some(root) = cgroup_root() else {
            println!("SKIP {test}: no cgroup version 2 is mounted");
            return None;
        };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let controls = WITH_CONTROLS.contains(&test).then(controls);
        let cgroup =
            |side: &str| Cgroup::new(root.clone(), &format!("mr-{}-{test}-{side}", std::process::id()));
        Some(Self {
            network: Network::new(test),
            clients: cgroup("c"),
            servers: cgroup("s"),
            _controls: controls,
            _turn: turn,
        })
    }

    pub fn client(&self) -> &str {
        &self.network.publisher
    }

    pub fn server(&self) -> &str {
        &self.network.relay
    }

    /// In the servers' cgroup.
    pub fn listen(&self) -> TcpListener {
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
        self.servers.enter(|| inside(self.server(), || TcpListener::bind(at).expect("bind")))
    }

    /// In the clients' cgroup.
    pub fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        self.connect_in(&self.clients, listener)
    }

    /// In this one.
    pub fn connect_in(&self, cgroup: &Cgroup, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let to = SocketAddr::new(net::address(4, 1, 1), PORT);
        let connect = || TcpStream::connect_timeout(&to, LONG).expect("connected");
        let client = cgroup.enter(|| inside(self.client(), connect));
        let (server, _) = listener.accept().expect("accepted");
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(LONG)).expect("timeout");
            stream.set_write_timeout(Some(LONG)).expect("timeout");
        }
        (client, server)
    }

    /// Both sides loaded and attached, with one rule each.
    pub fn both(&self, client: &Rule, server: &Rule) -> (Tcp, Tcp) {
        (loaded(&self.clients, client), loaded(&self.servers, server))
    }
}

/// As tests of `millrace graft` take it, which say why there are two files.
fn controls() -> Flock<File> {
    let lock = |name: &str| {
        let file = File::create(std::env::temp_dir().join(name)).expect("a lock");
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error).expect("a turn")
    };
    let _door = lock("millrace-graft-tests.door");
    lock("millrace-graft-tests.lock")
}

pub fn loaded(cgroup: &Cgroup, rule: &Rule) -> Tcp {
    let mut tcp = Tcp::load().expect("loads");
    tcp.set_rules(std::slice::from_ref(rule)).expect("rules");
    tcp.attach(&cgroup.path).expect("attached");
    tcp
}

pub fn rule(side: Side, settings: Settings) -> Rule {
    let graft = if side == Side::Client { *b"clie" } else { *b"serv" };
    Rule {
        side,
        peer: all(),
        ports: PORT..=PORT,
        caller: Caller::default(),
        agree: true,
        bound: false,
        graft,
        choice: 0,
        settings,
    }
}

pub fn all() -> Prefix {
    "::/0".parse().expect("a prefix")
}

pub fn congestion(name: &str) -> Settings {
    Settings { congestion: Some(name.into()), ..Settings::default() }
}

/// All that were counted.
pub fn counted(tcp: &mut Tcp) -> Vec<(Outcome, u64)> {
    tcp.outcomes().expect("outcomes").into_iter().filter(|(_, count)| *count > 0).collect()
}

/// A whole transfer; both must have closed in the end.
pub fn transfer(mut from: TcpStream, mut to: TcpStream, bytes: usize) {
    let data: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let expected = data.clone();
    let sender = std::thread::spawn(move || {
        from.write_all(&data).expect("written");
        drop(from);
    });
    let mut got = Vec::new();
    to.read_to_end(&mut got).expect("read");
    assert!(got == expected, "{} of {bytes} bytes", got.len());
    sender.join().expect("the sender");
}

pub fn congestion_of(stream: &TcpStream) -> String {
    let name =
        nix::sys::socket::getsockopt(stream, nix::sys::socket::sockopt::TcpCongestion).expect("a name");
    name.to_string_lossy().trim_end_matches('\0').to_owned()
}

pub fn set_congestion(stream: &TcpStream, name: &str) -> nix::Result<()> {
    nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::TcpCongestion, &name.into())
}

pub fn available() -> Vec<String> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").expect("a list");
    text.split_whitespace().map(str::to_owned).collect()
}

pub struct Cgroup {
    root: PathBuf,
    pub path: PathBuf,
}

impl Cgroup {
    fn new(root: PathBuf, name: &str) -> Self {
        let path = root.join(name);
        fs::create_dir(&path).expect("a cgroup");
        Self { root, path }
    }

    /// One in it.
    pub fn below(&self, name: &str) -> Self {
        let path = self.path.join(name);
        fs::create_dir(&path).expect("a cgroup");
        Self { root: self.root.clone(), path }
    }

    /// A socket belongs to the cgroup that its process is in when it is made.
    pub fn enter<T>(&self, work: impl FnOnce() -> T) -> T {
        let enter = |path: &PathBuf| {
            fs::write(path.join("cgroup.procs"), std::process::id().to_string()).expect("entered");
        };
        enter(&self.path);
        let done = work();
        enter(&self.root);
        done
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let pid = std::process::id().to_string();
        let _ = fs::write(self.root.join("cgroup.procs"), pid);
        let _ = fs::remove_dir(&self.path);
    }
}

fn cgroup_root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields.find(|fields| fields.get(2) == Some(&"cgroup2")).map(|fields| PathBuf::from(fields[1]))
}
