//! Networks made of namespaces and emulated links, and measurements in them.
//!
//! [`lab`] makes a network on one machine: nodes are network namespaces, links are veth pairs that can lose, delay and
//! shape packets, by netem or by an emulator in userspace. It is a library as well as `millrace-lab lab`, and needs root:
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
//! [`mod@bench`] is `millrace-lab bench`: relays, defences of a QUIC server, and the observer of networking's costs, each
//! measured in such a network. It uses the lab, never the other way round. [`mod@interfaces`] is how much the kernel forwards on
//! each kind of interface. [`hostile`] is a client that means no good,
//! [`receivers`] are thousands of subscribers in one process, [`stall`] are strangers to carriers who do not go on.
//! [`transport`] is how either comes to a relay, [`mod@train`] learns from measured transfers, and [`mesh`] simulates a cluster. What is measured is the program `millrace`,
//! which runs as a process.

pub mod bench;
mod beside;
pub mod hostile;
pub mod interfaces;
pub mod lab;
pub mod mesh;
mod program;
mod progress;
pub mod receivers;
pub mod stall;
mod stats;
pub mod train;
pub mod transport;
