//! `millrace fanout`: RTP from one sender to many receivers, forwarded in the kernel, and the client that asks for it.
#![deny(missing_docs)]

pub mod config;
pub mod daemon;
mod metrics;
pub mod receive;
mod reports;
pub mod status;
mod stream;
pub mod text;
pub mod trace;

#[cfg(test)]
pub use stream::EVENTS;

/// Path of the control socket, if no other path is configured.
pub const DEFAULT_SOCKET: &str = "/run/millrace/fanout.sock";

#[cfg(test)]
mod tests {
    use millrace_fanout::kernel::{CopyOutcome, FurtherRun, Outcome};
    use millrace_testkit::documented::{FANOUT, REASONS, assert_named};

    use crate::EVENTS;

    #[test]
    fn every_packet_outcome_of_the_fan_out_is_documented() {
        assert_named(REASONS, "name", Outcome::ALL.map(Outcome::name));
        assert_named(REASONS, "name", CopyOutcome::ALL.map(CopyOutcome::name));
        assert_named(REASONS, "name", FurtherRun::ALL.map(FurtherRun::name));
        assert_named(FANOUT, "event", EVENTS);
    }
}
