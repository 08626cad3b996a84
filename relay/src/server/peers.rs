//! Keeps a session with each relay of the cluster that the settings or a discovery store name.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::code;
use millrace_relay_cluster::{BRIEF, Pauses};
use millrace_relay_status as status;
use parking_lot::Mutex;
use tokio::{sync::watch, time};
use tracing::{info, warn};
use url::Url;

use super::{ServerShared, dial};
use crate::{
    ClusterPeer,
    hub::OperatorCounters,
    session::{Dialed, PeerTerms, RelaySession},
};

/// How long this relay keeps a session after the peer has sent GOAWAY.
const LEAVING: Duration = Duration::from_secs(15);

/// The most relays from a discovery store to which this relay keeps sessions. Relays with a session count, even if the
/// store no longer lists them.
const MAX_FOUND: usize = 1000;

/// The relays that this one connects to, each with a task of its own, in the order in which they were first named.
#[derive(Default)]
pub struct KeptPeers(Mutex<Vec<Arc<KeptPeer>>>);

/// A relay of the cluster to which this relay connects.
pub struct KeptPeer {
    terms: ClusterPeer,
    /// True if a discovery store names the relay, and the settings do not.
    is_found: bool,
    /// Whether this relay connects again when the present session ends. Always true for relays of the settings.
    wanted: AtomicBool,
    /// The last time that a session on demand was of use. `None` for relays with which there always is a session.
    needed: Option<Mutex<Instant>>,
    status: watch::Sender<status::ClusterPeerStatus>,
}

impl KeptPeers {
    /// Returns the connection state of each relay of the cluster.
    pub fn status(&self) -> Vec<status::ClusterPeerStatus> {
        self.0.lock().iter().map(|peer| peer.status.borrow().clone()).collect()
    }

    /// Takes the discovery store's newest list. Returns the listed relays that have no task yet, up to the limit. A
    /// relay that is not in the list any more is no longer wanted.
    pub fn take_found(&self, found: &[ClusterPeer]) -> Vec<Arc<KeptPeer>> {
        let mut kept = self.0.lock();
        let named: HashSet<&Url> = found.iter().map(|peer| &peer.upstream.url).collect();
        let mut room = MAX_FOUND;
        for peer in kept.iter().filter(|peer| peer.is_found) {
            peer.wanted.store(named.contains(&peer.terms.upstream.url), Relaxed);
            room = room.saturating_sub(1);
        }
        let known: HashSet<Url> = kept.iter().map(|peer| peer.terms.upstream.url.clone()).collect();
        let fresh = found.iter().filter(|peer| !known.contains(&peer.upstream.url));
        let fresh: Vec<_> = fresh.take(room).map(|terms| KeptPeer::new(terms, true, false)).collect();
        kept.extend(fresh.iter().cloned());
        fresh
    }

    /// Adds a relay that the settings name. The settings contain each relay once.
    pub fn add(&self, terms: &ClusterPeer) -> Arc<KeptPeer> {
        let peer = KeptPeer::new(terms, false, false);
        self.0.lock().push(Arc::clone(&peer));
        peer
    }

    /// Returns the relay, for which a session is needed now, and whether it was added. Returns `None` if there are too
    /// many relays.
    pub fn demand(&self, terms: &ClusterPeer) -> Option<(Arc<KeptPeer>, bool)> {
        let mut kept = self.0.lock();
        if let Some(peer) = kept.iter().find(|peer| peer.terms.upstream.url == terms.upstream.url) {
            peer.needed.iter().for_each(|needed| *needed.lock() = Instant::now());
            peer.wanted.store(true, Relaxed);
            return Some((Arc::clone(peer), false));
        }
        if kept.iter().filter(|peer| peer.is_found).count() >= MAX_FOUND {
            return None;
        }
        let peer = KeptPeer::new(terms, true, true);
        kept.push(Arc::clone(&peer));
        Some((peer, true))
    }

    /// Gives up a relay with a session on demand that was of no use for the time `idle`. Returns true if so.
    fn give_up(&self, peer: &KeptPeer, idle: Duration) -> bool {
        // `demand` changes both under this lock, so whoever demands the relay finds it wanted or adds it anew.
        let _kept = self.0.lock();
        let is_over = peer.needed.as_ref().is_some_and(|needed| needed.lock().elapsed() >= idle);
        if is_over {
            peer.wanted.store(false, Relaxed);
        }
        is_over
    }

    /// Removes a relay to which this relay no longer keeps a session. Returns false, and removes nothing, if a session
    /// is still wanted.
    fn end(&self, peer: &KeptPeer) -> bool {
        // `take_found` changes `wanted` under this lock, so a relay is either removed or stays wanted.
        let mut kept = self.0.lock();
        if peer.wanted.load(Relaxed) {
            return false;
        }
        kept.retain(|other| !std::ptr::eq(&**other, peer));
        true
    }
}

impl ServerShared {
    /// Keeps a session with a relay, as long as it is wanted. After GOAWAY it connects again at once, and keeps the
    /// earlier session until the new one has the same routes and the tracks have moved to it.
    pub(super) async fn keep_peer(self: Arc<Self>, peer: Arc<KeptPeer>) {
        let host = peer.status.borrow().host.clone();
        let idle =
            self.config.cluster.as_ref().and_then(|cluster| cluster.on_demand).unwrap_or(Duration::MAX);
        let mut pauses = Pauses::default();
        // The URI of the relay's GOAWAY, which is used for the next session only.
        let mut there = None;
        // An earlier session whose peer has sent GOAWAY.
        let mut left: Option<Arc<RelaySession>> = None;
        loop {
            self.until_undrained().await;
            self.peers.give_up(&peer, idle);
            if self.peers.end(&peer) {
                info!(%host, "this relay is not needed any more, or the discovery store no longer names it: not connecting to it again");
                return;
            }
            let target = there.take().unwrap_or_else(|| peer.terms.upstream.clone());
            let (lasted, invites) = match dial::connect(&self, &target.url).await {
                Ok((connection, tunnel)) => {
                    let terms =
                        PeerTerms { cost: peer.terms.cost, namespaces: peer.terms.namespaces.clone() };
                    let dialed = Dialed { setup: target.setup(), peer: Some(Arc::new(terms)) };
                    let session = self.begin_session(Arc::clone(&connection), Some(dialed), tunnel, None);
                    peer.note(Some(session.id()), String::new());
                    if peer.needed.is_some() {
                        OperatorCounters::count(&self.hub.counters.sessions_on_demand);
                    }
                    let began = Instant::now();
                    let mut reason = "the session is over";
                    let mut invites = false;
                    let mut running = tokio::spawn(Arc::clone(&self).run_session(Arc::clone(&session)));
                    tokio::select! {
                        _ = &mut running => {}
                        () = self.until_unneeded(&peer, &session, idle) => {
                            OperatorCounters::count(&self.hub.counters.sessions_unneeded);
                            reason = ""; // It is no failure: whoever needs the relay again waits for the next session.
                            session.close(code::Session::NO_ERROR, "nobody needs this session any more");
                            let _ = running.await; // if the session's task panicked, the panic hook has logged it
                        }
                        uri = session.until_peer_goes_away() => {
                            info!(%host, session = session.id(), "a relay of the cluster sent GOAWAY: connecting again");
                            (reason, invites) = ("the relay is going away", true);
                            there = peer.terms.upstream.at(&uri).filter(|_| !uri.is_empty());
                            tokio::spawn(Arc::clone(&self).leave_peer(Arc::clone(&session), Arc::clone(&peer)));
                            // One such session at a time is kept, however often the peer sends GOAWAY: the earlier
                            // one, if this one is too short to have taken over its tracks.
                            let earlier = left.take().filter(|left| self.sessions.lock().contains_key(&left.id()));
                            let is_brief = began.elapsed() < BRIEF;
                            if let Some(earlier) = &earlier {
                                let unkept = if is_brief { &session } else { earlier };
                                unkept.close(code::Session::NO_ERROR, "moved to another session");
                            }
                            left = earlier.filter(|_| is_brief).or(Some(Arc::clone(&session)));
                        }
                    }
                    if !invites {
                        info!(%host, session = session.id(), "the session with a relay of the cluster ended");
                    }
                    peer.note(None, reason.to_owned());
                    (began.elapsed(), invites || connection.is_forgotten())
                }
                Err(error) => {
                    let reason = format!("{error:#}");
                    warn!(%host, error = reason, "cannot connect to a relay of the cluster: trying again later");
                    peer.note(None, reason);
                    (Duration::ZERO, false)
                }
            };
            if peer.wanted.load(Relaxed) {
                time::sleep(pauses.next_pause(lasted, invites)).await;
            }
        }
    }
}

impl ServerShared {
    /// Closes a session whose peer has sent GOAWAY, once the present one has announced as many routes and the earlier
    /// one is idle, or `LEAVING` later.
    async fn leave_peer(self: Arc<Self>, session: Arc<RelaySession>, peer: Arc<KeptPeer>) {
        let routes = |id| self.hub.with_table(|table| table.count(id)).unwrap_or_default();
        let takes_over = |other: &RelaySession| {
            let is_present = other.id() > session.id() && peer.status.borrow().session == Some(other.id());
            is_present && other.hop().is_some() && routes(other.id()) >= routes(session.id())
        };
        if time::timeout(LEAVING, self.leave(&session, takes_over)).await.is_err() {
            session.close(code::Session::NO_ERROR, "the peer is going away");
        }
    }

    /// Waits until a session on demand was of no use for the time `idle`.
    async fn until_unneeded(&self, peer: &KeptPeer, session: &RelaySession, idle: Duration) {
        let Some(needed) = &peer.needed else { return std::future::pending().await };
        loop {
            time::sleep(idle / 4).await;
            if !session.is_idle() {
                *needed.lock() = Instant::now();
            } else if self.peers.give_up(peer, idle) {
                return;
            }
        }
    }
}

impl KeptPeer {
    fn new(terms: &ClusterPeer, is_found: bool, on_demand: bool) -> Arc<Self> {
        // The URL's path may contain a token, so the status shows only the host.
        let host = terms.upstream.url.authority().to_owned();
        let status = status::ClusterPeerStatus { host, found: is_found, on_demand, ..Default::default() };
        let terms = terms.clone();
        let needed = on_demand.then(|| Mutex::new(Instant::now()));
        Arc::new(Self {
            terms,
            is_found,
            wanted: AtomicBool::new(true),
            needed,
            status: watch::Sender::new(status),
        })
    }

    /// Waits until there is no session with the relay for a reason, and returns the reason.
    pub async fn failure(&self) -> String {
        let mut status = self.status.subscribe();
        let failed = status.wait_for(|status| status.session.is_none() && !status.reason.is_empty()).await;
        failed.map(|status| status.reason.clone()).unwrap_or_default() // The sender is in `self`, so waiting cannot fail.
    }

    fn note(&self, session: Option<u64>, reason: String) {
        self.status.send_modify(|status| (status.session, status.reason) = (session, reason));
    }
}

impl ClusterPeer {
    /// Returns the settings for a relay that may announce all namespaces, and whose own announced cost is used.
    pub fn new(upstream: crate::UpstreamRelay) -> Self {
        Self { upstream, cost: None, namespaces: Vec::new() }
    }
}
