//! The relay program on real interfaces: publisher - relay - subscriber. Needs root.

mod entries;
mod equality;
mod limits;
mod open;
#[path = "../support/peers.rs"]
mod peers;
#[path = "../support/quic.rs"]
mod quic;
mod run_time;
mod runs;
mod scene;
mod userspace;

use millrace_kernel::crypto::QuicKeys;
use millrace_relay_kernel::program::Compute;
use millrace_testkit::net;
