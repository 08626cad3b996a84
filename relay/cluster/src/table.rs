//! The route table of one relay.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

use millrace_moq::{HopId, HopPath, Namespace};

/// Time for which a route must have existed before a track changes from a working route to this route.
const HOLD: Duration = Duration::from_secs(5);
/// Time that a track waits before it uses a route through a relay that has just disappeared, or does not answer. The
/// relays on this route have probably not noticed it yet, or their withdrawal is on its way.
const HUNT: Duration = Duration::from_millis(500);
/// Cost that is added to the routes of a session whose peer does not answer. It is part of what this relay announces,
/// so all relays prefer routes without such a session. A preference that stays within one relay would not do: relays
/// that each avoid the same silent peer would use routes through each other in turn, without end.
const DOUBT: u64 = 1 << 48;
/// Largest number of relays that are remembered after they have withdrawn their last announcement.
const MAX_GONE: usize = 16;

/// The ID of a session with a peer.
pub type ClusterLink = u64;

/// Identifies an announcement. A session may announce a namespace several times, each time by another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnnouncementKey {
    /// The session that sent the announcement.
    pub link: ClusterLink,
    /// The number of the announcement within its session.
    pub number: u64,
}

/// An announcement of a namespace, in the form in which peers send it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The hops from the publisher to the sender, which is the last.
    pub path: HopPath,
    /// The cost of receiving from the sender. The cost of the link to the sender is not included.
    pub cost: u64,
}

/// A peer for which a route is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neighbour {
    /// The ID of the peer's session, or 0 for the relay itself.
    pub link: ClusterLink,
    /// The hop ID of the peer, or [`HopId::UNNAMED`] if the peer is no relay of the cluster.
    pub hop: HopId,
}

impl Neighbour {
    /// The relay itself, for which every route may be used.
    pub const NOBODY: Self = Self { link: 0, hop: HopId::UNNAMED };
}

/// A route to a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceRoute {
    /// The announcement that the route was made from.
    pub key: AnnouncementKey,
    /// The hops of the route, the publisher's first.
    pub path: HopPath,
    /// The cost of receiving by this route, including that of the link to the session's peer. It is 0 if the publisher
    /// has its session with this relay.
    pub cost: u64,
    /// True if the publisher has its session with this relay.
    pub is_local: bool,
    /// The time since which the session has announced the namespace with a path of this length.
    pub since: Instant,
    /// The time since which the announced cost says that a relay on the route does not answer.
    doubted: Option<Instant>,
    /// Number of the announcement, counted over all sessions. Of two otherwise equal routes, the newer one is
    /// preferred.
    serial: u64,
}

impl NamespaceRoute {
    /// Reports whether the route may serve `neighbour`: the route must neither come from the neighbour's session nor
    /// contain the neighbour's hop.
    fn is_for(&self, neighbour: Neighbour) -> bool {
        self.key.link != neighbour.link && !self.path.passes(neighbour.hop)
    }
}

/// Limits of what peers may announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteLimits {
    /// Largest number of announcements of one session.
    pub per_link: usize,
}

/// The reason why an announcement is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnnouncementRefusal {
    /// The path of the announcement contains this relay.
    #[error("the path passes this relay")]
    Loop,
    /// The session has reached its limit of announced namespaces.
    #[error("the peer announces too many namespaces")]
    TooMany,
}

/// The decision about the session from which a track is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextSource {
    /// The relay keeps receiving the track from its present session.
    Stay,
    /// The relay should subscribe to the track at this session, and unsubscribe at the present sessions.
    Move(ClusterLink),
    /// The relay keeps receiving the track from its present session for now, and decides again at this time.
    Later(Instant),
    /// There is no route to the track any more.
    Lost,
}

/// The routes of one relay. Methods that change routes record the affected namespaces, which
/// [`RouteTable::take_changes`] returns.
#[derive(Debug)]
pub struct RouteTable {
    own: HopId,
    limits: RouteLimits,
    routes: BTreeMap<Namespace, Vec<NamespaceRoute>>,
    counts: HashMap<ClusterLink, usize>,
    /// Sessions whose peers do not answer, each with the time since which. Their routes cost [`DOUBT`] more.
    suspects: HashMap<ClusterLink, Instant>,
    /// The sessions from which tracks are received at present, by the announced namespaces to which these tracks
    /// belong.
    carried: BTreeMap<Namespace, BTreeSet<ClusterLink>>,
    changes: BTreeSet<Namespace>,
    /// Relays that have recently withdrawn their last announcement here, each with the time of the withdrawal. Routes
    /// of other peers through such a relay are probably outdated.
    gone: VecDeque<(HopId, Instant)>,
    serial: u64,
    announces_only_own: bool,
}

impl RouteTable {
    /// Makes the table of the relay with the hop ID `own`.
    pub fn new(own: HopId, limits: RouteLimits) -> Self {
        Self {
            own,
            limits,
            routes: BTreeMap::new(),
            counts: HashMap::new(),
            suspects: HashMap::new(),
            carried: BTreeMap::new(),
            changes: BTreeSet::new(),
            gone: VecDeque::new(),
            serial: 0,
            announces_only_own: false,
        }
    }

    /// Makes a table that announces only namespaces whose publisher has its session with this relay. Other relays find
    /// the publishers of other namespaces by themselves.
    pub fn announcing_only_own(self) -> Self {
        Self { announces_only_own: true, ..self }
    }

    /// Returns the hop ID of this relay.
    pub fn own(&self) -> HopId {
        self.own
    }

    /// Adds or changes an announcement of a peer. `link_cost` is the cost of the link to the peer.
    ///
    /// # Errors
    /// Returns an error if the announcement is refused. If its path is a loop, an earlier announcement with this key is
    /// withdrawn.
    pub fn announce(
        &mut self,
        key: AnnouncementKey,
        namespace: &Namespace,
        announcement: Announcement,
        link_cost: u64,
        now: Instant,
    ) -> Result<(), AnnouncementRefusal> {
        let Announcement { path, cost } = announcement;
        if path.passes(self.own) {
            self.withdraw(key, namespace, now);
            return Err(AnnouncementRefusal::Loop);
        }
        let count = self.counts.get(&key.link).copied().unwrap_or(0);
        let is_known = self.route(key, namespace).is_some();
        if !is_known && count >= self.limits.per_link {
            return Err(AnnouncementRefusal::TooMany);
        }
        self.put(key, namespace, path, cost.saturating_add(link_cost), false, now);
        Ok(())
    }

    /// Adds a publisher that has its session with this relay. `path` is the publisher's own path, if it supports the
    /// cluster extension.
    pub fn publish(
        &mut self,
        key: AnnouncementKey,
        namespace: &Namespace,
        path: Option<HopPath>,
        now: Instant,
    ) {
        let path = path.unwrap_or_else(|| self.stamp(key.link));
        self.put(key, namespace, path, 0, true, now);
    }

    /// Makes a path for a publisher without a hop ID. Its hop is derived from the session, and an unnamed hop is added,
    /// so that other relays prefer fully named paths.
    fn stamp(&self, link: ClusterLink) -> HopPath {
        let stamp = mix(self.own.0 ^ mix(link)) & HopId::MAX.0;
        let named = HopPath::new(HopId(stamp.max(1)));
        named.then(HopId::UNNAMED).unwrap_or(named)
    }

    fn put(
        &mut self,
        key: AnnouncementKey,
        namespace: &Namespace,
        path: HopPath,
        cost: u64,
        is_local: bool,
        now: Instant,
    ) {
        self.serial += 1;
        let serial = self.serial;
        // A relay that sends an announcement has not disappeared, so it is removed from the list of disappeared relays.
        // Relays that disappeared longer than `HUNT` ago are removed, too.
        self.gone.retain(|(hop, at)| *hop != path.sender() && now < *at + HUNT);
        let routes = self.routes.entry(namespace.clone()).or_default();
        let doubted = (cost >= DOUBT).then_some(now);
        match routes.iter_mut().find(|route| route.key == key) {
            Some(route) if (&route.path, route.cost) == (&path, cost) => return,
            Some(route) => {
                // A path of another length counts as a new route, which must first last for [`HOLD`].
                let since = if route.path.hops().len() == path.hops().len() { route.since } else { now };
                let doubted = doubted.map(|now| route.doubted.unwrap_or(now));
                *route = NamespaceRoute { path, cost, since, doubted, serial, ..route.clone() };
            }
            None => {
                routes.push(NamespaceRoute { key, path, cost, is_local, since: now, doubted, serial });
                *self.counts.entry(key.link).or_default() += 1;
            }
        }
        self.changes.insert(namespace.clone());
    }

    /// Withdraws an announcement. An announcement that does not exist is ignored.
    pub fn withdraw(&mut self, key: AnnouncementKey, namespace: &Namespace, now: Instant) {
        let Some(routes) = self.routes.get_mut(namespace) else { return };
        let Some(place) = routes.iter().position(|route| route.key == key) else { return };
        let route = routes.remove(place);
        if routes.is_empty() {
            self.routes.remove(namespace);
        }
        if let Some(count) = self.counts.get_mut(&key.link) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&key.link);
                self.suspects.remove(&key.link);
                // This was the session's last announcement, so the peer itself has probably disappeared, unless it has
                // another session.
                let sender = route.path.sender();
                let has_another = self
                    .routes
                    .get(namespace)
                    .into_iter()
                    .flatten()
                    .any(|other| other.path.sender() == sender);
                if !route.is_local && sender.is_named() && !has_another {
                    self.gone.truncate(MAX_GONE - 1);
                    self.gone.push_front((sender, now));
                }
            }
        }
        self.changes.insert(namespace.clone());
    }

    /// Marks a session as suspect while its peer does not answer. Routes that contain a suspect session, here or at
    /// another relay, are used only if there is no other route.
    pub fn set_suspect(&mut self, link: ClusterLink, is_suspect: bool, now: Instant) {
        let was_suspect = self.suspects.contains_key(&link);
        match is_suspect {
            true if self.counts.contains_key(&link) => drop(self.suspects.entry(link).or_insert(now)),
            _ => drop(self.suspects.remove(&link)),
        }
        let changed = was_suspect != self.suspects.contains_key(&link);
        if changed {
            let concerns = |routes: &Vec<NamespaceRoute>| routes.iter().any(|route| route.key.link == link);
            let concerned = self.routes.iter().filter(|(_, routes)| concerns(routes));
            self.changes.extend(concerned.map(|(namespace, _)| namespace.clone()));
        }
    }

    /// Sets the sessions from which tracks are currently received, by the namespaces of the tracks.
    pub fn set_carried(&mut self, carried: BTreeMap<Namespace, BTreeSet<ClusterLink>>) {
        // A track's namespace may be longer than the announced one. So each prefix of the track's namespace is looked
        // up among the announced namespaces.
        let mut announced: BTreeMap<Namespace, BTreeSet<ClusterLink>> = BTreeMap::new();
        for (namespace, links) in carried {
            for prefix in namespace.prefixes() {
                let routes = self.routes.get(&prefix).into_iter().flatten();
                let used = routes.map(|route| route.key.link).filter(|link| links.contains(link));
                let used: Vec<_> = used.collect();
                if !used.is_empty() {
                    announced.entry(prefix).or_default().extend(used);
                }
            }
        }
        for (namespace, links) in &announced {
            if self.carried.get(namespace) != Some(links) {
                self.changes.insert(namespace.clone());
            }
        }
        let ended = self.carried.keys().filter(|namespace| !announced.contains_key(namespace));
        self.changes.extend(ended.cloned());
        self.carried = announced;
    }

    /// Reports whether tracks of the namespace are received from this session.
    pub fn is_carried(&self, namespace: &Namespace, link: ClusterLink) -> bool {
        self.carried.get(namespace).is_some_and(|links| links.contains(&link))
    }

    /// Returns the namespaces whose routes have changed since the last call.
    pub fn take_changes(&mut self) -> BTreeSet<Namespace> {
        std::mem::take(&mut self.changes)
    }

    /// Returns the rank of a route; the smallest is chosen. Routes in use come before unused ones, so that all tracks
    /// of a namespace take one route. Otherwise two relays could each choose the route through the other relay, which
    /// is announced with cost 0, and form a loop.
    fn rank(&self, namespace: &Namespace, route: &NamespaceRoute) -> impl Ord + use<> {
        let is_used = self.is_carried(namespace, route.key.link);
        (self.is_doubtful(route), !route.is_local, !is_used, self.merit(namespace, route))
    }

    /// Returns the cost of a route, including [`DOUBT`] for its session if that is suspect.
    fn cost(&self, route: &NamespaceRoute) -> u64 {
        let doubt = if self.suspects.contains_key(&route.key.link) { DOUBT } else { 0 };
        route.cost.saturating_add(doubt)
    }

    /// Reports whether a relay on the route does not answer the next one.
    fn is_doubtful(&self, route: &NamespaceRoute) -> bool {
        self.cost(route) >= DOUBT
    }

    /// Returns the time when a relay on the route disappeared, or `None` if none has.
    fn ghost(&self, route: &NamespaceRoute) -> Option<Instant> {
        self.gone.iter().find(|(hop, _)| route.path.passes(*hop)).map(|(_, at)| *at)
    }

    /// Returns the rank of a route without regard to whether it is in use.
    fn merit(&self, namespace: &Namespace, route: &NamespaceRoute) -> impl Ord + use<> {
        (
            self.is_doubtful(route),
            self.ghost(route).is_some(),
            !route.is_local,
            route.path.has_unnamed(),
            self.cost(route),
            route.path.hops().len(),
            if route.is_local { 0 } else { hash(namespace, &route.path) },
            Reverse(route.serial),
        )
    }

    fn route(&self, key: AnnouncementKey, namespace: &Namespace) -> Option<&NamespaceRoute> {
        self.routes.get(namespace)?.iter().find(|route| route.key == key)
    }

    /// Returns the best route to exactly this namespace that may serve `neighbour`.
    pub fn best(&self, namespace: &Namespace, neighbour: Neighbour) -> Option<&NamespaceRoute> {
        let routes = self.routes.get(namespace)?.iter().filter(|route| route.is_for(neighbour));
        routes.min_by_key(|route| self.rank(namespace, route))
    }

    /// Returns the routes to exactly this namespace that may serve `neighbour`, the best one first.
    pub fn routes_for(&self, namespace: &Namespace, neighbour: Neighbour) -> Vec<&NamespaceRoute> {
        let mut routes = self.routes(namespace);
        routes.retain(|route| route.is_for(neighbour));
        routes
    }

    /// Returns the hops of all routes that a session announces for tracks of a namespace.
    pub fn hops_by(&self, namespace: &Namespace, link: ClusterLink) -> Vec<HopId> {
        self.of_link(namespace, link).flat_map(|route| route.path.hops().iter().copied()).collect()
    }

    /// Returns the best route to tracks in this namespace: the best one to the longest announced prefix of the
    /// namespace.
    pub fn find(&self, namespace: &Namespace, neighbour: Neighbour) -> Option<&NamespaceRoute> {
        longest_first(namespace).iter().find_map(|prefix| self.best(prefix, neighbour))
    }

    fn find_by<K: Ord>(
        &self,
        namespace: &Namespace,
        order: impl Fn(&Namespace, &NamespaceRoute) -> K,
    ) -> Option<&NamespaceRoute> {
        let best =
            |prefix: &Namespace| self.routes.get(prefix)?.iter().min_by_key(|route| order(prefix, route));
        longest_first(namespace).iter().find_map(best)
    }

    /// Returns the path and the cost to announce to `neighbour`. Returns `None` if no route may serve it.
    pub fn announcement(&self, namespace: &Namespace, neighbour: Neighbour) -> Option<Announcement> {
        let is_announced = |route: &&NamespaceRoute| route.is_local || !self.announces_only_own;
        let routes = self.routes.get(namespace)?.iter().filter(|route| route.is_for(neighbour));
        let routes = routes.filter(is_announced);
        // A namespace whose tracks this relay receives already is announced with cost 0, unless the route in use is
        // doubtful. The announced path is the one in use, even if another would be chosen now.
        let carried = routes.clone().filter(|route| self.is_carried(namespace, route.key.link));
        let carried = carried.min_by_key(|route| self.rank(namespace, route));
        let (route, cost) = match carried {
            Some(route) if !self.is_doubtful(route) => (route, 0),
            Some(route) => (route, self.cost(route)),
            None => {
                // A path with the maximum number of hops cannot be announced further.
                let usable = routes.filter(|route| route.path.then(self.own).is_ok());
                let best = usable.min_by_key(|route| self.rank(namespace, route))?;
                (best, self.cost(best))
            }
        };
        Some(Announcement { path: route.path.then(self.own).ok()?, cost })
    }

    /// Reports whether a route that the session announces for tracks of the namespace passes `hop`.
    pub fn passes(&self, namespace: &Namespace, link: ClusterLink, hop: HopId) -> bool {
        self.of_link(namespace, link).any(|route| route.path.passes(hop))
    }

    fn of_link(&self, namespace: &Namespace, link: ClusterLink) -> impl Iterator<Item = &NamespaceRoute> {
        let all = namespace.prefixes().filter_map(|prefix| self.routes.get(&prefix));
        all.flatten().filter(move |route| route.key.link == link)
    }

    /// Decides whether a track of `namespace` that is received from the sessions `from` has to move.
    pub fn next(&self, namespace: &Namespace, from: &[ClusterLink], now: Instant) -> NextSource {
        let best = self.find_by(namespace, |prefix, route| self.merit(prefix, route));
        let current = from.iter().flat_map(|link| self.of_link(namespace, *link));
        let Some(current) = current.min_by_key(|route| self.rank(namespace, route)) else {
            // The present route was withdrawn. A route through a relay that just disappeared is used only after a wait.
            return match best.map(|best| (best.key.link, self.ghost(best).map(|at| at + HUNT))) {
                Some((_, Some(until))) if now < until => NextSource::Later(until),
                Some((link, _)) => NextSource::Move(link),
                None => NextSource::Lost,
            };
        };
        let Some(best) = best.filter(|best| !from.contains(&best.key.link)) else { return NextSource::Stay };
        // If a relay on the track's route does not answer, the track moves, but not to another such route.
        if self.is_doubtful(current) {
            if self.is_doubtful(best) {
                return NextSource::Stay;
            }
            let since = self.suspects.get(&current.key.link).copied().or(current.doubted);
            // The first hop is the publisher's.
            let shared =
                current.path.hops().iter().skip(1).any(|hop| hop.is_named() && best.path.passes(*hop));
            return match since.filter(|_| shared).map(|since| since + HUNT) {
                Some(until) if now < until => NextSource::Later(until),
                _ => NextSource::Move(best.key.link),
            };
        }
        // Moving only to strictly shorter paths keeps loops from forming, see the crate's documentation. A publisher of
        // this relay gets no track from a publisher elsewhere that works, since tracks belong to their first publisher.
        let is_shorter = !best.is_local && best.path.hops().len() < current.path.hops().len();
        match is_shorter && self.cost(best) <= self.cost(current) {
            true if now >= best.since + HOLD => NextSource::Move(best.key.link),
            true => NextSource::Later(best.since + HOLD),
            false => NextSource::Stay,
        }
    }

    /// Reports whether any session announces exactly this namespace.
    pub fn has(&self, namespace: &Namespace) -> bool {
        self.routes.contains_key(namespace)
    }

    /// Returns the announced namespaces below `prefix`, in their order.
    pub fn below<'a>(&'a self, prefix: &'a Namespace) -> impl Iterator<Item = &'a Namespace> {
        let from = self.routes.range(prefix.clone()..).map(|(namespace, _)| namespace);
        from.take_while(move |namespace| prefix.is_prefix_of(namespace))
    }

    /// Returns the routes to exactly this namespace, in order of preference.
    pub fn routes(&self, namespace: &Namespace) -> Vec<&NamespaceRoute> {
        let mut routes: Vec<_> = self.routes.get(namespace).into_iter().flatten().collect();
        routes.sort_by_key(|route| self.rank(namespace, route));
        routes
    }

    /// Returns how many namespaces and how many routes exist, and how many namespaces are received from other relays.
    pub fn size(&self) -> (usize, usize, usize) {
        (self.routes.len(), self.routes.values().map(Vec::len).sum(), self.carried.len())
    }

    /// Returns the number of announcements of a session.
    pub fn count(&self, link: ClusterLink) -> usize {
        self.counts.get(&link).copied().unwrap_or(0)
    }

    /// Reports whether the session is marked as suspect.
    pub fn is_suspect(&self, link: ClusterLink) -> bool {
        self.suspects.contains_key(&link)
    }
}

fn longest_first(namespace: &Namespace) -> Vec<Namespace> {
    let mut prefixes: Vec<_> = namespace.prefixes().collect();
    prefixes.sort_by_key(|prefix| Reverse(prefix.fields().len()));
    prefixes
}

/// Hashes a namespace and a path with FNV-1a. All relays of all versions must prefer the same one of equal routes. The
/// namespace is included to spread equal routes over the peers.
fn hash(namespace: &Namespace, path: &HopPath) -> u64 {
    let fields = namespace.fields().iter().flat_map(|field| field.iter().copied());
    let hops = path.hops().iter().flat_map(|hop| hop.0.to_le_bytes());
    fields.chain(hops).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Mixes the bits of a number with the finaliser of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests;
