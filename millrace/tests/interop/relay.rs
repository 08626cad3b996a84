//! Runs a relay of ours in the test's process.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use millrace_lab::lab::LabNode;
use millrace_moq::{Namespace, TrackName};
use millrace_relay_daemon::{
    config::{Config, Settings},
    server::{RelayIdentity, RunningServer},
    status::{Status, StatusSource},
    tls,
};
use millrace_testkit::wait_until;
use tokio::runtime::Runtime;

use super::{
    clip::GROUP,
    site::{self, RelayHost, RelaySite, until_forwarded},
};

/// Name of the broadcast that these tests publish.
pub const BROADCAST: &str = "live/cam";

pub struct InteropRelay {
    server: Arc<RunningServer>,
    runtime: Runtime,
    v4: Ipv4Addr,
    /// Keeps the test's network namespaces until the relay is dropped.
    site: Option<Arc<RelaySite>>,
}

impl InteropRelay {
    /// Starts a relay that listens on all IPv4 addresses of its host: a network namespace, or this machine if the tests
    /// forward in userspace.
    pub fn start() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        let site = RelaySite::of_this_test();
        let mut relay = Self::on(site.host(), change);
        relay.site = Some(site);
        relay
    }

    /// Starts a relay on a node of the lab (a network namespace).
    pub fn inside(node: &LabNode) -> Self {
        Self::inside_with(node, |_| {})
    }

    pub fn inside_with(node: &LabNode, change: impl FnOnce(&mut Config)) -> Self {
        Self::on(RelayHost(Some(node)), change)
    }

    fn on(host: RelayHost<'_>, change: impl FnOnce(&mut Config)) -> Self {
        site::log();
        let runtime = Runtime::new().unwrap();
        let listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), host.port(0));
        // How late media arrives depends on the machine's load, so the relay drops none for being late. Tests of late
        // media set `max_delay` themselves.
        let max_delay = Some("off".parse().unwrap());
        let listen = Some(vec![listen.into()]);
        let settings = Settings { listen, public: Some(true), max_delay, ..Settings::default() };
        let mut config = Config::new(settings, None).unwrap();
        host.configure(&mut config);
        change(&mut config);
        let certificate = tls::identity(&config.identity, vec!["localhost".into()]).unwrap();
        let identity = RelayIdentity::from_certificate(certificate);
        let server = host.enter(|| {
            let _inside = runtime.enter();
            Arc::new(RunningServer::start(config, identity).unwrap())
        });
        Self { server, runtime, v4: host.v4(), site: None }
    }

    pub fn url(&self) -> String {
        self.url_at(self.v4)
    }

    /// Returns the URL for WebTransport.
    pub fn web_url(&self) -> String {
        self.url().replace("moqt:", "https:")
    }

    pub fn url_at(&self, host: impl std::fmt::Display) -> String {
        format!("moqt://{host}:{}", self.server.local_addrs()[0].port())
    }

    /// Closes every session of the relay.
    pub fn stop(&self) {
        self.runtime.block_on(self.server.stop());
    }

    pub fn status(&self) -> Status {
        self.server.status()
    }

    pub fn assert_forwarded(&self) {
        until_forwarded(|| self.status());
    }

    /// Waits until `wanted` is true of the relay's status, and returns it.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        wait_until(what, || self.status(), wanted)
    }

    pub fn until_announced(&self) {
        self.until("a publisher", |status| status.sessions.iter().any(|session| session.publisher));
    }

    pub fn until_subscribed(&self, track: &str, subscribers: u64) {
        let name = name(track);
        self.until(&format!("{subscribers} of {name}"), |status| {
            status.tracks.iter().any(|track| track.name == name && track.subscribers == subscribers)
        });
    }

    pub fn until_published(&self, track: &str) {
        let name = name(track);
        self.until(&name, |status| {
            status.tracks.iter().any(|track| track.name == name && track.publishers == 1)
        });
    }

    /// Waits until this number of objects has arrived, and all of them were delivered to their subscribers.
    pub fn until_delivered(&self, objects: usize) {
        self.until(&format!("{objects} delivered"), |status| {
            let idle = status.sessions.iter().all(|session| session.pending == 0 && session.in_flight == 0);
            idle && status.totals.objects_received >= objects as u64
        });
    }

    /// Waits until the largest object of the track at the relay is the one with this frame of the video.
    pub fn until_largest(&self, track: &str, frame: usize) {
        let name = name(track);
        let at = ((frame / GROUP) as u64, (frame % GROUP) as u64);
        self.until(&format!("{name} at {at:?}"), |status| {
            let found = status.tracks.iter().find(|track| track.name == name);
            found.is_some_and(|track| track.largest == Some(at))
        });
    }
}

fn name(track: &str) -> String {
    TrackName::new(Namespace::from_path(BROADCAST).unwrap(), track.to_owned()).unwrap().to_string()
}
