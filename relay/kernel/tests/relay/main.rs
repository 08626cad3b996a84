//! Tests of the relay program on real network interfaces, with a publisher, a relay and subscribers. They need root.

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
