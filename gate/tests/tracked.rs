//! Tests with connections of unmodified quinn that the gate tracks, while it limits packets of connections that it does
//! not know ("unknown packets"). A second sender floods with such packets from the clients' address. Exactly the
//! packets of the flood must count as unknown.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use millrace_gate::{Gate, Pass, Policy, Rule, ScopeStatistics, XdpMode};
use quinn::{
    Connection, ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig, ServerConfig, TokioRuntime,
    TransportConfig,
};
use support::{GateSite, PORT, SERVER, answer, hello, inside, is_root, long_hello, wait_until};
use tokio::{
    sync::mpsc::{Sender, channel},
    task::JoinSet,
    time::Instant,
};

/// Idle time-out for connections in the gate's policy below. It is long enough that a client on a busy machine is not
/// forgotten.
const IDLE: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_secs(60);
/// Time after which refused clients give up. It is long enough that the admitted clients connect even on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(15);

const POLICY: &str = "\
[[scope]]
name = \"web\"
port = 4433
idle_timeout = 6
[scope.rules]
quota = { connections = 2 }
client_initials = { per_second = 1, burst = 20 }
client_packets = { per_second = 1, burst = 30 }
unknown_packets = { per_second = 1, burst = 30 }
";

/// A server that does not report its connections to the gate in front of it. A socket at the clients' address sends
/// packets of no known connection.
struct TrackedScene {
    site: GateSite,
    gate: Gate,
    stranger: UdpSocket,
    junk: u64,
    server: Endpoint,
}

impl TrackedScene {
    fn new(name: &str, config: EndpointConfig, policy: &str) -> Self {
        let site = GateSite::new(name, "");
        let server = serve(&site, config);
        let gate = Gate::new(&Policy::parse(policy).unwrap()).unwrap();
        inside(&site.server, || gate.attach("eth", XdpMode::Native)).unwrap();
        let stranger = inside(&site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap());
        stranger.connect((SERVER, PORT)).unwrap();
        Self { site, gate, stranger, junk: 0, server }
    }

    fn web(&self) -> ScopeStatistics {
        self.gate.statistics().unwrap().scope("web").unwrap().clone()
    }

    /// Makes an endpoint that sends keep-alives.
    fn lively(&self, idle: Duration) -> Endpoint {
        let mut transport = TransportConfig::default();
        transport.keep_alive_interval(Some(IDLE / 4));
        transport.max_idle_timeout(Some(idle.try_into().unwrap()));
        let mut config = self.site.client_config(idle);
        config.transport_config(Arc::new(transport));
        let mut client = self.site.endpoint(idle);
        client.set_default_client_config(config);
        client
    }

    /// Returns the number of packets with short headers that the gate assigned to no live connection, passed or
    /// refused.
    fn strange(&self) -> u64 {
        let web = self.web();
        let rules = [Rule::ClientPackets, Rule::UnknownPackets].map(|rule| web.rule(rule).packets);
        rules.iter().sum::<u64>() + web.pass(Pass::Unknown).packets
    }

    fn refused(&self) -> u64 {
        let web = self.web();
        Rule::ALL.iter().map(|rule| web.rule(*rule).packets).sum()
    }

    fn connections(&self) -> u32 {
        let clients = self.gate.clients("web").unwrap();
        clients.iter().map(|client| client.connections).sum()
    }

    /// Sends more packets of no known connection than the gate allows from one address, and waits until the gate has
    /// counted all of them.
    fn flood(&mut self) {
        for n in 0..50u64 {
            let packet = [&[0x40][..], &(self.junk + n).to_be_bytes(), &[0xee; 60]].concat();
            self.stranger.send(&packet).unwrap();
        }
        self.junk += 50;
        wait_until("the end of the junk", || self.strange(), |count| *count >= self.junk);
    }

    /// Checks that only the packets of the flood counted as unknown, and that no other packet was refused.
    fn assert_unhurt(&self) {
        let passed = self.web().pass(Pass::Unknown).packets;
        assert_eq!((self.strange(), self.refused() + passed), (self.junk, self.junk));
    }
}

/// A generator of connection IDs whose lifetime is short, so that the server soon retires them.
struct ShortLived(u64);

impl ConnectionIdGenerator for ShortLived {
    fn generate_cid(&mut self) -> ConnectionId {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ConnectionId::new(&self.0.to_be_bytes())
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        Some(IDLE / 4)
    }
}

fn serve(site: &GateSite, endpoint: EndpointConfig) -> Endpoint {
    let socket = inside(&site.server, || UdpSocket::bind((SERVER, PORT)).unwrap());
    let config: ServerConfig = site.server_config();
    let server = Endpoint::new(endpoint, Some(config), socket, Arc::new(TokioRuntime)).unwrap();
    let accepting = server.clone();
    tokio::spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            tokio::spawn(async move {
                if let Ok(connection) = incoming.await {
                    answer(connection).await;
                }
            });
        }
    });
    server
}

/// A NAT between one client and the server. On request, the NAT sends the client's packets from another port.
struct TrackedNat {
    front: SocketAddr,
    rebind: Sender<tokio::net::UdpSocket>,
}

impl TrackedNat {
    fn start(site: &GateSite) -> Self {
        let front = socket(site, "127.0.0.1");
        let at = front.local_addr().unwrap();
        let mut back = outer(site);
        let (rebind, mut rebound) = channel(1);
        tokio::spawn(async move {
            let mut client = None;
            let mut out = [0; 2048];
            let mut home = [0; 2048];
            loop {
                tokio::select! {
                    Ok((len, from)) = front.recv_from(&mut out) => {
                        client = Some(from);
                        let _ = back.send(&out[..len]).await;
                    }
                    Ok(len) = back.recv(&mut home) => {
                        if let Some(client) = client {
                            let _ = front.send_to(&home[..len], client).await;
                        }
                    }
                    next = rebound.recv() => match next {
                        Some(next) => back = next,
                        None => return,
                    }
                }
            }
        });
        Self { front: at, rebind }
    }

    async fn rebind(&self, site: &GateSite) {
        self.rebind.send(outer(site)).await.unwrap();
    }
}

fn socket(site: &GateSite, address: &str) -> tokio::net::UdpSocket {
    let address: IpAddr = address.parse().unwrap();
    let socket = inside(&site.clients, || UdpSocket::bind((address, 0)).unwrap());
    socket.set_nonblocking(true).unwrap();
    tokio::net::UdpSocket::from_std(socket).unwrap()
}

fn outer(site: &GateSite) -> tokio::net::UdpSocket {
    let socket = inside(&site.clients, || {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((SERVER, PORT)).unwrap();
        socket
    });
    socket.set_nonblocking(true).unwrap();
    tokio::net::UdpSocket::from_std(socket).unwrap()
}

async fn connect(endpoint: &Endpoint, there: SocketAddr) -> Connection {
    let connection = endpoint.connect(there, "localhost").unwrap().await.unwrap();
    hello(&connection).await;
    connection
}

/// Opens two connections on one socket, while another sender at the same address uses up the rate limit of unknown
/// packets. No packet of the connections may be refused when they update keys or change ports.
#[tokio::test(flavor = "multi_thread")]
async fn key_updates_and_port_changes_use_no_rate_of_unknown_packets() {
    if !is_root() {
        return;
    }
    let mut scene = TrackedScene::new("tracked", EndpointConfig::default(), POLICY);
    let nat = TrackedNat::start(&scene.site);
    let client = scene.site.endpoint_at("127.0.0.1", LONG);
    let connections = [connect(&client, nat.front).await, connect(&client, nat.front).await];
    for _ in 0..10 {
        scene.flood();
        for connection in &connections {
            connection.force_key_update();
            hello(connection).await;
        }
        nat.rebind(&scene.site).await;
        // The requests are long, because of the limit of three times the received bytes before an address is validated
        // (RFC 9000, section 8.1). With short requests quinn might be blocked for longer than the validation takes.
        for connection in &connections {
            long_hello(connection).await;
        }
    }
    assert_eq!(scene.connections(), 2);
    scene.assert_unhurt();
}

/// Keeps the connections idle, except for keep-alives, for longer than the gate's idle time.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connection_with_keep_alives_uses_no_rate_of_unknown_packets() {
    if !is_root() {
        return;
    }
    let mut scene = TrackedScene::new("rest", EndpointConfig::default(), POLICY);
    let client = scene.lively(LONG);
    let connection = connect(&client, (SERVER, PORT).into()).await;
    scene.flood();
    // exact: the connections stay idle for longer than IDLE, the gate's idle time-out, which is under test
    tokio::time::sleep(2 * IDLE).await;
    scene.flood();
    hello(&connection).await;
    assert_eq!(scene.connections(), 1);
    scene.assert_unhurt();
}

/// Lets the server retire its IDs all the time. The client continues with new IDs, from the same address and port.
#[tokio::test(flavor = "multi_thread")]
async fn changed_connection_ids_use_no_rate_of_unknown_packets() {
    if !is_root() {
        return;
    }
    let mut endpoint = EndpointConfig::default();
    endpoint.cid_generator(|| Box::new(ShortLived(1 << 63)));
    let mut scene = TrackedScene::new("ids", endpoint, POLICY);
    let client = scene.site.endpoint(LONG);
    let connection = connect(&client, (SERVER, PORT).into()).await;
    let start = Instant::now();
    let by_path = |scene: &TrackedScene| scene.web().pass(Pass::LivePath).packets;
    while start.elapsed() < 2 * IDLE || (by_path(&scene) <= 10 && start.elapsed() < LONG) {
        scene.flood();
        connection.force_key_update();
        hello(&connection).await;
        // exact: this pause sets the rate at which the client sends requests
        tokio::time::sleep(IDLE / 10).await;
    }
    assert!(by_path(&scene) > 10, "{} packets with other IDs", by_path(&scene));
    scene.assert_unhurt();
}

/// Opens many connections of one client at the same time, all of them before the first is answered. As many as the
/// quota allows become live and stay live. The server sees no other handshake complete.
#[tokio::test(flavor = "multi_thread")]
async fn parallel_handshakes_are_limited_to_the_quota() {
    if !is_root() {
        return;
    }
    let policy = "[[scope]]\nname = \"web\"\nport = 4433\nrules.quota = { connections = 2 }\n";
    let scene = TrackedScene::new("parallel", EndpointConfig::default(), policy);
    let mut all = JoinSet::new();
    for client in (0..12).map(|_| scene.lively(PATIENCE)) {
        all.spawn(async move {
            let connection = client.connect((SERVER, PORT).into(), "localhost").unwrap().await.ok()?;
            asked(&connection).await.then_some(connection)
        });
    }
    let served: Vec<Connection> = all.join_all().await.into_iter().flatten().collect();
    assert_eq!((served.len(), scene.connections()), (2, 2));
    // The connections over the quota never complete a handshake, so the server closes them after the idle timeout.
    wait_until("the server to have two", || scene.server.open_connections(), |count| *count == 2);
    for connection in &served {
        hello(connection).await;
    }
    let web = scene.web();
    assert_eq!(web.rule(Rule::Quota).packets, scene.refused());
}

/// Reports whether a request is answered before the connection is closed.
async fn asked(connection: &Connection) -> bool {
    let Ok((mut send, mut recv)) = connection.open_bi().await else { return false };
    let said = send.write_all(b"who is there?").await.is_ok() && send.finish().is_ok();
    said && recv.read_to_end(100).await.is_ok_and(|answer| answer == b"hello\n")
}

/// Checks two kinds of connections that the gate cannot track: one that changes address and ID at once, as quinn does,
/// and one that began before the gate was attached. Their packets count as unknown, and pass while no rule refuses
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn packets_of_moved_or_earlier_quinn_connections_count_as_unknown() {
    if !is_root() {
        return;
    }
    let scene =
        TrackedScene::new("unseen", EndpointConfig::default(), "[[scope]]\nname = \"web\"\nport = 4433\n");
    let client = scene.site.endpoint(LONG);
    let connection = connect(&client, (SERVER, PORT).into()).await;
    assert_eq!((scene.strange(), scene.connections()), (0, 1));
    client.rebind(inside(&scene.site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap())).unwrap();
    hello(&connection).await;
    let moved = scene.strange();
    assert!(moved > 0 && scene.refused() == 0);

    let TrackedScene { site, gate, server: _server, .. } = scene;
    drop(gate);
    let gate = Gate::new(&Policy::parse("[[scope]]\nname = \"web\"\nport = 4433\n").unwrap()).unwrap();
    inside(&site.server, || gate.attach("eth", XdpMode::Native)).unwrap();
    hello(&connection).await;
    let web = gate.statistics().unwrap().scope("web").unwrap().clone();
    assert!(web.pass(Pass::Unknown).packets > 0 && web.pass(Pass::Live).packets == 0);
    assert!(gate.clients("web").unwrap().is_empty());
}
