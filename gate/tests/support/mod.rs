//! A server and its clients, each in a network namespace: the server as a process, the clients on quinn.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    fs::File,
    io::{BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use millrace_gate::{Gate, Policy, XdpMode};
#[allow(unused_imports, reason = "each test file uses a part")]
pub use millrace_testkit::{async_wait_until, wait_for, wait_until};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use quinn::{Connection, ConnectionError, Endpoint, EndpointConfig, TokioRuntime};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tempfile::TempDir;

pub const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 97, 0, 1));
pub const PORT: u16 = 4433;

/// Reports whether tests that need root can run. Prints a message if not.
pub fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP: not root, no namespaces and no XDP");
    }
    root
}

/// A test network: a namespace for the server and one for its clients, with an interface `eth` each, a directory for
/// files, and a certificate.
pub struct GateSite {
    pub server: String,
    pub clients: String,
    pub dir: TempDir,
    certificate: CertificateDer<'static>,
}

impl GateSite {
    pub fn new(name: &str, policy: &str) -> Self {
        let id = std::process::id();
        let [server, clients] = ["s", "c"].map(|role| format!("gate-{id}-{name}-{role}"));
        ip(&["netns", "add", &server]);
        ip(&["netns", "add", &clients]);
        let dir = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let certificate = CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap();
        for (name, text) in [
            ("key.pem", made.signing_key.serialize_pem()),
            ("cert.pem", made.cert.pem()),
            ("gate.toml", policy.to_owned()),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let site = Self { server, clients, dir, certificate };
        site.link();
        site
    }

    /// Makes the interfaces, which must not exist yet.
    pub fn link(&self) {
        let Self { server, clients, .. } = self;
        ip(&["-n", server, "link", "add", "eth", "type", "veth", "peer", "name", "eth", "netns", clients]);
        for (namespace, host) in [(server, "1"), (clients, "2")] {
            ip(&["-n", namespace, "addr", "add", &format!("10.97.0.{host}/24"), "dev", "eth"]);
            ip(&["-n", namespace, "addr", "add", &format!("fd97::{host}/64"), "dev", "eth", "nodad"]);
            ip(&["-n", namespace, "link", "set", "eth", "up"]);
            ip(&["-n", namespace, "link", "set", "lo", "up"]);
        }
    }

    /// Runs `ip link` in the server's namespace.
    pub fn ip_link(&self, arguments: &[&str]) {
        ip(&[&["-n", &self.server, "link"], arguments].concat());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Attaches a gate that passes everything to the clients' interface. A veth accepts frames that its peer sends by
    /// XDP_TX only while it has an XDP program itself.
    pub fn take_answers(&self) -> Gate {
        let gate = Gate::new(&Policy::parse("[[scope]]\nname = \"none\"\nport = 1\n").unwrap()).unwrap();
        inside(&self.clients, || gate.attach("eth", XdpMode::Native)).unwrap();
        gate
    }

    /// Makes a command that runs inside the server's namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.server, program]).current_dir(self.dir.path());
        command
    }

    /// Starts an example, and waits until it reports that it is ready. All examples have the same arguments.
    pub fn serve(&self, program: &str) -> GateServerProcess {
        let port = PORT.to_string();
        let mut command = self.command(program);
        command.args(["eth", "gate.toml", "web", "10.97.0.1", &port, "cert.pem", "key.pem"]);
        GateServerProcess::start(command)
    }

    /// Reports whether there is an XDP program on the server's interface.
    pub fn is_guarded(&self) -> bool {
        self.has_xdp("eth")
    }

    /// Reports whether there is an XDP program on an interface in the server's namespace.
    pub fn has_xdp(&self, interface: &str) -> bool {
        said(Command::new("ip").args(["-d", "-n", &self.server, "link", "show", "dev", interface]))
            .contains("xdp")
    }

    /// Makes a client's endpoint, in the namespace of clients.
    pub fn endpoint(&self, idle: Duration) -> Endpoint {
        self.endpoint_at("0.0.0.0", idle)
    }

    /// Makes a client's endpoint at an IPv4 or IPv6 address.
    pub fn endpoint_at(&self, address: &str, idle: Duration) -> Endpoint {
        let address = SocketAddr::new(address.parse().unwrap(), 0);
        let socket = inside(&self.clients, || UdpSocket::bind(address).unwrap());
        let mut endpoint =
            Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime)).unwrap();
        endpoint.set_default_client_config(self.client_config(idle));
        endpoint
    }

    pub fn client_config(&self, idle: Duration) -> quinn::ClientConfig {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"hello".to_vec()];
        let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
        let mut config = quinn::ClientConfig::new(Arc::new(tls));
        let mut transport = quinn::TransportConfig::default();
        transport.max_idle_timeout(Some(idle.try_into().unwrap()));
        config.transport_config(Arc::new(transport));
        config
    }

    /// Makes the configuration of a server in this process.
    pub fn server_config(&self) -> quinn::ServerConfig {
        let key = PrivateKeyDer::from_pem_file(self.path("key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.clone()], key)
            .unwrap();
        tls.alpn_protocols = vec![b"hello".to_vec()];
        let tls = quinn::crypto::rustls::QuicServerConfig::try_from(tls).unwrap();
        quinn::ServerConfig::with_crypto(Arc::new(tls))
    }

    /// Opens a new connection, which fails when no packet arrives for `idle`.
    pub async fn connect(&self, idle: Duration) -> Result<Connection, ConnectionError> {
        self.endpoint(idle).connect(SocketAddr::new(SERVER, PORT), "localhost").unwrap().await
    }
}

impl Drop for GateSite {
    fn drop(&mut self) {
        for namespace in [&self.server, &self.clients] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

/// Runs the server's side of a connection: answers the requests of [`hello`] until the connection ends.
pub async fn answer(connection: Connection) {
    while let Ok((mut send, mut recv)) = connection.accept_bi().await {
        let _ = recv.read_to_end(1024).await;
        let _ = send.write_all(b"hello\n").await;
        let _ = send.finish();
    }
}

/// Sends a request on a new stream, and checks the answer.
pub async fn hello(connection: &Connection) {
    ask(connection, b"who is there?").await;
}

/// Sends a request that fills most of a packet.
pub async fn long_hello(connection: &Connection) {
    ask(connection, &[b'?'; 1000]).await;
}

async fn ask(connection: &Connection, question: &[u8]) {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(question).await.unwrap();
    send.finish().unwrap();
    assert_eq!(recv.read_to_end(100).await.unwrap(), b"hello\n");
}

/// Returns an Initial that would open a new connection (RFC 9000, section 17.2.2).
pub fn initial(n: u64) -> Vec<u8> {
    let mut packet = vec![0xc0, 0, 0, 0, 1, 8];
    packet.extend(n.to_be_bytes());
    packet.extend([0, 0]);
    packet.extend((0x4000_u16 | 1182).to_be_bytes());
    packet.resize(1200, 0xaa);
    packet
}

/// Checks that an example enforces a quota of 2: the third connection is refused, the first two are not affected, and a
/// closed connection makes room for another. Returns the two connections that are open in the end.
pub async fn quota_of_two_holds(site: &GateSite) -> [Connection; 2] {
    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_secs(2);
    let first = site.connect(LONG).await.expect("the first");
    hello(&first).await;
    let second = site.connect(LONG).await.expect("the second");
    hello(&second).await;
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    hello(&first).await;
    hello(&second).await;
    first.close(0u8.into(), b"");
    // The first two connections stay open for longer than the third client tries to connect.
    let third = tokio::time::timeout(millrace_testkit::BOUND, async {
        loop {
            if let Ok(Ok(connection)) = tokio::time::timeout(SHORT, site.connect(LONG)).await {
                break connection;
            }
        }
    });
    let third = third.await.expect("room for another");
    hello(&third).await;
    hello(&second).await;
    assert_eq!(site.connect(SHORT).await.unwrap_err(), ConnectionError::TimedOut);
    [second, third]
}

/// A server process that has printed `ready`. Dropping this value kills the process.
pub struct GateServerProcess {
    process: Child,
    out: BufReader<ChildStdout>,
}

impl GateServerProcess {
    pub fn start(mut command: Command) -> Self {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { process, out }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    /// Ends the process by a signal. Returns its exit code and the rest of its output.
    pub fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        self.signal(signal);
        let status = wait_for("end of the server", || self.process.try_wait().unwrap());
        let mut rest = String::new();
        let _ = std::io::Read::read_to_string(&mut self.out, &mut rest);
        (status.code(), rest)
    }
}

impl Drop for GateServerProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {}: {said}", arguments.join(" "));
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `work` on a new thread in a namespace.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let done = scope.spawn(|| {
            setns(File::open(format!("/run/netns/{namespace}")).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            work()
        });
        done.join().unwrap()
    })
}
