//! A gate that runs, and its policy.

use std::{path::PathBuf, time::Instant};

use anyhow::Context as _;
use millrace_daemon::{daemon::Front, log};
use millrace_gate::{
    Gate, Mode, Policy,
    status::{self, Recent, Reload, Status},
};
use millrace_kernel::clock;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::lists::Lists;
use crate::watch::Watch;

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
    pub front: Front,
}

pub struct Daemon {
    pub gate: Gate,
    source: Source,
    pub dry_run: bool,
    /// Of the policy in force.
    text: Mutex<String>,
    /// The latest; at first what it was started with.
    reloaded: Mutex<Reload>,
    pub lists: Lists,
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
        Ok(Self {
            gate,
            source: setup.source.clone(),
            dry_run: setup.dry_run,
            text: Mutex::new(text),
            reloaded: Mutex::new(Reload { time_s: unix_time(), error: None }),
            lists: Lists::default(),
            recent: Mutex::default(),
            since: Instant::now(),
        })
    }

    pub fn tick(&self, watch: &mut Watch) {
        watch.tick(&self.gate).into_iter().for_each(|it| self.recent.lock().push(it));
        for (scope, prefix) in self.lists.expire(&self.gate, Instant::now()) {
            info!(%prefix, scope, "neither blocked nor allowed any more: its time is over");
        }
    }

    /// Reads the policy again; all or nothing.
    pub fn reload(&self) -> anyhow::Result<()> {
        let done = self.try_reload();
        let error = done.as_ref().err().map(|error| format!("{error:#}"));
        *self.reloaded.lock() = Reload { time_s: unix_time(), error };
        done
    }

    fn try_reload(&self) -> anyhow::Result<()> {
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

    pub fn status(&self) -> anyhow::Result<Status> {
        let policy = match &self.source {
            Source::File(path) => path.display().to_string(),
            Source::Text(_) => String::new(),
        };
        let reload = matches!(self.source, Source::File(_)).then(|| self.reloaded.lock().clone());
        let failed = reload.as_ref().and_then(|reload| reload.error.as_ref());
        let failed =
            failed.map(|error| format!("the latest reload failed, the policy before stays: {error}"));
        let mut status = Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            dry_run: self.dry_run,
            policy,
            recent: self.recent.lock().all(),
            log_lines_dropped: log::dropped(),
            ..status::of(&self.gate)?
        };
        status.trouble.extend(failed);
        status.reload = reload;
        self.lists.tell_ends(&mut status.listed, Instant::now());
        Ok(status)
    }
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    clock::unix_ns() as f64 / 1e9
}

fn warn_of(policy: &Policy) {
    policy.warnings().into_iter().for_each(|warning| warn!("{warning}"));
}
