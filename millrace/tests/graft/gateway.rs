//! Tests of gateways. Connections between hosts without Millrace are tunnelled between their gateways. Without a
//! tunnel, a rule for the connection, or the far gateway's permission, the gateways forward the connection as usual.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use millrace_kernel::tc::{self, KernelHook};
use socket2::SockRef;

use crate::{
    agreement::keys,
    carried::{
        CARRIERS, accepted, at, carrier, carry, ended, exchange, fill, hash, noise, read_all, rule,
        wait_for_end, wait_for_ended, wait_for_resets, wait_for_state,
    },
    site::{CLIENT, GraftProcess, GraftSite, LONG, PORT, SERVER, inside, ip, wait_for, wait_until},
};

const SERVER_HOST: &str = "10.98.0.2";
const SERVER_HOST6: &str = "fd98::2";
const CLIENT_HOST: &str = "10.97.0.2";
const CLIENT_HOST6: &str = "fd97::2";
const NEAR: &str = "\"10.97.0.0/24\", \"fd97::/64\"";
const FAR: &str = "\"10.98.0.0/24\", \"fd98::/64\"";

/// Two gateways, each with one host behind it: client - `lan0` gateway `eth` - `eth` gateway `lan0` - server.
struct Sites {
    hosts: [String; 2],
    site: GraftSite,
}

impl Sites {
    fn new(test: &str) -> Option<Self> {
        let site = GraftSite::new(&format!("gw-{test}"))?;
        let hosts = [0, 1].map(|side| format!("{}h", site.namespaces[side]));
        let sites = Self { hosts, site };
        for side in [0, 1] {
            let gateway = &sites.site.namespaces[side];
            let host = &sites.hosts[side];
            let net = 97 + side;
            let other = 98 - side;
            let via = 1 + side;
            ip(&format!("netns add {host}"));
            ip(&format!("-n {gateway} link add lan0 type veth peer name eth netns {host}"));
            ip(&format!("-n {host} link set lo up"));
            for (namespace, interface, number) in [(gateway, "lan0", 1), (host, "eth", 2)] {
                ip(&format!("-n {namespace} addr add 10.{net}.0.{number}/24 dev {interface}"));
                ip(&format!("-n {namespace} addr add fd{net}::{number}/64 dev {interface} nodad"));
                ip(&format!("-n {namespace} link set {interface} up"));
            }
            ip(&format!("-n {host} route add default via 10.{net}.0.1"));
            ip(&format!("-n {host} -6 route add default via fd{net}::1"));
            inside(gateway, || {
                fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
            });
            ip(&format!("-n {gateway} route add 10.{other}.0.0/24 via 10.96.0.{via}"));
            ip(&format!("-n {gateway} -6 route add fd{other}::/64 via fd96::{via}"));
        }
        Some(sites)
    }

    /// Returns a listener on the server's host, behind the far gateway.
    fn listen_on(&self, at: SocketAddr) -> TcpListener {
        inside(&self.hosts[1], || TcpListener::bind(at).unwrap())
    }

    fn listen(&self) -> TcpListener {
        self.listen_on(at(SERVER_HOST, PORT))
    }

    /// Connects from the client's host, behind the near gateway.
    fn try_connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        inside(&self.hosts[0], || TcpStream::connect_timeout(&to, LONG))
    }

    fn connect(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let near = self.try_connect(listener.local_addr().unwrap()).unwrap();
        let (near, far, seen) = accepted(near, listener);
        assert_eq!((seen, near.local_addr().unwrap()), (far.peer_addr().unwrap(), seen));
        assert_eq!(near.peer_addr().unwrap(), far.local_addr().unwrap());
        (near, far)
    }

    fn configure(&self, more: [&str; 2]) {
        let known = keys(&self.site);
        self.site.configure_on(0, &near(&known[1], more[0]));
        self.site.configure_on(1, &far(&known[0], more[1]));
    }

    fn start(&self) -> [GraftProcess<'_>; 2] {
        let far = GraftProcess::start_on(&self.site, 1);
        let near = GraftProcess::start_on(&self.site, 0);
        wait_for_state(&near, "warm");
        [near, far]
    }

    fn warm(&self, more: [&str; 2]) -> [GraftProcess<'_>; 2] {
        self.configure(more);
        self.start()
    }

    /// Returns the programs, rules and routes that gateways have left in the kernel of one gateway's host.
    fn left(&self, side: usize) -> Vec<String> {
        let namespace = &self.site.namespaces[side];
        let programs = inside(namespace, || {
            let count = |name| tc::count(index(name), KernelHook::Ingress).unwrap_or_default();
            count("lan0") + count("lo")
        });
        let mut left = vec![format!("{programs} programs")];
        left.retain(|it| it != "0 programs");
        for show in ["rule show", "-6 rule show", "route show table all", "-6 route show table all"] {
            let shown =
                Command::new("ip").args(["-N", "-n", namespace]).args(show.split(' ')).output().unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            let ours = |line: &&str| line.contains("0x4d5") || line.contains("proto 91");
            left.extend(shown.lines().filter(ours).map(str::to_owned));
        }
        left
    }
}

impl Drop for Sites {
    fn drop(&mut self) {
        for host in &self.hosts {
            let _ = Command::new("ip").args(["netns", "del", host]).status();
        }
    }
}

fn index(name: &str) -> i32 {
    nix::net::if_::if_nametoindex(name).unwrap().try_into().unwrap()
}

fn near(far: &str, more: &str) -> String {
    format!(
        "[agreement]\nkey = \"host0.key\"\n[carry]\n{more}\n[gateway]\ninterface = \"lan0\"\nnetworks = [{NEAR}]\n\
         [[peer]]\nname = \"far\"\nkey = \"{far}\"\ncarry = \"{SERVER}:{CARRIERS}\"\nnetworks = [{FAR}]\n{}",
        rule("client", PORT)
    )
}

fn far(near: &str, more: &str) -> String {
    format!(
        "[agreement]\nkey = \"host1.key\"\n[carry]\nlisten = \"{SERVER}:{CARRIERS}\"\n{more}\n[gateway]\n\
         interface = \"lan0\"\nnetworks = [{FAR}]\n[[peer]]\nname = \"near\"\nkey = \"{near}\"\n\
         networks = [{NEAR}]\n{}",
        rule("server", PORT)
    )
}

/// Returns the number of packets at a gateway that got this verdict from the gateway's BPF program, for example
/// `asked`. The program counts a packet before the kernel forwards it.
fn packets(daemon: &GraftProcess<'_>, verdict: &str) -> u64 {
    carry(daemon).gateway.unwrap().verdicts[verdict]
}

#[test]
fn hosts_without_software_exchange_all_bytes_through_gateways() {
    let Some(sites) = Sites::new("carried") else { return };
    let ends = sites.warm(["", ""]);
    let [near, far] = &ends;
    for (server, client) in [(SERVER_HOST, CLIENT_HOST), (SERVER_HOST6, CLIENT_HOST6)] {
        let listener = sites.listen_on(at(server, PORT));
        let (here, there) = sites.connect(&listener);
        assert_eq!(here.local_addr().unwrap().ip().to_string(), client);
        assert_eq!(here.peer_addr().unwrap(), at(server, PORT));
        exchange(&here, &there, 3_000_000);
    }
    wait_for_end(&ends[0], &ends[1]);
    wait_for_ended([near, far], "done", 2);
    for end in [near, far] {
        let carried = carry(end);
        assert_eq!(
            (carried.sent_bytes, carried.received_bytes, carried.kept_bytes),
            (6_000_000, 6_000_000, 0)
        );
        assert!(packets(end, "taken") > 10, "{carried:?}");
    }
    assert!(packets(near, "let-in") >= 2 && packets(near, "no-socket") == 0);
    assert_eq!(packets(near, "asked"), 2);
    let why = near.succeed(&["why", SERVER_HOST]);
    assert!(why.contains(&format!("{SERVER_HOST}: carried by far")), "{why}");
    let status = near.succeed(&["status"]);
    assert!(status.contains("gateway of 10.97.0.0/24, fd97::/64 behind lan0: 0 wait"), "{status}");
    // exact: the daemon's list of problems no longer changes, since all connections have ended
    assert_eq!(near.status().trouble, Vec::<String>::new());
}

/// Connections that were open before the gateway started, and connections that no rule names, are forwarded.
#[test]
fn gateway_forwards_connections_that_are_not_tunnelled() {
    let Some(sites) = Sites::new("plain") else { return };
    let listener = sites.listen();
    let other = sites.listen_on(at(SERVER_HOST, PORT + 1));
    let before = sites.connect(&listener);
    (&before.0).write_all(b"before").unwrap();
    (&before.1).read_exact(&mut [0; 6]).unwrap();
    sites.configure(["", ""]);
    let near = GraftProcess::start_on(&sites.site, 0);
    // The far gateway has no daemon yet.
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 100_000);
    assert!(packets(&near, "cold") >= 1 && carrier(&near).state == "cold");
    let far = GraftProcess::start_on(&sites.site, 1);
    wait_for_state(&near, "warm");
    exchange(&before.0, &before.1, 100_000);
    let (here, there) = sites.connect(&other);
    exchange(&here, &there, 100_000);
    assert!(packets(&near, "no-rule") >= 1 && packets(&near, "asked") == 0);
    // ICMP, and connections from the servers' host, are forwarded.
    let mut ping = Command::new("ip");
    ping.args(["netns", "exec", &sites.hosts[0], "ping", "-c1", "-W60", SERVER_HOST]);
    if let Ok(output) = ping.output() {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 100_000);
    assert!(packets(&near, "let-in") >= 1);
    wait_for_end(&near, &far);
    // The far gateway's daemon is killed while a connection is tunnelled.
    let (mut here, _there) = sites.connect(&listener);
    far.kill();
    wait_for_state(&near, "cold");
    let (next, there) = sites.connect(&listener);
    exchange(&next, &there, 100_000);
    assert_eq!(here.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn gateway_client_gets_the_servers_connection_refusal_or_reset() {
    let Some(sites) = Sites::new("said") else { return };
    let ends = sites.warm(["", ""]);
    for server in [SERVER_HOST, SERVER_HOST6] {
        for _ in 0..2 {
            let error = sites.try_connect(at(server, PORT)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "nobody listens");
        }
        let listener = sites.listen_on(at(server, PORT));
        for resets_here in [true, false] {
            let (mut here, mut there) = sites.connect(&listener);
            here.write_all(b"before").unwrap();
            there.read_exact(&mut [0; 6]).unwrap();
            let (resets, mut other) = if resets_here { (here, there) } else { (there, here) };
            SockRef::from(&resets).set_linger(Some(Duration::ZERO)).unwrap();
            drop(resets);
            assert_eq!(other.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
    }
    wait_for_end(&ends[0], &ends[1]);
    let [near, far] = &ends;
    wait_for_ended([near, far], "refused", 4);
    wait_for_resets([near, far], 4);
}

#[test]
fn gateway_buffers_at_most_window_kib_for_a_slow_reader() {
    let Some(sites) = Sites::new("slow") else { return };
    let ends = sites.warm(["window-kib = 256", "window-kib = 256"]);
    let (mut here, there) = sites.connect(&sites.listen());
    let sent = noise(3, 32 << 20);
    let written = fill(&mut here, &sent, || carry(&ends[0]).kept_bytes > 200 << 10);
    assert!(written < sent.len(), "the connection ended by itself");
    for end in &ends {
        assert!(carry(end).kept_bytes <= 256 << 10, "{:?}", carry(end));
    }
    here.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(hash(&read_all(&there)), hash(&sent[..written]));
}

#[test]
fn failing_carriers_between_gateways_lose_no_byte() {
    let Some(sites) = Sites::new("cut") else { return };
    let ends = sites.warm(["carrier = \"tcp\"\nwindow-kib = 512", "carrier = \"tcp\"\nwindow-kib = 512"]);
    let (here, there) = sites.connect(&sites.listen());
    let sent = [noise(1, 24 << 20), noise(2, 24 << 20)];
    thread::scope(|scope| {
        for (mut stream, bytes) in [(&here, &sent[0]), (&there, &sent[1])] {
            scope.spawn(move || {
                stream.write_all(bytes).unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            });
        }
        // The processes that read the data start only after the connections between the gateways were cut. So the
        // transfer cannot end before that.
        for cut in 0..3 {
            let before = carry(&ends[0]).resumed;
            let filter = format!("( dport = :{CARRIERS} or sport = :{CARRIERS} )");
            let killed = sites.site.command(cut % 2, "ss").args(["-K", "-t", &filter]).output().unwrap();
            assert!(killed.status.success(), "{}", String::from_utf8_lossy(&killed.stderr));
            wait_for("a resumption", || carry(&ends[0]).resumed > before);
        }
        let got = [&here, &there].map(|stream| scope.spawn(move || hash(&read_all(stream))));
        let [to_here, to_there] = got.map(|it| it.join().unwrap());
        assert_eq!([to_there, to_here], [hash(&sent[0]), hash(&sent[1])]);
    });
    wait_for_end(&ends[0], &ends[1]);
    wait_for_ended([&ends[0]], "done", 1);
    assert_eq!(ended(&ends[0], "lost"), 0);
}

#[test]
fn many_connections_at_once_go_through_gateways() {
    let Some(sites) = Sites::new("many") else { return };
    let ends = sites.warm(["", ""]);
    let listener = sites.listen();
    let count = 200;
    let data = noise(4, 20_000);
    let connect = || TcpStream::connect_timeout(&at(SERVER_HOST, PORT), LONG).unwrap();
    let (ours, theirs) = thread::scope(|scope| {
        let theirs = scope.spawn(|| (0..count).map(|_| listener.accept().unwrap()).collect::<Vec<_>>());
        let ours = inside(&sites.hosts[0], || {
            thread::scope(|scope| {
                let begun: Vec<_> = (0..count).map(|_| scope.spawn(connect)).collect();
                begun.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
            })
        });
        (ours, theirs.join().unwrap())
    });
    for mut stream in &ours {
        stream.write_all(&data).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
    }
    theirs.iter().for_each(|(there, _)| assert_eq!(hash(&read_all(there)), hash(&data)));
    let mut seen: Vec<_> = theirs.iter().map(|(_, from)| *from).collect();
    let mut true_ends: Vec<_> = ours.iter().map(|stream| stream.local_addr().unwrap()).collect();
    seen.sort();
    true_ends.sort();
    assert_eq!(seen, true_ends);
    drop((ours, theirs));
    wait_for_end(&ends[0], &ends[1]);
    assert_eq!(ended(&ends[1], "busy"), 0);
    // On a busy machine an answer of the other gateway may be so late that new connections go past the tunnel for a
    // while. Their SYNs are counted, once or more.
    let status = carry(&ends[0]);
    let past: u64 = ["cold", "asleep"].map(|verdict| packets(&ends[0], verdict)).iter().sum();
    let tunnelled = status.sent_bytes / 20_000;
    assert_eq!(status.sent_bytes, tunnelled * 20_000);
    assert!((1..=200).contains(&tunnelled) && tunnelled + past >= 200, "{status:#?}");
}

/// A gateway's key is valid only for the addresses and ports that the far gateway's settings list. Other connections
/// are refused by the far gateway and then forwarded by the near gateway, so the far network's own firewall decides
/// about them.
#[test]
fn a_gateway_is_no_open_proxy() {
    let Some(sites) = Sites::new("proxy") else { return };
    let known = keys(&sites.site);
    let outside = "10.97.1.0/24";
    // The near gateway claims more networks and ports than the far one grants.
    let claims = near(&known[1], "")
        .replace(NEAR, &format!("{NEAR}, \"{outside}\""))
        .replace(FAR, &format!("{FAR}, \"10.99.0.0/24\""))
        + &rule("client", PORT + 1).replace("name = \"client\"", "name = \"more\"");
    sites.site.configure_on(0, &claims);
    sites.site.configure_on(1, &far(&known[0], ""));
    let [near, far] = sites.start();
    let [gateway, other] = &sites.site.namespaces[..] else { unreachable!("two") };
    let [client, server] = &sites.hosts;

    // The far gateway's settings do not grant this port to the near gateway.
    let listener = sites.listen_on(at(SERVER_HOST, PORT + 1));
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 100_000);
    wait_for_ended([&far, &near], "not-listed", 1);
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 1000);
    assert_eq!(
        (ended(&far, "not-listed"), packets(&near, "refused")),
        (1, 1),
        "the far gateway was asked again at once"
    );

    // The far gateway can reach the server's network, but its settings do not grant the network to the near gateway.
    ip(&format!("-n {server} addr add 10.99.0.2/24 dev eth"));
    ip(&format!("-n {other} route add 10.99.0.0/24 dev lan0"));
    ip(&format!("-n {gateway} route add 10.99.0.0/24 via {SERVER}"));
    let listener = sites.listen_on(at("10.99.0.2", PORT));
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 100_000);
    wait_for_ended([&far, &near], "not-here", 1);

    // The far gateway's settings do not list the client's address for the near gateway's key.
    let listener = sites.listen();
    ip(&format!("-n {client} addr add 10.97.1.2/24 dev eth"));
    ip(&format!("-n {gateway} route add {outside} dev lan0"));
    ip(&format!("-n {other} route add {outside} via 10.96.0.2"));
    let (here, there) = from(&sites, "10.97.1.2", &listener);
    exchange(&here, &there, 100_000);
    wait_for_ended([&far, &near], "client", 1);

    // The client's address is not in the near gateway's own settings.
    ip(&format!("-n {client} addr add 10.97.3.2/24 dev eth"));
    ip(&format!("-n {gateway} route add 10.97.3.0/24 dev lan0"));
    ip(&format!("-n {other} route add 10.97.3.0/24 via 10.96.0.2"));
    let (here, there) = from(&sites, "10.97.3.2", &listener);
    exchange(&here, &there, 1000);
    assert!(packets(&near, "outside") >= 1);

    // The client uses the address of a host that is behind another interface of the gateway.
    ip(&format!("-n {gateway} link add other0 type veth peer name other1"));
    ip(&format!("-n {gateway} link set other1 up"));
    ip(&format!("-n {gateway} link set other0 up"));
    ip(&format!("-n {gateway} route add 10.97.0.77/32 dev other0"));
    ip(&format!("-n {client} addr add 10.97.0.77/32 dev eth"));
    let asked = packets(&near, "asked");
    let spoofs = inside(client, || {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&at("10.97.0.77", 0).into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&at(SERVER_HOST, PORT).into());
        socket
    });
    wait_for("a verdict", || packets(&near, "wrong-way") > 0);
    assert_eq!(packets(&near, "asked"), asked);
    drop(spoofs);
    assert_eq!((ended(&far, "done"), carry(&far).sent_bytes, carry(&far).received_bytes), (0, 0, 0));
}

/// Connects from the address `client` of the client's host.
fn from(sites: &Sites, client: &str, listener: &TcpListener) -> (TcpStream, TcpStream) {
    from_end(sites, at(client, 0), listener)
}

fn from_end(sites: &Sites, client: SocketAddr, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let to = listener.local_addr().unwrap();
    let here: TcpStream = inside(&sites.hosts[0], || {
        let domain = socket2::Domain::for_address(to);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&client.into()).unwrap();
        socket.connect_timeout(&to.into(), LONG).unwrap();
        socket.into()
    });
    let (there, seen) = listener.accept().unwrap();
    assert_eq!((seen.ip(), here.local_addr().unwrap()), (client.ip(), seen));
    for stream in [&here, &there] {
        stream.set_read_timeout(Some(LONG)).unwrap();
    }
    (here, there)
}

/// A client uses the same port again, while the gateway's socket of the previous connection is in TIME_WAIT.
#[test]
fn client_port_reused_in_time_wait_makes_a_new_gateway_connection() {
    let Some(sites) = Sites::new("again") else { return };
    let ends = sites.warm(["", ""]);
    let listener = sites.listen();
    let client = at(CLIENT_HOST, 40_123);
    let waits = || {
        let shown = sites.site.command(0, "ss").args(["-tanH", "state", "time-wait"]).output().unwrap();
        String::from_utf8(shown.stdout).unwrap().contains(":40123")
    };
    let (here, mut there) = from_end(&sites, client, &listener);
    there.write_all(b"all").unwrap();
    // The server closes first, so the gateway's socket towards the client enters TIME_WAIT.
    drop(there);
    assert_eq!(read_all(&here), b"all");
    drop(here);
    wait_for_end(&ends[0], &ends[1]);
    wait_for("the old socket in TIME_WAIT", waits);
    let (here, there) = from_end(&sites, client, &listener);
    exchange(&here, &there, 3_000_000);
    drop((here, there));
    wait_for_ended([&ends[0]], "done", 2);
    assert_eq!((packets(&ends[0], "asked"), packets(&ends[0], "old")), (2, 0));
}

/// One end of the carrier (the connection between two daemons) is a gateway. The other end is a host whose daemon
/// tunnels the host's own connections.
#[test]
fn gateway_interoperates_with_a_host_daemon() {
    let Some(sites) = Sites::new("host") else { return };
    let known = keys(&sites.site);
    let knows = |text: String, network: &str, address: &str| {
        text.replace(
            &format!("networks = [{network}]\n[[rule]]"),
            &format!("networks = [{network}]\naddresses = [\"{address}\"]\n[[rule]]"),
        )
    };
    sites.site.configure_on(0, &knows(near(&known[1], ""), FAR, SERVER_HOST));
    sites.site.configure_on(1, &knows(far(&known[0], ""), NEAR, CLIENT));
    let ends = sites.start();
    // The server runs on the far gateway's host.
    let listener = sites.site.listen();
    let here = sites.try_connect(at(SERVER, PORT)).unwrap();
    let (there, seen) = listener.accept().unwrap();
    assert_eq!((seen, there.peer_addr().unwrap()), (here.local_addr().unwrap(), seen));
    exchange(&here, &there, 1_000_000);
    // The client runs on the near gateway's host.
    let listener = sites.listen();
    let here = sites.site.try_connect(at(SERVER_HOST, PORT)).unwrap();
    let (there, seen) = listener.accept().unwrap();
    assert_eq!(seen, here.local_addr().unwrap());
    assert_eq!(here.peer_addr().unwrap(), at(SERVER_HOST, PORT));
    exchange(&here, &there, 1_000_000);
    wait_for_end(&ends[0], &ends[1]);
    let [near, far] = &ends;
    wait_for_ended([near, far], "done", 2);
    assert_eq!((carry(near).verdicts["redirected"], packets(near, "asked")), (1, 1));
}

/// The gateway's interface to its hosts is deleted and created again.
#[test]
fn gateway_serves_a_recreated_interface() {
    let Some(sites) = Sites::new("interface") else { return };
    let [near, _far] = sites.warm(["", ""]);
    let [gateway, _] = &sites.site.namespaces[..] else { unreachable!("two of them") };
    ip(&format!("-n {gateway} link del lan0"));
    let is_said = |it: &String| it.contains("there is no interface lan0");
    wait_until("the trouble in the log", || near.status().trouble, |trouble| trouble.iter().any(is_said));
    let host = &sites.hosts[0];
    ip(&format!("-n {gateway} link add lan0 type veth peer name eth netns {host}"));
    for (namespace, interface, number) in [(gateway, "lan0", 1), (host, "eth", 2)] {
        ip(&format!("-n {namespace} addr add 10.97.0.{number}/24 dev {interface}"));
        ip(&format!("-n {namespace} link set {interface} up"));
    }
    ip(&format!("-n {host} route add default via 10.97.0.1"));
    wait_until("the end of the trouble", || near.status().trouble, Vec::is_empty);
    let (here, there) = sites.connect(&sites.listen());
    exchange(&here, &there, 100_000);
    assert!(packets(&near, "let-in") >= 1);
}

/// Returns the processes whose parent is the daemon.
fn children(daemon: &GraftProcess<'_>) -> Vec<i32> {
    // exact: callers repeat this read until the daemon has the expected child processes
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let text =
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    text.collect::<String>().split_whitespace().map(|it| it.parse().unwrap()).collect()
}

#[test]
fn gateway_leaves_no_rules_however_it_ends() {
    let Some(sites) = Sites::new("left") else { return };
    let listener = sites.listen();
    let plain = || {
        let (here, there) = sites.connect(&listener);
        exchange(&here, &there, 100_000);
    };
    let half = || {
        let (here, there) = sites.connect(&listener);
        (&here).write_all(b"half of ").unwrap();
        (&there).read_exact(&mut [0; 8]).unwrap();
        [here, there]
    };
    let is_reset = |mut stream: TcpStream| {
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    };
    let [near, far] = sites.warm(["", ""]);
    assert!(sites.left(0).len() >= 7, "{:?}", sites.left(0));
    // Another program may delete the gateway's rules. The gateway must restore them.
    let rule = sites.left(0).into_iter().find(|line| line.contains("iif lan0")).unwrap();
    assert!(rule.starts_with("91:"), "{rule}");
    ip(&format!("-n {} rule del pref 91 iif lan0", sites.site.namespaces[0]));
    wait_until("the rule", || sites.left(0), |left| left.contains(&rule));

    let [here, later] = half();
    near.kill();
    is_reset(here);
    wait_until("no rules or routes to be left", || sites.left(0), Vec::is_empty);
    plain();

    let near = GraftProcess::start_on(&sites.site, 0);
    wait_for_state(&near, "warm");
    let [here, _there] = half();
    near.end();
    assert_eq!(sites.left(0), Vec::<String>::new());
    is_reset(here);
    plain();

    // The far daemon has kept its end of the tunnelled connection, since a new connection between the daemons might
    // have resumed it.
    is_reset(later);

    // The watchdog process, which removes a killed gateway's rules, is killed first, and then the daemon.
    let near = GraftProcess::start_on(&sites.site, 0);
    let watchdog = wait_until("its watchdog", || children(&near), |all| all.len() == 1)[0];
    let watchdog = nix::unistd::Pid::from_raw(watchdog);
    // The daemon is paused, so that it cannot start another watchdog process before it is killed itself.
    near.pause();
    nix::sys::signal::kill(watchdog, nix::sys::signal::Signal::SIGKILL).unwrap();
    near.kill();
    assert!(sites.left(0).iter().any(|line| line.contains("fwmark")), "{:?}", sites.left(0));
    plain();
    let near = GraftProcess::start_on(&sites.site, 0);
    assert!(near.log().contains("routes that a killed gateway had left"), "{}", near.log());
    wait_for_state(&near, "warm");
    plain();
    assert!(packets(&near, "let-in") >= 1);
    near.kill();
    far.kill();
    for side in [0, 1] {
        wait_until("no rules or routes to be left", || sites.left(side), Vec::is_empty);
    }
}

/// Clients must still reach the server while the gateway's daemon hangs.
#[test]
fn connections_bypass_a_gateway_whose_daemon_hangs() {
    let Some(sites) = Sites::new("hangs") else { return };
    let [near, _far] = sites.warm(["", ""]);
    let listener = sites.listen();
    near.pause();
    let (here, there) = sites.connect(&listener);
    exchange(&here, &there, 100_000);
    near.go_on();
    assert!(packets(&near, "asleep") >= 1);
    assert_eq!(packets(&near, "let-in"), 0);
}

/// An ICMP error about a tunnelled packet must reach the gateway's own socket.
#[test]
fn icmp_errors_about_tunnelled_packets_reach_the_gateway() {
    let Some(sites) = Sites::new("icmp") else { return };
    let [near, _far] = sites.warm(["", ""]);
    let (here, there) = sites.connect(&sites.listen());
    let from = here.local_addr().unwrap().port().to_be_bytes();
    let to = PORT.to_be_bytes();
    // The ICMP message is "fragmentation needed" about a segment from the server to the client.
    let mut error = vec![3, 4, 0, 0, 0, 0, 5, 0];
    error.extend([0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 98, 0, 2, 10, 97, 0, 2]);
    error.extend([to, from].concat());
    error.extend([0; 4]);
    let sum = error.chunks(2).map(|it| u32::from(u16::from_be_bytes([it[0], it[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    error[2..4].copy_from_slice(&sum.to_be_bytes());
    inside(&sites.hosts[0], || {
        let icmp = Some(socket2::Protocol::ICMPV4);
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::RAW, icmp).unwrap();
        socket.send_to(&error, &at(SERVER_HOST, 0).into()).unwrap();
    });
    wait_until("the error", || packets(&near, "icmp-error"), |count| *count == 1);
    exchange(&here, &there, 100_000);
}

/// Interfaces named on the command line are added to those in the settings, and interfaces that do not exist are
/// reported.
#[test]
fn gateway_interfaces_may_be_named_on_the_command_line() {
    let Some(sites) = Sites::new("named") else { return };
    let known = keys(&sites.site);
    let all = near(&known[1], "");
    let unnamed = all.replace("interface = \"lan0\"\n", "");
    sites.site.share();
    let start = |text: &str, arguments: &[&str]| -> Child {
        sites.site.configure_on(0, text);
        let mut command = sites.site.command(0, env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", arguments[0], "--http=off", "--config"]).arg(sites.site.path("graft0.toml"));
        command.arg("--socket").arg(sites.site.path("graft0.sock")).args(&arguments[1..]);
        sites.site.spawn(0, {
            command.stderr(Stdio::piped());
            command
        })
    };
    for (text, arguments, wanted) in [
        (&unnamed, &["run"][..], "gateway: neither interface nor --interface names an interface"),
        (&unnamed, &["gateway", "--interface", "none0"], "there is no interface none0"),
        (
            &all.replace(
                "[gateway]\ninterface = \"lan0\"\nnetworks = [\"10.97.0.0/24\", \"fd97::/64\"]\n",
                "",
            ),
            &["gateway", "--interface", "lan0"],
            "--interface needs [gateway] with networks",
        ),
    ] {
        let output = start(text, arguments).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{wanted}: {said}");
    }
    assert_eq!(sites.left(0), Vec::<String>::new());
    sites.site.configure_on(1, &far(&known[0], ""));
    let _far = GraftProcess::start_on(&sites.site, 1);
    sites.site.configure_on(0, &unnamed);
    let near = GraftProcess::start_as(&sites.site, 0, "gateway", &["--interface", "lan0"]);
    wait_for_state(&near, "warm");
    let (here, there) = sites.connect(&sites.listen());
    exchange(&here, &there, 100_000);
    assert!(packets(&near, "let-in") >= 1);
}
