//! Crowds of light receivers in a thread of a benchmark, and the publisher of their track.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{anyhow, ensure};
use millrace_moq::{Namespace, TrackName};

use super::{contender::PORT, process::BenchProcess, site::BenchSite};
use crate::{
    program::product,
    receivers::{ReceiverControl, ReceiverRun, Settings, report::ReceiversReport},
};

const NAMESPACE: &str = "bench";
const TRACK: &str = "objects";
/// Length of the track, seconds. The publisher is stopped long before its end.
const SHOW_SECONDS: u32 = 3600;
/// Longest wait until a crowd of sessions is connected and served.
const CROWD_LIMIT: Duration = Duration::from_secs(300);
const SOCKETS: usize = 32;

/// The track that crowds subscribe to, with a group per second.
#[derive(Debug, Clone, Copy)]
pub struct CrowdTrack {
    pub rate_hz: u32,
    pub object_bytes: u32,
}

impl CrowdTrack {
    /// Starts a publisher of the track, which runs until it is dropped.
    pub fn publish(self, site: &BenchSite) -> anyhow::Result<BenchProcess> {
        let Self { rate_hz, object_bytes } = self;
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let arguments = format!(
            "publish --reconnect=false --generate --json --name {NAMESPACE} --track {TRACK} --rate-hz {rate_hz} \
             --object-bytes {object_bytes} --objects-per-group {rate_hz} --duration {SHOW_SECONDS} \
             --tls-disable-verify {url}"
        );
        let mut command = site.node("pub")?.command(product()?);
        command.args(arguments.split_whitespace());
        BenchProcess::start("publisher", command, site.directory())
    }
}

/// Sessions that connect together and stay, in a thread of this process.
pub struct Crowd {
    pub control: Arc<ReceiverControl>,
    thread: JoinHandle<anyhow::Result<ReceiversReport>>,
    count: u64,
}

impl Crowd {
    /// Connects sessions, and waits until all are connected and, if `is_active`, have received an object. Sessions that
    /// are not active may subscribe later.
    pub fn start(
        site: &BenchSite,
        count: usize,
        is_active: bool,
        server: &mut BenchProcess,
    ) -> anyhow::Result<Self> {
        let host = site.relay()?.addr_v4();
        let settings = Settings {
            relay: SocketAddr::new(IpAddr::V4(host), PORT),
            host: host.to_string(),
            path: String::new(),
            track: Some(TrackName::new(Namespace::from_path(NAMESPACE)?, TRACK)?),
            subscribes_at_once: is_active,
            sessions: count,
            sockets: SOCKETS,
            from: Vec::new(),
            streams: 128,
            duration: None,
            moves: None,
        };
        let control = Arc::new(ReceiverControl::default());
        // Sockets belong to the namespace that they are made in, so the thread itself may run in any.
        let run = site.subscribers()?.enter(|| ReceiverRun::new(settings, Arc::clone(&control)))??;
        let thread = std::thread::Builder::new().name("receivers".into()).spawn(|| run.run())?;
        let crowd = Self { control, thread, count: count as u64 };
        match is_active {
            true => crowd.wait_until_served(server)?,
            false => crowd.wait_until(server, ReceiverControl::connected)?,
        }
        Ok(crowd)
    }

    /// Waits until all sessions have received an object.
    pub fn wait_until_served(&self, server: &mut BenchProcess) -> anyhow::Result<()> {
        self.wait_until(server, ReceiverControl::served)
    }

    fn wait_until(
        &self,
        server: &mut BenchProcess,
        reached: fn(&ReceiverControl) -> u64,
    ) -> anyhow::Result<()> {
        let is_up = || reached(&self.control) >= self.count;
        server.wait_until("all sessions are served", CROWD_LIMIT, || is_up() || self.thread.is_finished())?;
        ensure!(is_up(), "the sessions ended before all of them were served");
        ensure!(self.control.ended_early() == 0, "the relay ended {} sessions", self.control.ended_early());
        Ok(())
    }

    /// Ends the sessions. Fails if the relay had ended one of them.
    pub fn finish(self) -> anyhow::Result<ReceiversReport> {
        self.control.stop();
        let report = self.thread.join().map_err(|_| anyhow!("the receivers' thread panicked"))??;
        ensure!(report.ended_early.is_empty(), "sessions ended early: {:?}", report.ended_early);
        Ok(report)
    }
}
