//! Tests with connections of unmodified quinn behind the gate. The gate validates addresses by Retry, and must not
//! disturb live connections. All packets are counted.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;
#[path = "../examples/quinn/token.rs"]
mod token;

use std::{
    net::{SocketAddr, UdpSocket},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use millrace_gate::{Event, Gate, ListEntry, Pass, Policy, Prefix, Rule, Scope, ScopeStatistics, XdpMode};
use quinn::{
    ConnectionError, ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig, ServerConfig,
    TokioRuntime,
};
use support::{GateSite, PORT, SERVER, answer, hello, initial, inside, is_root, wait_until};

const LONG: Duration = Duration::from_secs(60);

/// Publishes every connection ID before quinn uses it.
struct PublishedIds {
    scope: Scope,
    next: Arc<AtomicU64>,
}

impl ConnectionIdGenerator for PublishedIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let id = self.next.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed).to_be_bytes();
        self.scope.publish(&id).unwrap();
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

fn gate(site: &GateSite, policy: &str) -> Gate {
    let gate = Gate::new(&Policy::parse(policy).unwrap()).unwrap();
    inside(&site.server, || gate.attach("eth", XdpMode::Native)).unwrap();
    gate
}

fn server(site: &GateSite, address: &str, endpoint: EndpointConfig, config: ServerConfig) -> Endpoint {
    let address = SocketAddr::new(address.parse().unwrap(), PORT);
    let socket = inside(&site.server, || UdpSocket::bind(address).unwrap());
    Endpoint::new(endpoint, Some(config), socket, Arc::new(TokioRuntime)).unwrap()
}

fn web(gate: &Gate) -> ScopeStatistics {
    gate.statistics().unwrap().scope("web").unwrap().clone()
}

/// Returns the number of packets that any rule has refused.
fn refused(gate: &Gate) -> u64 {
    let web = web(gate);
    Rule::ALL.iter().map(|rule| web.rule(*rule).packets).sum()
}

const RETRY: &str = "\
[[scope]]
name = \"web\"
port = 4433
rules.retry = \"enforce\"
";

/// Checks that each address is validated before the server gets a connection's first packet, and that both the client
/// and the server accept the Retry.
#[tokio::test(flavor = "multi_thread")]
async fn retry_is_accepted_by_stock_quinn() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("live-retry", "");
    let _pass = site.take_answers();
    let gate = gate(&site, RETRY);
    for (connections, (local, at)) in (1..).zip([("0.0.0.0", "10.97.0.1"), ("::", "fd97::1")]) {
        let mut config = site.server_config();
        token::take_part(&mut config, gate.scope("web").unwrap());
        let server = server(&site, at, EndpointConfig::default(), config);
        let served = tokio::spawn(async move {
            let incoming = server.accept().await.unwrap();
            let validated = incoming.remote_address_validated();
            answer(incoming.await.unwrap()).await;
            validated
        });
        let client = site.endpoint_at(local, LONG);
        let there = SocketAddr::new(at.parse().unwrap(), PORT);
        let connection = client.connect(there, "localhost").unwrap().await.expect("a connection");
        hello(&connection).await;
        connection.close(0u8.into(), b"");
        client.wait_idle().await;
        assert!(served.await.unwrap(), "the address was proved");
        let web = web(&gate);
        // A client that gets the Retry late may repeat its Initial without the token. So more Initials may be refused
        // than there are connections.
        assert!(web.rule(Rule::Retry).packets >= connections);
        assert!(web.pass(Pass::Proved).packets >= connections);
        assert_eq!((web.pass(Pass::New).packets, refused(&gate)), (0, web.rule(Rule::Retry).packets));
    }
}

fn published(connections: u32) -> String {
    format!(
        "[[scope]]\nname = \"web\"\nport = 4433\nlive = \"published\"\nid_bytes = 8\n\
         [scope.rules]\nquota = {{ connections = {connections} }}\nunknown_id = \"enforce\"\n"
    )
}

/// Runs a live connection that changes keys, connection IDs and ports, while the policy changes all the time. Its
/// address also sends a flood and is over its quota, as if several clients were behind one NAT. Exactly the flood is
/// refused.
#[tokio::test(flavor = "multi_thread")]
async fn live_connection_loses_no_packet_during_a_flood() {
    const ROUNDS: u64 = 40;
    const BURST: u64 = 50;
    if !is_root() {
        return;
    }
    let site = GateSite::new("live", "");
    let gate = gate(&site, &published(1));
    let scope = gate.scope("web").unwrap();
    let mut endpoint = EndpointConfig::default();
    let ids = scope.clone();
    let next = Arc::new(AtomicU64::new(1 << 63));
    endpoint.cid_generator(move || Box::new(PublishedIds { scope: ids.clone(), next: next.clone() }));
    let server = server(&site, "10.97.0.1", endpoint, site.server_config());
    let served = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().await.unwrap();
        let _counted = scope.connection(connection.remote_address().ip()).unwrap();
        answer(connection).await;
        server
    });
    let client = site.endpoint(LONG);
    let there = SocketAddr::new(support::SERVER, PORT);
    let connection = client.connect(there, "localhost").unwrap().await.expect("a connection");
    hello(&connection).await;
    assert_eq!(refused(&gate), 0);

    let attacker = inside(&site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap());
    attacker.connect(there).unwrap();
    for round in 0..ROUNDS {
        for n in 0..BURST {
            attacker.send(&initial(round * BURST + n)).unwrap();
        }
        connection.force_key_update();
        if round % 4 == 0 {
            client.rebind(inside(&site.clients, || UdpSocket::bind("0.0.0.0:0").unwrap())).unwrap();
        }
        gate.set_policy(&Policy::parse(&published(1 - round as u32 % 2)).unwrap()).unwrap();
        hello(&connection).await;
        let sent = (round + 1) * BURST;
        wait_until("the end of the burst", || web(&gate).rule(Rule::Quota).packets, |count| *count >= sent);
    }
    let total = ROUNDS * BURST;
    assert_eq!((web(&gate).rule(Rule::Quota).packets, refused(&gate)), (total, total));
    // The connection still works after the gate has been removed.
    let live = web(&gate).pass(Pass::Live).packets;
    assert!(live > 2 * ROUNDS, "{live} packets of the live connection");
    drop(gate);
    hello(&connection).await;
    assert!(!site.is_guarded());
    connection.close(0u8.into(), b"");
    drop(served.await.unwrap());
}

const ONE_EACH: &str = "\
[[scope]]
name = \"web\"
port = 4433
rules.quota = { connections = 1, answer = true }
";

/// Checks that unmodified quinn gives up at once when the gate answers an Initial over the quota, though it would have
/// waited for a minute. The client's live connection is not affected.
#[tokio::test(flavor = "multi_thread")]
async fn answered_refusal_ends_quinns_connection_attempt_at_once() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("live-refusal", "");
    let _pass = site.take_answers();
    let gate = gate(&site, ONE_EACH);
    for (connections, (local, at)) in (1..).zip([("0.0.0.0", "10.97.0.1"), ("::", "fd97::1")]) {
        let server = server(&site, at, EndpointConfig::default(), site.server_config());
        let served = tokio::spawn(async move { answer(server.accept().await.unwrap().await.unwrap()).await });
        let client = site.endpoint_at(local, LONG);
        let there = SocketAddr::new(at.parse().unwrap(), PORT);
        let live = client.connect(there, "localhost").unwrap().await.expect("a connection");
        hello(&live).await;
        // The Initials come from the live connection's socket, and then from another socket, as from two clients behind
        // one NAT.
        for endpoint in [&client, &site.endpoint_at(local, LONG)] {
            let refused = endpoint.connect(there, "localhost").unwrap().await;
            assert_eq!(refused.unwrap_err(), ConnectionError::VersionMismatch);
            hello(&live).await;
        }
        live.close(0u8.into(), b"");
        client.wait_idle().await;
        served.await.unwrap();
        // A client that gets the gate's Version Negotiation late may repeat its Initial, so there may be more answers
        // than connections.
        let answered = gate.statistics().unwrap().event(Event::Answered);
        assert!(answered >= 2 * connections);
        assert_eq!((web(&gate).rule(Rule::Quota).packets, refused(&gate)), (answered, answered));
        assert_eq!(web(&gate).pass(Pass::New).packets, connections);
    }
}

fn nft(site: &GateSite, command: &str) -> String {
    let output = Command::new("ip").args(["netns", "exec", &site.server, "nft", command]).output().unwrap();
    assert!(output.status.success(), "nft {command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Checks that netfilter does not see packets that the gate refuses, and can drop those that the gate passes.
#[test]
fn netfilter_sees_passed_packets_and_may_drop_them() {
    const PACKETS: u64 = 20;
    if !is_root() {
        return;
    }
    let site = GateSite::new("live-nft", "");
    let gate = gate(&site, "[[scope]]\nname = \"web\"\nport = 4433\n");
    nft(&site, "add table inet t");
    for (chain, hook, verdict) in [("seen", "prerouting", "accept"), ("stopped", "input", "drop")] {
        nft(&site, &format!("add chain inet t {chain} {{ type filter hook {hook} priority 0; }}"));
        nft(&site, &format!("add rule inet t {chain} udp dport {PORT} counter {verdict}"));
    }
    let counted = |chain: &str| {
        let listed = nft(&site, &format!("list chain inet t {chain}"));
        let packets = listed.split_once("counter packets ").unwrap().1.split(' ').next().unwrap();
        packets.parse::<u64>().unwrap()
    };
    let server = inside(&site.server, || UdpSocket::bind((SERVER, PORT)).unwrap());
    server.set_nonblocking(true).unwrap();
    let client = inside(&site.clients, || UdpSocket::bind("10.97.0.2:0").unwrap());
    let send = || {
        for n in 0..PACKETS {
            client.send_to(&initial(n), (SERVER, PORT)).unwrap();
        }
    };
    let all: Prefix = "10.97.0.2/32".parse().unwrap();

    gate.list(None, all, ListEntry::Block).unwrap();
    send();
    wait_until("all refused", || web(&gate).rule(Rule::Block).packets, |packets| *packets == PACKETS);
    assert_eq!(counted("seen"), 0);

    gate.unlist(None, all).unwrap();
    gate.list(None, all, ListEntry::Allow).unwrap();
    send();
    wait_until("all stopped", || counted("stopped"), |packets| *packets == PACKETS);
    assert_eq!((counted("seen"), refused(&gate)), (PACKETS, PACKETS));
    assert!(server.recv(&mut [0; 2048]).is_err(), "netfilter has dropped what the gate lets in");
}
