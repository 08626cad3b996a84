//! A worker process of the daemon, as its requests see it.

use std::{os::fd::OwnedFd, sync::Arc};

use anyhow::{anyhow, bail};
use millrace_daemon::daemon::{Daemon, Observed, Reloads};

use super::control::{GraftAnswer, GraftRequest, Status};

/// A worker process of the daemon.
pub trait WorkerProcess: Send + Sync + Sized + 'static {
    /// Returns this process's contribution to the daemon's status.
    ///
    /// # Errors
    /// The status cannot be read.
    fn share(&self) -> anyhow::Result<Status>;

    /// Returns this process's page of metrics.
    ///
    /// # Errors
    /// This process has none, or its status cannot be read.
    fn page(&self) -> anyhow::Result<String> {
        Err(another())
    }

    /// Answers a request that is for this process. `None` means that the answer has no data.
    ///
    /// # Errors
    /// The request is for another process, or is refused.
    fn answer(&self, _request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        bail!(another())
    }

    /// Reads the settings again. Either all new settings apply, or none does.
    ///
    /// # Errors
    /// The settings are refused.
    fn read_settings(&self) -> anyhow::Result<()>;

    /// Returns the record of the latest reload's outcome.
    fn reloads(&self) -> &Reloads;

    /// Does periodic work, about once a second.
    ///
    /// # Errors
    /// The process cannot continue.
    fn tick(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Takes an end of a connection to the worker process with this name.
    fn linked(self: &Arc<Self>, _name: &str, _partner: OwnedFd) {}
}

/// Returns the error for a request that is for another process.
pub fn another() -> anyhow::Error {
    anyhow!("another part of the daemon serves this request")
}

/// A worker process that answers the requests of its supervisor.
pub struct Served<W>(pub Arc<W>);

impl<W: WorkerProcess> Observed for Served<W> {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        self.0.share()
    }

    fn metrics(&self) -> anyhow::Result<String> {
        self.0.page()
    }

    fn is_well(&self) -> bool {
        self.0.share().is_ok()
    }
}

impl<W: WorkerProcess> Daemon for Served<W> {
    type Request = GraftRequest;
    type Answer = GraftAnswer;
    type Caller = ();

    fn caller(&self) {}

    fn answer(&self, (): &mut (), request: GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
        Ok(match request {
            GraftRequest::Status => Some(GraftAnswer::Status(self.0.share()?.into())),
            GraftRequest::Metrics => Some(GraftAnswer::Metrics(self.0.page()?)),
            GraftRequest::Reload => return self.reload().map(|()| None),
            request => self.0.answer(request)?,
        })
    }

    fn read_settings(&self) -> anyhow::Result<()> {
        self.0.read_settings()
    }

    fn reloads(&self) -> &Reloads {
        self.0.reloads()
    }

    fn tick(&self) -> anyhow::Result<()> {
        self.0.tick()
    }

    fn linked(self: &Arc<Self>, name: &str, partner: OwnedFd) {
        self.0.linked(name, partner);
    }
}
