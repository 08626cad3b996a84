//! A gate that runs, and its policy.

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::Context as _;
use millrace_daemon::{
    daemon::{Observed, Reloads},
    log,
};
use millrace_gate::{
    Gate, Mode, Policy,
    status::{self, Recent, Status},
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::{info, warn};

use super::{lists::Lists, metrics, watch::Watch};

/// Addresses of clients that all connections to the socket together may count connections of, for each client that the gate has room for:
/// several addresses may be one client.
const ADDRESSES_FACTOR: usize = 16;

/// Where the policy comes from.
#[derive(Clone, Debug)]
pub enum Source {
    File(PathBuf),
    /// Made of flags.
    Text(String),
}

impl Source {
    /// The policy and its text.
    pub fn read(&self) -> anyhow::Result<(Policy, String)> {
        match self {
            Self::File(path) => {
                let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
                Ok((Policy::parse_file(&text, path)?, text))
            }
            Self::Text(text) => Ok((Policy::parse(text)?, text.clone())),
        }
    }
}

pub struct Setup {
    pub source: Source,
    pub dry_run: bool,
    pub interfaces: Vec<String>,
    pub mode: Mode,
}

pub struct Daemon {
    pub gate: Gate,
    source: Source,
    pub dry_run: bool,
    /// Of the policy in force.
    text: Mutex<String>,
    pub reloads: Reloads,
    pub lists: Lists,
    watch: Mutex<Watch>,
    /// Places for clients whose connections are counted, shared by all connections to the socket: one may be a server's for its whole life.
    pub places: Arc<Semaphore>,
    recent: Mutex<Recent>,
    since: Instant,
}

impl Daemon {
    pub fn start(setup: &Setup) -> anyhow::Result<Self> {
        let (policy, text) = setup.source.read()?;
        warn_of(&policy);
        let policy = if setup.dry_run { policy.dry_run() } else { policy };
        let gate = Gate::new(&policy)?;
        for name in &setup.interfaces {
            gate.attach(name, setup.mode)?;
        }
        let places = usize::try_from(gate.load().max_clients).unwrap_or(usize::MAX);
        let places = places.saturating_mul(ADDRESSES_FACTOR).min(Semaphore::MAX_PERMITS);
        Ok(Self {
            places: Arc::new(Semaphore::new(places)),
            gate,
            source: setup.source.clone(),
            dry_run: setup.dry_run,
            text: Mutex::new(text),
            reloads: Reloads::default(),
            lists: Lists::default(),
            watch: Mutex::default(),
            recent: Mutex::default(),
            since: Instant::now(),
        })
    }

    pub fn tick(&self) {
        self.watch.lock().tick(&self.gate).into_iter().for_each(|it| self.recent.lock().push(it));
        for (scope, prefix) in self.lists.expire(&self.gate, Instant::now()) {
            info!(%prefix, scope, "neither blocked nor allowed any more: its time is over");
        }
    }

    /// Reads the policy again; all or nothing.
    pub fn read_policy(&self) -> anyhow::Result<()> {
        // Held from the file to the kernel: of two reloads the later one's is in force.
        let mut current = self.text.lock();
        let (policy, text) = self.source.read()?;
        warn_of(&policy);
        let policy = if self.dry_run { policy.dry_run() } else { policy };
        self.gate.set_policy(&policy)?;
        *current = text;
        info!("new policy");
        Ok(())
    }

    pub fn policy_text(&self) -> String {
        self.text.lock().clone()
    }
}

impl Observed for Daemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        let policy = match &self.source {
            Source::File(path) => path.display().to_string(),
            Source::Text(_) => String::new(),
        };
        let mut status = Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            dry_run: self.dry_run,
            policy,
            recent: self.recent.lock().all(),
            log_lines_dropped: log::dropped(),
            ..status::of(&self.gate)?
        };
        if matches!(self.source, Source::File(_)) {
            status.trouble.extend(self.reloads.trouble("policy before stays"));
            status.reload = Some(self.reloads.latest());
        }
        self.lists.tell_ends(&mut status.listed, Instant::now());
        Ok(status)
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    /// A policy that cannot be read is no trouble of the gate's: the one before does its work.
    fn is_well(&self) -> bool {
        status::trouble(&self.gate).is_empty()
    }
}

fn warn_of(policy: &Policy) {
    policy.warnings().into_iter().for_each(|warning| warn!("{warning}"));
}
