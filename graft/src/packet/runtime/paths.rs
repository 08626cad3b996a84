//! Sessions with several paths: the packets of each session are divided among its paths by the reports of both ends.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_graft_kernel::packet::{self, PATHS_MAX, SessionEnds};
use nix::net::if_::if_nametoindex;

use super::super::PathStatus;
use super::super::agree::ListMessage;
use super::super::paths::{Balance, COUNT, IDLE, LOOK, WEIGHT_MOST};
use super::super::settings::{PathSettings, Settings};
use super::PacketRuntime;
use super::hops::WantedHop;
use crate::Error;

/// Time for which a session counts as busy after packets other than reports were sent or received.
const CALM: Duration = Duration::from_secs(2);

/// The paths of one session, and how its packets are divided.
pub(super) struct SessionRoutes {
    settings: PathSettings,
    each: Vec<packet::SessionPath>,
    balance: Balance,
    /// Number of the session's packets that had been sent or received at the time of the latest check.
    passed: u64,
    /// Time until which the session counts as busy: it has packets other than reports.
    busy_until: Duration,
    /// Time at which an idle session sends its next report.
    says: Duration,
}

/// Index of each existing interface, by name.
type InterfaceIndexes = BTreeMap<String, u32>;

/// Returns the existing interfaces that paths may use.
fn interfaces(settings: &Settings) -> InterfaceIndexes {
    let number = |name: &String| Some((name.clone(), if_nametoindex(name.as_str()).ok()?));
    settings.interfaces.iter().filter_map(number).collect()
}

/// Returns the sessions that have several paths.
pub(super) fn list_ends(settings: &Settings) -> Vec<SessionEnds> {
    let with = settings.sessions.iter().filter(|session| session.paths.is_some());
    with.map(|session| session.ends).collect()
}

/// Checks the kernel's filter by source address (`rp_filter`). Packets on a path have the session's addresses, which
/// may belong to another interface.
///
/// # Errors With its present setting, the filter would drop packets of a path. The error contains the command that
/// changes the filter.
pub(super) fn check(settings: &Settings) -> Result<(), Error> {
    for session in &settings.sessions {
        let paths = session.paths.iter().flat_map(|paths| paths.each.iter().skip(1));
        for path in paths.filter(|path| path.local.is_ipv4()) {
            let strict = ["all", &path.interface].iter().any(|of| {
                let file = format!("/proc/sys/net/ipv4/conf/{of}/rp_filter");
                std::fs::read_to_string(file).is_ok_and(|text| text.trim() == "1")
            });
            let loose =
                std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{}/rp_filter", path.interface))
                    .is_ok_and(|text| text.trim() == "2");
            if strict && !loose {
                return Err(Error::Settings(format!(
                    "session {}: path: interface {} drops packets with addresses of another one: \
                     sysctl -w net.ipv4.conf.{}.rp_filter=2",
                    session.name, path.interface, path.interface
                )));
            }
        }
    }
    Ok(())
}

impl SessionRoutes {
    fn new(settings: &PathSettings, interfaces: &InterfaceIndexes) -> Self {
        let mut routes = Self {
            settings: settings.clone(),
            each: Vec::new(),
            balance: Balance::new(settings.each.len()),
            passed: 0,
            busy_until: Duration::ZERO,
            says: Duration::ZERO,
        };
        routes.each = routes.current(interfaces);
        routes
    }

    /// Restarts the counts of packets after the other daemon was restarted.
    pub fn begin_anew(&mut self) {
        self.balance = Balance::new(self.each.len());
    }

    /// Returns the present paths. A path whose interface does not exist at present has index 0 and gets no packets.
    fn current(&self, interfaces: &InterfaceIndexes) -> Vec<packet::SessionPath> {
        let path = |(path, weight): (&super::super::settings::PathSetting, u32)| {
            let ifindex = interfaces.get(&path.interface).copied().unwrap_or_default();
            let weight = match (ifindex, self.settings.is_redundant) {
                (0, _) => 0,
                (_, true) => WEIGHT_MOST,
                _ => weight,
            };
            packet::SessionPath { local: path.local, remote: path.remote, ifindex, weight }
        };
        self.settings.each.iter().zip(self.balance.weights()).map(path).collect()
    }

    /// Reports whether a path with other addresses than the session's own is up.
    fn is_another_up(&self) -> bool {
        let mut others = self.each.iter().enumerate().skip(1);
        others.any(|(at, path)| path.ifindex != 0 && self.balance.is_up(at))
    }

    pub fn status(&self, counts: &[packet::PathCount; PATHS_MAX]) -> Vec<PathStatus> {
        let each = self.settings.each.iter().zip(self.each.iter().zip(counts)).enumerate();
        let status = |(at, (path, (now, count))): (usize, (&super::super::settings::PathSetting, _))| {
            let now: &packet::SessionPath = now;
            let count: &packet::PathCount = count;
            PathStatus {
                interface: path.interface.clone(),
                local: path.local.to_string(),
                remote: path.remote.to_string(),
                is_up: now.ifindex != 0 && self.balance.is_up(at),
                weight: now.weight,
                sent: count.sent,
                came: count.came,
            }
        };
        each.map(status).collect()
    }
}

impl PacketRuntime {
    pub(super) fn begin_paths(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let Some(paths) = &live.session.paths else { return Ok(()) };
        let routes = SessionRoutes::new(paths, &interfaces(&self.settings));
        self.hooks.set_paths(ends, &routes.each, routes.settings.is_redundant)?;
        live.routes = Some(routes);
        Ok(())
    }

    pub(super) fn look_at_paths(&mut self) -> Result<(), Error> {
        let now = self.now();
        if self.pathed.is_empty() || now < self.looked_at_paths + LOOK {
            return Ok(());
        }
        self.looked_at_paths = now;
        let interfaces = interfaces(&self.settings);
        let mut wanted = WantedHop::new();
        for ends in self.pathed.clone() {
            self.look_at_paths_of(&ends, now, &interfaces)?;
            let Some(routes) = self.live.get(&ends).and_then(|live| live.routes.as_ref()) else { continue };
            *wanted.entry((ends.local.ip(), ends.remote.ip())).or_default() |= routes.is_another_up();
        }
        self.hops.look(now, &wanted);
        Ok(())
    }

    fn look_at_paths_of(
        &mut self,
        ends: &SessionEnds,
        now: Duration,
        interfaces: &InterfaceIndexes,
    ) -> Result<(), Error> {
        let Some(routes) = self.live.get_mut(ends).and_then(|live| live.routes.as_mut()) else {
            return Ok(());
        };
        let counts = self.hooks.path_counts(ends)?;
        let round_trip = self.hooks.progress(ends)?.round_trip;
        routes.balance.look(now, round_trip, &counts.map(|count| count.sent));
        let current = routes.current(interfaces);
        if current != routes.each {
            let same = |(old, new): (&packet::SessionPath, &packet::SessionPath)| old.ifindex == new.ifindex;
            let is_redundant = routes.settings.is_redundant;
            // If only weights change, the kernel keeps the counters of the paths. Another interface index makes them
            // new paths, whose counters start from zero.
            match routes.each.iter().zip(&current).all(same) {
                true => self.hooks.weigh_paths(ends, &current, is_redundant)?,
                false => {
                    routes.balance = Balance::new(current.len());
                    self.hooks.set_paths(ends, &current, is_redundant)?;
                }
            }
            routes.each = current;
        }
        let passed: u64 = counts.iter().map(|count| count.sent + count.came).sum();
        // Both ends send a report about each path on every path. Only if more packets than those reports have passed,
        // the application has traffic.
        let messages = 4 * (routes.each.len() * routes.each.len()) as u64;
        if passed > routes.passed + messages {
            routes.busy_until = now + CALM;
        }
        routes.passed = passed;
        if now < routes.says && now >= routes.busy_until {
            return Ok(());
        }
        routes.says = now + IDLE;
        for (path, count) in counts.iter().enumerate().take(routes.each.len()) {
            self.say(ends, ListMessage::Came { path: path as u8, count: count.came as u32 & COUNT });
        }
        Ok(())
    }

    /// Handles a report about a path. Returns false if the message is about something else.
    pub(super) fn hear_paths(&mut self, ends: &SessionEnds, message: ListMessage) -> Result<bool, Error> {
        let ListMessage::Came { path, count } = message else { return Ok(false) };
        if let Some(routes) = self.live.get_mut(ends).and_then(|live| live.routes.as_mut()) {
            let sent = self.hooks.path_counts(ends)?.get(usize::from(path)).map_or(0, |count| count.sent);
            routes.balance.on_count(path, count, sent);
        }
        Ok(true)
    }
}
