//! State that all connections of a tunnel broker share.

use std::sync::Arc;

use millrace_graft::{RuleSetting, settings::CarrierKind};
use parking_lot::RwLock;

use super::{
    carriers::Carriers, gateway::CarryGateway, hooks::Hooks, openings::TunnelOpenings, ports::PortRange,
    purposes::Purposes, table::TunnelTable, watch::TunnelWatch,
};

/// State that all connections of a tunnel broker share, from the broker's start to its end.
pub struct CarryContext {
    /// Random number that this broker chose when it started, by which peers notice a restart.
    pub run: u64,
    pub hooks: Arc<Hooks>,
    pub table: Arc<TunnelTable>,
    pub watch: TunnelWatch,
    pub carriers: Arc<Carriers>,
    /// Range of local ports from which the tunnel broker connects to servers on this host.
    pub ports: PortRange,
    /// Asks this host's firewall whether a connection may be tunnelled.
    pub openings: TunnelOpenings,
    /// The gateway for hosts behind this host, if the settings have a gateway.
    pub gateway: Option<Arc<CarryGateway>>,
    /// Rules that say to which servers of this host peers may tunnel connections.
    pub servers: RwLock<Vec<RuleSetting>>,
    /// Number of bytes that are sent on a new carrier to open its congestion window.
    pub warm: u64,
    /// Kinds of carriers that may be used, in order of preference.
    pub carriers_wanted: Vec<CarrierKind>,
    /// Statistics of past connections, which predict how a new connection will be used.
    pub purposes: Arc<Purposes>,
}
