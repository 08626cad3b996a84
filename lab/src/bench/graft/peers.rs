//! Two daemons that are each other's peers, and applications that ask them for sessions.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use millrace_graft::message::{Error, Preconnection, Session, Why};

use super::daemon::Daemon;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::lab::Node;

const START: Duration = Duration::from_secs(60);
const TURN: Duration = Duration::from_millis(20);

pub struct Peers {
    directory: PathBuf,
    pub near: Daemon,
    _far: Daemon,
}

impl Peers {
    /// With grafts and parameters, and lines of the peer, in the words of settings.
    pub fn start(site: &Site, grafts: &str, more: &str) -> anyhow::Result<Self> {
        let (near, far) = (site.relay()?, site.subscribers()?);
        let text = |node: &Node, other: &Node| -> anyhow::Result<String> {
            let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
            Ok(format!(
                "interface = [{device:?}]\n{grafts}\n[[peer]]\nname = \"other\"\nlocal = \"{}\"\nremote = \"{}\"\n\
                 key-file = \"key\"\nports = \"41000-41012\"\n{more}",
                node.addr_v4(),
                other.addr_v4(),
            ))
        };
        Ok(Self {
            directory: site.directory().to_owned(),
            near: Daemon::start(site, "near", near, &text(near, far)?)?,
            _far: Daemon::start(site, "far", far, &text(far, near)?)?,
        })
    }

    /// The one or the other: `near`, `far`.
    pub fn asks(&self, name: &str) -> Preconnection {
        Preconnection::new("other", "bench").socket(self.directory.join(format!("{name}.messages")))
    }

    /// As soon as the daemons know each other, and have keys.
    pub fn opened(&self, services: &[&str]) -> Result<Session, Error> {
        let begin = Instant::now();
        loop {
            let asks = services.iter().fold(self.asks("near"), |asks, service| asks.service(*service));
            match asks.initiate() {
                Err(Error::Refused { why, reason }) if why != Why::Impossible && begin.elapsed() < START => {
                    tracing::debug!("not yet: {reason}");
                    std::thread::sleep(TURN);
                }
                done => return done,
            }
        }
    }
}
