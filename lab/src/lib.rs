//! Networks made of namespaces and emulated links, and measurements in them.
//!
//! [`lab`] creates a network on one machine. Nodes are network namespaces. Links are veth pairs that can lose, delay
//! and shape packets, by netem or by an emulator in userspace. It is a library as well as the command `millrace-lab
//! lab`, and needs root:
//!
//! ```no_run
//! use millrace_lab::lab::{Lab, Topology};
//!
//! // A publisher and two subscribers around a relay.
//! let lab = Lab::new(&Topology::standard(1, 2))?;
//! let output = lab.node("sub1")?.command("ip").args(["-brief", "address"]).output()?;
//! println!("{}", String::from_utf8_lossy(&output.stdout));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`mod@bench`] has the benchmarks of `millrace-lab bench`, which run in such networks: relays, defences of a QUIC
//! server, grafts, and the observer of networking's CPU cost. The lab does not depend on them. [`mod@interfaces`]
//! measures how much the kernel forwards on each kind of interface. [`hostile`] is a client that attacks a relay, and
//! [`receivers`] runs thousands of subscribers in one process. [`stall`] starts handshakes with a graft daemon and
//! never finishes them. [`transport`] names the transports of clients to a relay. [`mod@train`] learns from measured
//! transfers, and [`mesh`] and [`lookups`] simulate clusters of relays. The measured program is `millrace`, which runs
//! as a process of its own.

pub mod bench;
mod beside;
pub mod hostile;
pub mod interfaces;
pub mod lab;
pub mod lookups;
pub mod mesh;
mod program;
mod progress;
pub mod receivers;
pub mod stall;
mod stats;
pub mod train;
pub mod transport;
