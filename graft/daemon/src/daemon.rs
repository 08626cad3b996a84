//! The part of the daemon for TCP: it holds the runtime of grafts, applies the settings, and answers requests.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_daemon::{
    daemon::{PartProcess, Reloads},
    log,
};
use millrace_graft::{
    GraftRuntime, Learned,
    settings::AgreementSettings,
    status::{self, GraftConnectionStatus, PeerExplanation, Status},
};
use millrace_graft_kernel::{PinDirectory, SelectionMaps, remove_leftovers};
use millrace_graft_proto::select::kind::ClassLesson;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::{
    control::{LoadTimes, SwapAnswer},
    tunnel_link::{REPORT, TunnelReport},
    usable::usable,
};

/// Reports of tunnelled connections for which the answer to a question about an unknown connection waits.
const REPORTS_AWAITED: u32 = 3;
/// Time without a report after which no carrier counts as ready. There is a report each second.
const SILENT: Duration = Duration::from_secs(3);

/// Arguments with which the worker process for TCP starts.
pub struct GraftSetup {
    /// Path of the settings file.
    pub config: PathBuf,
    /// Interfaces behind which there are hosts whose connections are tunnelled, in addition to those of the settings.
    pub interfaces: Vec<String>,
    /// True if grafts and rules stay in the kernel when the process ends.
    pub persist: bool,
    /// Directory in bpffs under which grafts are pinned. It may contain grafts that an earlier process has pinned.
    pub pins: Option<PathBuf>,
}

/// The worker process for TCP: the runtime of grafts, and the settings.
///
/// [`Self::start`] loads the grafts and rules of the settings. From then on, the process calls [`Self::tick`] about once
/// a second, [`Self::learn`] ten times a second and [`Self::keep`] once a minute. [`Self::read_settings`] replaces the
/// runtime's settings. A task that needs two locks takes that of the reports before the runtime's.
pub struct GraftDaemon {
    config: PathBuf,
    interfaces: Vec<String>,
    runtime: Mutex<GraftRuntime>,
    /// Results of reading the settings, for the status.
    pub reloads: Reloads,
    /// Number of connections to the process that negotiates agreements.
    pub links: Arc<AtomicUsize>,
    reports: Mutex<TunnelReports>,
    /// The model that chooses congestion controls, as it was last written to its file, with the file's path.
    kept: Mutex<Option<(PathBuf, Learned)>>,
    /// Reason why the learned model could not be read from or written to its file.
    not_kept: Mutex<Option<String>>,
}

/// The reports of the process that tunnels connections.
#[derive(Default)]
struct TunnelReports {
    /// Number of the connection over which the latest process reports.
    number: u64,
    /// Time of the latest report.
    latest: Option<Instant>,
}

impl GraftDaemon {
    /// Starts the daemon. The control socket must be open already, since only one daemon can open it. Grafts in the
    /// kernel are then leftovers of an ended process and may be removed.
    pub fn start(setup: &GraftSetup, part: &PartProcess) -> anyhow::Result<Self> {
        // Kernels before 6.4 keep the congestion controls of a killed process.
        match remove_leftovers()? {
            0 => {}
            count => warn!(count, "removed congestion controls that a killed process had left"),
        }
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        let pins = setup.pins.as_deref().map(PinDirectory::at);
        let shared = SelectionMaps::from_descriptors(part.take_kept());
        let mut runtime = GraftRuntime::start_after(settings, pins.as_ref(), setup.persist, shared.as_ref())?;
        // The process that tunnels connections gets these maps, and so does the process that follows this one.
        part.keep(&runtime.share()?.descriptors())?;
        let daemon = Self {
            config: setup.config.clone(),
            interfaces: setup.interfaces.clone(),
            runtime: Mutex::new(runtime),
            reloads: Reloads::default(),
            links: Arc::default(),
            reports: Mutex::default(),
            kept: Mutex::default(),
            not_kept: Mutex::default(),
        };
        daemon.recall();
        Ok(daemon)
    }

    /// Calls `work` with the locked runtime. `work` must not take longer than about 10 ms.
    pub fn with<T>(&self, work: impl FnOnce(&mut GraftRuntime) -> T) -> T {
        // `block_in_place` moves the tasks that wait for this thread to another one, because the present task may have
        // to wait for the lock.
        tokio::task::block_in_place(|| work(&mut self.runtime.lock()))
    }

    /// Returns the settings of agreements with peers, or `None` if there are none.
    pub fn agreement(&self) -> Option<AgreementSettings> {
        self.runtime.lock().agreement().cloned()
    }

    /// Reads the results of connections that have ended, and updates the model that chooses congestion controls for new
    /// connections.
    pub fn learn(&self) {
        let mut runtime = self.runtime.lock();
        if !runtime.selects() {
            return;
        }
        if let Err(error) = runtime.learn() {
            warn!("cannot update the selection model from results of connections: {error}");
        }
    }

    /// Begins to take reports of tunnelled connections. Returns a number for [`Self::end_reports`].
    pub fn begin_reports(&self) -> u64 {
        let mut reports = self.reports.lock();
        reports.number += 1;
        reports.number
    }

    /// Takes a report of tunnelled connections. Returns connections without a tunnel that have ended.
    pub fn note_report(&self, report: TunnelReport) -> Vec<ClassLesson> {
        self.reports.lock().latest = Some(Instant::now());
        let mut runtime = self.runtime.lock();
        runtime.set_carriers(report.carriers);
        runtime.note_carried(report.flows);
        runtime.teach(report.lessons);
        runtime.take_lessons(report.is_first)
    }

    /// Forgets all tunnelled connections, since the process that tunnels them has ended, unless another one reports.
    pub fn end_reports(&self, number: u64) {
        let reports = self.reports.lock();
        if reports.number == number {
            self.runtime.lock().forget_carried();
        }
    }

    /// Takes no carrier for ready if the process that tunnels connections has not reported for some seconds.
    fn check_reports(&self) {
        let reports = self.reports.lock();
        if reports.latest.is_some_and(|at| at.elapsed() > SILENT) {
            self.runtime.lock().set_carriers(BTreeMap::new());
        }
    }

    /// Returns why a TCP connection uses its congestion control or carrier. `ends` are its two addresses, in any order.
    ///
    /// # Errors
    /// The connection is unknown, or the kernel's records cannot be read.
    pub fn explain_connection(&self, ends: [SocketAddr; 2]) -> anyhow::Result<GraftConnectionStatus> {
        let mut found = self.runtime.lock().explain_connection(ends)?;
        // A tunnelled connection that has just begun is in the next report.
        for _ in 0..REPORTS_AWAITED {
            if found.is_some() || self.reports.lock().latest.is_none() {
                break;
            }
            thread::sleep(REPORT);
            found = self.runtime.lock().explain_connection(ends)?;
        }
        let [local, remote] = ends;
        found.with_context(|| {
            format!(
                "nothing is known of a connection {local}-{remote}: no rule with select and no carrier covers it, or it ended long ago"
            )
        })
    }

    /// Does the periodic work of the runtime, about once a second.
    pub fn tick(&self) {
        self.check_reports();
        if let Err(error) = self.runtime.lock().tick() {
            warn!("cannot read the sockets of this host: {error}");
        }
    }

    /// Writes the learned model for choosing congestion controls to its file, if the settings name one and the model
    /// has changed.
    pub fn keep(&self) {
        let (path, learned) = {
            let runtime = self.runtime.lock();
            let Some(path) = runtime.settings().learned.clone() else {
                *self.not_kept.lock() = None;
                return;
            };
            (path, runtime.learned())
        };
        let mut kept = self.kept.lock();
        let what = (path, learned);
        if kept.as_ref() == Some(&what) {
            return;
        }
        let done = what.1.write(&what.0);
        let trouble = done.err().map(|error| format!("the learned state cannot be written: {error}"));
        // If the learned model could not be written, `kept` stays `None`, so that the next call tries again.
        *kept = Some(what).filter(|_| trouble.is_none());
        trouble.iter().for_each(|trouble| warn!("{trouble}"));
        *self.not_kept.lock() = trouble;
    }

    /// Reads the learned model for choosing congestion controls that an earlier process has written.
    fn recall(&self) {
        let mut runtime = self.runtime.lock();
        let Some(path) = runtime.settings().learned.clone() else { return };
        match Learned::read(&path) {
            Ok(None) => {}
            Ok(Some(learned)) => runtime.recall(&learned),
            Err(error) => {
                let trouble = format!("the learned state cannot be read: {error}");
                warn!("{trouble}");
                *self.not_kept.lock() = Some(trouble);
            }
        }
    }

    /// Reads the settings again, and applies either all of them or none.
    pub fn read_settings(&self) -> anyhow::Result<()> {
        let mut runtime = self.runtime.lock();
        let settings = usable(&self.config, &self.interfaces);
        settings.and_then(|settings| Ok(runtime.apply(settings.in_place)?))?;
        info!("the new settings are in force");
        Ok(())
    }

    /// Loads a graft that the settings do not load, with these values of its parameters.
    pub fn load(&self, graft: &str, parameters: BTreeMap<String, u64>) -> anyhow::Result<LoadTimes> {
        let timing = self.runtime.lock().load(graft, parameters)?;
        info!(graft, "the graft was loaded");
        let us = |time: Duration| time.as_micros().try_into().unwrap_or(u64::MAX);
        Ok(LoadTimes { open_us: us(timing.open), load_us: us(timing.load), attach_us: us(timing.attach) })
    }

    /// Unloads a graft. Connections that use it keep it until they close.
    pub fn unload(&self, graft: &str) -> anyhow::Result<()> {
        self.runtime.lock().unload(graft)?;
        info!(graft, "the graft was unloaded");
        Ok(())
    }

    /// Moves live connections from one graft to another, which is loaded if necessary with these values of its
    /// parameters.
    pub fn swap(
        &self,
        from: &str,
        to: &str,
        parameters: BTreeMap<String, u64>,
    ) -> anyhow::Result<SwapAnswer> {
        let done = self.runtime.lock().swap(from, to, parameters)?;
        info!(from, to, connections = done.changed.connections, "connections were moved to another graft");
        Ok(SwapAnswer {
            connections: done.changed.connections,
            listeners: done.changed.listeners,
            refused: done.changed.refused,
            walk_us: done.walk_us,
        })
    }

    /// Returns the problems that need the operator's attention.
    fn trouble(&self) -> Vec<String> {
        let mut trouble = self.runtime.lock().trouble();
        trouble.extend(self.not_kept.lock().clone());
        trouble
    }

    /// Explains which graft the TCP connections with a peer use, and why.
    pub fn explain_peer(&self, peer: IpAddr) -> anyhow::Result<PeerExplanation> {
        Ok(self.runtime.lock().explain_peer(peer)?)
    }

    /// Returns the status of this process.
    pub fn status(&self) -> anyhow::Result<Status> {
        let status = self.runtime.lock().status()?;
        Ok(Status { trouble: self.trouble(), log_lines_dropped: log::dropped(), ..status })
    }

    /// Returns the measured paths to peers.
    pub fn paths(&self) -> Vec<status::PeerPath> {
        self.runtime.lock().paths()
    }
}
