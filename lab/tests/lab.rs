//! Tests whole labs: their start, their links with real packets, and their complete removal.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::io::{BufRead as _, BufReader, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millrace_lab::lab::{self, Directions, Impairment, Lab, LinkDirection, Settings, Topology};
use millrace_testkit::{wait_for, wait_until};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::Pid;

/// Longest wait for an event that must happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time without a packet after which no more is expected.
const SILENCE: Duration = Duration::from_millis(250);
/// Time without a packet after which no more is expected, if all packets have left the link before.
const SILENCE_AT_LAST: Duration = Duration::from_secs(1);
/// Largest number of the kernel's own multicast reports in a link's counters, in addition to a test's packets.
const STRAY: u64 = 8;

/// Returns early from a test without root, after printing that it is skipped.
macro_rules! needs_root {
    ($name:literal) => {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {}: needs root", $name);
            return;
        }
    };
}

const PAYLOAD: usize = 1000;
const FRAME: usize = PAYLOAD + 8 + 20 + 14;

/// A UDP socket in a node, which sends and receives numbered datagrams.
struct DatagramProbe {
    socket: UdpSocket,
}

impl DatagramProbe {
    fn bind(lab: &Lab, node: &str, address: IpAddr) -> Self {
        let socket = lab.node(node).unwrap().enter(|| UdpSocket::bind((address, 0)).unwrap()).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20)).unwrap();
        Self { socket }
    }

    fn address(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    fn send(&self, to: SocketAddr, number: u32) {
        assert_eq!(self.socket.send_to(&datagram(number), to).unwrap(), PAYLOAD);
    }

    /// Returns the number of the next datagram, or `None` if none arrives in time.
    fn receive(&self, within: Duration) -> Option<u32> {
        let mut payload = [0u8; 2 * PAYLOAD];
        self.socket.set_read_timeout(Some(within)).unwrap();
        loop {
            match self.socket.recv(&mut payload) {
                Ok(len) => assert_eq!(len, PAYLOAD),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
            return Some(u32::from_be_bytes(payload[..4].try_into().unwrap()));
        }
    }
}

fn datagram(number: u32) -> Vec<u8> {
    let mut payload = vec![0u8; PAYLOAD];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    payload
}

/// Two nodes, `pub` and `sub1`, with an emulated link. Datagrams go from `pub` to `sub1`.
struct NodePair {
    lab: Lab,
    tx: DatagramProbe,
    rx: DatagramProbe,
    /// Number of datagrams that were sent in bursts.
    sent: Cell<u64>,
}

impl NodePair {
    fn new(settings: &str) -> Self {
        let mut topology = Topology::standard(0, 1);
        topology.links[0].emulate = true;
        topology.impair("pub-sub1", Directions::Forward, settings).unwrap();
        Self::from_topology(&topology)
    }

    fn from_topology(topology: &Topology) -> Self {
        let lab = Lab::new(topology).unwrap();
        let tx = DatagramProbe::bind(&lab, "pub", lab.node("pub").unwrap().addr_v4().into());
        let rx = DatagramProbe::bind(&lab, "sub1", lab.node("sub1").unwrap().addr_v4().into());
        Self { lab, tx, rx, sent: Cell::new(0) }
    }

    fn burst(&self, numbers: std::ops::Range<u32>) {
        self.sent.set(self.sent.get() + numbers.len() as u64);
        numbers.for_each(|number| self.tx.send(self.rx.address(), number));
    }

    /// Returns the datagrams that arrive until the link is empty and the receiver has read everything.
    fn rest(&self) -> Vec<u32> {
        let mut numbers = Vec::new();
        // netem counts packets as soon as they are sent, the emulator only when it processes them.
        let is_netem = self.lab.link("pub-sub1").unwrap().is_netem();
        let look = || {
            numbers.extend(std::iter::from_fn(|| self.rx.receive(SILENCE)));
            self.counters() // exact: if a packet is not counted yet, `wait_until` reads the counters again
        };
        let is_empty = |counters: &lab::FrameCounters| {
            let has_come = is_netem || counters.received + counters.overrun >= self.sent.get();
            has_come && counters.queued == 0 && counters.in_flight == 0
        };
        wait_until("an empty link", look, is_empty);
        numbers.extend(std::iter::from_fn(|| self.rx.receive(SILENCE_AT_LAST)));
        numbers
    }

    fn counters(&self) -> lab::FrameCounters {
        self.lab.link("pub-sub1").unwrap().counters(LinkDirection::Forward).unwrap()
    }
}

#[test]
fn every_lab_node_reaches_every_node_over_ipv4_and_ipv6() {
    needs_root!("every_lab_node_reaches_every_node_over_ipv4_and_ipv6");
    let mut topology = Topology::standard(2, 2);
    topology.link_mut("relay-relay2").unwrap().emulate = true;
    let lab = Lab::new(&topology).unwrap();
    assert!(!lab.link("pub-relay").unwrap().is_emulated());
    assert!(lab.link("relay-relay2").unwrap().is_emulated());
    let names: Vec<&str> = lab.nodes().iter().map(lab::LabNode::name).collect();
    assert_eq!(names, ["pub", "relay", "relay2", "sub1", "sub2"]);

    for from in lab.nodes() {
        for to in lab.nodes().iter().filter(|to| to.name() != from.name()) {
            for interface in to.interfaces() {
                let pairs: [(IpAddr, IpAddr); 2] = [
                    (from.addr_v4().into(), interface.v4.into()),
                    (from.addr_v6().into(), interface.v6.into()),
                ];
                for (near, far) in pairs {
                    let tx = DatagramProbe::bind(&lab, from.name(), near);
                    let rx = DatagramProbe::bind(&lab, to.name(), far);
                    tx.send(rx.address(), 7);
                    assert_eq!(rx.receive(PATIENCE), Some(7), "{near} -> {far}");
                    rx.send(tx.address(), 8);
                    assert_eq!(tx.receive(PATIENCE), Some(8), "{far} -> {near}");
                }
            }
        }
    }
}

#[test]
fn commands_run_inside_a_node_of_the_lab() {
    needs_root!("commands_run_inside_a_node_of_the_lab");
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let sub = lab.node("sub1").unwrap();
    let output = sub.command("ip").args(["-brief", "address"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("to-relay") && text.contains(&format!("{}/24", sub.addr_v4())), "{text}");
    assert!(!text.contains("to-pub"), "{text}");

    // The child process is the program itself, so a signal to the child reaches the program.
    let mut child = sub.command("sleep").arg("1000").spawn().unwrap();
    let comm = format!("/proc/{}/comm", child.id()); // exact: `wait_for` rereads this file until it names the program
    wait_for("exec", || std::fs::read_to_string(&comm).is_ok_and(|comm| comm == "sleep\n"));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn segmentation_offload_does_not_reach_the_wire() {
    needs_root!("segmentation_offload_does_not_reach_the_wire");
    let pair = NodePair::new("");
    // exact: the link has counted none of the test's packets, since none has been sent yet
    let before = pair.counters();
    setsockopt(&pair.tx.socket, sockopt::UdpGsoSegment, &(PAYLOAD as i32)).unwrap();
    let segments: Vec<u8> = (0..10).flat_map(datagram).collect();
    if let Err(error) = pair.tx.socket.send_to(&segments, pair.rx.address()) {
        // Kernels before 6.11 refuse UDP segmentation on a device without checksum offload.
        assert_eq!(error.raw_os_error(), Some(nix::libc::EIO), "{error}");
        println!("SKIP segmentation_offload_does_not_reach_the_wire: the kernel refuses it here (EIO)");
        return;
    }
    for number in 0..10 {
        assert_eq!(pair.rx.receive(PATIENCE), Some(number));
    }
    let after = pair.counters(); // exact: all packets have arrived, and the link counts each one before it arrives
    assert!(after.received - before.received >= 10);
    assert!(after.received_bytes - before.received_bytes >= 10 * FRAME as u64);
}

#[test]
fn link_without_impairment_loses_and_reorders_nothing() {
    needs_root!("link_without_impairment_loses_and_reorders_nothing");
    let pair = NodePair::new("");
    pair.burst(0..1000);
    assert_eq!(pair.rest(), (0..1000).collect::<Vec<_>>());
    // exact: the link's packet counters are final, since no packet is queued or in flight
    let counters = pair.counters();
    assert_eq!((counters.lost, counters.overrun, counters.queue_dropped), (0, 0, 0));
}

#[test]
fn total_loss_loses_everything() {
    needs_root!("total_loss_loses_everything");
    let pair = NodePair::new("loss=100%");
    pair.burst(0..100);
    wait_for("losses", || pair.counters().lost >= 100);
    assert_eq!(pair.rest(), [0u32; 0]);
    // exact: the link's packet counters are final, since no packet is queued or in flight
    assert_eq!(pair.counters().delivered, 0);
}

#[test]
fn random_loss_counter_equals_missing_packets() {
    needs_root!("random_loss_counter_equals_missing_packets");
    let pair = NodePair::new("loss=20%");
    pair.burst(0..2000);
    let missing = 2000 - pair.rest().len() as u64;
    // On average 400 of 2000 packets are lost. The accepted range is five standard deviations to either side.
    assert!((310..490).contains(&missing), "{missing}");
    // exact: the link's packet counters are final, since no packet is queued or in flight
    assert!((missing..=missing + STRAY).contains(&pair.counters().lost));
}

#[test]
fn packets_never_arrive_before_their_delay() {
    needs_root!("packets_never_arrive_before_their_delay");
    const DELAY: Duration = Duration::from_millis(40);
    let pair = NodePair::new("delay=40ms");
    let one_way = |tx: &DatagramProbe, rx: &DatagramProbe| {
        let start = Instant::now();
        tx.send(rx.address(), 1);
        assert_eq!(rx.receive(PATIENCE), Some(1));
        start.elapsed()
    };
    // By how much a packet exceeds the configured delay depends on the CPUs; `millrace-lab lab accuracy` measures that.
    for _ in 0..10 {
        let there = one_way(&pair.tx, &pair.rx);
        assert!(there >= DELAY, "{there:?}");
    }
    // The delay must not apply to the opposite direction of the link.
    let back = pair.lab.link("pub-sub1").unwrap().impairment(LinkDirection::Backward);
    assert_eq!(back, Impairment::default());
    one_way(&pair.rx, &pair.tx);
}

#[test]
fn full_duplication_doubles_every_packet() {
    needs_root!("full_duplication_doubles_every_packet");
    let pair = NodePair::new("duplicate=100%");
    pair.burst(0..100);
    assert_eq!(pair.rest(), (0..100).flat_map(|n| [n, n]).collect::<Vec<_>>());
}

#[test]
fn reordering_reorders_and_loses_nothing() {
    needs_root!("reordering_reorders_and_loses_nothing");
    let pair = NodePair::new("reorder=20% reorder-by=20ms");
    pair.burst(0..200);
    let mut numbers = pair.rest();
    assert!(!numbers.is_sorted());
    numbers.sort_unstable();
    assert_eq!(numbers, (0..200).collect::<Vec<_>>());
}

#[test]
fn emulated_rate_limits_throughput() {
    needs_root!("emulated_rate_limits_throughput");
    let pair = NodePair::new("rate=4mbit");
    let start = Instant::now();
    pair.burst(0..101);
    assert_eq!(pair.rx.receive(PATIENCE), Some(0));
    let first = start.elapsed();
    for number in 1..101 {
        assert_eq!(pair.rx.receive(PATIENCE), Some(number));
    }
    let last = start.elapsed();
    let one = Duration::from_nanos(FRAME as u64 * 8 * 1_000_000_000 / 4_000_000);
    assert!(first >= one, "{first:?}");
    // The link must not be faster than its configured rate. It may be slower, depending on the CPUs; `millrace-lab lab
    // accuracy` measures by how much.
    assert!(last >= one * 101, "{last:?}");
}

#[test]
fn full_queue_drops_packets_and_counts_them() {
    needs_root!("full_queue_drops_packets_and_counts_them");
    // At this rate a frame takes a minute, so none leaves the queue during the burst.
    let pair = NodePair::new("rate=100bit queue-packets=10");
    pair.burst(0..100);
    wait_for("the burst", || pair.counters().received >= 100);
    let lift = Settings::parse("rate=none").unwrap();
    pair.lab.link("pub-sub1").unwrap().change(Directions::Forward, &lift).unwrap();
    let numbers = pair.rest();
    let dropped = 100 - numbers.len() as u64;
    assert!((90 - 3..=90 + STRAY).contains(&dropped), "{dropped}");
    assert!(numbers.is_sorted());
    // exact: the link's packet counters are final, since no packet is queued or in flight
    assert!((dropped..=dropped + STRAY).contains(&pair.counters().queue_dropped));
}

#[test]
fn link_settings_change_while_the_lab_is_up() {
    needs_root!("link_settings_change_while_the_lab_is_up");
    let pair = NodePair::new("");
    let link = pair.lab.link("pub-sub1").unwrap();
    pair.burst(0..1);
    assert_eq!(pair.rx.receive(PATIENCE), Some(0));

    link.set(LinkDirection::Forward, Impairment::parse("loss=100%").unwrap()).unwrap();
    pair.burst(1..2);
    wait_for("loss", || pair.counters().lost >= 1);
    assert_eq!(pair.rest(), [0u32; 0]);

    // Another process changes the link with `millrace-lab lab set`.
    let output =
        program(&["set", "--lab", pair.lab.id(), "pub-sub1", "loss=0", "delay=30ms"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let start = Instant::now();
    pair.burst(2..3);
    assert_eq!(pair.rx.receive(PATIENCE), Some(2));
    assert!(start.elapsed() >= Duration::from_millis(30));

    let output = program(&["set", "--lab", pair.lab.id(), "pub-sub1", "delay=much"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("`delay = much`"), "{output:?}");
    assert_eq!(link.impairment(LinkDirection::Forward), Impairment::parse("delay=30ms").unwrap());
}

#[test]
fn link_without_emulation_refuses_impairment_settings() {
    needs_root!("link_without_emulation_refuses_impairment_settings");
    let lab = Lab::new(&Topology::standard(0, 1)).unwrap();
    let link = lab.link("pub-sub1").unwrap();
    let error = link.change(Directions::Both, &Settings::parse("loss=1%").unwrap()).unwrap_err();
    assert!(error.to_string().contains("emulate = true"), "{error}");
    assert!(lab.node("nobody").is_err());
    assert!(lab.link("no-link").is_err());
}

#[test]
fn events_of_the_topology_take_effect_in_time() {
    needs_root!("events_of_the_topology_take_effect_in_time");
    let topology = Topology::parse(
        "relays = 0\n[[event]]\nat = '700ms'\nlink = 'pub-sub1'\ndirection = 'forward'\nloss = '100%'\n\
         [[event]]\nat = '3s'\nlink = 'pub-sub1'\ndirection = 'forward'\nloss = 0\ndelay = '50ms'\n",
    )
    .unwrap();
    let before = Instant::now();
    let pair = NodePair::from_topology(&topology);
    let link = pair.lab.link("pub-sub1").unwrap();
    let is = |settings: &str| link.impairment(LinkDirection::Forward) == Impairment::parse(settings).unwrap();

    wait_for("the first event", || is("loss=100%"));
    assert!(before.elapsed() >= Duration::from_millis(700), "{:?}", before.elapsed());
    wait_for("the second event", || is("delay=50ms"));
    assert!(before.elapsed() >= Duration::from_secs(3), "{:?}", before.elapsed());

    let start = Instant::now();
    pair.burst(0..1);
    assert_eq!(pair.rx.receive(PATIENCE), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[test]
fn netem_is_used_for_links_that_it_can_impair() {
    needs_root!("netem_is_used_for_links_that_it_can_impair");
    let mut topology = Topology::standard(0, 1);
    topology.impair("pub-sub1", Directions::Forward, "delay=40ms").unwrap();
    let pair = NodePair::from_topology(&topology);
    let link = pair.lab.link("pub-sub1").unwrap();
    if !link.is_netem() {
        println!("SKIP netem_is_used_for_links_that_it_can_impair: the kernel has no netem");
        return;
    }
    let start = Instant::now();
    pair.burst(0..1);
    assert_eq!(pair.rx.receive(PATIENCE), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(40));

    link.change(Directions::Forward, &Settings::parse("delay=0 duplicate=100%").unwrap()).unwrap();
    pair.burst(0..10);
    assert_eq!(pair.rest(), (0..10).flat_map(|n| [n, n]).collect::<Vec<_>>());

    link.set(LinkDirection::Forward, Impairment::parse("loss=100% burst-start=1%").unwrap()).unwrap();
    // exact: the link's packet counters are final, since no packet is queued or in flight
    let before = pair.counters();
    pair.burst(0..100);
    assert_eq!(pair.rest(), [0u32; 0]);
    // exact: the link's packet counters are final, since no packet is queued or in flight
    assert!(pair.counters().lost - before.lost >= 100);

    let error = link.set(LinkDirection::Forward, Impairment::parse("rate=1mbit").unwrap()).unwrap_err();
    assert!(error.to_string().contains("emulate = true"), "{error}");

    // netem cannot impair links by jitter or rate, and has no seed, so these links must use the emulator.
    for text in ["jitter = '1ms'", "rate = '1mbit'"] {
        let file = format!("relays = 0\n[[link]]\nname = 'pub-sub1'\nboth = {{ {text} }}");
        let lab = Lab::new(&Topology::parse(&file).unwrap()).unwrap();
        assert!(!lab.link("pub-sub1").unwrap().is_netem(), "{text}");
    }
    let file = "seed = 7\nrelays = 0\n[[link]]\nname = 'pub-sub1'\nboth = { delay = '1ms' }";
    let lab = Lab::new(&Topology::parse(file).unwrap()).unwrap();
    assert!(!lab.link("pub-sub1").unwrap().is_netem());
}

#[test]
fn dropped_lab_is_removed_completely() {
    needs_root!("dropped_lab_is_removed_completely");
    let lab = Lab::new(&Topology::standard(1, 2)).unwrap();
    let id = lab.id().to_owned();
    assert!(!is_gone(&id));
    let mut inside = lab.node("relay").unwrap().command("sleep").arg("1000").spawn().unwrap();
    wait_until_inside(&inside, &id);
    drop(lab);
    assert!(is_gone(&id));
    // The process must have been killed: by itself it would run for a thousand seconds.
    assert!(!inside.wait().unwrap().success());
}

#[test]
fn lab_is_removed_after_a_panic() {
    needs_root!("lab_is_removed_after_a_panic");
    let (send, id) = std::sync::mpsc::channel();
    let work = std::thread::spawn(move || {
        let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
        send.send(lab.id().to_owned()).unwrap();
        panic!("on purpose");
    });
    assert!(work.join().is_err());
    assert!(is_gone(&id.recv().unwrap()));
}

#[test]
fn lab_is_removed_after_a_signal() {
    needs_root!("lab_is_removed_after_a_signal");
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let (mut child, id) = up();
        assert!(!is_gone(&id));
        kill(pid(&child), signal).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(is_gone(&id), "{signal}");
    }
}

/// Environment variable that makes the child process of `program_with_labs_removes_them_on_signal` hold a lab.
const HOLD: &str = "MILLRACE_TEST_HOLD_A_LAB";

#[test]
fn program_with_labs_removes_them_on_signal() {
    needs_root!("program_with_labs_removes_them_on_signal");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process_holds_a_lab_for_the_signal_test", "--nocapture"])
        .env(HOLD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let id = lines.find_map(|line| line.strip_prefix("holding ").map(str::to_owned)).unwrap();
    assert!(!is_gone(&id));
    kill(pid(&child), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + Signal::SIGINT as i32));
    assert!(is_gone(&id));
}

#[test]
fn child_process_holds_a_lab_for_the_signal_test() {
    if std::env::var_os(HOLD).is_none() {
        return;
    }
    lab::remove_on_signal().unwrap();
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    println!("\nholding {}", lab.id());
    std::thread::sleep(Duration::from_secs(1000)); // exact: the parent test kills this process
}

#[test]
fn lab_run_ends_with_its_command() {
    needs_root!("lab_run_ends_with_its_command");
    let script = "echo $LAB_ID; nsenter --net=/run/netns/$LAB_SUB1_NETNS ip address; exit 7";
    let output = program(&["run", "--", "sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("to-relay"), "{text}");
    assert!(is_gone(text.lines().next().unwrap()));

    let mut child = program(&["run", "--in", "relay", "--", "sh", "-c", "echo $LAB_ID; exec sleep 1000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let id = BufReader::new(child.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    assert!(!is_gone(&id));
    kill(pid(&child), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + Signal::SIGTERM as i32));
    assert!(is_gone(&id));
}

/// The terminal sends Ctrl-C to all foreground processes, so the lab must not forward the signal to the command.
#[test]
fn interrupt_is_not_forwarded_to_the_command() {
    needs_root!("interrupt_is_not_forwarded_to_the_command");
    let script = "trap 'exit 42' INT; echo up; read line; exit 41";
    let mut command = program(&["run", "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    kill(pid(&child), Signal::SIGINT).unwrap();
    std::thread::sleep(SILENCE); // exact: a forwarded interrupt would end the command within this time
    // The command ends at the end of its input, and the lab ends with the command.
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(41));
}

#[test]
fn clean_command_removes_labs_of_killed_processes_only() {
    needs_root!("clean_command_removes_labs_of_killed_processes_only");
    let (mut child, id) = up();
    let netns = format!("--net=/run/netns/{id}-relay");
    let mut inside = Command::new("nsenter").args([&netns, "sleep", "1000"]).spawn().unwrap();
    wait_until_inside(&inside, &id);
    let output = program(&["clean"]).output().unwrap();
    assert!(output.status.success() && !is_gone(&id), "cleaned a lab that is alive: {output:?}");

    kill(pid(&child), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    assert!(program(&["clean"]).output().unwrap().status.success());
    assert!(is_gone(&id));
    assert!(!inside.wait().unwrap().success());
}

#[test]
fn lab_status_lists_labs_left_behind_by_killed_processes() {
    needs_root!("lab_status_lists_labs_left_behind_by_killed_processes");
    let (mut child, id) = up();
    // Removing the remains of labs needs an exclusive lock of the registry. This shared lock keeps other processes from
    // doing so during the test.
    let registry = std::fs::File::open("/run/millrace/lab/registry").unwrap();
    let shared = Flock::lock(registry, FlockArg::LockShared).map_err(|(_, error)| error).unwrap();
    let shown = || {
        let output = program(&["status"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        // The output may also show labs of other tests, and its long lines are wrapped. So the test joins the lines.
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::trim).collect::<Vec<_>>().join(" ")
    };
    let left = |text: &str| {
        let at = text.find("left behind by processes that ended: ");
        at.is_some_and(|at| text[at..].contains(&id) && text[at..].contains("`millrace-lab lab clean`"))
    };
    let text = shown();
    assert!(text.contains(&format!("lab {id} (process {})", child.id())) && !left(&text), "{text}");
    kill(pid(&child), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    let text = shown();
    assert!(left(&text) && !text.contains(&format!("lab {id} (process")), "{text}");
    // If the directory of a lab is missing, its namespaces must still be shown.
    std::fs::remove_dir_all(Path::new("/run/millrace/lab").join(&id)).unwrap();
    assert!(left(&shown()), "{}", shown());
    drop(shared);
    let output = program(&["clean"]).output().unwrap();
    assert!(output.status.success() && is_gone(&id), "{output:?}");
    assert!(!left(&shown()));
}

#[test]
fn new_lab_removes_labs_left_behind_by_killed_processes() {
    needs_root!("new_lab_removes_labs_left_behind_by_killed_processes");
    let (mut child, id) = up();
    kill(pid(&child), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    let lab = Lab::new(&Topology::standard(0, 1)).unwrap();
    assert!(is_gone(&id));
    assert!(!is_gone(lab.id()));
}

#[test]
fn detached_lab_goes_up_and_down_again() {
    needs_root!("detached_lab_goes_up_and_down_again");
    let output = program(&["up", "--detach", "--emulate"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let id = text.split_whitespace().nth(1).unwrap();
    let _down = Down(id);
    let exec = program(&["exec", "--lab", id, "sub1", "--", "ip", "address"]).output().unwrap();
    assert!(String::from_utf8(exec.stdout).unwrap().contains("10.77.1.2/24"));
    let status = program(&["status", "--json"]).output().unwrap();
    let labs: Vec<serde_json::Value> = serde_json::from_slice(&status.stdout).unwrap();
    let lab = labs.iter().find(|lab| lab["id"] == id).unwrap();
    assert_eq!(lab["links"][1]["name"], "relay-sub1");
    assert!(lab["links"][1]["forward"]["counters"]["received"].is_u64());
    let down = || program(&["down", "--lab", id]).output().unwrap();
    let output = down();
    assert_eq!((output.status.code(), output.stdout), (Some(0), format!("lab {id} is down\n").into_bytes()));
    assert!(is_gone(id));
    let again = down();
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(again.status.code() == Some(1) && said.contains(&format!("lab {id} is not up")), "{said}");

    let bad = program(&["up", "--detach", "--impair", "pub-relay loss=2"]).output().unwrap();
    assert!(!bad.status.success());
    assert!(String::from_utf8_lossy(&bad.stderr).contains("`loss = 2`"), "{bad:?}");
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-lab"));
    command.arg("lab").args(arguments).env_remove("LAB_ID");
    command
}

/// Takes a lab in the background down when it is dropped, so that it does not outlive a failing test.
struct Down<'a>(&'a str);

impl Drop for Down<'_> {
    fn drop(&mut self) {
        let _ = program(&["down", "--lab", self.0]).stderr(Stdio::null()).status();
    }
}

/// Starts a lab in a child process. Returns the child and the lab's ID.
fn up() -> (Child, String) {
    let mut child = program(&["up"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let id = lines.next().unwrap().split_whitespace().nth(1).unwrap().to_owned();
    assert!(lines.any(|line| line.starts_with("ready")));
    (child, id)
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap())
}

fn is_gone(id: &str) -> bool {
    let namespaces = std::fs::read_dir("/run/netns").unwrap().map(|entry| entry.unwrap().file_name());
    let left = namespaces.filter(|name| name.to_string_lossy().starts_with(&format!("{id}-"))).count();
    left == 0 && !Path::new("/run/millrace/lab").join(id).exists()
}

/// Waits until `nsenter` has moved the child into the namespace of the lab's relay.
fn wait_until_inside(child: &Child, id: &str) {
    use std::os::unix::fs::MetadataExt as _;
    let inode = |path: String| std::fs::metadata(path).map(|meta| meta.ino()).ok();
    let relay = inode(format!("/run/netns/{id}-relay"));
    wait_for("nsenter", || inode(format!("/proc/{}/ns/net", child.id())) == relay);
}
