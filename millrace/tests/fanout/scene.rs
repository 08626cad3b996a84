//! Test setup for the fan-out: a sender, a relay and receivers in three network namespaces, the fan-out as a process,
//! and clients of its protocol.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use millrace_daemon::http::fetch;
use millrace_fanout::{
    message::{ReceiverAction, ReceiverRequest, RelayAnswer, RequestOutcome},
    rtp::DatagramKind,
    token::ReceiverToken,
};
use millrace_lab::lab::{Lab, LabNode, Topology};
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

use crate::net::{self, PacketCapture};

pub const PORT: u16 = 5004;
pub const NAME: &str = "live";
pub const SSRC: u32 = 0x0102_0304;
/// Time that a test waits to see that no packet arrives.
const MOMENT: Duration = Duration::from_millis(100);

/// Returns an RTP packet with `len` bytes of payload.
pub fn media(sequence: u16, len: usize) -> Vec<u8> {
    let head = [&[0x80, 96][..], &sequence.to_be_bytes(), &[0, 0, 0, 9], &SSRC.to_be_bytes()].concat();
    head.into_iter().chain((0..len).map(|at| (at as u16 ^ sequence) as u8)).collect()
}

/// Returns the payload of a UDP datagram over IPv4 without options.
pub fn payload(frame: &[u8]) -> Option<Vec<u8>> {
    (frame.get(12..14)? == [8, 0] && *frame.get(23)? == 17).then_some(())?;
    let len = usize::from(u16::from_be_bytes([*frame.get(38)?, *frame.get(39)?]));
    Some(frame.get(42..34 + len)?.to_vec())
}

pub struct FanoutScene {
    lab: Lab,
    dir: TempDir,
    pub listen: SocketAddr,
    pub sender: UdpSocket,
    /// The address of the RTP sender, as the fan-out's settings name it.
    from: SocketAddr,
}

impl FanoutScene {
    pub fn new(family: u8) -> Self {
        Self::with_sender(family, 0)
    }

    /// Makes the test setup with a fixed port of the RTP sender, since ffmpeg's command line names the port.
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

    fn node(&self, name: &str) -> &LabNode {
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

    /// Returns the interface on which the sender's packets arrive.
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
        // Errors are ignored: an earlier ICMP error of the receivers' host makes send fail once.
        let _ = self.sender.send(packet);
    }

    /// Returns the packets in the capture that the sender sent to the stream.
    pub fn sent(&self, capture: &PacketCapture) -> Vec<Vec<u8>> {
        let frames = capture.frames().into_iter().filter(|frame| {
            let port = frame.get(36..38).map(|port| u16::from_be_bytes([port[0], port[1]]));
            frame.get(26..30) == Some(&octets(self.from.ip())[..]) && matches!(port, Some(5004 | 5005))
        });
        frames.filter_map(|frame| payload(&frame)).collect()
    }

    /// Returns fan-out settings with one stream. `more` has further lines of the stream's settings.
    pub fn config(&self, more: &str) -> String {
        format!(
            "interface = [\"{}\"]\n[[stream]]\nname = \"{NAME}\"\nlisten = \"{}\"\nsender = \"{}\"\n{more}",
            self.relay_interface(),
            self.listen,
            self.from
        )
    }

    pub fn start(&self, more: &str) -> FanoutProcess<'_> {
        FanoutProcess::start(self, &self.config(more))
    }

    pub fn client(&self) -> ProtocolClient<'_> {
        let node = self.node("receiver");
        let ip: IpAddr = if self.listen.is_ipv4() { node.addr_v4().into() } else { node.addr_v6().into() };
        let socket = net::socket(node.netns().name(), SocketAddr::new(ip, 0));
        // The receive buffer is large enough for all media of a test, so that no packet is dropped there.
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).unwrap();
        ProtocolClient { scene: self, socket, token: ReceiverToken::default(), transaction: 0 }
    }

    /// Returns the socket of a player on the receivers' host.
    pub fn player(&self) -> UdpSocket {
        net::socket(self.receiver_namespace(), SocketAddr::new(self.node("receiver").addr_v4().into(), 0))
    }

    pub fn start_gate(&self) -> GuardedProcess {
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
        let process = GuardedProcess { child, name: "the gate", log: log.clone() };
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

/// A process that is killed when dropped.
pub struct GuardedProcess {
    child: Child,
    name: &'static str,
    log: PathBuf,
}

impl GuardedProcess {
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        wait_for("its end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for GuardedProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        show_log_on_panic(self.name, &self.log);
    }
}

/// A running `millrace fanout run`.
pub struct FanoutProcess<'a> {
    scene: &'a FanoutScene,
    process: GuardedProcess,
}

/// The fields of a status that the tests read.
#[derive(Debug, Deserialize)]
pub struct Status {
    pub interfaces: Vec<InterfaceReport>,
    pub streams: Vec<StreamReport>,
    pub packets: BTreeMap<String, u64>,
    pub copies: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub struct InterfaceReport {
    pub reattached: u64,
}

#[derive(Debug, Deserialize)]
pub struct StreamReport {
    pub ssrc: Option<String>,
    pub packets: u64,
    pub receivers: Vec<ReceiverReportLine>,
    pub paused: Vec<serde_json::Value>,
    pub events: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub struct ReceiverReportLine {
    pub address: SocketAddr,
    pub pinned: bool,
    pub packets: u64,
    pub lost_percent: Option<f64>,
    pub dropped: BTreeMap<String, u64>,
}

const HTTP: &str = "127.0.0.1:9189";

impl<'a> FanoutProcess<'a> {
    fn command(scene: &FanoutScene, config: &str) -> Command {
        let path = scene.dir.path().join("fanout.toml");
        fs::write(&path, config).unwrap();
        let mut command = scene.node("relay").command(env!("CARGO_BIN_EXE_millrace"));
        command.args(["fanout", "run", "--http-token-file=off", "--http", HTTP, "--config"]).arg(path);
        command.arg("--socket").arg(scene.dir.path().join("fanout.sock"));
        command
    }

    fn start(scene: &'a FanoutScene, config: &str) -> Self {
        let log = scene.dir.path().join("log");
        let child = Self::command(scene, config).stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let process = GuardedProcess { child, name: "the fan-out", log };
        let mut fanout = Self { scene, process };
        wait_for("a fan-out that is ready", || {
            let ended = fanout.process.child.try_wait().unwrap();
            assert!(ended.is_none(), "{}", fanout.log());
            fanout.logged("ready")
        });
        fanout
    }

    /// Returns the error with which the fan-out refuses to start with these settings.
    pub fn fails(scene: &FanoutScene, config: &str) -> String {
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

    /// Replaces the fan-out's settings file.
    pub fn write(&self, config: &str) {
        fs::write(self.scene.dir.path().join("fanout.toml"), config).unwrap();
    }

    pub fn end(self, signal: Signal) -> Option<i32> {
        self.process.end(signal)
    }
}

/// A receiver that uses the fan-out's protocol and checks the packets that arrive.
pub struct ProtocolClient<'a> {
    scene: &'a FanoutScene,
    socket: UdpSocket,
    token: ReceiverToken,
    transaction: u32,
}

impl ProtocolClient<'_> {
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
                // A read with a timeout fails with EINTR when the machine is suspended for a moment (signal(7)).
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => break received.ok()?,
            }
        };
        assert_eq!(from, self.scene.listen);
        Some(buffer[..len].to_vec())
    }

    /// Returns the next packet of the stream, skipping answers and reports.
    pub fn packet(&self) -> Vec<u8> {
        loop {
            let datagram = self.receive().expect("a packet");
            if is_of_the_stream(&datagram) {
                return datagram;
            }
        }
    }

    /// Reads all waiting packets, and returns how many of them belong to the stream.
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

    /// Sends a request until it is answered, and again with a token if the fan-out asks to validate the address.
    pub fn ask(&mut self, what: ReceiverAction) -> RequestOutcome {
        loop {
            self.transaction += 1;
            let request = ReceiverRequest {
                what,
                token: self.token,
                transaction: self.transaction,
                stream: NAME.into(),
            };
            self.send(&request.encode());
            match self.answer(self.transaction).what {
                RequestOutcome::Prove(token) => self.token = token,
                RequestOutcome::Lease { seconds, token } => {
                    self.token = token;
                    return RequestOutcome::Lease { seconds, token };
                }
                other => return other,
            }
        }
    }

    pub fn answer(&self, transaction: u32) -> RelayAnswer {
        loop {
            let datagram = self.receive().expect("an answer");
            if let Some(answer) = RelayAnswer::read(&datagram).filter(|it| it.transaction == transaction) {
                return answer;
            }
        }
    }

    pub fn subscribe(&mut self, seconds: u16) {
        let said = self.ask(ReceiverAction::Subscribe { seconds });
        assert!(matches!(said, RequestOutcome::Lease { .. }), "{said:?}");
    }
}

/// Reports whether the datagram is neither an answer to a request nor the fan-out's own RTCP report.
fn is_of_the_stream(datagram: &[u8]) -> bool {
    DatagramKind::read(datagram).is_some_and(|packet| packet.ssrc() != 0)
}
