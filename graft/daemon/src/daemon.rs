//! The part of the daemon for TCP: it holds the runtime of grafts, applies the settings, and answers requests.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicUsize},
};

use anyhow::{Context as _, bail};
use millrace_daemon::{
    daemon::{Observed, Reloads},
    log,
};
use millrace_graft::{
    GraftRuntime, Learned, SideSetting,
    settings::{AgreementSettings, DaemonSettings},
    status::{self, GraftConnectionStatus, PeerExplanation, Status},
};
use millrace_graft_kernel::{PinDirectory, gateway, hook::RedirectRule, remove_leftovers};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{carry::TunnelBroker, metrics, tls::Tls};

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

/// The worker process for TCP: the runtime of grafts, the tunnel broker, and the settings.
///
/// [`Self::start`] loads the grafts and rules of the settings, and [`Self::follow_carry`] starts the tunnel broker.
/// From then on, the process calls [`Self::tick`] about once a second, [`Self::learn`] ten times a second and
/// [`Self::keep`] once a minute. [`Self::read_settings`] replaces the runtime's settings. The tasks that watch
/// [`Self::changes`] then call [`Self::follow_carry`], so that the broker follows the runtime. A task that needs both
/// locks takes the broker's before the runtime's.
pub struct GraftDaemon {
    config: PathBuf,
    interfaces: Vec<String>,
    runtime: Mutex<GraftRuntime>,
    /// Results of reading the settings, for the status.
    pub reloads: Reloads,
    /// Channel that sends the runtime's revision, so that tasks learn of changed rules.
    changes: watch::Sender<u64>,
    /// Number of connections to the process that negotiates agreements.
    pub links: Arc<AtomicUsize>,
    broker: Mutex<Option<TunnelBroker>>,
    /// Reason why the broker does not run although the settings have [carry].
    no_broker: Mutex<Option<String>>,
    /// The model that chooses congestion controls, as it was last written to its file, with the file's path.
    kept: Mutex<Option<(PathBuf, Learned)>>,
    /// Reason why the learned model could not be read from or written to its file.
    not_kept: Mutex<Option<String>>,
}

/// Durations of the three steps of loading a graft (open the object file, load it into the kernel, attach it), in
/// microseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// Time to open the object file.
    pub open_us: u64,
    /// Time to load the programs into the kernel, which verifies them.
    pub load_us: u64,
    /// Time to register the graft as a congestion control.
    pub attach_us: u64,
}

/// The result of moving live TCP connections to another graft.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SwapAnswer {
    /// Number of connected sockets that were moved.
    pub connections: u64,
    /// Number of listening sockets that were moved.
    pub listeners: u64,
    /// Number of sockets whose change the kernel refused.
    pub refused: u64,
    /// Time for visiting all sockets, in microseconds.
    pub walk_us: u64,
}

impl GraftDaemon {
    /// Starts the daemon. The control socket must be open already, since only one daemon can open it. Grafts in the
    /// kernel are then leftovers of an ended process and may be removed.
    pub fn start(setup: &GraftSetup) -> anyhow::Result<Self> {
        // Kernels before 6.4 keep the congestion controls of a killed process.
        match remove_leftovers()? {
            0 => {}
            count => warn!(count, "removed congestion controls that a killed process had left"),
        }
        match gateway::remove_leftovers(None) {
            Ok(0) => {}
            Ok(count) => warn!(count, "removed rules and routes that a killed gateway had left"),
            Err(error) => warn!("cannot find out whether a killed gateway has left rules or routes: {error}"),
        }
        let settings = usable(&setup.config, &setup.interfaces)?.in_place;
        let pins = setup.pins.as_deref().map(PinDirectory::at);
        let runtime = GraftRuntime::start_after(settings, pins.as_ref(), setup.persist)?;
        let (changes, _) = watch::channel(runtime.revision());
        let daemon = Self {
            config: setup.config.clone(),
            interfaces: setup.interfaces.clone(),
            runtime: Mutex::new(runtime),
            reloads: Reloads::default(),
            changes,
            links: Arc::default(),
            broker: Mutex::default(),
            no_broker: Mutex::default(),
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

    /// Returns the runtime's revision as a value that tasks can watch.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the settings of agreements with peers, or `None` if there are none.
    pub fn agreement(&self) -> Option<AgreementSettings> {
        self.runtime.lock().agreement().cloned()
    }

    /// Starts, updates or ends the broker of tunnelled connections according to the settings. Must be called inside of
    /// a tokio runtime.
    pub fn follow_carry(&self) -> anyhow::Result<()> {
        let (settings, cgroup, shared, kinds) = {
            let mut runtime = self.runtime.lock();
            let shared = runtime.share()?;
            let kinds = runtime.kinds();
            (runtime.settings().clone(), runtime.cgroup().to_owned(), shared, kinds)
        };
        // Lock order: the broker before the runtime. The runtime's lock was released above.
        let mut broker = self.broker.lock();
        let done = match &*broker {
            Some(running) if settings.carry.is_some() => running.apply(&settings),
            _ => {
                // The old broker must have ended before a new one binds its ports.
                *broker = None;
                self.runtime.lock().forget_carried();
                TunnelBroker::start(&settings, &cgroup, &shared, kinds).map(|started| *broker = started)
            }
        };
        *self.no_broker.lock() = done.as_ref().err().map(|error| format!("nothing is carried: {error:#}"));
        done
    }

    /// Adds redirection rules for the processes of a cgroup, until the cgroup is removed or empty.
    ///
    /// # Errors
    /// No tunnel broker runs, or the kernel rejects the hook.
    pub fn hook(&self, cgroup: &Path, side: SideSetting, rules: Vec<RedirectRule>) -> anyhow::Result<()> {
        match &*self.broker.lock() {
            Some(broker) => broker.hook(cgroup, side, rules),
            None => bail!("this daemon carries nothing: its settings have no [carry]"),
        }
    }

    /// Reads the results of connections that have ended, and updates the model that chooses congestion controls for new
    /// connections.
    pub fn learn(&self) {
        if !self.runtime.lock().selects() {
            return;
        }
        self.hear_broker();
        if let Err(error) = self.runtime.lock().learn() {
            warn!("cannot update the selection model from results of connections: {error}");
        }
    }

    /// Passes the broker's events to the runtime. Both locks are held, so that the runtime gets the events in order.
    fn hear_broker(&self) {
        let broker = self.broker.lock();
        let mut runtime = self.runtime.lock();
        let (flows, warmth) = broker.as_ref().map(|it| (it.take_flows(), it.warmth())).unwrap_or_default();
        runtime.set_carriers(warmth);
        runtime.note_carried(flows);
    }

    /// Returns why a TCP connection uses its congestion control or carrier. `ends` are its two addresses, in any order.
    ///
    /// # Errors
    /// The connection is unknown, or the kernel's records cannot be read.
    pub fn explain_connection(&self, ends: [SocketAddr; 2]) -> anyhow::Result<GraftConnectionStatus> {
        self.hear_broker();
        let found = self.runtime.lock().explain_connection(ends)?;
        let [local, remote] = ends;
        found.with_context(|| {
            format!(
                "nothing is known of a connection {local}-{remote}: no rule with select and no carrier covers it, or it ended long ago"
            )
        })
    }

    /// Does the periodic work of the runtime and the tunnel broker, about once a second.
    pub fn tick(&self) {
        self.hear_broker();
        let mut runtime = self.runtime.lock();
        if let Err(error) = runtime.tick() {
            warn!("cannot read the sockets of this host: {error}");
        }
        // Adding or removing a cgroup that a rule names changes the revision, since agreements cover the rules for
        // existing cgroups.
        let revision = runtime.revision();
        // Tasks that watch the runtime's revision wake up only if the revision has changed.
        self.changes.send_if_modified(|known| std::mem::replace(known, revision) != revision);
        let rules = runtime.settings().redirect_rules();
        // The lock order is the broker before the runtime, so the runtime's lock is released first.
        drop(runtime);
        if let Some(broker) = &*self.broker.lock() {
            broker.tick(rules);
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
        let done = settings.and_then(|settings| Ok(runtime.apply(settings.in_place)?));
        self.changes.send_replace(runtime.revision());
        done?;
        info!("the new settings are in force");
        Ok(())
    }

    /// Loads a graft that the settings do not load, with these values of its parameters.
    pub fn load(&self, graft: &str, parameters: BTreeMap<String, u64>) -> anyhow::Result<LoadTimes> {
        let timing = self.runtime.lock().load(graft, parameters)?;
        info!(graft, "the graft was loaded");
        let us = |time: std::time::Duration| time.as_micros().try_into().unwrap_or(u64::MAX);
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
        let mut runtime = self.runtime.lock();
        let done = runtime.swap(from, to, parameters)?;
        self.changes.send_replace(runtime.revision());
        drop(runtime);
        info!(from, to, connections = done.changed.connections, "connections were moved to another graft");
        Ok(SwapAnswer {
            connections: done.changed.connections,
            listeners: done.changed.listeners,
            refused: done.changed.refused,
            walk_us: done.walk_us,
        })
    }

    /// Returns the problems that need the operator's attention.
    pub fn trouble(&self) -> Vec<String> {
        let mut trouble = self.runtime.lock().trouble();
        trouble.extend(self.no_broker.lock().clone());
        trouble.extend(self.not_kept.lock().clone());
        trouble.extend(self.broker.lock().as_ref().and_then(TunnelBroker::trouble));
        trouble
    }

    /// Explains which graft and which carrier the TCP connections with a peer use, and why.
    pub fn explain_peer(&self, peer: IpAddr) -> anyhow::Result<PeerExplanation> {
        let why = self.runtime.lock().explain_peer(peer)?;
        let carrier = self.broker.lock().as_ref().and_then(|broker| broker.carrier_to(peer));
        Ok(PeerExplanation { carrier, ..why })
    }

    /// Returns the measured paths to peers.
    pub fn paths(&self) -> Vec<status::PeerPath> {
        self.runtime.lock().paths()
    }
}

impl Observed for GraftDaemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        self.hear_broker();
        let status = self.runtime.lock().status()?;
        let carry = self.broker.lock().as_ref().map(TunnelBroker::status);
        Ok(Status { trouble: self.trouble(), log_lines_dropped: log::dropped(), carry, ..status })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    fn is_well(&self) -> bool {
        self.trouble().is_empty()
    }
}

/// Reads the settings, and checks keys and certificates before any setting is applied.
pub fn usable(config: &Path, interfaces: &[String]) -> anyhow::Result<DaemonSettings> {
    let mut settings = DaemonSettings::read(config)?;
    settings.in_place.add_gateway_interfaces(interfaces)?;
    settings.in_place.agreement.as_ref().map(Tls::new).transpose()?;
    Ok(settings)
}
