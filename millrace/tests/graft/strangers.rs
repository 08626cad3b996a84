//! What strangers, peers and other users of a host cannot do to its daemons.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsFd as _,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};

use millrace_graft::message::control::Control;
use nix::sys::signal::Signal;
use quinn::{AsyncUdpSocket, Runtime as _, UdpPoller, udp};

use crate::{
    agreement::keys,
    carried::{
        CARRIERS, Stops, accepted, at, client, connect, exchange, server, wait_for_ended, wait_for_state,
        warm,
    },
    messages::{Host, hosts, pair, socket},
    site::{CLIENT, CLIENT6, Daemon, PORT, SERVER, SERVER6, Site, inside, ip, wait_for, wait_until},
};

/// Longer than a test waits for anything.
const LINGER: Duration = Duration::from_secs(3600);

/// A connection that nobody reads at the other end, and that waits for that when it is closed. To close the other end ends the wait.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nonblocking(true).unwrap();
    while (&near).write(&[0; 1 << 16]).is_ok() {}
    socket2::SockRef::from(&near).set_linger(Some(LINGER)).unwrap();
    (near, far)
}

/// Any user may connect to the socket of messages, and pass what takes an hour to close: with a record that is read, with one that is not, and
/// beyond what a user may have.
#[test]
fn lingering_sockets_of_users_delay_nobody() {
    let Some(site) = Site::new("linger") else { return };
    let [mut near, _far] = hosts(&site, "");
    let mut kept = Vec::new();
    // While it is stopped: what it reads is to be the last descriptor, since the sender's would linger else.
    let pass = |near: &Host<'_>, connections: usize, records: usize| {
        near.signal(Signal::SIGSTOP);
        wait_for("it to stop", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", near.process.id())).unwrap();
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat"));
                stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
            })
        });
        let passed = (0..connections).map(|_| {
            let control = Control::connect(&socket(&site, 0)).unwrap();
            let (lingers, far) = lingering();
            for _ in 0..records {
                control.send(&"garbage", &[lingers.as_fd()]).unwrap();
            }
            (control, far)
        });
        let passed: Vec<_> = passed.collect();
        near.signal(Signal::SIGCONT);
        passed
    };
    // Garbage, of which the first record ends the connection and the others are not read.
    for records in [1, 3] {
        kept.extend(pass(&near, 2, records));
        for _ in 0..5 {
            let (done, said) = near.verb(&["status"]);
            assert!(done, "{said}");
        }
        // Sessions are opened, and carry.
        let (mut here, mut there) = pair(&site, &["reliability"]);
        here.send(b"goes on").unwrap();
        assert_eq!(crate::messages::message(&mut there), b"goes on");
    }
    // Of this user, more than it may have: some are turned away.
    for _ in 0..3 {
        kept.extend(pass(&near, 40, 1));
        let (done, said) = near.verb(&["status"]);
        assert!(done, "{said}");
    }
    // They end with the daemon.
    near.signal(Signal::SIGTERM);
    wait_for("the end of the daemon", || near.process.try_wait().unwrap().is_some());
    drop(kept);
}

/// A service that listens on loopback alone is for this host alone, whatever ports are listed, unless a rule names the address.
#[test]
fn loopback_is_not_reached_by_carriers_unless_a_rule_names_it() {
    const LOOPBACK: &str = "127.0.0.1";
    let Some(site) = Site::new("loopback") else { return };
    let known = keys(&site);
    // The client takes it for an address of its peer.
    site.configure_on(0, &client(&known[1], "").replace(SERVER6, LOOPBACK));
    site.configure_on(1, &server(&known[0], ""));
    let far = Daemon::start_on(&site, 1);
    let near = Daemon::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let listener = site.listen_on(at(LOOPBACK, PORT));
    listener.set_nonblocking(true).unwrap();
    // It goes in place, where nobody listens.
    let refused = site.try_connect(at(LOOPBACK, PORT)).and_then(|mut stream| stream.read(&mut [0]));
    assert!(!matches!(refused, Ok(1..)), "{refused:?}");
    wait_for_ended([&far], "not-here", 1);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);

    let named = server(&known[0], "") + &format!("addresses = [\"{LOOPBACK}\"]\n");
    site.configure_on(1, &named.replace(&format!("addresses = [\"{SERVER6}\"]\n"), ""));
    far.succeed(&["reload"]);
    listener.set_nonblocking(false).unwrap();
    // It was avoided for a while.
    let stream = wait_for("a connection that is carried", || site.try_connect(at(LOOPBACK, PORT)).ok());
    let (here, there, seen) = accepted(stream, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 10_000);
}

/// Who listens outside of the daemon's cgroup would see this host as the client: it sees the client, in place.
#[test]
fn listener_outside_the_cgroup_is_not_reached_by_carriers() {
    let Some(site) = Site::new("outside") else { return };
    let [_near, far] = warm(&site, ["", ""]);
    let listener = inside(&site.namespaces[1], || TcpListener::bind((SERVER, PORT)).unwrap());
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 10_000);
    wait_for_ended([&far], "not-listed", 1);
}

/// Other addresses of the client's host, of which strangers call.
const STRANGERS: [&str; 2] = ["10.96.0.50", "10.96.0.51"];

/// The peer's host has the address that its settings have there. `stall` calls all the time, and says no more than it has to, to hold a place.
fn peer_is_warm_while_strangers_stall(
    kind: &str,
    stall: impl FnOnce(&Site, &AtomicBool, &AtomicUsize) + Send,
) {
    let Some(site) = Site::new(&format!("stall-{kind}")) else { return };
    for address in STRANGERS {
        ip(&format!("-n {} addr add {address}/24 dev eth", site.namespaces[0]));
    }
    let known = keys(&site);
    let with = |text: String| text.replace("[carry]", &format!("[carry]\ncarrier = {kind:?}"));
    site.configure_on(0, &with(client(&known[1], "")));
    let addresses = format!("addresses = [\"{CLIENT}\", \"{CLIENT6}\"]");
    site.configure_on(
        1,
        &with(server(&known[0], "")).replace(&format!("addresses = [\"{CLIENT6}\"]"), &addresses),
    );
    let _far = Daemon::start_on(&site, 1);
    let (is_over, stalled) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let _stops = Stops(&is_over);
        let (site, is_over, stalled) = (&site, &is_over, &stalled);
        scope.spawn(move || stall(site, is_over, stalled));
        wait_until("strangers", || stalled.load(Relaxed), |count| *count > 300);
        let near = Daemon::start_on(site, 0);
        wait_for_state(&near, "warm");
        let before = stalled.load(Relaxed);
        wait_until("more strangers", || stalled.load(Relaxed), |count| *count > before);
    });
}

/// Some 200 a second.
const PACE: Duration = Duration::from_millis(5);

#[test]
fn peer_by_tcp_is_warm_while_strangers_stall() {
    peer_is_warm_while_strangers_stall("tcp", |site, is_over, stalled| {
        inside(&site.namespaces[0], || {
            let mut kept = Vec::new();
            while !is_over.load(Relaxed) {
                let from = SocketAddr::new(STRANGERS[kept.len() % 2].parse().unwrap(), 0);
                let socket =
                    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
                socket.bind(&from.into()).unwrap();
                if socket.connect(&at(SERVER, CARRIERS).into()).is_ok() {
                    kept.push(socket);
                    stalled.fetch_add(1, Relaxed);
                }
                thread::sleep(PACE); // exact: paces the strangers
            }
        });
    });
}

/// Sends two datagrams of each connection: the first one, and the first one with the token of a Retry.
#[derive(Debug)]
struct Stalling {
    socket: Arc<dyn AsyncUdpSocket>,
    sent: Mutex<std::collections::HashMap<Vec<u8>, usize>>,
    stalled: Arc<AtomicUsize>,
}

/// The connection's own ID stands behind the other one's in a long header.
fn own_id(datagram: &[u8]) -> Option<&[u8]> {
    let length = usize::from(*datagram.get(5)?);
    let rest = datagram.get(6 + length..)?;
    rest.get(1..1 + usize::from(*rest.first()?))
}

impl AsyncUdpSocket for Stalling {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &udp::Transmit<'_>) -> std::io::Result<()> {
        let id = own_id(transmit.contents).unwrap_or_default().to_vec();
        let mut sent = self.sent.lock().unwrap();
        let count = sent.entry(id).or_default();
        match *count {
            2 => Ok(()),
            _ => {
                self.socket.try_send(transmit)?;
                *count += 1;
                self.stalled.fetch_add(usize::from(*count == 2), Relaxed);
                Ok(())
            }
        }
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [std::io::IoSliceMut<'_>],
        about: &mut [udp::RecvMeta],
    ) -> Poll<std::io::Result<usize>> {
        self.socket.poll_recv(context, buffers, about)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

#[test]
fn peer_by_quic_is_warm_while_strangers_stall() {
    peer_is_warm_while_strangers_stall("quic", |site, is_over, stalled| {
        let sockets =
            inside(&site.namespaces[0], || STRANGERS.map(|from| UdpSocket::bind((from, 0)).unwrap()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let count = Arc::new(AtomicUsize::new(0));
            let endpoints = sockets.map(|socket| {
                let socket = quinn::TokioRuntime.wrap_udp_socket(socket).unwrap();
                let (sent, stalled) = (Mutex::default(), count.clone());
                let socket = Arc::new(Stalling { socket, sent, stalled });
                let (config, runtime) = (quinn::EndpointConfig::default(), Arc::new(quinn::TokioRuntime));
                quinn::Endpoint::new_with_abstract_socket(config, None, socket, runtime).unwrap()
            });
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let tls = rustls::ClientConfig::builder_with_provider(provider)
                .with_protocol_versions(&[&rustls::version::TLS13])
                .unwrap()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
            let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
            let config = quinn::ClientConfig::new(Arc::new(tls));
            let mut connecting = std::collections::VecDeque::new();
            while !is_over.load(Relaxed) {
                let endpoint = &endpoints[connecting.len() % 2];
                let to = at(SERVER, CARRIERS);
                connecting.push_back(endpoint.connect_with(config.clone(), to, "stranger").unwrap());
                if connecting.len() > 2000 {
                    connecting.pop_front();
                }
                stalled.store(count.load(Relaxed), Relaxed);
                tokio::time::sleep(PACE).await; // exact: paces the strangers
            }
        });
    });
}
