//! Grafts: transport functions that are loaded while TCP runs. Congestion controls from object files
//! ([`Control`]), agreement with peers and settings of new sockets ([`Tcp`]), the sockets that live ([`Sockets`]), and
//! connections that are led to a broker ([`hook::Hook`]), which may hold their SYNs back ([`hold::Hold`]), of other hosts too
//! ([`gateway::Gateway`]). What the host's firewall says of those is asked first ([`opening::Openings`]).

mod attachment;
mod caller;
mod control;
mod diag;
mod error;
mod events;
pub mod gateway;
pub mod hold;
pub mod hook;
pub mod icmp;
mod intf;
pub mod joint;
mod namespace;
mod object;
pub mod opening;
mod pins;
mod recipe;
mod rule;
mod sockets;
mod tcp;
mod told;

pub use caller::{CGROUP_LEVELS, COMMAND_MAX, Caller, cgroup_id};
pub use control::{Control, Timing, remove_leftovers};
pub use diag::{Listener, listener};
pub use error::Error;
pub use events::Events;
pub use object::{NAME_PREFIX, Object, Parameter};
pub use pins::Pins;
pub use recipe::Verification;
pub use rule::{RULES, Rule, Settings, Side, covers, everybody};
pub use sockets::{Change, Changed, Socket, Sockets};
pub use tcp::{Connection, Outcome, Peer, Tcp};
pub use told::{Arm, CHOICES, Choice, Shared, Told, What};

/// What `bpf/graft.h` is at.
pub const ABI: u32 = 1;
/// What `bpf/graft_packet.h` is at.
pub const PACKET_ABI: u32 = 3;

/// The grafts that are compiled in: name and object file.
pub const SHIPPED: [(&str, &[u8]); 4] = [
    ("hybla", include_bytes!(concat!(env!("OUT_DIR"), "/graft_hybla.bpf.o"))),
    ("longhaul", include_bytes!(concat!(env!("OUT_DIR"), "/graft_longhaul.bpf.o"))),
    ("pcc", include_bytes!(concat!(env!("OUT_DIR"), "/graft_pcc.bpf.o"))),
    ("westwood", include_bytes!(concat!(env!("OUT_DIR"), "/graft_westwood.bpf.o"))),
];

/// A function in two versions whose states are not alike, for tests of those who have one take the other's place.
#[doc(hidden)]
pub const TALLIES: [&[u8]; 2] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/tally1_test.bpf.o")),
    include_bytes!(concat!(env!("OUT_DIR"), "/tally2_test.bpf.o")),
];

macro_rules! functions {
    ($($name:literal),* $(,)?) => {
        /// The functions on packets that are compiled in: name and object file.
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
