//! A runtime of grafts that goes on, and its settings.

use std::{
    collections::{BTreeMap, HashSet},
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use millrace_daemon::{
    daemon::{Observed, Reloads},
    log,
};
use millrace_graft::{
    Identity, Learned, Runtime, Settings, Side,
    settings::Agreement,
    status::{self, Connection, Status, Why},
};
use millrace_graft_kernel::{Pins, gateway, hook::Lead, remove_leftovers};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    carry::Broker,
    metrics,
    probe::{Probed, Probes, Target},
    tls::Tls,
};

pub struct Setup {
    pub config: PathBuf,
    /// Behind which are hosts whose connections are carried, besides those of the settings.
    pub interfaces: Vec<String>,
    /// What is done stays when the process ends.
    pub persist: bool,
    /// Where; and where an earlier process may have left something.
    pub pins: Option<PathBuf>,
}

pub struct Daemon {
    config: PathBuf,
    interfaces: Vec<String>,
    runtime: Mutex<Runtime>,
    pub reloads: Reloads,
    /// The runtime's revision.
    changes: watch::Sender<u64>,
    /// Grafts that peers gave and that were not usable: they are not asked for again.
    unfetched: Mutex<HashSet<Identity>>,
    /// Why there are no agreements, if there should be.
    disagrees: Mutex<Option<String>>,
    probes: Probes,
    broker: Mutex<Option<Broker>>,
    /// Why there is none, if there should be.
    no_broker: Mutex<Option<String>>,
    /// What was learned, as it lies in its file.
    kept: Mutex<Option<(PathBuf, Learned)>>,
    /// Why it does not, if it should.
    not_kept: Mutex<Option<String>>,
}

/// How long the steps of loading took.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Loaded {
    pub open_us: u64,
    pub load_us: u64,
    pub attach_us: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Swapped {
    pub connections: u64,
    pub listeners: u64,
    pub refused: u64,
    pub walk_us: u64,
}

impl Daemon {
    /// After the socket: it says that there is no other whose grafts would be taken for leftovers.
    pub fn start(setup: &Setup) -> anyhow::Result<Self> {
        match remove_leftovers()? {
            0 => {}
            count => warn!(count, "congestion controls that a killed process left were taken back"),
        }
        match gateway::remove_leftovers(None) {
            Ok(0) => {}
            Ok(count) => warn!(count, "rules and routes that a killed gateway left were taken back"),
            Err(error) => warn!("it is not known whether a killed gateway has left rules or routes: {error}"),
        }
        let settings = usable(&setup.config, &setup.interfaces)?;
        let pins = setup.pins.as_deref().map(Pins::at);
        let runtime = Runtime::start_after(settings, pins.as_ref(), setup.persist)?;
        let (changes, _) = watch::channel(runtime.revision());
        let daemon = Self {
            config: setup.config.clone(),
            interfaces: setup.interfaces.clone(),
            runtime: Mutex::new(runtime),
            reloads: Reloads::default(),
            changes,
            unfetched: Mutex::default(),
            disagrees: Mutex::default(),
            probes: Probes::default(),
            broker: Mutex::default(),
            no_broker: Mutex::default(),
            kept: Mutex::default(),
            not_kept: Mutex::default(),
        };
        daemon.recall();
        Ok(daemon)
    }

    /// Whatever the runtime does takes no more than some 10 ms.
    pub fn with<T>(&self, work: impl FnOnce(&mut Runtime) -> T) -> T {
        tokio::task::block_in_place(|| work(&mut self.runtime.lock()))
    }

    /// Its revision, whenever that changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub fn agreement(&self) -> Option<Agreement> {
        self.runtime.lock().agreement().cloned()
    }

    /// Whether there are no agreements although the settings have some.
    pub fn set_disagreement(&self, reason: Option<String>) {
        *self.disagrees.lock() = reason;
    }

    /// Begins, goes on, or ends, as the settings say. Has to be called from the runtime of tasks.
    pub fn follow_carry(&self) -> anyhow::Result<()> {
        let (settings, cgroup, shared, kinds) = {
            let mut runtime = self.runtime.lock();
            let (shared, kinds) = (runtime.share()?, runtime.kinds());
            (runtime.settings().clone(), runtime.cgroup().to_owned(), shared, kinds)
        };
        let mut broker = self.broker.lock();
        let done = match &*broker {
            Some(running) if settings.carry.is_some() => running.apply(&settings),
            _ => {
                *broker = None;
                self.runtime.lock().forget_carried();
                Broker::start(&settings, &cgroup, &shared, kinds).map(|started| *broker = started)
            }
        };
        *self.no_broker.lock() = done.as_ref().err().map(|error| format!("nothing is carried: {error:#}"));
        done
    }

    pub fn hook(&self, cgroup: &Path, side: Side, leads: Vec<Lead>) -> anyhow::Result<()> {
        match &*self.broker.lock() {
            Some(broker) => broker.hook(cgroup, side, leads),
            None => bail!("this daemon carries nothing: its settings have no [carry]"),
        }
    }

    pub fn may_fetch(&self, identity: Identity) -> bool {
        !self.unfetched.lock().contains(&identity)
    }

    pub fn cannot_fetch(&self, identity: Identity) {
        self.unfetched.lock().insert(identity);
    }

    /// What has come of connections is taken into account for those that follow.
    pub fn learn(&self) {
        if !self.runtime.lock().selects() {
            return;
        }
        self.hear_broker();
        if let Err(error) = self.runtime.lock().learn() {
            warn!("what came of connections cannot be learned from: {error}");
        }
    }

    /// Under both locks: who comes later has told the runtime of nothing that was before.
    fn hear_broker(&self) {
        let broker = self.broker.lock();
        let mut runtime = self.runtime.lock();
        let (told, warmth) = broker.as_ref().map(|it| (it.take_told(), it.warmth())).unwrap_or_default();
        runtime.set_carriers(warmth);
        runtime.note_carried(told);
    }

    pub fn why_connection(&self, ends: [SocketAddr; 2]) -> anyhow::Result<Connection> {
        self.hear_broker();
        let found = self.runtime.lock().why_connection(ends)?;
        let [local, remote] = ends;
        found.with_context(|| {
            format!(
                "nothing is known of a connection {local}-{remote}: no rule with select, and no carrier, has it, or it ended long ago"
            )
        })
    }

    pub fn tick(&self) {
        self.hear_broker();
        let mut runtime = self.runtime.lock();
        if let Err(error) = runtime.tick() {
            warn!("the sockets cannot be read: {error}");
        }
        // A cgroup that a rule names has come or gone: agreements are on the rules before.
        let revision = runtime.revision();
        self.changes.send_if_modified(|known| std::mem::replace(known, revision) != revision);
        for (peer, report) in self.probes.take_fresh() {
            runtime.note_probe(peer, report);
        }
        self.probes.start_due(runtime.probes());
        let leads = runtime.settings().leads();
        drop(runtime);
        if let Some(broker) = &*self.broker.lock() {
            broker.tick(leads);
        }
    }

    /// What is learned outlasts this process, if the settings have a file for it. Nothing is written where nothing is new.
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
        let trouble = done.err().map(|error| format!("what is learned cannot be kept: {error}"));
        *kept = Some(what).filter(|_| trouble.is_none());
        trouble.iter().for_each(|trouble| warn!("{trouble}"));
        *self.not_kept.lock() = trouble;
    }

    /// What an earlier process has kept.
    fn recall(&self) {
        let mut runtime = self.runtime.lock();
        let Some(path) = runtime.settings().learned.clone() else { return };
        match Learned::read(&path) {
            Ok(None) => {}
            Ok(Some(learned)) => runtime.recall(&learned),
            Err(error) => {
                let trouble = format!("what was learned before is not known: {error}");
                warn!("{trouble}");
                *self.not_kept.lock() = Some(trouble);
            }
        }
    }

    /// Reads the settings again; all or nothing.
    pub fn read_settings(&self) -> anyhow::Result<()> {
        let mut runtime = self.runtime.lock();
        let settings = usable(&self.config, &self.interfaces);
        let done = settings.and_then(|settings| Ok(runtime.apply(settings)?));
        self.changes.send_replace(runtime.revision());
        done?;
        self.unfetched.lock().clear();
        info!("new settings");
        Ok(())
    }

    pub fn load(&self, graft: &str, parameters: BTreeMap<String, u64>) -> anyhow::Result<Loaded> {
        let timing = self.runtime.lock().load(graft, parameters)?;
        info!(graft, "loaded");
        let us = |time: std::time::Duration| time.as_micros().try_into().unwrap_or(u64::MAX);
        Ok(Loaded { open_us: us(timing.open), load_us: us(timing.load), attach_us: us(timing.attach) })
    }

    pub fn unload(&self, graft: &str) -> anyhow::Result<()> {
        self.runtime.lock().unload(graft)?;
        info!(graft, "unloaded");
        Ok(())
    }

    pub fn swap(&self, from: &str, to: &str, parameters: BTreeMap<String, u64>) -> anyhow::Result<Swapped> {
        let mut runtime = self.runtime.lock();
        let done = runtime.swap(from, to, parameters)?;
        self.changes.send_replace(runtime.revision());
        drop(runtime);
        info!(from, to, connections = done.changed.connections, "swapped");
        Ok(Swapped {
            connections: done.changed.connections,
            listeners: done.changed.listeners,
            refused: done.changed.refused,
            walk_us: done.walk_us,
        })
    }

    pub fn trouble(&self) -> Vec<String> {
        let mut trouble = self.runtime.lock().trouble();
        trouble.extend(self.disagrees.lock().clone());
        trouble.extend(self.no_broker.lock().clone());
        trouble.extend(self.not_kept.lock().clone());
        trouble.extend(self.broker.lock().as_ref().and_then(Broker::trouble));
        trouble.extend(self.reloads.trouble("settings before stay"));
        trouble
    }

    pub fn why(&self, peer: IpAddr) -> anyhow::Result<Why> {
        let why = self.runtime.lock().why(peer)?;
        let carrier = self.broker.lock().as_ref().and_then(|broker| broker.carrier_to(peer));
        Ok(Why { carrier, ..why })
    }

    pub fn probe(&self, target: Target, period: Duration, duration: Duration) -> anyhow::Result<()> {
        self.probes.start(target, period, duration)?;
        info!(peer = %target.peer, by = target.by(), "probing");
        Ok(())
    }

    pub fn probed(&self) -> Vec<Probed> {
        let runtime = self.runtime.lock();
        self.probes.all(|rtt_us| runtime.class_of(rtt_us))
    }

    pub fn paths(&self) -> Vec<status::Path> {
        self.runtime.lock().paths()
    }
}

impl Observed for Daemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        self.hear_broker();
        let status = self.runtime.lock().status()?;
        let carry = self.broker.lock().as_ref().map(Broker::status);
        Ok(Status {
            trouble: self.trouble(),
            reload: Some(self.reloads.latest()),
            log_lines_dropped: log::dropped(),
            carry,
            ..status
        })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?, self.probed())?)
    }

    fn is_well(&self) -> bool {
        self.trouble().is_empty()
    }
}

/// What can be wrong with keys and certificates is wrong before anything changes.
pub fn usable(config: &Path, interfaces: &[String]) -> anyhow::Result<Settings> {
    let mut settings = Settings::read(config)?;
    settings.behind(interfaces)?;
    settings.agreement.as_ref().map(Tls::new).transpose()?;
    Ok(settings)
}
