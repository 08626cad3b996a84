//! Test setup for grafts: two hosts (network namespaces) with a cgroup each, and daemons on them. This process can be
//! in one cgroup at a time, so its tests take turns. Tests of other processes run at the same time and share only the
//! host's list of congestion controls: see `GraftSite::with_controls`.

use std::{
    cell::Cell,
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use millrace_graft::{ObjectIdentity, status::Status};
use millrace_graft_daemon::control;
use millrace_lab::lab::{Lab, Topology};
use millrace_testkit::show_log_on_panic;
pub use millrace_testkit::{wait_for, wait_until};
use nix::{
    fcntl::{Flock, FlockArg},
    sched::{CloneFlags, setns},
    sys::{
        signal::{Signal, kill},
        socket::{getsockopt, sockopt},
    },
    unistd::Pid,
};
use tempfile::TempDir;

/// Longest time that a test waits for something. No test depends on its value.
pub const LONG: Duration = millrace_testkit::BOUND;

/// Address of the HTTP server of daemons that have one.
pub const HTTP: &str = "127.0.0.1:9186";
pub const SERVER: &str = "10.96.0.1";
pub const CLIENT: &str = "10.96.0.2";
pub const SERVER6: &str = "fd96::1";
pub const CLIENT6: &str = "fd96::2";
pub const PORT: u16 = 7100;

static TURN: Mutex<()> = Mutex::new(());

/// Returns the key pair that both hosts use, as PEM, and the hash of its public key. The hosts identify each other by
/// this hash.
fn own_key() -> &'static (String, ObjectIdentity) {
    static KEY: OnceLock<(String, ObjectIdentity)> = OnceLock::new();
    KEY.get_or_init(|| {
        let key = rcgen::KeyPair::generate().unwrap();
        (
            key.serialize_pem(),
            ObjectIdentity::from_image(&rcgen::PublicKeyData::subject_public_key_info(&key)),
        )
    })
}

/// Returns settings for packet sessions: this host's key, and the peer `other`. The text ends in the peer's section, so
/// that callers can append settings of the peer.
pub fn peer(local: &str, remote: &str) -> String {
    peer_with(&format!("local = \"{local}\"\nremote = \"{remote}\"\n"))
}

pub fn peer_with(ends: &str) -> String {
    let (_, identity) = own_key();
    format!(
        "[agreement]\nkey = \"host.key\"\n[[peer]]\nname = \"other\"\nkey = \"{identity}\"\n[peer.sessions]\n{ends}"
    )
}

pub struct GraftSite {
    pub directory: TempDir,
    /// Network namespaces of the client's and the server's host. Tests in an emulated network may have more hosts.
    pub namespaces: Vec<String>,
    root: PathBuf,
    cgroups: Vec<PathBuf>,
    /// The emulated network that the namespaces belong to.
    lab: Option<Lab>,
    controls: OnceLock<Flock<fs::File>>,
    _turn: MutexGuard<'static, ()>,
}

impl GraftSite {
    /// Returns a test setup for tests that load or list congestion controls. The host has one list of them, so no other
    /// test's daemons run meanwhile. `None` if the host cannot run the test; the reason is printed.
    pub fn with_controls(test: &str) -> Option<Self> {
        Some(Self::new(test)?.alone())
    }

    /// Returns the answer to GET of `path`, with the headers, from the HTTP server at [`HTTP`] on the client's (0) or
    /// server's (1) host.
    pub fn get(&self, side: usize, path: &str) -> String {
        inside(&self.namespaces[side], || {
            let mut stream = TcpStream::connect(HTTP).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {HTTP}\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        })
    }

    /// Returns the test setup, or `None` if the host cannot run the test. The reason is printed.
    pub fn new(test: &str) -> Option<Self> {
        let site = Self::bare(test, 2)?;
        for namespace in &site.namespaces {
            ip(&format!("netns add {namespace}"));
        }
        let [client, server] = &site.namespaces[..] else { unreachable!("two") };
        ip(&format!("-n {client} link add eth type veth peer name eth netns {server}"));
        for (namespace, address, v6) in [(client, CLIENT, CLIENT6), (server, SERVER, SERVER6)] {
            ip(&format!("-n {namespace} link set lo up"));
            ip(&format!("-n {namespace} addr add {address}/24 dev eth"));
            ip(&format!("-n {namespace} addr add {v6}/64 dev eth nodad"));
            ip(&format!("-n {namespace} link set eth up"));
        }
        Some(site)
    }

    /// Returns a test setup whose hosts are the nodes of an emulated network, with links that lose and delay packets.
    pub fn in_lab(test: &str, topology: &Topology) -> Option<Self> {
        let mut site = Self::bare(test, topology.nodes().len())?;
        let lab = Lab::new(topology).unwrap();
        for node in lab.nodes() {
            // A connection must not begin with the metrics that the kernel cached from an earlier one.
            node.enter(|| fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1").unwrap()).unwrap();
        }
        site.namespaces = lab.nodes().iter().map(|node| node.netns().name().to_owned()).collect();
        site.lab = Some(lab);
        Some(site)
    }

    /// Locks the host's list of congestion controls for this test alone. Must be called before a daemon is started.
    pub fn alone(self) -> Self {
        self.controls.get_or_init(|| controls(FlockArg::LockExclusive));
        self
    }

    /// Shares the host's list of congestion controls with other tests that start daemons. A starting daemon removes
    /// controls that have no BPF link (all of them, before Linux 6.4), since a killed daemon may have left them
    /// (`remove_leftovers`).
    pub fn share(&self) {
        self.controls.get_or_init(|| controls(FlockArg::LockShared));
    }

    /// Writes the key file that the settings of `peer` name.
    pub fn put_key(&self) {
        fs::write(self.path("host.key"), &own_key().0).unwrap();
    }

    pub fn address(&self, node: &str) -> IpAddr {
        self.lab.as_ref().unwrap().node(node).unwrap().addr_v4().into()
    }

    fn bare(test: &str, hosts: usize) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {test}: needs root");
            return None;
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let Some(mount) = mounts.find(|fields| fields[2] == "cgroup2") else {
            println!("SKIP {test}: no cgroup version 2 is mounted");
            return None;
        };
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("mg-{}-{test}", std::process::id());
        let root = PathBuf::from(mount[1]);
        let sides: Vec<_> =
            ["c", "s", "t"].into_iter().take(hosts).map(|side| format!("{name}-{side}")).collect();
        let cgroups: Vec<_> = sides.iter().map(|side| root.join(side)).collect();
        cgroups.iter().for_each(|cgroup| fs::create_dir(cgroup).unwrap());
        let directory = TempDir::new().unwrap();
        let lab = None;
        let controls = OnceLock::new();
        Some(Self { directory, namespaces: sides, root, cgroups, lab, controls, _turn: turn })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the settings of the client's daemon: its cgroup, and `text`.
    pub fn configure(&self, text: &str) {
        self.configure_on(0, text);
    }

    /// Writes the settings of a host's daemon. `side` 0 is the client's host, and 1 the server's.
    pub fn configure_on(&self, side: usize, text: &str) {
        let text = format!("cgroup = {:?}\n{text}", self.cgroups[side]);
        fs::write(self.path(&format!("graft{side}.toml")), text).unwrap();
    }

    /// Listens on the server's host, in the daemon's cgroup.
    pub fn listen(&self) -> TcpListener {
        let bind = || inside(&self.namespaces[1], || TcpListener::bind((SERVER, PORT)).unwrap());
        self.enter(1, bind)
    }

    /// Listens at this address of the server's host, in the daemon's cgroup.
    pub fn listen_on(&self, at: SocketAddr) -> TcpListener {
        self.listen_at(1, at)
    }

    /// Listens on one of the hosts, in the daemon's cgroup.
    pub fn listen_at(&self, side: usize, at: SocketAddr) -> TcpListener {
        self.enter(side, || inside(&self.namespaces[side], || TcpListener::bind(at).unwrap()))
    }

    /// Connects from the client's host, in the daemon's cgroup.
    pub fn try_connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        self.enter(0, || inside(&self.namespaces[0], || TcpStream::connect_timeout(&to, LONG)))
    }

    /// Starts to connect without waiting for the result.
    pub fn begin_to_connect(&self, to: SocketAddr) -> TcpStream {
        let begin = || {
            let socket =
                socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let begun = socket.connect(&to.into()).unwrap_err();
            assert_eq!(begun.raw_os_error(), Some(nix::libc::EINPROGRESS));
            socket.into()
        };
        self.enter(0, || inside(&self.namespaces[0], begin))
    }

    pub fn cgroup(&self, side: usize) -> &Path {
        &self.cgroups[side]
    }

    /// Returns a command that runs a program on one of the hosts, in the daemon's cgroup.
    pub fn command(&self, side: usize, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.namespaces[side])).arg(program);
        command
    }

    pub fn spawn(&self, side: usize, mut command: Command) -> Child {
        self.enter(side, || command.spawn().unwrap())
    }

    /// Runs `work` in a host's cgroup. A socket belongs to the cgroup in which its process was when the socket was
    /// made.
    pub fn enter<T>(&self, side: usize, work: impl FnOnce() -> T) -> T {
        let enter =
            |path: &Path| fs::write(path.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        enter(&self.cgroups[side]);
        let done = work();
        enter(&self.root);
        done
    }

    /// Connects from the client's cgroup. Returns the client's end and the server's.
    pub fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let to: SocketAddr = (SERVER.parse::<std::net::IpAddr>().unwrap(), PORT).into();
        let connect = || inside(&self.namespaces[0], || TcpStream::connect_timeout(&to, LONG).unwrap());
        let client = self.enter(0, connect);
        let (server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(LONG)).unwrap();
        (client, server)
    }
}

impl Drop for GraftSite {
    fn drop(&mut self) {
        for namespace in self.namespaces.iter().filter(|_| self.lab.is_none()) {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
        let _ = fs::write(self.root.join("cgroup.procs"), std::process::id().to_string());
        for cgroup in &self.cgroups {
            let _ = fs::remove_dir(cgroup);
        }
    }
}

/// Locks the host's list of congestion controls, for all test programs together.
fn controls(how: FlockArg) -> Flock<fs::File> {
    let lock = |name: &str, how| {
        let file = fs::File::create(std::env::temp_dir().join(name)).unwrap();
        Flock::lock(file, how).map_err(|(_, error)| error).unwrap()
    };
    // A test that waits for the exclusive lock holds a second lock, `door`, for which later tests wait. Otherwise
    // shared locks could keep it waiting forever.
    let _door = lock("millrace-graft-tests.door", FlockArg::LockExclusive);
    lock("millrace-graft-tests.lock", how)
}

pub fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
}

pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let done = scope.spawn(|| {
            setns(fs::File::open(format!("/run/netns/{namespace}")).unwrap(), CloneFlags::CLONE_NEWNET)
                .unwrap();
            work()
        });
        done.join().unwrap()
    })
}

pub fn signal(process: u32, signal: Signal) {
    kill(Pid::from_raw(process.cast_signed()), signal).unwrap();
}

/// Stops a process. Returns when all of its threads have stopped, which happens one by one.
pub fn pause(process: u32) {
    signal(process, Signal::SIGSTOP);
    let is_stopped = |task: std::io::Result<fs::DirEntry>| {
        let stat = fs::read_to_string(task.unwrap().path().join("stat"));
        stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
    };
    wait_for("all threads to stop", || {
        fs::read_dir(format!("/proc/{process}/task")).unwrap().all(is_stopped)
    });
}

/// Reports whether a process has ended with all of its threads, which share its files. A zombie counts as ended, since
/// in a container without an init process nobody reaps it.
pub fn has_ended(process: u32) -> bool {
    let is_over = |task: std::io::Result<fs::DirEntry>| {
        // exact: callers repeat this check until the process has ended
        let stat = task.and_then(|task| fs::read_to_string(task.path().join("stat"))).unwrap_or_default();
        stat.is_empty() || stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
    };
    // exact: callers repeat this check until the process has ended
    let tasks = format!("/proc/{process}/task");
    fs::read_dir(tasks).map_or_else(|error| error.kind() == ErrorKind::NotFound, |mut all| all.all(is_over))
}

/// Returns the process ID of a daemon's child process (part), from a status as JSON.
pub fn part(status: &str, name: &str) -> u32 {
    let status: control::Status = serde_json::from_str(status).unwrap();
    let part = status.parts.iter().find(|part| part.name == name);
    part.and_then(|part| part.pid).unwrap_or_else(|| panic!("no process of {name}: {:?}", status.parts))
}

/// Returns the state of a child process (part) of the daemon: `serving`, `ended` ...
pub fn part_state(daemon: &GraftProcess<'_>, name: &str) -> String {
    // exact: callers repeat this read until the state is as expected
    let status: control::Status = serde_json::from_str(&daemon.succeed(&["status", "--json"])).unwrap();
    status.parts.into_iter().find(|part| part.name == name).map(|part| part.state).unwrap_or_default()
}

pub fn congestion(stream: &TcpStream) -> String {
    let name = getsockopt(stream, sockopt::TcpCongestion).unwrap();
    name.to_string_lossy().trim_end_matches('\0').to_owned()
}

pub fn ours() -> Vec<String> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap();
    let mut ours: Vec<_> =
        text.split_whitespace().filter(|name| name.starts_with("mr_")).map(str::to_owned).collect();
    ours.sort();
    ours
}

/// Waits until no congestion control of ours is registered. The kernel removes them some time after a killed process
/// has ended.
pub fn wait_for_none_of_ours() {
    wait_until("the end of our congestion controls", ours, Vec::is_empty);
}

pub fn transfer(mut from: TcpStream, mut to: TcpStream) {
    let data = vec![7; 1 << 20];
    let sender = thread::spawn(move || from.write_all(&data).unwrap());
    let mut got = Vec::new();
    to.read_to_end(&mut got).unwrap();
    sender.join().unwrap();
    assert_eq!(got.len(), 1 << 20);
}

/// A running `millrace graft run` in a host's network namespace and cgroup; killed when dropped.
pub struct GraftProcess<'a> {
    site: &'a GraftSite,
    side: usize,
    process: Child,
    /// ID of the daemon's child process that is paused; 0 if none is paused.
    paused: Cell<u32>,
}

impl<'a> GraftProcess<'a> {
    /// Starts the daemon of the client's host.
    pub fn start(site: &'a GraftSite) -> Self {
        Self::start_on(site, 0)
    }

    pub fn start_on(site: &'a GraftSite, side: usize) -> Self {
        Self::start_with(site, side, &[])
    }

    pub fn start_with(site: &'a GraftSite, side: usize, more: &[&str]) -> Self {
        Self::start_as(site, side, "run", more)
    }

    /// Starts a daemon with `run` or `gateway` as its subcommand.
    pub fn start_as(site: &'a GraftSite, side: usize, verb: &str, more: &[&str]) -> Self {
        site.share();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", site.namespaces[side]));
        command.arg(env!("CARGO_BIN_EXE_millrace")).args(["graft", verb, "--config"]);
        command.arg(site.path(&format!("graft{side}.toml")));
        command.arg("--socket").arg(site.path(&format!("graft{side}.sock"))).args(more);
        if !more.contains(&"--http") {
            command.arg("--http=off");
        }
        let log = site.path(&format!("log{side}"));
        command.stderr(fs::File::create(&log).unwrap());
        let process = site.enter(side, || command.spawn().unwrap());
        let mut daemon = Self { site, side, process, paused: Cell::new(0) };
        wait_for("a daemon that is ready", || {
            let log = daemon.log();
            assert!(daemon.process.try_wait().unwrap().is_none(), "{log}");
            log.contains("ready")
        });
        daemon
    }

    /// Returns the ID of the daemon's child process (part) that most tests are about: `tunnel` if the settings want it,
    /// and otherwise `grafts`.
    pub fn pid(&self) -> u32 {
        let name = if part_state(self, "tunnel") == "off" { "grafts" } else { "tunnel" };
        part(&self.succeed(&["status", "--json"]), name)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.site.path(&format!("log{}", self.side))).unwrap()
    }

    pub fn verb(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command
            .arg("graft")
            .args(args)
            .arg("--socket")
            .arg(self.site.path(&format!("graft{}.sock", self.side)));
        command.output().unwrap()
    }

    pub fn succeed(&self, args: &[&str]) -> String {
        let output = self.verb(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn fail(&self, args: &[&str]) -> String {
        let output = self.verb(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn status(&self) -> Status {
        serde_json::from_str(&self.succeed(&["status", "--json"])).unwrap()
    }

    /// Pauses the daemon's child process (part) that [`Self::pid`] returns. Returns when the process has stopped.
    pub fn pause(&self) {
        self.paused.set(self.pid());
        pause(self.paused.get());
    }

    pub fn go_on(&self) {
        signal(self.paused.get(), Signal::SIGCONT);
        // If the paused child process of the daemon did not answer for some seconds, the daemon sends it no requests
        // until it answers again.
        let are_serving = || {
            let status: control::Status = serde_json::from_str(&self.succeed(&["status", "--json"])).unwrap();
            status.parts.iter().all(|part| ["serving", "off"].contains(&part.state.as_str()))
        };
        wait_for("the part to answer", are_serving);
    }

    /// Ends the daemon with SIGTERM.
    pub fn end(mut self) {
        signal(self.process.id(), Signal::SIGTERM);
        assert!(self.process.wait().unwrap().success(), "{}", self.log());
    }

    /// Kills the daemon with SIGKILL, and waits until all of its child processes have ended.
    pub fn kill(mut self) {
        let status: control::Status = serde_json::from_str(&self.succeed(&["status", "--json"])).unwrap();
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        // The kernel kills the child processes with the daemon, which may take a moment.
        let parts: Vec<_> = status.parts.iter().filter_map(|part| part.pid).collect();
        wait_for("the end of the parts", || parts.iter().all(|id| has_ended(*id)));
    }
}

impl Drop for GraftProcess<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let side = self.side;
        let log = self.site.path(&format!("log{}", self.side));
        show_log_on_panic(&format!("the daemon of side {side}"), &log);
    }
}
