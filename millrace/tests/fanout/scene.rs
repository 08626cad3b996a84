//! A sender, a relay and receivers in three namespaces, the fan-out as a process, and clients that speak its protocol.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use millrace_daemon::http::fetch;
use millrace_fanout::{
    message::{Answer, Ask, Request, Say},
    rtp::Packet,
    token::Token,
};
use millrace_lab::lab::{Lab, Node, Topology};
use millrace_testkit::{BOUND, show_log_on_panic};
pub use millrace_testkit::{wait_for, wait_until};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{setsockopt, sockopt},
    },
    unistd::Pid,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use tempfile::TempDir;

use crate::net::{self, Capture};

pub const PORT: u16 = 5004;
pub const NAME: &str = "live";
pub const SSRC: u32 = 0x0102_0304;
/// For what must not come.
const MOMENT: Duration = Duration::from_millis(100);

/// RTP with so many bytes of payload.
pub fn media(sequence: u16, len: usize) -> Vec<u8> {
    let head = [&[0x80, 96][..], &sequence.to_be_bytes(), &[0, 0, 0, 9], &SSRC.to_be_bytes()].concat();
    head.into_iter().chain((0..len).map(|at| (at as u16 ^ sequence) as u8)).collect()
}

/// Of a UDP datagram over IPv4 without options.
pub fn payload(frame: &[u8]) -> Option<Vec<u8>> {
    (frame.get(12..14)? == [8, 0] && *frame.get(23)? == 17).then_some(())?;
    let len = usize::from(u16::from_be_bytes([*frame.get(38)?, *frame.get(39)?]));
    Some(frame.get(42..34 + len)?.to_vec())
}

pub struct Scene {
    lab: Lab,
    dir: TempDir,
    pub listen: SocketAddr,
    pub sender: UdpSocket,
    /// What the settings say of it.
    from: SocketAddr,
}

impl Scene {
    pub fn new(family: u8) -> Self {
        Self::with_sender(family, 0)
    }

    /// Its ports are free for ffmpeg.
    pub fn for_ffmpeg() -> Self {
        let mut scene = Self::with_sender(4, 0);
        scene.from.set_port(6000);
        scene
    }

    fn with_sender(family: u8, port: u16) -> Self {
        let mut topology = Topology::default();
        topology.connect("sender", "relay");
        topology.connect("relay", "receiver");
        let lab = Lab::new(&topology).unwrap();
        let address = |name: &str| -> IpAddr {
            let node = lab.node(name).unwrap();
            if family == 4 { node.addr_v4().into() } else { node.addr_v6().into() }
        };
        let listen = SocketAddr::new(address("relay"), PORT);
        let sender =
            net::socket(lab.node("sender").unwrap().netns().name(), SocketAddr::new(address("sender"), port));
        sender.connect(listen).unwrap();
        let from = sender.local_addr().unwrap();
        Self { lab, dir: TempDir::new().unwrap(), listen, sender, from }
    }

    fn node(&self, name: &str) -> &Node {
        self.lab.node(name).unwrap()
    }

    pub fn sender_namespace(&self) -> &str {
        self.node("sender").netns().name()
    }

    pub fn relay_namespace(&self) -> &str {
        self.node("relay").netns().name()
    }

    pub fn receiver_namespace(&self) -> &str {
        self.node("receiver").netns().name()
    }

    fn interface(&self, node: &str, link: &str) -> String {
        self.node(node).interface(link).unwrap().device.clone()
    }

    pub fn sender_interface(&self) -> String {
        self.interface("sender", "sender-relay")
    }

    /// That the sender's packets arrive on.
    pub fn relay_interface(&self) -> String {
        self.interface("relay", "sender-relay")
    }

    pub fn receiver_interface(&self) -> String {
        self.interface("receiver", "relay-receiver")
    }

    pub fn in_sender(&self, program: &str) -> Command {
        self.node("sender").command(program)
    }

    pub fn in_receiver(&self, program: &str) -> Command {
        self.node("receiver").command(program)
    }

    pub fn send(&self, packet: &[u8]) {
        // A host that nobody listens on may have said so.
        let _ = self.sender.send(packet);
    }

    /// What the sender has sent to the stream.
    pub fn sent(&self, capture: &Capture) -> Vec<Vec<u8>> {
        let frames = capture.frames().into_iter().filter(|frame| {
            let port = frame.get(36..38).map(|port| u16::from_be_bytes([port[0], port[1]]));
            frame.get(26..30) == Some(&octets(self.from.ip())[..]) && matches!(port, Some(5004 | 5005))
        });
        frames.filter_map(|frame| payload(&frame)).collect()
    }

    /// Settings of one stream, and what else is said of it.
    pub fn config(&self, more: &str) -> String {
        format!(
            "interface = [\"{}\"]\n[[stream]]\nname = \"{NAME}\"\nlisten = \"{}\"\nsender = \"{}\"\n{more}",
            self.relay_interface(),
            self.listen,
            self.from
        )
    }

    pub fn start(&self, more: &str) -> Fanout<'_> {
        Fanout::start(self, &self.config(more))
    }

    pub fn client(&self) -> Client<'_> {
        let node = self.node("receiver");
        let ip: IpAddr = if self.listen.is_ipv4() { node.addr_v4().into() } else { node.addr_v6().into() };
        let socket = net::socket(node.netns().name(), SocketAddr::new(ip, 0));
        // All of a test's media may wait there.
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).unwrap();
        Client { scene: self, socket, token: Token::default(), transaction: 0 }
    }

    /// Where a player listens, on the receivers' host.
    pub fn player(&self) -> UdpSocket {
        net::socket(self.receiver_namespace(), SocketAddr::new(self.node("receiver").addr_v4().into(), 0))
    }

    pub fn start_gate(&self) -> Process {
        let log = self.dir.path().join("gate.log");
        let socket = self.dir.path().join("gate.sock");
        let _ = fs::remove_file(&log);
        let child = self
            .node("relay")
            .command(env!("CARGO_BIN_EXE_millrace"))
            .args(["gate", "--port=443", "--http=off", "--interface", &self.relay_interface(), "--socket"])
            .arg(socket)
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let process = Process { child, name: "the gate", log: log.clone() };
        wait_for("a gate that guards", || fs::read_to_string(&log).unwrap().contains("guarding"));
        process
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Killed when dropped.
pub struct Process {
    child: Child,
    name: &'static str,
    log: PathBuf,
}

impl Process {
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        wait_for("its end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        show_log_on_panic(self.name, &self.log);
    }
}

/// `millrace fanout run`.
pub struct Fanout<'a> {
    scene: &'a Scene,
    process: Process,
}

/// What is looked at of a status.
#[derive(Debug, Deserialize)]
pub struct Status {
    pub interfaces: Vec<Interface>,
    pub streams: Vec<Stream>,
    pub packets: BTreeMap<String, u64>,
    pub copies: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub struct Interface {
    pub reattached: u64,
}

#[derive(Debug, Deserialize)]
pub struct Stream {
    pub ssrc: Option<String>,
    pub packets: u64,
    pub receivers: Vec<Receiver>,
    pub paused: Vec<serde_json::Value>,
    pub events: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub struct Receiver {
    pub address: SocketAddr,
    pub pinned: bool,
    pub packets: u64,
    pub lost_percent: Option<f64>,
    pub dropped: BTreeMap<String, u64>,
}

const HTTP: &str = "127.0.0.1:9189";

impl<'a> Fanout<'a> {
    fn command(scene: &Scene, config: &str) -> Command {
        let path = scene.dir.path().join("fanout.toml");
        fs::write(&path, config).unwrap();
        let mut command = scene.node("relay").command(env!("CARGO_BIN_EXE_millrace"));
        command.args(["fanout", "run", "--http-token-file=off", "--http", HTTP, "--config"]).arg(path);
        command.arg("--socket").arg(scene.dir.path().join("fanout.sock"));
        command
    }

    fn start(scene: &'a Scene, config: &str) -> Self {
        let log = scene.dir.path().join("log");
        let child = Self::command(scene, config).stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let process = Process { child, name: "the fan-out", log };
        let mut fanout = Self { scene, process };
        wait_for("a fan-out that is ready", || {
            let ended = fanout.process.child.try_wait().unwrap();
            assert!(ended.is_none(), "{}", fanout.log());
            fanout.logged("ready")
        });
        fanout
    }

    /// What it says of settings that it cannot start with.
    pub fn fails(scene: &Scene, config: &str) -> String {
        let output = Self::command(scene, config).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scene.dir.path().join("log")).unwrap()
    }

    pub fn logged(&self, words: &str) -> bool {
        self.log().contains(words)
    }

    pub fn begin(&self, args: &[&str]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.arg("fanout").args(args).arg("--socket").arg(self.scene.dir.path().join("fanout.sock"));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn verb(&self, args: &[&str]) -> Output {
        self.begin(args).wait_with_output().unwrap()
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

    pub fn get(&self, path: &str) -> String {
        let (code, text) = self.fetch(path);
        assert_eq!(code, 200, "{text}");
        text
    }

    /// Returns the status code and the body of an HTTP response.
    pub fn fetch(&self, path: &str) -> (u16, String) {
        net::inside(self.scene.relay_namespace(), || fetch(HTTP.parse().unwrap(), path, None).unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Other settings, in the place of those that it was started with.
    pub fn write(&self, config: &str) {
        fs::write(self.scene.dir.path().join("fanout.toml"), config).unwrap();
    }

    pub fn end(self, signal: Signal) -> Option<i32> {
        self.process.end(signal)
    }
}

/// A receiver that speaks the protocol, and looks at what comes.
pub struct Client<'a> {
    scene: &'a Scene,
    socket: UdpSocket,
    token: Token,
    transaction: u32,
}

impl Client<'_> {
    pub fn address(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    pub fn send(&self, datagram: &[u8]) {
        self.socket.send_to(datagram, self.scene.listen).unwrap();
    }

    fn receive(&self) -> Option<Vec<u8>> {
        let mut buffer = [0; 4096];
        let (len, from) = loop {
            match self.socket.recv_from(&mut buffer) {
                // A host that is halted for a moment interrupts whoever waits with a time-out (signal(7)).
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => break received.ok()?,
            }
        };
        assert_eq!(from, self.scene.listen);
        Some(buffer[..len].to_vec())
    }

    /// The next packet of the stream.
    pub fn packet(&self) -> Vec<u8> {
        loop {
            let datagram = self.receive().expect("a packet");
            if is_of_the_stream(&datagram) {
                return datagram;
            }
        }
    }

    /// Takes what is there, and returns how many packets of the stream that was.
    pub fn drain(&self) -> usize {
        self.socket.set_read_timeout(Some(MOMENT)).unwrap();
        let count =
            std::iter::from_fn(|| self.receive()).filter(|datagram| is_of_the_stream(datagram)).count();
        self.socket.set_read_timeout(Some(BOUND)).unwrap();
        count
    }

    pub fn gets_nothing(&self) -> bool {
        self.drain() == 0
    }

    /// Asks until it is answered, once more when it has to prove itself.
    pub fn ask(&mut self, what: Ask) -> Say {
        loop {
            self.transaction += 1;
            let request =
                Request { what, token: self.token, transaction: self.transaction, stream: NAME.into() };
            self.send(&request.encode());
            match self.answer(self.transaction).what {
                Say::Prove(token) => self.token = token,
                Say::Lease { seconds, token } => {
                    self.token = token;
                    return Say::Lease { seconds, token };
                }
                other => return other,
            }
        }
    }

    pub fn answer(&self, transaction: u32) -> Answer {
        loop {
            let datagram = self.receive().expect("an answer");
            if let Some(answer) = Answer::read(&datagram).filter(|it| it.transaction == transaction) {
                return answer;
            }
        }
    }

    pub fn subscribe(&mut self, seconds: u16) {
        let said = self.ask(Ask::Subscribe { seconds });
        assert!(matches!(said, Say::Lease { .. }), "{said:?}");
    }
}

/// Neither an answer nor the relay's own report, which is of nobody.
fn is_of_the_stream(datagram: &[u8]) -> bool {
    Packet::read(datagram).is_some_and(|packet| packet.ssrc() != 0)
}
