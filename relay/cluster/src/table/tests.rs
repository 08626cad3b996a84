//! Tests of single route tables, and of simulated meshes of relays.

use std::collections::VecDeque;

use super::*;

fn namespace(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

fn table(own: u64) -> RouteTable {
    RouteTable::new(HopId(own), RouteLimits { per_link: 100 })
}

fn path(hops: &[u64]) -> HopPath {
    let first = HopPath::new(HopId(hops[0]));
    hops[1..].iter().fold(first, |path, hop| path.then(HopId(*hop)).unwrap())
}

fn key(link: ClusterLink) -> AnnouncementKey {
    AnnouncementKey { link, number: 0 }
}

fn announce(
    table: &mut RouteTable,
    link: ClusterLink,
    hops: &[u64],
    cost: u64,
    now: Instant,
) -> Result<(), AnnouncementRefusal> {
    let announcement = Announcement { path: path(hops), cost };
    table.announce(key(link), &namespace("live"), announcement, 1, now)
}

fn best(table: &RouteTable) -> Option<ClusterLink> {
    table.best(&namespace("live"), Neighbour::NOBODY).map(|route| route.key.link)
}

#[test]
fn cheapest_route_is_used_and_after_its_withdrawal_the_next_cheapest() {
    let now = Instant::now();
    let live = namespace("live");
    let mut table = table(9);
    announce(&mut table, 1, &[100, 1], 5, now).unwrap();
    announce(&mut table, 2, &[100, 7, 2], 2, now).unwrap();
    assert_eq!(best(&table), Some(2));
    // A path with an unnamed hop is worse than any path without one, whatever they cost.
    announce(&mut table, 3, &[100, 0, 3], 0, now).unwrap();
    assert_eq!(best(&table), Some(2));
    table.withdraw(key(2), &live, now);
    assert_eq!(best(&table), Some(1));
    table.set_suspect(1, true, now);
    assert_eq!(best(&table), Some(3));
    table.set_suspect(1, false, now);
    table.publish(key(4), &live, None, now);
    assert_eq!(best(&table), Some(4), "the publisher is here");
    assert_eq!(table.take_changes(), [live.clone()].into());
    for link in [1, 3, 4] {
        table.withdraw(key(link), &live, now);
    }
    assert!(best(&table).is_none() && table.counts.is_empty() && table.routes.is_empty());
}

#[test]
fn table_that_announces_only_own_publishers_passes_on_no_route_of_another_relay() {
    let now = Instant::now();
    let other = Neighbour { link: 5, hop: HopId(5) };
    for is_passed_on in [true, false] {
        let mut table = if is_passed_on { table(9) } else { table(9).announcing_only_own() };
        announce(&mut table, 1, &[100, 1], 0, now).unwrap();
        table.set_carried([(namespace("live"), [1].into())].into());
        assert_eq!(best(&table), Some(1), "the route is used here");
        assert_eq!(table.announcement(&namespace("live"), other).is_some(), is_passed_on);
        table.publish(key(4), &namespace("live"), None, now);
        assert!(table.announcement(&namespace("live"), other).is_some());
    }
}

#[test]
fn choice_among_equal_cost_routes_is_independent_of_announcement_order() {
    let now = Instant::now();
    let mut one = table(9);
    let mut other = table(10);
    let paths = [[100, 1], [100, 2], [100, 3]];
    for (link, hops) in paths.iter().enumerate() {
        announce(&mut one, link as u64, hops, 3, now).unwrap();
    }
    for (link, hops) in paths.iter().enumerate().rev() {
        announce(&mut other, link as u64, hops, 3, now).unwrap();
    }
    assert_eq!(best(&one), best(&other));
}

#[test]
fn announcement_with_own_hop_id_is_refused_and_ends_the_earlier_one() {
    let now = Instant::now();
    let mut table = table(9);
    announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    assert_eq!(announce(&mut table, 1, &[100, 9, 1], 0, now), Err(AnnouncementRefusal::Loop));
    assert_eq!(best(&table), None);
}

#[test]
fn peer_announcements_beyond_the_namespace_limit_are_refused() {
    let now = Instant::now();
    let mut table = RouteTable::new(HopId(9), RouteLimits { per_link: 3 });
    let mut taken = 0;
    for number in 0..1000 {
        let announcement = Announcement { path: path(&[100, 1]), cost: number };
        let namespace = namespace(&format!("live/{number}"));
        taken += u64::from(table.announce(key(1), &namespace, announcement, 1, now).is_ok());
    }
    assert_eq!((taken, table.routes.len(), table.count(1)), (3, 3, 3));
    let announcement = Announcement { path: path(&[100, 1]), cost: 7 };
    assert_eq!(
        table.announce(key(1), &namespace("live/0"), announcement.clone(), 1, now),
        Ok(()),
        "a change"
    );
    assert_eq!(table.announce(key(2), &namespace("live/9"), announcement, u64::MAX, now), Ok(()));
    assert_eq!(table.best(&namespace("live/9"), Neighbour::NOBODY).unwrap().cost, u64::MAX);
}

#[test]
fn route_through_a_neighbour_is_not_announced_to_it() {
    let now = Instant::now();
    let live = namespace("live");
    let mut table = table(9);
    announce(&mut table, 1, &[100, 5, 1], 0, now).unwrap();
    announce(&mut table, 2, &[100, 2], 6, now).unwrap();
    let told = |table: &RouteTable, link, hop| {
        let told = table.announcement(&live, Neighbour { link, hop: HopId(hop) })?;
        Some((told.path, told.cost))
    };
    assert_eq!(told(&table, 3, 3), Some((path(&[100, 5, 1, 9]), 1)));
    for (link, hop) in [(1, 1), (5, 5)] {
        assert_eq!(told(&table, link, hop), Some((path(&[100, 2, 9]), 7)), "{hop}");
    }
    assert_eq!(told(&table, 1, 0), Some((path(&[100, 2, 9]), 7)), "an unnamed peer");
    // A route in use is announced with cost 0, even if an unused route would be cheaper.
    table.take_changes();
    table.set_carried([(namespace("live/room"), [2].into())].into());
    assert_eq!(table.take_changes(), [live.clone()].into());
    assert_eq!(told(&table, 3, 3), Some((path(&[100, 2, 9]), 0)));
    assert_eq!(told(&table, 2, 2), Some((path(&[100, 5, 1, 9]), 1)));
    table.set_carried(BTreeMap::new());
    assert_eq!(table.take_changes(), [live.clone()].into());
}

#[test]
fn route_with_the_longest_matching_namespace_prefix_is_used() {
    let now = Instant::now();
    let mut table = table(9);
    let mut put = |link, at: &str, hops: &[u64]| {
        let announcement = Announcement { path: path(hops), cost: 0 };
        table.announce(key(link), &namespace(at), announcement, 1, now).unwrap();
    };
    put(1, "live", &[100, 1]);
    put(2, "live/room", &[100, 7, 2]);
    let of = |at: &str, hop| {
        let neighbour = Neighbour { link: 99, hop: HopId(hop) };
        table.find(&namespace(at), neighbour).map(|route| route.key.link)
    };
    assert_eq!(of("live/room/cam", 0), Some(2));
    assert_eq!(of("live/room", 7), Some(1), "relay 7 is on the longer one's way");
    assert_eq!(of("live/other", 0), Some(1));
    assert_eq!(of("other", 0), None);
}

#[test]
fn track_moves_only_to_a_shorter_no_costlier_route_older_than_hold_time() {
    let now = Instant::now();
    let live = namespace("live");
    let later = now + HOLD;
    let mut table = table(9);
    announce(&mut table, 1, &[100, 5, 1], 4, now).unwrap();
    assert_eq!(table.next(&live, &[1], now), NextSource::Stay);
    announce(&mut table, 2, &[100, 6, 2], 0, now).unwrap();
    assert_eq!(table.next(&live, &[1], later), NextSource::Stay, "it is cheaper, but as long");
    announce(&mut table, 4, &[100, 4], 9, now).unwrap();
    assert_eq!(table.next(&live, &[1], later), NextSource::Stay, "it is shorter, but costs more");
    table.withdraw(key(4), &live, now);
    announce(&mut table, 3, &[100, 3], 0, now).unwrap();
    assert_eq!(table.next(&live, &[1], now), NextSource::Later(later));
    assert_eq!(table.next(&live, &[1], later), NextSource::Move(3));
    table.set_suspect(3, true, now);
    assert_eq!(table.next(&live, &[3], now), NextSource::Move(2), "by way of other relays");
    announce(&mut table, 2, &[100, 3, 2], 0, now).unwrap();
    assert_eq!(
        table.next(&live, &[3], now),
        NextSource::Later(now + HUNT),
        "the relays on it may not know yet"
    );
    assert_eq!(table.next(&live, &[3], now + HUNT), NextSource::Move(2));
    table.withdraw(key(2), &live, now);
    table.set_suspect(1, true, now);
    assert_eq!(table.next(&live, &[3], later), NextSource::Stay, "no other one answers");
    table.withdraw(key(3), &live, now);
    assert_eq!(table.next(&live, &[3], later), NextSource::Move(1));
    table.withdraw(key(1), &live, now);
    assert_eq!(table.next(&live, &[3], later), NextSource::Lost);
}

#[test]
fn track_moves_between_a_local_publisher_and_a_relay_only_if_the_present_one_fails() {
    let now = Instant::now();
    let live = namespace("live");
    let later = now + HOLD;
    let mut table = table(9);
    announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    table.publish(key(4), &live, None, now);
    assert_eq!(table.next(&live, &[1], later), NextSource::Stay, "the relay works");
    assert_eq!(table.next(&live, &[4], later), NextSource::Stay, "the publisher works");
    table.set_suspect(1, true, now);
    assert_eq!(table.next(&live, &[1], now), NextSource::Move(4));
    table.set_suspect(4, true, now);
    assert_eq!(table.next(&live, &[4], now), NextSource::Stay, "neither answers");
    let peer = Neighbour { link: 5, hop: HopId(5) };
    assert_eq!(table.announcement(&live, peer).map(|told| told.cost), Some(DOUBT));
    table.set_suspect(1, false, now);
    assert_eq!(table.next(&live, &[4], now), NextSource::Move(1));
    table.withdraw(key(1), &live, now);
    assert_eq!(table.next(&live, &[1], now), NextSource::Move(4), "there is no other");
}

/// A simulated mesh: relays by index, links with their costs, and messages in flight. In each relay, the session with
/// relay `n` has the ID `n + 1`, because 0 is not a valid ID.
struct Mesh {
    tables: Vec<RouteTable>,
    links: Vec<BTreeMap<usize, u64>>,
    /// The announcements that each relay has sent to each of its neighbours.
    told: BTreeMap<(usize, usize), Announcement>,
    way: VecDeque<(usize, usize, Option<Announcement>)>,
    seed: u64,
    messages: usize,
}

impl Mesh {
    fn random(seed: u64, relays: usize) -> Self {
        let mut mesh = Self {
            tables: (0..relays).map(|relay| table(relay as u64 + 1)).collect(),
            links: vec![BTreeMap::new(); relays],
            told: BTreeMap::new(),
            way: VecDeque::new(),
            seed,
            messages: 0,
        };
        for relay in 1..relays {
            let other = mesh.below(relay);
            mesh.link(relay, other);
        }
        for _ in 0..relays {
            let one = mesh.below(relays);
            let other = mesh.below(relays);
            if one != other {
                mesh.link(one, other);
            }
        }
        mesh
    }

    fn below(&mut self, bound: usize) -> usize {
        self.seed = mix(self.seed);
        (self.seed % bound as u64) as usize
    }

    fn link(&mut self, one: usize, other: usize) {
        let cost = self.below(4) as u64;
        self.links[one].insert(other, cost);
        self.links[other].insert(one, cost);
    }

    fn tell(&mut self, relay: usize) {
        let live = namespace("live");
        self.tables[relay].take_changes();
        for other in self.links[relay].keys().copied().collect::<Vec<_>>() {
            let neighbour = Neighbour { link: other as u64 + 1, hop: HopId(other as u64 + 1) };
            let told = self.tables[relay].announcement(&live, neighbour);
            if self.told.get(&(relay, other)) != told.as_ref() {
                match told.clone() {
                    Some(told) => self.told.insert((relay, other), told),
                    None => self.told.remove(&(relay, other)),
                };
                self.way.push_back((relay, other, told));
            }
        }
    }

    /// Delivers messages until there are none left. The order on each link is kept.
    fn settle(&mut self, now: Instant) {
        let live = namespace("live");
        while !self.way.is_empty() {
            let place = self.below(self.way.len());
            let (from, to, _) = self.way[place];
            let first = self.way.iter().position(|(one, other, _)| (*one, *other) == (from, to)).unwrap();
            let (_, _, told) = self.way.remove(first).unwrap();
            let Some(cost) = self.links[to].get(&from).copied() else { continue };
            self.messages += 1;
            assert!(self.messages < 200_000, "the mesh does not settle");
            match told {
                Some(told) => {
                    let taken = self.tables[to].announce(key(from as u64 + 1), &live, told, cost, now);
                    assert_ne!(taken, Err(AnnouncementRefusal::TooMany));
                }
                None => self.tables[to].withdraw(key(from as u64 + 1), &live, now),
            }
            self.tell(to);
        }
    }

    fn cut(&mut self, one: usize, other: usize, now: Instant) {
        for (one, other) in [(one, other), (other, one)] {
            self.links[one].remove(&other);
            self.told.remove(&(one, other));
            self.tables[one].withdraw(key(other as u64 + 1), &namespace("live"), now);
        }
        self.tell(one);
        self.tell(other);
    }

    /// Reports whether one relay can reach the other over the links that the test has not removed.
    fn connects(&self, from: usize, to: usize) -> bool {
        let mut seen = BTreeSet::from([from]);
        let mut next = vec![from];
        while let Some(relay) = next.pop() {
            next.extend(self.links[relay].keys().copied().filter(|other| seen.insert(*other)));
        }
        seen.contains(&to)
    }

    /// Follows the best routes from every relay. The routes must lead to the publisher's relay without a loop, unless
    /// it cannot be reached.
    fn check(&self, origin: usize) {
        let live = namespace("live");
        for start in 0..self.tables.len() {
            let mut at = start;
            let mut steps = 0;
            while at != origin {
                let Some(route) = self.tables[at].best(&live, Neighbour::NOBODY) else { break };
                let next = route.key.link as usize - 1;
                assert!(self.links[at].contains_key(&next), "over a link that is cut");
                at = next;
                steps += 1;
                assert!(steps <= self.tables.len(), "a circle");
            }
            assert_eq!(at == origin, self.connects(start, origin), "relay {start}");
        }
    }
}

#[test]
fn random_meshes_converge_without_loops_and_find_every_remaining_route() {
    let now = Instant::now();
    for seed in 0..60 {
        let mut mesh = Mesh::random(seed, 3 + seed as usize % 12);
        let origin = mesh.below(mesh.tables.len());
        let publisher = AnnouncementKey { link: 1000, number: 0 };
        mesh.tables[origin].publish(publisher, &namespace("live"), None, now);
        mesh.tell(origin);
        mesh.settle(now);
        mesh.check(origin);
        for _ in 0..mesh.tables.len() {
            let one = mesh.below(mesh.tables.len());
            let others: Vec<_> = mesh.links[one].keys().copied().collect();
            if others.is_empty() {
                continue;
            }
            let other = others[mesh.below(others.len())];
            mesh.cut(one, other, now);
            if mesh.below(2) == 0 {
                mesh.settle(now);
                mesh.check(origin);
            }
        }
        mesh.settle(now);
        mesh.check(origin);
        mesh.tables[origin].withdraw(publisher, &namespace("live"), now);
        mesh.tell(origin);
        mesh.settle(now);
        assert!(mesh.tables.iter().all(|table| !table.has(&namespace("live"))), "seed {seed}: a ghost");
    }
}

/// Relays announce with cost 0 each namespace whose tracks they already receive. The mesh must converge in that case,
/// too.
#[test]
fn meshes_with_namespaces_announced_at_cost_0_converge() {
    let now = Instant::now();
    let live = namespace("live");
    for seed in 100..130 {
        let mut mesh = Mesh::random(seed, 8);
        mesh.tables[0].publish(AnnouncementKey { link: 1000, number: 0 }, &live, None, now);
        mesh.tell(0);
        mesh.settle(now);
        for _ in 0..8 {
            let relay = mesh.below(8);
            if let Some(route) = mesh.tables[relay].best(&live, Neighbour::NOBODY).cloned() {
                mesh.tables[relay].set_carried([(live.clone(), [route.key.link].into())].into());
                mesh.tell(relay);
                mesh.settle(now);
            }
        }
        mesh.check(0);
    }
}

impl Mesh {
    /// Returns the session from which a relay receives the namespace.
    fn source(&self, relay: usize) -> Option<ClusterLink> {
        self.tables[relay].carried.get(&namespace("live"))?.first().copied()
    }

    /// Makes a relay receive the namespace by its best route. A relay that receives it by way of the asking one
    /// refuses.
    fn receive(&mut self, relay: usize) {
        let live = namespace("live");
        let routes = self.tables[relay].routes(&live);
        let serves = |link: ClusterLink| {
            let peer = link as usize - 1;
            let used = self.source(peer).map(|source| self.tables[peer].hops_by(&live, source));
            used.is_none_or(|hops| !hops.contains(&HopId(relay as u64 + 1)))
        };
        let link = routes.iter().map(|route| route.key.link).find(|link| serves(*link)).expect("a route");
        self.tables[relay].set_carried([(live, [link].into())].into());
        self.tell(relay);
    }
}

/// Sessions with a relay that does not answer stay open, so nothing is withdrawn. If one of the peers still hears the
/// relay, the others use routes through that one.
#[test]
fn routes_settle_while_a_relay_answers_none_or_only_one_of_its_peers() {
    let now = Instant::now();
    let live = namespace("live");
    for seed in 200..260 {
        let relays = 3 + seed as usize % 8;
        let mut mesh = Mesh::random(seed, relays);
        for one in 0..relays {
            (0..one).for_each(|other| mesh.link(one, other));
        }
        mesh.tables[0].publish(AnnouncementKey { link: 1000, number: 0 }, &live, None, now);
        mesh.tell(0);
        mesh.settle(now);
        (1..relays).for_each(|relay| mesh.receive(relay));
        mesh.settle(now);
        let before = mesh.messages;
        // Relay 0 is the silent one. With `hearing` 0, no relay hears it.
        let hearing = mesh.below(relays);
        for relay in (1..relays).filter(|relay| *relay != hearing) {
            mesh.tables[relay].set_suspect(1, true, now);
            mesh.tell(relay);
        }
        mesh.settle(now);
        let next = |mesh: &Mesh, relay: usize| {
            let from: Vec<_> = mesh.source(relay).into_iter().collect();
            mesh.tables[relay].next(&live, &from, now + HUNT)
        };
        for relay in (1..relays).cycle().take(3 * relays) {
            if let NextSource::Move(_) = next(&mesh, relay) {
                mesh.receive(relay);
                mesh.settle(now);
            }
        }
        for relay in 1..relays {
            let next = next(&mesh, relay);
            assert!(!matches!(next, NextSource::Move(_)), "seed {seed}: relay {relay} still moves");
            if hearing > 0 {
                assert_eq!(mesh.source(relay) == Some(1), relay == hearing, "seed {seed}, relay {relay}");
            }
        }
        if hearing > 0 {
            mesh.check(0);
        }
        let each = (mesh.messages - before) / (relays * relays);
        assert!(each <= 12, "seed {seed}: {each} announcements for each link");
        for relay in 1..relays {
            mesh.tables[relay].set_suspect(1, false, now);
            mesh.tell(relay);
        }
        mesh.settle(now);
        mesh.check(0);
    }
}

/// The other peers of a relay that has disappeared withdraw their routes through it a moment later.
#[test]
fn route_through_a_relay_that_disappeared_comes_last_and_after_a_delay() {
    let now = Instant::now();
    let live = namespace("live");
    let mut table = table(9);
    announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    announce(&mut table, 2, &[100, 1, 2], 0, now).unwrap();
    table.withdraw(key(1), &live, now);
    assert_eq!(table.next(&live, &[1], now), NextSource::Later(now + HUNT));
    assert_eq!(table.next(&live, &[1], now + HUNT), NextSource::Move(2));
    announce(&mut table, 3, &[100, 6, 5, 3], 9, now).unwrap();
    assert_eq!(table.next(&live, &[1], now), NextSource::Move(3));
    announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    assert_eq!(best(&table), Some(1), "it is back");
    announce(&mut table, 4, &[100, 1], 0, now).unwrap();
    table.withdraw(key(1), &live, now);
    assert!(table.gone.is_empty(), "it has another session");
    announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    table.withdraw(key(4), &live, now);
    for _ in 0..100 {
        table.withdraw(key(1), &live, now);
        announce(&mut table, 1, &[100, 1], 0, now).unwrap();
    }
    assert!(table.gone.len() <= MAX_GONE);
}
