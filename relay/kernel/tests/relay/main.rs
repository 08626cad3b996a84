//! The relay program on real interfaces: publisher - relay - subscriber. Needs root.

mod entries;
mod equality;
mod limits;
#[path = "../support/net.rs"]
mod net;
mod open;
#[path = "../support/peers.rs"]
mod peers;
#[path = "../support/quic.rs"]
mod quic;
mod run_time;
mod runs;
mod scene;
mod userspace;

use millrace_bpf::crypto::QuicKeys;
use millrace_bpf::relay::Compute;
