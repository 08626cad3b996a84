//! Sessions with several paths: which of them carry how much, by what both ends say of them.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_graft_kernel::joint::{self, Ends, PATHS_MAX};
use nix::net::if_::if_nametoindex;

use super::super::PathStatus;
use super::super::agree::Word;
use super::super::paths::{Balance, COUNT, IDLE, LOOK, WEIGHT_MOST};
use super::super::settings::{Paths, Settings};
use super::Runtime;
use super::hops::Wanted;
use crate::Error;

/// A session has traffic for so long after something more than words has passed.
const CALM: Duration = Duration::from_secs(2);

pub(super) struct Routes {
    settings: Paths,
    each: Vec<joint::Path>,
    balance: Balance,
    /// What had been sent and had come at the latest look.
    passed: u64,
    busy_until: Duration,
    says: Duration,
}

/// Numbers of those that are there, by their names.
type Interfaces = BTreeMap<String, u32>;

/// Of all that paths may have.
fn interfaces(settings: &Settings) -> Interfaces {
    let number = |name: &String| Some((name.clone(), if_nametoindex(name.as_str()).ok()?));
    settings.interfaces.iter().filter_map(number).collect()
}

/// Sessions that have paths.
pub(super) fn of(settings: &Settings) -> Vec<Ends> {
    let with = settings.sessions.iter().filter(|session| session.paths.is_some());
    with.map(|session| session.ends).collect()
}

/// What comes by a path has the session's addresses, of which the kernel may believe that they belong to another interface.
///
/// # Errors
/// It would drop them.
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
                    "session {}: path: interface {} drops what comes with addresses of another one: \
                     sysctl -w net.ipv4.conf.{}.rp_filter=2",
                    session.name, path.interface, path.interface
                )));
            }
        }
    }
    Ok(())
}

impl Routes {
    fn new(settings: &Paths, interfaces: &Interfaces) -> Self {
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

    /// The other daemon was started anew, and counts from the beginning.
    pub fn begin_anew(&mut self) {
        self.balance = Balance::new(self.each.len());
    }

    /// Interfaces come and go. One that is not there has no number, and carries nothing.
    fn current(&self, interfaces: &Interfaces) -> Vec<joint::Path> {
        let path = |(path, weight): (&super::super::settings::Path, u32)| {
            let ifindex = interfaces.get(&path.interface).copied().unwrap_or_default();
            let weight = match (ifindex, self.settings.is_redundant) {
                (0, _) => 0,
                (_, true) => WEIGHT_MOST,
                _ => weight,
            };
            joint::Path { local: path.local, remote: path.remote, ifindex, weight }
        };
        self.settings.each.iter().zip(self.balance.weights()).map(path).collect()
    }

    /// Than the session's own.
    fn is_another_up(&self) -> bool {
        let mut others = self.each.iter().enumerate().skip(1);
        others.any(|(at, path)| path.ifindex != 0 && self.balance.is_up(at))
    }

    pub fn status(&self, counts: &[joint::PathCount; PATHS_MAX]) -> Vec<PathStatus> {
        let each = self.settings.each.iter().zip(self.each.iter().zip(counts)).enumerate();
        let status = |(at, (path, (now, count))): (usize, (&super::super::settings::Path, _))| {
            let (now, count): (&joint::Path, &joint::PathCount) = (now, count);
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

impl Runtime {
    pub(super) fn begin_paths(&mut self, ends: &Ends) -> Result<(), Error> {
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let Some(paths) = &live.session.paths else { return Ok(()) };
        let routes = Routes::new(paths, &interfaces(&self.settings));
        self.joints.set_paths(ends, &routes.each, routes.settings.is_redundant)?;
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
        let mut wanted = Wanted::new();
        for ends in self.pathed.clone() {
            self.look_at_paths_of(&ends, now, &interfaces)?;
            let Some(routes) = self.live.get(&ends).and_then(|live| live.routes.as_ref()) else { continue };
            *wanted.entry((ends.local.ip(), ends.remote.ip())).or_default() |= routes.is_another_up();
        }
        self.hops.look(now, &wanted);
        Ok(())
    }

    fn look_at_paths_of(&mut self, ends: &Ends, now: Duration, interfaces: &Interfaces) -> Result<(), Error> {
        let Some(routes) = self.live.get_mut(ends).and_then(|live| live.routes.as_mut()) else {
            return Ok(());
        };
        let counts = self.joints.path_counts(ends)?;
        let round_trip = self.joints.progress(ends)?.round_trip;
        routes.balance.look(now, round_trip, &counts.map(|count| count.sent));
        let current = routes.current(interfaces);
        if current != routes.each {
            let same = |(old, new): (&joint::Path, &joint::Path)| old.ifindex == new.ifindex;
            let is_redundant = routes.settings.is_redundant;
            match routes.each.iter().zip(&current).all(same) {
                true => self.joints.weigh_paths(ends, &current, is_redundant)?,
                false => {
                    routes.balance = Balance::new(current.len());
                    self.joints.set_paths(ends, &current, is_redundant)?;
                }
            }
            routes.each = current;
        }
        let passed: u64 = counts.iter().map(|count| count.sent + count.came).sum();
        let words = 4 * (routes.each.len() * routes.each.len()) as u64;
        if passed > routes.passed + words {
            routes.busy_until = now + CALM;
        }
        routes.passed = passed;
        if now < routes.says && now >= routes.busy_until {
            return Ok(());
        }
        routes.says = now + IDLE;
        for (path, count) in counts.iter().enumerate().take(routes.each.len()) {
            self.say(ends, Word::Came { path: path as u8, count: count.came as u32 & COUNT });
        }
        Ok(())
    }

    /// Whether the word was about these.
    pub(super) fn hear_paths(&mut self, ends: &Ends, word: Word) -> Result<bool, Error> {
        let Word::Came { path, count } = word else { return Ok(false) };
        if let Some(routes) = self.live.get_mut(ends).and_then(|live| live.routes.as_mut()) {
            let sent = self.joints.path_counts(ends)?.get(usize::from(path)).map_or(0, |count| count.sent);
            routes.balance.hear(path, count, sent);
        }
        Ok(true)
    }
}
