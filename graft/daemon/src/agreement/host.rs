//! This host, as negotiations of agreements see it.

use std::{
    collections::HashSet,
    os::unix::net::UnixStream,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use millrace_graft::{
    ObjectIdentity, Settings,
    settings::{AgreementSettings, GraftFetch},
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::block_in_place,
};

use crate::link::{GraftsLink, LinkRequest};

/// This host: its settings, and the connection to the worker process that holds its rules.
pub struct AgreementHost {
    settings: Mutex<Settings>,
    /// Connection to the worker process that holds the rules of this host.
    pub link: GraftsLink,
    /// Channel that sends the revision of the rules in force; 0 while the process that holds them does not run.
    changes: watch::Sender<u64>,
    /// Number of hosts that have connected and not shown a known key, and that were not reported yet.
    pub strangers: AtomicU64,
    /// Wakes the task that follows the settings and the rules in force.
    pub news: Notify,
    /// Grafts that were fetched from a peer but could not be loaded on this host. They are not fetched again.
    unfetched: Mutex<HashSet<ObjectIdentity>>,
}

impl AgreementHost {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings: Mutex::new(settings),
            link: GraftsLink::default(),
            changes: watch::Sender::new(0),
            strangers: AtomicU64::new(0),
            news: Notify::new(),
            unfetched: Mutex::default(),
        }
    }

    /// Returns the revision of the rules in force as a value that tasks can watch.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Uses this connection to the process that holds the rules from now on. Agreements that another such process has
    /// put in force have ended with it.
    pub fn renew_link(&self, partner: UnixStream) {
        self.link.renew(partner);
        self.changes.send_replace(0);
        self.news.notify_one();
    }

    /// Reports strangers, asks for the revision of the rules in force, and wakes the tasks that watch it if it has
    /// changed.
    pub fn look(&self) {
        let strangers = self.strangers.swap(0, Relaxed);
        let revision = self.link.revision(strangers).unwrap_or_else(|_| {
            self.strangers.fetch_add(strangers, Relaxed);
            0
        });
        self.changes.send_if_modified(|known| std::mem::replace(known, revision) != revision);
    }

    /// Returns a copy of the settings in force.
    pub fn settings(&self) -> Settings {
        self.settings.lock().clone()
    }

    /// Replaces the settings.
    pub fn set_settings(&self, settings: Settings) {
        *self.settings.lock() = settings;
        // A graft that this host could not use may be usable with the new settings.
        self.unfetched.lock().clear();
        self.news.notify_one();
    }

    /// Returns the settings of agreements with peers, or `None` if there are none.
    pub fn agreement(&self) -> Option<AgreementSettings> {
        self.settings.lock().agreement.clone()
    }

    /// Reports whether a graft may be fetched from a peer. Fetched grafts that this host could not load are not fetched
    /// again.
    pub fn may_fetch(&self, identity: ObjectIdentity) -> bool {
        !self.unfetched.lock().contains(&identity)
    }

    /// Records that a graft was fetched from a peer, but cannot be loaded on this host.
    pub fn cannot_fetch(&self, identity: ObjectIdentity) {
        self.unfetched.lock().insert(identity);
    }

    /// Passes a graft that a peer has sent to the process that stores and loads it.
    pub fn keep(&self, wanted: &GraftFetch, manifest: String, image: &[u8]) -> anyhow::Result<()> {
        // This process checks the signature first, so the other one parses only what a trusted key has signed.
        block_in_place(|| self.settings().check_fetched(wanted, &manifest, image))?;
        let graft = wanted.graft.clone();
        self.link.ask(&LinkRequest::Keep { graft, manifest, image: BASE64.encode(image) }).map(drop)
    }
}
