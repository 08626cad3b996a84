//! What all connections of a broker share.

use std::sync::Arc;

use millrace_graft::{Rule, settings::Kind};
use parking_lot::RwLock;

use super::{
    carriers::Carriers, gateway::Gateway, hooks::Hooks, openings::Openings, ports::Ports, purposes::Purposes,
    table::Table, watch::Watch,
};

pub struct Context {
    /// Of this broker, another after each start.
    pub run: u64,
    pub hooks: Arc<Hooks>,
    pub table: Arc<Table>,
    pub watch: Watch,
    pub carriers: Arc<Carriers>,
    /// To connect to servers of this host from.
    pub ports: Ports,
    /// Asks this host's firewall whether a connection may begin.
    pub openings: Openings,
    /// For hosts behind this one.
    pub gateway: Option<Arc<Gateway>>,
    /// That say which servers of this host are reached by carriers.
    pub servers: RwLock<Vec<Rule>>,
    /// Bytes that open a new carrier's window.
    pub warm: u64,
    /// What carriers may be, in order of preference.
    pub carriers_wanted: Vec<Kind>,
    /// What connections are for.
    pub purposes: Arc<Purposes>,
}
