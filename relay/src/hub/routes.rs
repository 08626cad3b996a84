//! Chooses between the routes that relays of the cluster announce, and moves tracks from one relay to another.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant as Time},
};

use millrace_moq::{HopId, Namespace};
use millrace_relay_cluster::{
    Announcement, AnnouncementKey, AnnouncementRefusal, ClusterLink, Neighbour, NextSource, RouteLimits,
    RouteTable,
};
use tokio::time::{Instant, sleep_until};

use super::{
    Hub, OperatorCounters,
    announced::{RelayRegistration, RoutePublication},
    namespaces::{NamespaceState, PublisherNamespaces},
    pages,
    publisher::{HubPublisher, Requester},
    route_watch::RouteWatch,
};
use crate::{live::LiveTrack, upstream::UpstreamTrack};

/// The most relays at which the relay tries to subscribe to one track, one after the other.
const MAX_ASKED: usize = 3;
/// How long a track stays at a relay that has withdrawn its route. The relay's PUBLISH_DONE for the track may still be
/// on its way.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// The shortest time between a track's unexpected end and the SUBSCRIBE at the next relay. Without it, a track that
/// ends repeatedly would cause a busy loop.
const PAUSE: Duration = Duration::from_millis(100);

impl NamespaceState {
    /// Returns the relays at which tracks of `namespace` may be subscribed to, the best one first. `longest` is the
    /// number of fields of the longest matching namespace that a publisher here has announced. A relay is returned only
    /// if it has announced a longer one.
    pub(super) fn relays_of(
        &self,
        namespace: &Namespace,
        asker: Neighbour,
        longest: Option<usize>,
    ) -> Vec<Arc<dyn HubPublisher>> {
        let Some(table) = &self.table else { return Vec::new() };
        let prefixes: Vec<_> = namespace.prefixes().collect();
        let mut found: Vec<Arc<dyn HubPublisher>> = Vec::new();
        // The longest prefix is looked up first, because the most specific announcement is preferred.
        for prefix in prefixes.iter().rev() {
            if longest.is_some_and(|longest| longest >= prefix.fields().len()) {
                break;
            }
            let routes = table.routes_for(prefix, asker).into_iter().filter(|route| !route.is_local);
            for route in routes {
                // A relay that announces several prefixes of the namespace is returned once.
                let is_new = !found.iter().any(|known| known.id() == route.key.link);
                let relay = self.relays.get(&route.key.link).and_then(Weak::upgrade);
                found.extend(relay.filter(|_| is_new && found.len() < MAX_ASKED));
            }
        }
        found
    }

    /// Returns the relay or the publisher of this relay that has announced tracks of `namespace` in the session `link`.
    fn source(&self, namespace: &Namespace, link: ClusterLink) -> Option<Arc<dyn HubPublisher>> {
        let relay = self.relays.get(&link).and_then(Weak::upgrade);
        relay.or_else(|| self.publisher_in(namespace, link))
    }
}

impl PublisherNamespaces {
    fn watch_routes(self: &Arc<Self>, prefix: Namespace) -> RouteWatch {
        let present = self.announced_below(prefix.clone(), Namespace::clone);
        self.0.lock().route_watchers.add(prefix, present)
    }
}

impl Hub {
    /// Makes a table of routes for a relay that has none, with the namespaces of its publishers. Returns false if the
    /// relay has a table.
    pub fn begin_routes(&self, hop: HopId, max_routes: usize) -> bool {
        let mut state = self.namespaces.0.lock();
        if state.table.is_some() {
            return false;
        }
        state.table = Some(RouteTable::new(hop, RouteLimits { per_link: max_routes }));
        state.publish_all();
        true
    }

    /// Returns this relay's hop ID, or `None` if it has no routes.
    pub fn hop(&self) -> Option<HopId> {
        self.namespaces.0.lock().table.as_ref().map(RouteTable::own)
    }

    /// Calls `look` with the locked route table, and returns its result. Returns `None` if the relay is in no cluster.
    pub fn with_table<T>(&self, look: impl FnOnce(&RouteTable) -> T) -> Option<T> {
        self.namespaces.0.lock().table.as_ref().map(look)
    }

    /// Registers the session of a relay of the cluster, which may then announce routes.
    pub fn register_relay(&self, relay: &Arc<dyn HubPublisher>) -> RelayRegistration {
        let session = relay.id();
        self.namespaces.0.lock().relays.insert(session, Arc::downgrade(relay));
        RelayRegistration::new(&self.namespaces, session)
    }

    /// Adds a route that a [registered](Self::register_relay) relay has announced. `link_cost` is the cost of the link
    /// to that relay. The route's guard is returned even if the route is refused, since a later update of the route may
    /// be accepted.
    pub fn publish_route(
        &self,
        namespace: Namespace,
        session: u64,
        announcement: Announcement,
        link_cost: u64,
    ) -> (RoutePublication, Result<(), AnnouncementRefusal>) {
        let key = AnnouncementKey { link: session, number: self.namespaces.0.lock().next_id() };
        let publication = RoutePublication::new(&self.namespaces, namespace, key, link_cost);
        let taken = publication.update(announcement);
        match taken {
            Ok(()) => self.wake_waiting(publication.namespace()),
            Err(AnnouncementRefusal::Loop) => OperatorCounters::count(&self.counters.routes_looped),
            Err(AnnouncementRefusal::TooMany) => OperatorCounters::count(&self.counters.routes_refused),
        }
        (publication, taken)
    }

    /// Marks a session with a relay or a publisher as suspect: its peer does not answer, or the session is about to end.
    /// Routes of suspect sessions are used only if there is no other route.
    pub fn set_suspect(&self, session: u64, is_suspect: bool) {
        let mut state = self.namespaces.0.lock();
        if let Some(table) = &mut state.table {
            table.set_suspect(session, is_suspect, Time::now());
        }
        state.spread(&Namespace::default());
    }

    /// Records that the session `silent` does not answer, for the gaps of the tracks that come from it.
    pub fn doubt(&self, silent: u64) {
        pages::each(self.tracks_below(Namespace::default(), LiveTrack::is_established), |track| {
            if track.upstreams().iter().any(|source| source.publisher == silent) {
                track.gap.state.lock().doubt(&track.data);
            }
        });
    }

    /// Watches the routes below `prefix`. The watch lists the present namespaces first.
    pub fn watch_routes(&self, prefix: Namespace) -> RouteWatch {
        self.namespaces.watch_routes(prefix)
    }

    /// Returns the hop ID that is announced on the session `link`: on the private link of a takeover, it differs from
    /// the other process's.
    pub fn hop_on(&self, link: u64) -> Option<HopId> {
        let own = self.link_hop.get().copied().filter(|_| link == self.link.load(Relaxed));
        own.or_else(|| self.hop())
    }

    /// Returns the hop path and the cost to announce to the relay `neighbour` for a namespace.
    pub fn announcement(&self, namespace: &Namespace, neighbour: Neighbour) -> Option<Announcement> {
        let sender = self.hop_on(neighbour.link)?;
        let said = self.with_table(|table| table.announcement(namespace, neighbour))??;
        Some(Announcement { path: said.path.sent_by(sender), cost: said.cost })
    }

    /// Reports whether every path by which this relay gets the track passes through the relay `requester`. Then that
    /// relay must not be served, since the two relays would wait for each other.
    pub(super) fn would_loop(&self, track: &LiveTrack, requester: Requester) -> bool {
        let state = self.namespaces.0.lock();
        let Some(table) = state.table.as_ref().filter(|_| requester.hop.is_named()) else { return false };
        let passes = |upstream: &Arc<UpstreamTrack>| {
            upstream.is_of_relay && table.passes(track.name().namespace(), upstream.publisher, requester.hop)
        };
        let upstreams = track.upstreams();
        !upstreams.is_empty() && upstreams.iter().all(passes)
    }

    /// Returns the hops on the route by which `track` would arrive from the session `relay`.
    pub(super) fn hops_by(&self, track: &LiveTrack, relay: u64) -> Vec<HopId> {
        let hops = |table: &RouteTable| table.hops_by(track.name().namespace(), relay);
        self.with_table(hops).unwrap_or_default()
    }

    /// Schedules a new check of a namespace's routes, because a relay ended a track of the namespace without
    /// PUBLISH_DONE.
    pub fn route_lost(&self, namespace: &Namespace) {
        self.namespaces.0.lock().route_watchers.tell(namespace);
    }

    /// Tells the route table which sessions deliver tracks of each namespace. The table prefers the routes by which
    /// tracks arrive already.
    pub(super) fn note_carried(&self, tracks: &[Arc<LiveTrack>]) {
        if self.hop().is_none() {
            return;
        }
        let mut carried: BTreeMap<Namespace, BTreeSet<ClusterLink>> = BTreeMap::new();
        for track in tracks {
            for upstream in track.upstreams().iter().filter(|one| one.is_of_relay && !one.is_leaving()) {
                carried.entry(track.name().namespace().clone()).or_default().insert(upstream.publisher);
            }
        }
        let mut state = self.namespaces.0.lock();
        if let Some(table) = &mut state.table {
            table.set_carried(carried);
        }
        state.spread(&Namespace::default());
    }

    /// Moves tracks between relays as routes change. Never returns.
    pub async fn follow_routes(&self) {
        let mut watch = self.watch_routes(Namespace::default());
        let mut rerouting = Rerouting::default();
        loop {
            let due = rerouting.later.values().min().copied();
            // Without a scheduled check this timer never fires, and only changes of routes wake the task.
            let again = async {
                match due {
                    Some(due) => sleep_until(due.into()).await,
                    None => std::future::pending().await,
                }
            };
            let namespace = tokio::select! {
                namespace = watch.next(Instant::now) => namespace,
                () = again => match rerouting.due(Time::now()) {
                    Some(namespace) => namespace,
                    None => continue,
                },
            };
            self.reroute(&namespace, &mut rerouting);
        }
    }

    /// Checks the routes of all tracks at or below `namespace` that have subscriptions.
    fn reroute(&self, namespace: &Namespace, rerouting: &mut Rerouting) {
        let wanted = |track: &LiveTrack| {
            track.subscription_count() > 0 && (track.is_established() || track.is_waiting())
        };
        let now = Time::now();
        let tracks = self.tracks_below(namespace.clone(), wanted);
        pages::each(tracks, |track| self.reroute_track(&track, rerouting, now));
        rerouting.forget_old(now);
    }

    fn reroute_track(&self, track: &Arc<LiveTrack>, rerouting: &mut Rerouting, now: Time) {
        let namespace = track.name().namespace();
        self.give_up_lost(track, rerouting, now);
        let upstreams = track.upstreams();
        let is_silent = |link| self.with_table(|table| table.is_suspect(link)) == Some(true);
        let is_kept =
            |one: &Arc<UpstreamTrack>| one.is_of_upstream || !one.is_of_relay && !is_silent(one.publisher);
        if upstreams.iter().any(is_kept) {
            return; // the track comes from the upstream relay, or from a publisher of this relay that answers
        }
        // A publisher whose track is being moved counts as the source of the track until another publisher has taken
        // over.
        let is_leaving = upstreams.iter().all(|one| one.is_leaving());
        let staying = upstreams.iter().filter(|one| is_leaving || !one.is_leaving());
        let from: Vec<ClusterLink> = staying.map(|upstream| upstream.publisher).collect();
        match self.with_table(|table| table.next(namespace, &from, now)).unwrap_or(NextSource::Stay) {
            // A track without a route is given up above, and its subscriptions wait for a publisher (`live::absence`).
            NextSource::Stay | NextSource::Lost => {}
            NextSource::Later(until) => rerouting.again(namespace, until),
            NextSource::Move(link) => {
                let Some(next) = self.namespaces.0.lock().source(namespace, link) else { return };
                self.leave_sources(track);
                track.note_move_to(link);
                if !track.return_to(link) {
                    next.back_up(vec![Arc::clone(track)]);
                }
                // If the track is refused there, the next best route is tried at the next check.
                rerouting.again(namespace, now + PAUSE * 10);
            }
        }
    }

    /// Marks the track's sources as leaving, and counts the move if any was not.
    pub(super) fn leave_sources(&self, track: &LiveTrack) {
        let upstreams = track.upstreams();
        let staying = upstreams.iter().filter(|upstream| !upstream.is_leaving());
        if staying.inspect(|upstream| upstream.leave()).count() > 0 {
            OperatorCounters::count(&self.counters.reroutes);
        }
    }

    /// Gives up the relays that have withdrawn their routes to a track: `LAST_WORDS` later, since their PUBLISH_DONE or
    /// the end of their last group may be on its way.
    fn give_up_lost(&self, track: &LiveTrack, rerouting: &mut Rerouting, now: Time) {
        // The other process of a takeover may have the track without its namespace.
        let link = self.link.load(Relaxed);
        let is_lost = |one: &Arc<UpstreamTrack>| {
            one.is_of_relay
                && !(one.publisher == link && one.is_leaving())
                && self.hops_by(track, one.publisher).is_empty()
        };
        let mut lost = track.upstreams();
        lost.retain(is_lost);
        let since = *rerouting.lost.entry(track.number).or_insert(now);
        if !lost.is_empty() && now < since + LAST_WORDS {
            return rerouting.again(track.name().namespace(), since + LAST_WORDS);
        }
        rerouting.lost.remove(&track.number);
        for upstream in &lost {
            track.supersede(upstream, self.absence(), now);
        }
    }
}

/// State that the task of [`Hub::follow_routes`] keeps between two changes of routes.
#[derive(Default)]
struct Rerouting {
    /// Namespaces whose routes are checked again, with the time of the check.
    later: BTreeMap<Namespace, Time>,
    /// The times at which tracks lost their last route, by track number.
    lost: HashMap<u32, Time>,
}

impl Rerouting {
    fn again(&mut self, namespace: &Namespace, at: Time) {
        let due = self.later.entry(namespace.clone()).or_insert(at);
        *due = at.min(*due);
    }

    /// Forgets tracks that were not checked for a while, because they have no subscriptions any more.
    fn forget_old(&mut self, now: Time) {
        self.lost.retain(|_, since| now < *since + 2 * LAST_WORDS);
    }

    /// Removes and returns a namespace whose routes are due to be checked.
    fn due(&mut self, now: Time) -> Option<Namespace> {
        let namespace =
            self.later.iter().find(|(_, due)| **due <= now).map(|(namespace, _)| namespace.clone())?;
        self.later.remove(&namespace);
        Some(namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_route_of_an_unsubscribed_track_is_forgotten_after_a_timeout() {
        let now = Time::now();
        let mut rerouting = Rerouting::default();
        rerouting.lost.insert(7, now);
        rerouting.forget_old(now + LAST_WORDS);
        assert_eq!(rerouting.lost.get(&7), Some(&now), "the track is looked at now");
        rerouting.forget_old(now + 2 * LAST_WORDS);
        assert!(rerouting.lost.is_empty());
    }
}
