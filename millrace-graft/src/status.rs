//! What a runtime is doing, as data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::paths::Path;

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Status {
    pub uptime_s: f64,
    pub cgroup: String,
    pub loaded: Vec<Loaded>,
    pub rules: Vec<Rule>,
    /// By the name of what became of them.
    pub outcomes: BTreeMap<String, u64>,
    /// Not usable, with reasons.
    pub unusable: Vec<(String, String)>,
    pub reload: Option<Reload>,
    /// What is not as it should be.
    pub trouble: Vec<String>,
    /// Lines of the log that were not written.
    pub log_lines_dropped: u64,
    pub paths: Vec<Path>,
}

/// A graft in the kernel.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Loaded {
    pub name: String,
    pub congestion: String,
    /// SHA-256 of its object.
    pub identity: String,
    pub parameters: BTreeMap<String, u64>,
    /// Whether the kernel takes it back when this process is killed.
    pub by_link: bool,
    pub open_us: u64,
    pub load_us: u64,
    pub attach_us: u64,
    /// Live connections that use it, in this network namespace.
    pub connections: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Rule {
    pub name: String,
    pub side: String,
    pub ports: Vec<String>,
    pub peers: Vec<String>,
    pub agree: bool,
    pub congestion: Option<String>,
}

/// The latest reading of the settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Reload {
    /// Seconds since 1970.
    pub time_s: f64,
    pub error: Option<String>,
}

/// Why connections with a peer are as they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Why {
    pub peer: String,
    /// Of the latest connection that a rule fits.
    pub outcome: Option<String>,
    /// That outcome in words.
    pub reason: String,
    pub rule: Option<String>,
    /// What the peer said that it uses: the first bytes of an identity, and the name if it is known here.
    pub peer_graft: Option<String>,
    pub agreed: u64,
    pub age_s: Option<f64>,
    pub path: Option<Path>,
}
