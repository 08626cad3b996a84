//! A lab with one of the networks drawn from the Latin hypercube, and transfers on it.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millrace_graft_proto::select::candidates::CandidateCarrier;
use millrace_graft_proto::select::profile::ByteArrivals;

use crate::train::runs::{MeasuredPath, TrainingNetwork};
use anyhow::{Context as _, anyhow};
use nix::sys::socket::{setsockopt, sockopt};

use super::fetch::FetchResult;
use super::{design, seen};
use crate::bench::graft::carrying::{Carrying, CarryingSettings};
use crate::bench::process::BenchProcess;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::{Directions, LabNode, Topology};

/// Time that a tunnel gets before the measurement to open its congestion window.
const WARMING: Duration = Duration::from_secs(3);
/// Time that a process may take to start and to end, in addition to the transfer.
const GRACE: Duration = Duration::from_secs(30);
const CROSS_BYTES: usize = 1000;
const BLOCK: usize = 1 << 16;

pub struct SelectSite {
    pub seen: MeasuredPath,
    // Fields are dropped in this order: the cross traffic must end before its lab is removed.
    _cross: Option<Cross>,
    site: BenchSite,
    limit: Duration,
    bytes: u64,
    /// Wait after a transfer, until its last packets have left the network.
    settling: Duration,
}

impl SelectSite {
    /// Creates the lab, starts its cross traffic, and observes the path.
    pub fn new(
        network: &TrainingNetwork,
        number: u32,
        seed: u32,
        limit: u64,
        most_kib: u32,
    ) -> anyhow::Result<Self> {
        let mut topology = Topology::standard(1, 1);
        // Each combination of a network's number and a run's seed gives other random losses.
        (topology.seed, topology.netem) = (u64::from(number) << 16 | u64::from(seed), false);
        let delay = format!("delay={}us", (network.rtt_ms * 500.0) as u64);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &delay)?;
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &design::impairment(network))?;
        let site = BenchSite::new(&topology)?;
        for node in [site.relay()?, site.subscribers()?] {
            // Forget TCP metrics of earlier connections, so that every connection starts like the first one to its
            // peer.
            node.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        }
        let cross = (network.cross_percent > 0.0).then(|| Cross::start(&site, network)).transpose()?;
        let seen = seen::look(site.relay()?, site.subscribers()?)?;
        let limit = Duration::from_secs(limit);
        let bytes = u64::from(most_kib) << 10;
        let settling = Duration::from_secs_f64(network.rtt_ms * (1.0 + network.queue_bdp) / 1e3);
        Ok(Self { seen, _cross: cross, site, limit, bytes, settling })
    }

    pub fn transfer(&self, candidate: &str) -> anyhow::Result<ByteArrivals> {
        let node = self.server()?;
        let listener = node.enter(|| TcpListener::bind((node.addr_v4(), 0)))??;
        let at = listener.local_addr()?;
        let Some(carrier) = CandidateCarrier::from_candidate(candidate) else {
            let client = self.client(at, None)?;
            return self.serve(&listener, Some(candidate), client, 0.0);
        };
        let warm = carrier.is_warm;
        let directory = self.site.directory().join(candidate);
        let wanted = CarryingSettings { carry: &settings(carrier), ..CarryingSettings::default() };
        let near = self.site.subscribers()?;
        let far = self.server()?;
        let pair = Carrying::wanted(near, far, &directory, &[at.port()], &wanted)?;
        let _server = pair.server.start()?;
        let _client = pair.client.start()?;
        let start = Instant::now();
        pair.wait_warm()?;
        // The time to set up a new tunnel is added to the transfer's times. A tunnel that is ready before the transfer
        // (`warm`) adds no time.
        let later = if warm { Duration::ZERO } else { start.elapsed() };
        if warm {
            std::thread::sleep(WARMING);
        }
        let client = self.client(at, Some(&pair))?;
        let came = self.serve(&listener, None, client, later.as_secs_f64() * 1e3)?;
        pair.check_redirected(1)?;
        Ok(came)
    }

    fn server(&self) -> anyhow::Result<&LabNode> {
        self.site.relay()
    }

    fn client(&self, at: SocketAddr, carried: Option<&Carrying<'_>>) -> anyhow::Result<BenchProcess> {
        let mut command = self.site.subscribers()?.command(std::env::current_exe()?);
        command.args(["bench", "graft", "fetch", "--from", &at.to_string()]);
        command.args(["--limit", &self.limit.as_secs().to_string()]);
        if let Some(pair) = carried {
            command = pair.client.cgroup.command(&command);
        }
        BenchProcess::start("fetch", command, self.site.directory())
    }

    /// Accepts the connection of `client`, and sends data over it until the client closes it. Returns the result that
    /// the client prints.
    fn serve(
        &self,
        listener: &TcpListener,
        control: Option<&str>,
        mut client: BenchProcess,
        later_ms: f64,
    ) -> anyhow::Result<ByteArrivals> {
        let stream = client.accept(listener, self.limit + GRACE)?;
        self.send(stream, control)?;
        let said = client.finish(self.limit + GRACE)?;
        let got: FetchResult = serde_json::from_str(said.trim())
            .with_context(|| format!("cannot parse the client's output {said:?}"))?;
        std::thread::sleep(self.settling);
        Ok(got.came(later_ms))
    }

    fn send(&self, mut stream: TcpStream, control: Option<&str>) -> anyhow::Result<()> {
        if let Some(control) = control {
            setsockopt(&stream, sockopt::TcpCongestion, &control.into())
                .map_err(|error| anyhow!("TCP with {control}: {error}"))?;
        }
        stream.set_write_timeout(Some(self.limit + GRACE))?;
        let block = [0; BLOCK];
        let mut left = self.bytes;
        while left > 0 {
            let now = usize::try_from(left).map_or(BLOCK, |left| left.min(BLOCK));
            // A write error means that the client has closed the connection, since it has received enough. The client's
            // count of bytes is the result.
            if std::io::Write::write_all(&mut stream, &block[..now]).is_err() {
                return Ok(());
            }
            left -= now as u64;
        }
        Ok(())
    }
}

/// Returns the lines of the settings' section `[carry]` that select the tunnel's protocol.
fn settings(carrier: CandidateCarrier<'_>) -> String {
    let kind = match carrier.by {
        None => String::new(),
        Some("cubic") => "quic-congestion = \"cubic\"\n".to_owned(),
        Some(kind) => format!("carrier = \"{kind}\"\n"),
    };
    let warming = if carrier.is_warm { "" } else { "warm-kib = 0\n" };
    kind + warming
}

/// Cross traffic: datagrams at even intervals, which are sent until this is dropped.
struct Cross {
    over: Arc<AtomicBool>,
    sending: Option<JoinHandle<()>>,
    _sink: UdpSocket,
}

impl Cross {
    fn start(site: &BenchSite, network: &TrainingNetwork) -> anyhow::Result<Self> {
        let from = site.relay()?;
        let to = site.subscribers()?;
        let sink = to.enter(|| UdpSocket::bind((to.addr_v4(), 0)))??;
        let socket = from.enter(|| UdpSocket::bind((from.addr_v4(), 0)))??;
        socket.connect((to.addr_v4(), sink.local_addr()?.port()))?;
        let bytes_s = network.rate_mbit * 125e3 * network.cross_percent / 100.0;
        let period = Duration::from_secs_f64(CROSS_BYTES as f64 / bytes_s);
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        let sending = std::thread::spawn(move || {
            let mut next = Instant::now();
            while !ends.load(Ordering::Relaxed) {
                let _ = socket.send(&[0; CROSS_BYTES]);
                next += period;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        });
        Ok(Self { over, sending: Some(sending), _sink: sink })
    }
}

impl Drop for Cross {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(sending) = self.sending.take() {
            let _ = sending.join();
        }
    }
}
