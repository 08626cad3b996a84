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
pub mod icmp;
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

/// The congestion controls that are compiled into this crate, by name and object file.
pub const SHIPPED: [(&str, &[u8]); 4] = [
    ("hybla", include_bytes!(concat!(env!("OUT_DIR"), "/graft_hybla.bpf.o"))),
    ("longhaul", include_bytes!(concat!(env!("OUT_DIR"), "/graft_longhaul.bpf.o"))),
    ("pcc", include_bytes!(concat!(env!("OUT_DIR"), "/graft_pcc.bpf.o"))),
    ("westwood", include_bytes!(concat!(env!("OUT_DIR"), "/graft_westwood.bpf.o"))),
];

/// Two versions of a packet function with different states, for tests that replace one by the other.
#[doc(hidden)]
pub const TALLIES: [&[u8]; 2] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/tally1_test.bpf.o")),
    include_bytes!(concat!(env!("OUT_DIR"), "/tally2_test.bpf.o")),
];

macro_rules! functions {
    ($($name:literal),* $(,)?) => {
        /// The packet functions that are compiled into this crate, by name and object file.
        pub const FUNCTIONS: &[(&str, &[u8])] =
            &[$(($name, include_bytes!(concat!(env!("OUT_DIR"), "/function_", $name, ".bpf.o")))),*];
    };
}

functions!(
    "number",
    "order",
    "window",
    "acknowledge",
    "repair",
    "partial",
    "gobackn",
    "fec",
    "congestion",
    "pace"
);
