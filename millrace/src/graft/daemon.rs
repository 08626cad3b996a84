//! A runtime of grafts that goes on, and its settings.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use millrace_bpf::{clock, graft::remove_leftovers};
use millrace_graft::{
    Runtime, Settings,
    status::{Path, Reload, Status, Why},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::{http::access, log};

pub struct Setup {
    pub config: PathBuf,
    pub socket: PathBuf,
    pub socket_group: Option<String>,
    pub http: Option<std::net::SocketAddr>,
    pub http_access: access::Flags,
}

pub struct Daemon {
    config: PathBuf,
    runtime: Mutex<Runtime>,
    /// The latest; at first what it was started with.
    reloaded: Mutex<Reload>,
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
        let runtime = Runtime::start(Settings::read(&setup.config)?)?;
        Ok(Self {
            config: setup.config.clone(),
            runtime: Mutex::new(runtime),
            reloaded: Mutex::new(Reload { time_s: unix_time(), error: None }),
        })
    }

    pub fn tick(&self) {
        if let Err(error) = self.runtime.lock().tick() {
            warn!("the sockets cannot be read: {error}");
        }
    }

    /// Reads the settings again; all or nothing.
    pub fn reload(&self) -> anyhow::Result<()> {
        let mut runtime = self.runtime.lock();
        let done = Settings::read(&self.config).and_then(|settings| runtime.apply(settings));
        let error = done.as_ref().err().map(ToString::to_string);
        *self.reloaded.lock() = Reload { time_s: unix_time(), error };
        done?;
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
        let done = self.runtime.lock().swap(from, to, parameters)?;
        info!(from, to, connections = done.changed.connections, "swapped");
        Ok(Swapped {
            connections: done.changed.connections,
            listeners: done.changed.listeners,
            refused: done.changed.refused,
            walk_us: done.walk_us,
        })
    }

    pub fn status(&self) -> anyhow::Result<Status> {
        let status = self.runtime.lock().status()?;
        Ok(Status {
            trouble: self.trouble(),
            reload: Some(self.reloaded.lock().clone()),
            log_lines_dropped: log::dropped(),
            ..status
        })
    }

    pub fn trouble(&self) -> Vec<String> {
        let mut trouble = self.runtime.lock().trouble();
        let failed = self.reloaded.lock().error.clone();
        trouble.extend(
            failed.map(|error| format!("the latest reload failed, the settings before stay: {error}")),
        );
        trouble
    }

    pub fn why(&self, peer: IpAddr) -> anyhow::Result<Why> {
        Ok(self.runtime.lock().why(peer)?)
    }

    pub fn paths(&self) -> Vec<Path> {
        self.runtime.lock().paths()
    }
}

/// Seconds since 1970.
fn unix_time() -> f64 {
    clock::unix_ns() as f64 / 1e9
}
