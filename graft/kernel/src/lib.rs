//! Grafts: transport functions that are loaded into the kernel while connections run.
//!
//! * [`CongestionProgram`]: registers a congestion control from an object file
//! * [`Tcp`]: agrees with peers on grafts, and changes settings of new sockets
//! * [`SocketPrograms`]: reads and changes existing TCP sockets
//! * [`hook::HookPrograms`]: redirects this host's connections to a broker; [`hold::Hold`] may hold their SYNs back
//! * [`gateway::GatewayPrograms`]: redirects the connections of hosts behind this one to a broker
//! * [`opening::OpeningPrograms`]: asks the host's firewall whether it allows a redirected connection
//! * [`packet::PacketHooks`]: runs functions on the datagrams of UDP sessions
#![deny(missing_docs)]

mod attachment;
mod caller;
mod choices;
mod control;
mod diag;
mod error;
mod events;
pub mod gateway;
pub mod hold;
pub mod hook;
mod intf;
mod namespace;
mod object;
pub mod opening;
pub mod packet;
mod pins;
mod recipe;
mod rule;
mod sockets;
mod tcp;

pub use caller::{CGROUP_LEVELS, COMMAND_MAX, CallerRule, cgroup_id};
pub use choices::{
    CHOICES, CandidateChoice, PathCandidates, SelectedEvent, SelectedEventKind, SelectionMaps,
};
pub use control::{CongestionProgram, Timing, remove_leftovers};
pub use diag::{ListeningSocket, listener};
pub use error::Error;
pub use events::Events;
pub use object::{GraftObject, GraftParameter, NAME_PREFIX};
pub use pins::PinDirectory;
pub use recipe::Verification;
pub use rule::{RULES, RuleSide, Settings, TcpRule, covers, everybody};
pub use sockets::{ChangeCounts, SocketChange, SocketPrograms, SocketState};
pub use tcp::{Tcp, TcpConnection, TcpOutcome, TcpPeer};

/// Version of the interface that congestion controls are written against (`bpf/graft.h`).
pub const ABI: u32 = 1;
/// Version of the interface that packet functions are written against (`bpf/graft_packet.h`).
pub const PACKET_ABI: u32 = 3;

/// An object file that is compiled into this crate, with its manifest.
#[derive(Clone, Copy, Debug)]
pub struct ShippedObject {
    /// The name of the congestion control or packet function.
    pub name: &'static str,
    /// The object file.
    pub image: &'static [u8],
    /// The text of the manifest.
    pub manifest: &'static str,
}

/// Lists objects, with manifests from a folder.
macro_rules! shipped {
    ($prefix:literal, $folder:literal, $($name:literal),* $(,)?) => {
        &[$(ShippedObject {
            name: $name,
            image: include_bytes!(concat!(env!("OUT_DIR"), "/", $prefix, $name, ".bpf.o")),
            manifest: include_str!(concat!("../../", $folder, "/", $name, ".toml")),
        }),*]
    };
}

/// The congestion controls that are compiled into this crate.
pub const SHIPPED: &[ShippedObject] = shipped!("graft_", "pool", "longhaul", "pcc");

/// The packet functions that are compiled into this crate.
pub const FUNCTIONS: &[ShippedObject] = shipped!(
    "function_",
    "functions",
    "number",
    "order",
    "window",
    "acknowledge",
    "repair",
    "partial",
    "gobackn",
    "fec",
    "congestion",
    "pace",
);

/// Two versions of a packet function with different states, for tests that replace one by the other.
#[doc(hidden)]
pub const TALLIES: [&[u8]; 2] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/tally1_test.bpf.o")),
    include_bytes!(concat!(env!("OUT_DIR"), "/tally2_test.bpf.o")),
];
