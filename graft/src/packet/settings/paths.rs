//! Settings of sessions with several paths.

use std::collections::BTreeSet;
use std::net::IpAddr;

use millrace_graft_kernel::packet::{PATH_SESSIONS, PATHS_MAX, SessionEnds};
use serde::Deserialize;

use super::{SessionSetting, Settings};
use crate::Error;

/// The paths of a session. The first path uses the session's own addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSettings {
    pub each: Vec<PathSetting>,
    /// True if every packet is sent on all paths.
    pub is_redundant: bool,
}

/// The addresses in packets of one path, instead of the session's own. The ports stay the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PathSetting {
    /// Address of this host.
    pub local: IpAddr,
    /// Address of the other host.
    pub remote: IpAddr,
    /// Interface through which packets of the path leave this host.
    pub interface: String,
}

/// How packets are divided among paths.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Division {
    Spread,
    Redundant,
}

impl PathSettings {
    /// Checks the paths of a session.
    ///
    /// # Errors
    /// The error text says which path is wrong, and why.
    pub(super) fn checked(
        mut each: Vec<PathSetting>,
        division: Option<Division>,
        ends: &SessionEnds,
    ) -> Result<Option<Self>, String> {
        if each.is_empty() && division.is_none() {
            return Ok(None);
        }
        if !(2..=PATHS_MAX).contains(&each.len()) {
            return Err(format!("path: there are 2 to {PATHS_MAX} of them, or none"));
        }
        let is_own = |path: &PathSetting| (path.local, path.remote) == (ends.local.ip(), ends.remote.ip());
        let Some(own) = each.iter().position(is_own) else {
            return Err(format!(
                "path: one of them has the session's own addresses, local = \"{}\" and remote = \"{}\", and their interface",
                ends.local.ip(),
                ends.remote.ip()
            ));
        };
        each.swap(0, own);
        let mut pairs = BTreeSet::new();
        for path in &each {
            let PathSetting { local, remote, .. } = path;
            if local.is_ipv4() != ends.local.is_ipv4() || remote.is_ipv4() != ends.local.is_ipv4() {
                return Err(format!("path {local} - {remote} is of another family than the session"));
            }
            if !pairs.insert((*local, *remote)) {
                return Err(format!("path {local} - {remote} is there twice"));
            }
        }
        Ok(Some(Self { each, is_redundant: division == Some(Division::Redundant) }))
    }
}

impl SessionSetting {
    /// Returns the addresses and ports of the session's packets on its additional paths, from the second path on.
    fn outside(&self) -> impl Iterator<Item = SessionEnds> {
        let paths = self.paths.iter().flat_map(|paths| paths.each.iter().skip(1));
        let with = |path: &PathSetting| {
            let mut ends = self.ends;
            ends.local.set_ip(path.local);
            ends.remote.set_ip(path.remote);
            ends
        };
        paths.map(with)
    }
}

impl Settings {
    pub(super) fn check_paths(&self) -> Result<(), Error> {
        let with = self.sessions.iter().filter(|session| session.paths.is_some()).count();
        if with > PATH_SESSIONS {
            return Err(Error::Settings(format!(
                "{with} sessions have several paths, those of each peer's pool among them: at most {PATH_SESSIONS} may"
            )));
        }
        let mut taken: BTreeSet<_> = self.sessions.iter().map(|session| session.ends).collect();
        for session in &self.sessions {
            let wrong =
                |message: String| Err(Error::Settings(format!("session {}: {message}", session.name)));
            let Some(paths) = &session.paths else { continue };
            if let Some(path) = paths.each.iter().find(|path| !self.interfaces.contains(&path.interface)) {
                return wrong(format!("path: interface {} is not one of `interface`", path.interface));
            }
            if let Some(ends) = session.outside().find(|ends| !taken.insert(*ends)) {
                return wrong(format!(
                    "path {} - {}: another session has them, with these ports",
                    ends.local.ip(),
                    ends.remote.ip()
                ));
            }
            let drops_twice = |name: &String| self.grafts.get(name).is_some_and(|graft| graft.has("number"));
            let mut grafts = session.when.iter().map(|when| &when.graft).chain([&session.graft]);
            if paths.is_redundant && session.cipher.is_none() && !grafts.all(drops_twice) {
                return wrong(
                    "paths = \"redundant\" in clear needs grafts with the function number, which drops duplicates"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
}
