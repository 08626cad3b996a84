//! Two daemons that are peers, and applications that request sessions from them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use millrace_messages::{Error, Preconnection, Session, SessionRefusal};

use super::daemon::DaemonProcess;
use super::line::{self, PEER};
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::LabNode;

const START: Duration = Duration::from_secs(60);
const TURN: Duration = Duration::from_millis(20);

pub struct Peers {
    directory: PathBuf,
    pub near: DaemonProcess,
    _far: DaemonProcess,
}

impl Peers {
    /// Starts both daemons with the given grafts. `more` has further lines of the peer's settings.
    pub fn start(site: &BenchSite, grafts: &str, more: &str) -> anyhow::Result<Self> {
        let near = site.relay()?;
        let far = site.subscribers()?;
        let text = |node: &LabNode, other: &LabNode| -> anyhow::Result<String> {
            let known =
                line::peer(site.directory(), [node, other].map(|it| it.addr_v4().into()), "41000-41012")?;
            let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
            Ok(format!("[sessions]\ninterface = [{device:?}]\n{grafts}\n{known}{more}"))
        };
        Ok(Self {
            directory: site.directory().to_owned(),
            near: DaemonProcess::start(site, "near", near, &text(near, far)?)?,
            _far: DaemonProcess::start(site, "far", far, &text(far, near)?)?,
        })
    }

    /// Returns the connection to the daemon on the host `name`, `near` or `far`, with which an application requests
    /// sessions.
    pub fn asks(&self, name: &str) -> Preconnection {
        Preconnection::new(PEER, "bench").socket(self.directory.join(format!("{name}.messages")))
    }

    /// Opens a session as soon as the daemons have authenticated each other and agreed on keys.
    pub fn opened(&self, services: &[&str]) -> Result<Session, Error> {
        let begin = Instant::now();
        loop {
            let asks = services.iter().fold(self.asks("near"), |asks, service| asks.service(*service));
            match asks.initiate() {
                Err(Error::Refused { why, reason })
                    if why != SessionRefusal::Impossible && begin.elapsed() < START =>
                {
                    tracing::debug!("the session cannot be opened yet, trying again: {reason}");
                    std::thread::sleep(TURN);
                }
                done => return done,
            }
        }
    }
}
