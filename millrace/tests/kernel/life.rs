//! Tests in which the forwarding in the kernel starts or ends while media flows.

use std::{cell::OnceCell, fs, net::SocketAddr, os::unix::process::ExitStatusExt, process::Command};

use millrace_daemon::http::fetch;
use millrace_kernel::tc::{self, KernelHook};
use millrace_lab::lab::{Lab, LabNode, Topology};
use millrace_relay_daemon::{
    config::{Config, EngineChoice},
    status::Status,
};
use millrace_testkit::{cli::run_until_refused, show_log_on_panic};
use nix::{
    net::if_::if_nametoindex,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::runtime::Runtime;

use crate::{
    needs_root,
    net::{
        AHEAD, GroupStream, KernelNetwork, OF_A_GROUP, PORT, SHOW, cast, configure, play, start, sum, until,
    },
};

/// A track with 30 groups, which tests divide into phases of 10 groups.
const LONG: GroupStream = GroupStream { groups: 30, objects: 30, ..SHOW };

/// Returns the number of packets that the kernel has sent to subscribers.
fn sent(status: &Status) -> u64 {
    sum(status, |session| session.kernel.packets)
}

/// Number of packets that the kernel had sent to subscribers by the end of each phase, which has 10 groups.
pub struct Phases(pub Vec<u64>);

/// Smallest number of packets that the kernel sends to two subscribers in a phase of 10 groups.
pub const OF_A_PHASE: u64 = 2 * 10 * OF_A_GROUP;

/// Largest number of packets that may be in flight when the kernel has to stop sending.
const UNDER_WAY: u64 = 2 * (AHEAD + 1);

impl Phases {
    pub fn begin(&mut self, net: &KernelNetwork) {
        // exact: the kernel may send a few more packets meanwhile, and the test's bounds allow for them
        self.0.push(sent(&net.status()));
    }

    /// Returns the number of packets that the kernel sent in each phase.
    pub fn by_kernel(mut self, end: &Status) -> Vec<u64> {
        self.0.push(sent(end));
        self.0.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

#[test]
fn engine_is_switched_between_kernel_and_userspace_during_media() {
    needs_root!(engine_is_switched_between_kernel_and_userspace_during_media);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let user = Config { engine: EngineChoice::User, interfaces: Vec::new(), ..net.config.clone() };
    let mut phases = Phases(Vec::new());
    let status = play(&net, cast, &LONG, |group| match group {
        0 => phases.begin(&net),
        10 => {
            net.server.change_engine(&user).unwrap();
            phases.begin(&net);
            assert_eq!(net.server.engine(), ("user", "as configured".to_owned()));
        }
        20 => {
            let wrong = Config { interfaces: vec!["nowhere0".to_owned()], ..net.config.clone() };
            assert!(net.server.change_engine(&wrong).unwrap_err().to_string().contains("nowhere0"));
            assert_eq!(net.server.engine().0, "user", "the engine changed although nothing was reloaded");
            net.server.change_engine(&net.config).unwrap();
            phases.begin(&net);
            assert_eq!(net.server.engine().0, "kernel");
        }
        _ => {}
    });
    let [first, second, third] = phases.by_kernel(&status)[..] else { panic!("three phases") };
    assert!(first >= OF_A_PHASE && third >= OF_A_PHASE, "{first} {third} {:#?}", status.engine);
    assert!(second <= UNDER_WAY, "{second} {:#?}", status.engine);
}

/// Detaches all BPF programs from the node's interfaces, as a foreign program would.
pub fn detach_all(node: &LabNode) {
    let detach = |name: &str| tc::detach_all(index(name), KernelHook::Ingress).unwrap();
    node.enter(|| node.interfaces().iter().for_each(|one| assert_eq!(detach(&one.device), 1))).unwrap();
}

pub fn index(interface: &str) -> i32 {
    if_nametoindex(interface).unwrap() as i32
}

#[test]
fn detached_engine_continues_in_userspace() {
    needs_root!(detached_engine_continues_in_userspace);
    let net = KernelNetwork::new(2, false, |config| config.reattach = false);
    let cast = cast(&net, &["sub1", "sub2"]);
    let before = OnceCell::new();
    let status = play(&net, cast, &SHOW, |group| {
        if group == SHOW.groups / 2 {
            detach_all(net.relay());
            // exact: the kernel may send a few more packets meanwhile, and the test's bounds allow for them
            let status = net.status();
            before.set(sum(&status, |session| session.kernel.packets)).unwrap();
        }
    });
    let before = *before.get().unwrap();
    assert!(before >= 2 * 5 * OF_A_GROUP, "{before}");
    let after = sum(&status, |session| session.kernel.packets);
    assert!(after - before <= UNDER_WAY, "{before} and {after}: what was under way");
    // Objects may share packets, so the test compares the numbers of bytes and not of packets.
    let by_userspace = sum(&status, |session| session.data_plane.bytes);
    assert!(by_userspace >= 2 * 5 * SHOW.objects * SHOW.bytes as u64, "{by_userspace}");
    until("the detached program to be noticed", || {
        net.server.engine().1.contains("no more to to-pub: somebody has detached")
    });
}

#[test]
fn detached_engine_attaches_again() {
    needs_root!(detached_engine_attaches_again);
    let net = KernelNetwork::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let mut phases = Phases(Vec::new());
    let all = net.server.engine().1;
    let status = play(&net, cast, &LONG, |group| match group {
        10 => {
            detach_all(net.relay());
            phases.begin(&net);
        }
        20 => {
            let attached = |one: &str| {
                net.relay().enter(|| tc::count(index(one), KernelHook::Ingress).unwrap() == 1).unwrap()
            };
            let devices = || net.relay().interfaces().iter().map(|one| one.device.as_str());
            until("the program to be attached again", || devices().all(attached));
            until("the log line about it", || net.server.engine().1 == all);
            phases.begin(&net);
        }
        _ => {}
    });
    let by_kernel = phases.by_kernel(&status);
    assert!(by_kernel[1] >= OF_A_PHASE, "{by_kernel:?} {:#?}", status.engine);
}

/// Replaces both interfaces of the link between a peer's host and the relay, as a reloaded driver does.
pub fn replace_link(net: &KernelNetwork, name: &str) {
    let relay = net.relay();
    let node = net.lab.node(name).unwrap();
    let near = relay.interface(&link(name)).unwrap();
    let far = &node.interfaces()[0];
    let near_device = &near.device;
    let far_device = &far.device;
    let script = format!(
        "ip link del {near_device} && ip link add {near_device} address {} type veth \
         peer name {far_device} address {} netns {} && \
         ip address add {}/24 dev {near_device} && ip link set {near_device} up",
        near.mac,
        far.mac,
        node.netns().name(),
        near.v4
    );
    sh(relay, &script);
    sh(
        node,
        &format!(
            "ip address add {}/24 dev {far_device} && ip link set {far_device} up && ip route add default via {}",
            far.v4, near.v4
        ),
    );
    // GSO super-packets are left to userspace.
    sh(node, &format!("ethtool -K {far_device} tx off gso off tso off gro off"));
    sh(relay, &format!("ethtool -K {near_device} tx off gso off tso off gro off"));
}

pub fn link(name: &str) -> String {
    if name == "pub" { "pub-relay".to_owned() } else { format!("relay-{name}") }
}

pub fn sh(node: &LabNode, script: &str) {
    let output = node.command("sh").args(["-c", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn kernel_engine_reattaches_to_interfaces_that_disappear_and_return() {
    needs_root!(kernel_engine_reattaches_to_interfaces_that_disappear_and_return);
    for name in ["pub", "sub1"] {
        let net = KernelNetwork::new(2, false, |_| {});
        let cast = cast(&net, &["sub1", "sub2"]);
        let all = net.server.engine().1;
        let mut phases = Phases(Vec::new());
        let device = net.relay().interface(&link(name)).unwrap().device.clone();
        let status = play(&net, cast, &LONG, |group| match group {
            5 => sh(net.relay(), &format!("ip link set {device} down && ip link set {device} up")),
            10 => {
                sh(
                    net.relay(),
                    &format!(
                        "ip link set {device} name gone0 2>/dev/null || \
                    (ip link set {device} down && ip link set {device} name gone0)"
                    ),
                );
                until("the missing interface to be noticed", || {
                    net.server.engine().1.contains("the interface is gone")
                });
                sh(net.relay(), &format!("ip link set gone0 down; ip link set gone0 name {device}"));
                replace_link(&net, name);
                until("the program to be attached again", || net.server.engine().1 == all);
            }
            20 => phases.begin(&net),
            _ => {}
        });
        let by_kernel = phases.by_kernel(&status);
        assert!(by_kernel[0] >= OF_A_PHASE, "{name}: {by_kernel:?} {:#?}", status.engine);
    }
}

/// A relay as a process on the relay's node. Dropping this kills it.
struct RelayProcess<'a> {
    node: &'a LabNode,
    child: std::process::Child,
    dir: tempfile::TempDir,
}

const HTTP: &str = "127.0.0.1:9184";

impl<'a> RelayProcess<'a> {
    fn start(node: &'a LabNode) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut relay = Self::command(node);
        relay.arg("--config").arg(dir.path().join("relay.toml"));
        Self::configure(&dir, node, "kernel");
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let process = Self { node, child: relay.stderr(log).spawn().unwrap(), dir };
        until("the relay runs", || process.engine().is_some());
        process
    }

    fn command(node: &LabNode) -> Command {
        let mut command = node.command(env!("CARGO_BIN_EXE_millrace"));
        command.args(["relay", "--public", "--http-token-file=off", "--max-delay=off"]).env("NO_COLOR", "1");
        command
    }

    fn configure(dir: &tempfile::TempDir, node: &LabNode, engine: &str) {
        let interfaces: Vec<_> = node.interfaces().iter().map(|one| one.device.as_str()).collect();
        let interfaces =
            if engine == "kernel" { format!("interface = {interfaces:?}") } else { String::new() };
        let listen = SocketAddr::new(node.addr_v4().into(), PORT);
        let text = format!("listen = [\"{listen}\"]\nengine = \"{engine}\"\n{interfaces}\n");
        fs::write(dir.path().join("relay.toml"), text).unwrap();
    }

    fn engine(&self) -> Option<millrace_relay_daemon::status::EngineStatus> {
        // exact: the relay chooses kernel or userspace before it answers; callers wait for later changes
        let (_, body) = self.node.enter(|| fetch(HTTP.parse().unwrap(), "/status", None)).unwrap().ok()?;
        Some(serde_json::from_str::<Status>(&body).unwrap().relay.engine)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }
}

impl Drop for RelayProcess<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill(); // the process may already have ended
        let _ = self.child.wait();
        show_log_on_panic("relay", &self.dir.path().join("log"));
    }
}

/// Returns the number of BPF programs on all interfaces of a node.
fn programs(node: &LabNode) -> usize {
    let count = |name: &str| tc::count(index(name), KernelHook::Ingress).unwrap();
    node.enter(|| node.interfaces().iter().map(|one| count(&one.device)).sum()).unwrap()
}

#[test]
fn sighup_changes_the_engine_and_sigkill_leaves_nothing() {
    needs_root!(sighup_changes_the_engine_and_sigkill_leaves_nothing);
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let node = lab.node("relay").unwrap();
    let mut relay = RelayProcess::start(node);
    assert_eq!((relay.engine().unwrap().name.as_str(), programs(node)), ("kernel", 2));
    for (engine, want) in [("user", 0), ("kernel", 2)] {
        RelayProcess::configure(&relay.dir, node, engine);
        relay.signal(Signal::SIGHUP);
        until(engine, || relay.engine().is_some_and(|now| now.name == engine));
        until("its programs are there or gone", || programs(node) == want);
    }
    fs::write(relay.dir.path().join("relay.toml"), "engine = \"warp\"").unwrap();
    relay.signal(Signal::SIGHUP);
    until("it complains", || relay.log().contains("warp"));
    assert_eq!(programs(node), 2, "the engine to continue as before");
    relay.signal(Signal::SIGKILL);
    assert_eq!(relay.child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    until("the kernel lets go of its programs", || programs(node) == 0);
}

#[test]
fn unusable_kernel_engine_interfaces_are_refused_with_a_reason() {
    needs_root!(unusable_kernel_engine_interfaces_are_refused_with_a_reason);
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let node = lab.node("relay").unwrap();
    let addr = format!("{}:{PORT}", node.addr_v4());
    for (listen, interface, reasons) in [
        (addr.as_str(), "nowhere0", &["nowhere0", "there is no interface"][..]),
        (&addr, "lo", &["interface lo is loopback"]),
        ("10.77.0.2:0", "to-pub", &["listen addresses with a port"]),
    ] {
        let mut relay = RelayProcess::command(node);
        relay.args(["--engine=kernel", "--http=off", "--interface", interface, "--listen", listen]);
        refuses(relay, reasons);
    }
    let mut wildcard = RelayProcess::command(node);
    wildcard.args(["--engine=kernel", "--http=off", "--listen", "0.0.0.0:4443"]);
    refuses(wildcard, &["no interface is named"]);

    let mut powerless = node.command("setpriv");
    powerless.args([
        "--bounding-set=-all",
        env!("CARGO_BIN_EXE_millrace"),
        "relay",
        "--public",
        "--http=off",
    ]);
    powerless.args(["--engine=kernel", "--interface=to-pub", "--listen", &addr]);
    refuses(powerless, &["the kernel's fast path needs CAP_BPF", "Operation not permitted"]);
}

fn refuses(relay: Command, reasons: &[&str]) {
    let (code, said) = run_until_refused(relay);
    assert_eq!(code, Some(1), "{said}");
    for reason in reasons {
        assert!(said.contains(reason), "{reason} is not in\n{said}");
    }
}

#[test]
fn kernel_engine_that_cannot_attach_is_an_error_or_auto_uses_userspace() {
    needs_root!(kernel_engine_that_cannot_attach_is_an_error_or_auto_uses_userspace);
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let runtime = Runtime::new().unwrap();
    let nowhere = |config: &mut Config| config.interfaces = vec!["nowhere0".to_owned()];
    let start = |change: &dyn Fn(&mut Config)| start(&lab, &runtime, configure(&lab, change), 0);
    let error = start(&nowhere).err().expect("refused").to_string();
    assert!(error.contains("nowhere0"), "{error}");
    let auto = start(&|config| {
        nowhere(config);
        config.engine = EngineChoice::Auto;
    })
    .unwrap();
    assert_eq!(auto.engine().0, "user");
    assert!(auto.engine().1.contains("nowhere0"), "{}", auto.engine().1);
    drop(auto);
    // With `engine = "kernel"` the relay finds the interfaces of the listen address itself. With `engine = "auto"` it
    // forwards in the kernel only on interfaces that the settings name.
    let auto = start(&|config| {
        config.interfaces.clear();
        config.listen[0].set_port(PORT + 1);
        config.engine = EngineChoice::Auto;
    })
    .unwrap();
    assert_eq!(auto.engine().0, "user", "{}", auto.engine().1);
    let by_name = start(&|config| {
        config.interfaces.clear();
        config.listen[0].set_port(PORT + 2);
    })
    .unwrap();
    assert_eq!(by_name.engine().0, "kernel", "{}", by_name.engine().1);
}
