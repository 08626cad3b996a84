//! Tests of the packet gate (XDP) that a relay runs itself, while the relay forwards media in the kernel.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use millrace_client::{
    session::{Remote, Session},
    tls::CertificateTrust,
};
use millrace_kernel::xdp;
use millrace_moq::code;
use millrace_relay_daemon::{
    config::{Config, EngineChoice, GateChoice, Settings, UpstreamConfig},
    server::RelayStartError,
    status::{self, Status},
};
use tokio::time;

use crate::{
    life::{index, replace_link, sh},
    needs_root,
    net::{
        Cast, KernelNetwork, OF_A_GROUP, PORT, SHOW, assert_forwarded, cast, configure, introduce, play,
        start, start_on, subscribers, until,
    },
    peer::TestPeer,
};

/// Returns settings with which a relay listens on all addresses of the address family of `all`, and with defaults
/// otherwise.
fn everywhere(all: IpAddr) -> Config {
    let settings = Settings {
        listen: Some(vec![SocketAddr::from((all, PORT)).into()]),
        public: Some(true),
        ..Settings::default()
    };
    Config { http: None, ..Config::new(settings, None).unwrap() }
}

fn gated(subscribers: usize) -> KernelNetwork {
    KernelNetwork::new(subscribers, false, |config| config.gate = GateChoice::On)
}

fn url_of(net: &KernelNetwork) -> url::Url {
    format!("moqt://{}:{PORT}", net.relay().addr_v4()).parse().unwrap()
}

/// Tries to open another session with the relay from the host `node` of the emulated network. Reports whether the
/// session is refused or gets no answer.
fn is_turned_away(net: &KernelNetwork, node: &str) -> bool {
    let remote = Remote::new(url_of(net), CertificateTrust::Anyone);
    let connect = async { time::timeout(Duration::from_secs(3), Session::connect(&remote)).await };
    let connected = net.lab.node(node).unwrap().enter(|| net.run(connect)).unwrap();
    !matches!(connected, Ok(Ok(_)))
}

fn interface<'a>(
    gate: &'a status::GateStatusReport,
    name: &str,
) -> &'a millrace_gate::status::GateInterfaceStatus {
    gate.interfaces.iter().find(|it| it.name == name).unwrap()
}

#[test]
fn kernel_forwards_all_media_while_the_xdp_gate_runs() {
    needs_root!(kernel_forwards_all_media_while_the_xdp_gate_runs);
    let net = gated(2);
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    assert_eq!(status.engine.name, "kernel");
    assert_eq!(subscribers(&status).count(), 2);
    assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
    assert!(status.gate.on && status.gate.reason.contains("by XDP, native"), "{:?}", status.gate);
    assert!(status.gate.refused.is_empty(), "{:?}", status.gate);
}

/// Returns an Initial of `bytes` bytes, whose header has a connection ID of 8 bytes.
fn initial(version: u32, bytes: usize) -> Vec<u8> {
    let mut packet = vec![0xc0];
    packet.extend(version.to_be_bytes());
    packet.extend([8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]);
    let rest = (bytes - packet.len() - 2) as u16;
    packet.extend((0x4000 | rest).to_be_bytes());
    packet.resize(bytes, 0xaa);
    packet
}

/// The gate is on by default, and finds the interfaces of the served addresses. It must refuse exactly the packets that
/// no client sends.
#[test]
fn default_gate_refuses_only_packets_that_no_client_sends() {
    needs_root!(default_gate_refuses_only_packets_that_no_client_sends);
    let net = KernelNetwork::new(1, false, |config| *config = everywhere([0, 0, 0, 0].into()));
    // exact: the gate attaches to all interfaces before the relay's start is complete
    assert_eq!(guarded(&net.status()), ["to-pub", "to-sub1"]);

    let client = net.lab.node("sub1").unwrap();
    let socket = client.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let relay = SocketAddr::new(net.relay().addr_v4().into(), PORT);
    let send = |packet: &[u8]| assert_eq!(socket.send_to(packet, relay).unwrap(), packet.len());
    for _ in 0..20 {
        send(&initial(1, 1199));
    }
    for _ in 0..10 {
        send(&[0x40; 20]);
    }
    let mut retry = initial(1, 1200);
    retry[0] = 0xf0;
    for _ in 0..5 {
        send(&retry);
    }
    // The packets below must pass: short headers with unknown connection IDs, another version, fragments, and packets
    // for other ports.
    for _ in 0..7 {
        send(&[0x40; 21]);
    }
    let elsewhere = SocketAddr::new(relay.ip(), PORT + 1);
    socket.send_to(&[0x40; 3], elsewhere).unwrap();
    send(&vec![0x40; 4000]);
    send(&initial(0x1a2a_3a4a, 1200));
    let mut answer = [0; 100];
    let (bytes, from) = socket.recv_from(&mut answer).unwrap();
    assert_eq!((from, &answer[1..5]), (relay, &[0; 4][..]), "Version Negotiation: {:?}", &answer[..bytes]);

    let refused = [("short", 10), ("malformed", 5), ("initial_size", 20)];
    let refused = refused.map(|(rule, packets)| (rule.to_owned(), packets)).into();
    let sum = |status: &Status| status.gate.refused.values().sum::<u64>();
    let status = net.until("all refused packets to be counted", |status| sum(status) >= 35);
    assert_eq!(status.gate.refused, refused, "{:?}", status.gate);
    let metrics = millrace_relay_daemon::metrics::encode(status).unwrap();
    let line = r#"millrace_gate_refused_packets_total{scope="relay",rule="initial_size"} 20"#;
    assert!(metrics.lines().any(|it| it == line), "{metrics}");
    drop(net.peer("sub1"));
}

#[test]
fn client_at_its_session_limit_gets_no_further_session() {
    needs_root!(client_at_its_session_limit_gets_no_further_session);
    let net = KernelNetwork::new(1, false, |config| {
        config.gate = GateChoice::On;
        config.gate_sessions = Some(1);
    });
    let refused = |status: &Status| status.gate.refused.get("quota").copied().unwrap_or(0);
    let first = net.peer("sub1");
    net.until("the client's session to be counted", |status| status.sessions.len() == 1);
    assert!(is_turned_away(&net, "sub1"));
    let status = net.until("the gate to refuse the other client", |status| refused(status) > 0);
    assert_eq!((status.sessions.len(), status.drops["client_session_limit"]), (1, 0));
    let relay = status.gate.scopes.iter().find(|scope| scope.name == "relay").unwrap();
    assert_eq!((relay.clients, relay.connections), (1, 1));
    // A client at another address has a quota of its own.
    let _other = net.peer("pub");

    // Without the gate the relay itself limits the sessions of each client.
    let change = |gate| {
        let config = Config { gate, ..net.config.clone() };
        net.relay().enter(|| net.server.change_gate(&config)).unwrap().unwrap();
    };
    change(GateChoice::Off);
    assert!(!net.status().gate.on); // exact: the call that switches the gate off has returned
    assert!(is_turned_away(&net, "sub1"));
    net.until("the relay counts it", |status| status.drops["client_session_limit"] > 0);

    // A gate that is switched on while sessions exist learns these sessions from their packets.
    change(GateChoice::On);
    assert!(is_turned_away(&net, "sub1"));
    net.until("the new gate refuses it", |status| refused(status) > 0);

    // When a client closes a session, it can open another one immediately.
    first.session.close(code::Session::NO_ERROR, "");
    until("its session is over", || net.status().sessions.len() == 1);
    drop(net.peer("sub1"));
}

#[test]
fn packets_of_an_upstream_relay_pass_the_gate_and_are_forwarded() {
    needs_root!(packets_of_an_upstream_relay_pass_the_gate_and_are_forwarded);
    for scheme in ["moqt", "https"] {
        what_is_sent_by_an_upstream_relay_at(scheme);
    }
}

fn what_is_sent_by_an_upstream_relay_at(scheme: &str) {
    let mut topology = millrace_lab::lab::Topology::standard(1, 2);
    topology.netem = false;
    let lab = millrace_lab::lab::Lab::new(&topology).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let origin = lab.node("pub").unwrap();
    let origin_addr = SocketAddr::new(origin.addr_v4().into(), PORT);
    let url: url::Url = format!("{scheme}://{origin_addr}").parse().unwrap();
    let config = configure(&lab, |config| {
        config.listen = vec![origin_addr];
        (config.engine, config.interfaces) = (EngineChoice::User, Vec::new());
    });
    let upstream = start_on(origin, &runtime, config, 0).unwrap();
    let config = configure(&lab, |config| {
        config.gate = GateChoice::On;
        config.upstream =
            Some(UpstreamConfig { urls: vec![url.clone()], tls_root: None, token: None, identity: None });
    });
    let server = start(&lab, &runtime, config.clone(), 0).unwrap();
    let net = KernelNetwork { runtime, server: server.into(), lab, config };
    until("the upstream relay is reached", || net.status().sessions.iter().any(|session| session.upstream));

    let publisher = net.lab.node("pub").unwrap().enter(|| net.run(TestPeer::connect(url))).unwrap();
    let peers = ["sub1", "sub2"].map(|name| net.peer(name)).into();
    let cast: Cast = introduce(&net, publisher, peers);
    let status = play(&net, cast, &SHOW, |_| {});
    assert_eq!(subscribers(&status).count(), 2);
    assert_forwarded(&status, SHOW.groups * OF_A_GROUP);
    assert!(status.gate.on && status.gate.refused.is_empty(), "{:?}", status.gate);
    net.run(async {
        net.server.stop().await;
        upstream.stop().await;
    });
}

#[test]
fn xdp_gate_attaches_again_to_a_recreated_interface() {
    needs_root!(xdp_gate_attaches_again_to_a_recreated_interface);
    let net = gated(1);
    // exact: the gate attaches to all interfaces before the relay's start is complete
    let before = net.status().gate;
    assert!(before.interfaces.iter().all(|it| it.attached && it.reattached == 0), "{before:?}");
    sh(net.relay(), "ip link del to-sub1 2>/dev/null");
    let is_missed =
        |status: &Status| status.gate.reason.contains("to-sub1: the interface does not exist any more");
    let gate = net.until("the missing interface in the status", is_missed).gate;
    assert!(gate.on && !interface(&gate, "to-sub1").attached && interface(&gate, "to-pub").attached);
    let near = "to-sub1";
    let far = &net.lab.node("sub1").unwrap().interfaces()[0].device;
    sh(
        net.relay(),
        &format!(
            "ip link add {near} type veth peer name {far} netns {}",
            net.lab.node("sub1").unwrap().netns().name()
        ),
    );
    until("the interface to be guarded again", || interface(&net.status().gate, near).reattached == 1);
    replace_link(&net, "sub1");
    net.until("the interface to be guarded again", |status| {
        let it = interface(&status.gate, near);
        it.attached && it.trouble.is_none() && it.reattached == 2
    });
    let detach = || xdp::detach_all(index("to-pub")).unwrap();
    assert_eq!(net.relay().enter(detach).unwrap(), 1);
    until("the interface to be guarded again", || interface(&net.status().gate, "to-pub").reattached == 1);
    drop(net.peer("sub1"));
    // exact: the counts of refused packets are final, since the peer's handshake has passed the gate
    assert!(net.status().gate.refused.is_empty());
}

/// Returns the names of the interfaces that the gate guards, in alphabetical order.
fn guarded(status: &Status) -> Vec<&str> {
    let attached = status.gate.interfaces.iter().filter(|it| it.attached);
    let mut names: Vec<_> = attached.map(|it| it.name.as_str()).collect();
    names.sort_unstable();
    names
}

/// The relay listens on all addresses. Its gate must guard an interface as long as the interface has an address.
#[test]
fn xdp_gate_is_attached_while_the_interface_has_an_address() {
    needs_root!(xdp_gate_is_attached_while_the_interface_has_an_address);
    let net = KernelNetwork::new(1, false, |config| *config = everywhere([0, 0, 0, 0].into()));
    // exact: the gate attaches to all interfaces before the relay's start is complete
    assert_eq!(guarded(&net.status()), ["to-pub", "to-sub1"]);
    let client = net.lab.node("sub1").unwrap();
    let far = client.netns().name();
    sh(net.relay(), &format!("ip link add late up type veth peer name early netns {far}"));
    sh(client, "ip address add 192.0.2.2/24 dev early && ip link set early up");
    sh(net.relay(), "ip address add 192.0.2.1/24 dev late");
    until("the interface to be guarded", || guarded(&net.status()) == ["late", "to-pub", "to-sub1"]);

    let socket = client.enter(|| UdpSocket::bind("192.0.2.2:0").unwrap()).unwrap();
    for _ in 0..20 {
        socket.send_to(&[0x40; 20], ("192.0.2.1", PORT)).unwrap();
    }
    until("the packets to be refused", || net.status().gate.refused.get("short") == Some(&20));

    sh(net.relay(), "ip address del 192.0.2.1/24 dev late");
    until("the interface to be released", || guarded(&net.status()) == ["to-pub", "to-sub1"]);
    let left = || xdp::detach_all(index("late")).unwrap();
    assert_eq!(net.relay().enter(left).unwrap(), 0, "a program is still there");
    sh(net.relay(), "ip address add 192.0.2.1/24 dev late");
    until("the interface to be guarded again", || guarded(&net.status()) == ["late", "to-pub", "to-sub1"]);
    // exact: the count of packets refused as too short is final, since the test sends no more of them
    assert_eq!(net.status().gate.refused["short"], 20);
    drop(net.peer("sub1"));
}

/// The network comes up after the relay, as at boot.
#[test]
fn gate_attaches_when_an_interface_gets_its_first_address() {
    needs_root!(gate_attaches_when_an_interface_gets_its_first_address);
    let mut topology = millrace_lab::lab::Topology::standard(1, 1);
    topology.netem = false;
    let lab = millrace_lab::lab::Lab::new(&topology).unwrap();
    sh(lab.node("relay").unwrap(), "ip -6 address flush scope global");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let config = Config { gate_sessions: Some(1), ..everywhere(Ipv6Addr::UNSPECIFIED.into()) };
    let server = start(&lab, &runtime, config.clone(), 0).unwrap().into();
    let net = KernelNetwork { runtime, server, lab, config };
    // exact: the gate stays off until an interface has an address, and none has one yet
    let gate = net.status().gate;
    assert!(!gate.on && gate.reason.contains("no interface is named"), "{gate:?}");
    sh(net.relay(), "ip address add 2001:db8::1/64 dev to-sub1 nodad");
    let gate = net.until("there is a gate", |status| guarded(status) == ["to-sub1"]).gate;
    assert!(gate.on && !gate.reason.contains("no interface"), "{gate:?}");
    sh(net.relay(), "ip address del 2001:db8::1/64 dev to-sub1");
    let gate = net.until("the gate guards an interface", |status| !status.gate.on).gate;
    assert!(gate.reason.contains("no interface is named"), "{gate:?}");
}

/// A foreign XDP program is attached to the interface. With `gate = "on"` the relay fails with an error. With `auto` it
/// runs without the gate and reports that.
#[test]
fn gate_that_finds_a_foreign_xdp_program_leaves_it_attached() {
    needs_root!(gate_that_finds_a_foreign_xdp_program_leaves_it_attached);
    let first = gated(1);
    // Each relay has a port of its own, because quinn releases a port some time after the relay has ended.
    let also = |gate, port| {
        let config = Config { listen: vec![([0, 0, 0, 0], port).into()], gate, ..first.config.clone() };
        start(&first.lab, &first.runtime, config, 0)
    };
    let error = match also(GateChoice::On, PORT + 1) {
        Err(error @ RelayStartError::Gate(_)) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("two programs on one interface"),
    };
    for part in ["interface to-", "another gate at XDP"] {
        assert!(error.contains(part), "{error}");
    }
    let second = also(GateChoice::Auto, PORT + 2).unwrap();
    let gate = millrace_relay_daemon::status::StatusSource::status(&second).gate;
    assert!(!gate.on && gate.reason.contains("another gate at XDP"), "{gate:?}");
    first.run(second.stop());
    // exact: the first relay's gate no longer changes, since the second relay has stopped
    let gate = first.status().gate;
    assert!(gate.on && gate.interfaces.iter().all(|it| it.attached && it.reattached == 0), "{gate:?}");
}
