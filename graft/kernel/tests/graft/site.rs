//! A network for tests: two network namespaces as hosts, and two cgroups. This process can be in one cgroup at a time,
//! so its tests run one after another. Tests of other processes run at the same time, except those that change the
//! host's list of congestion controls.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_graft_kernel::{CallerRule, RuleSide, Settings, Tcp, TcpOutcome, TcpRule};
use millrace_kernel::prefix::Prefix;
use nix::fcntl::{Flock, FlockArg};

use crate::net::{self, NamespaceNetwork, inside};

pub const LONG: Duration = Duration::from_secs(60);
pub const PORT: u16 = 7000;

static TURN: Mutex<()> = Mutex::new(());
/// Names of tests that load congestion controls. All processes of the host share one list of congestion controls, so no
/// graft daemon may start during these tests.
const WITH_CONTROLS: [&str; 5] = ["carry", "replace", "known", "once", "leftover"];

pub struct GraftTestSite {
    network: NamespaceNetwork,
    pub clients: TestCgroup,
    pub servers: TestCgroup,
    _controls: Option<Flock<File>>,
    _turn: MutexGuard<'static, ()>,
}

impl GraftTestSite {
    /// Creates namespaces and cgroups. Returns `None` and prints SKIP if the test cannot run on this host.
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
            |side: &str| TestCgroup::new(root.clone(), &format!("mr-{}-{test}-{side}", std::process::id()));
        Some(Self {
            network: NamespaceNetwork::new(test),
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

    /// Opens a listening socket in the servers' cgroup and network namespace.
    pub fn listen(&self) -> TcpListener {
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
        self.servers.enter(|| inside(self.server(), || TcpListener::bind(at).expect("bind")))
    }

    /// Connects a socket that is created in the clients' cgroup. Returns the client's and the server's socket.
    pub fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        self.connect_in(&self.clients, listener)
    }

    /// Connects a socket that is created in the given cgroup. Returns the client's and the server's socket.
    pub fn connect_in(&self, cgroup: &TestCgroup, listener: &TcpListener) -> (TcpStream, TcpStream) {
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

    /// Loads and attaches the programs of both hosts, the client and the server, each with one rule.
    pub fn both(&self, client: &TcpRule, server: &TcpRule) -> (Tcp, Tcp) {
        (loaded(&self.clients, client), loaded(&self.servers, server))
    }
}

/// Takes two file locks, which protect the host's list of congestion controls. The tests of `millrace graft` take the
/// same locks and explain why there are two.
fn controls() -> Flock<File> {
    let lock = |name: &str| {
        let file = File::create(std::env::temp_dir().join(name)).expect("a lock");
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error).expect("a turn")
    };
    let _door = lock("millrace-graft-tests.door");
    lock("millrace-graft-tests.lock")
}

pub fn loaded(cgroup: &TestCgroup, rule: &TcpRule) -> Tcp {
    let mut tcp = Tcp::load(None).expect("loads");
    tcp.set_rules(std::slice::from_ref(rule)).expect("rules");
    tcp.attach(&cgroup.path).expect("attached");
    tcp
}

pub fn rule(side: RuleSide, settings: Settings) -> TcpRule {
    let graft = if side == RuleSide::Client { *b"clie" } else { *b"serv" };
    TcpRule {
        side,
        peer: all(),
        ports: PORT..=PORT,
        caller: CallerRule::default(),
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

/// Returns the outcomes of connections that were counted at least once, with their counts.
pub fn counted(tcp: &mut Tcp) -> Vec<(TcpOutcome, u64)> {
    tcp.outcomes().expect("outcomes").into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Transfers `bytes` bytes, checks them, and waits until both ends have closed.
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

pub struct TestCgroup {
    root: PathBuf,
    pub path: PathBuf,
}

impl TestCgroup {
    fn new(root: PathBuf, name: &str) -> Self {
        let path = root.join(name);
        fs::create_dir(&path).expect("a cgroup");
        Self { root, path }
    }

    /// Creates a child of this cgroup.
    pub fn below(&self, name: &str) -> Self {
        let path = self.path.join(name);
        fs::create_dir(&path).expect("a cgroup");
        Self { root: self.root.clone(), path }
    }

    /// Runs `work` in this cgroup. A socket belongs to the cgroup in which its process is at the socket's creation.
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

impl Drop for TestCgroup {
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
