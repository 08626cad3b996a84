//! A running gate and its policy.

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::Context as _;
use millrace_daemon::{
    daemon::{Observed, Reloads},
    log,
};
use millrace_gate::{
    Gate, Policy, XdpMode,
    status::{self, Recent, Status},
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tracing::{info, warn};

use super::{lists::Lists, metrics, watch::GateWatch};

/// Largest number of client addresses whose connections are counted over the control socket, as a multiple of the
/// gate's largest number of clients. A client is a network (such as an IPv6 /64), so it may have several addresses.
const ADDRESSES_FACTOR: usize = 16;

/// The source of the policy.
#[derive(Clone, Debug)]
pub enum PolicySource {
    /// A policy file.
    File(PathBuf),
    /// The text of a policy, which was made from command-line flags.
    Text(String),
}

impl PolicySource {
    /// Reads the policy and its text.
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

/// Settings of the daemon.
pub struct GateSetup {
    /// The source of the policy.
    pub source: PolicySource,
    /// True if all rules only count packets and refuse none.
    pub dry_run: bool,
    /// Names of the interfaces to attach to.
    pub interfaces: Vec<String>,
    /// XDP mode in which the gate is attached.
    pub mode: XdpMode,
}

/// A running gate with its policy and lists.
pub struct GateDaemon {
    /// The gate's programs and maps in the kernel.
    pub gate: Gate,
    source: PolicySource,
    /// True if all rules only count packets and refuse none.
    pub dry_run: bool,
    /// The text of the policy in force.
    text: Mutex<String>,
    /// Numbers of successful and failed reloads of the policy.
    pub reloads: Reloads,
    /// List entries that were added at run time.
    pub lists: Lists,
    watch: Mutex<GateWatch>,
    /// Limits for how many client addresses servers can count connections over the control socket. Each connection to
    /// the socket takes a permit of the semaphore per client address.
    pub places: Arc<Semaphore>,
    recent: Mutex<Recent>,
    since: Instant,
}

impl GateDaemon {
    /// Loads the gate and attaches it to the interfaces.
    pub fn start(setup: &GateSetup) -> anyhow::Result<Self> {
        let (policy, text) = setup.source.read()?;
        warn_of(&policy);
        let policy = if setup.dry_run { policy.dry_run() } else { policy };
        let gate = Gate::new(&policy)?;
        for name in &setup.interfaces {
            gate.attach(name, setup.mode)?;
        }
        let places = usize::try_from(gate.load().max_clients).unwrap_or(usize::MAX);
        // A semaphore with more permits than its maximum would panic.
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

    /// Logs changes and refused packets, and removes expired list entries. Call it several times a second.
    pub fn tick(&self) {
        self.watch.lock().tick(&self.gate).into_iter().for_each(|it| self.recent.lock().push(it));
        for (scope, prefix) in self.lists.expire(&self.gate, Instant::now()) {
            info!(%prefix, scope, "removed an expired entry from the gate's block or allow list");
        }
    }

    /// Reads the policy again and replaces the old one as a whole. On an error, the old policy stays in force.
    pub fn read_policy(&self) -> anyhow::Result<()> {
        // The lock is held while the file is read and the kernel's maps are written, so that the later of two reloads
        // wins.
        let mut current = self.text.lock();
        let (policy, text) = self.source.read()?;
        warn_of(&policy);
        let policy = if self.dry_run { policy.dry_run() } else { policy };
        self.gate.set_policy(&policy)?;
        // The text changes only after the kernel has accepted the policy, so it is always that of the policy in force.
        *current = text;
        info!("the gate's new policy is in force");
        Ok(())
    }

    /// Returns the text of the policy in force.
    pub fn policy_text(&self) -> String {
        self.text.lock().clone()
    }
}

impl Observed for GateDaemon {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        let policy = match &self.source {
            PolicySource::File(path) => path.display().to_string(),
            PolicySource::Text(_) => String::new(),
        };
        let mut status = Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            dry_run: self.dry_run,
            policy,
            recent: self.recent.lock().all(),
            log_lines_dropped: log::dropped(),
            ..status::read_status(&self.gate)?
        };
        // A policy from command-line flags never changes, so only a policy file has reloads to report.
        if matches!(self.source, PolicySource::File(_)) {
            status.trouble.extend(self.reloads.trouble("policy before stays"));
            status.reload = Some(self.reloads.latest());
        }
        self.lists.tell_ends(&mut status.listed, Instant::now());
        Ok(status)
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    /// Reports whether the gate works. A policy that cannot be read is no failure, since the previous one stays in
    /// force.
    fn is_well(&self) -> bool {
        status::trouble(&self.gate).is_empty()
    }
}

fn warn_of(policy: &Policy) {
    policy.warnings().into_iter().for_each(|warning| warn!("the gate's policy: {warning}"));
}
