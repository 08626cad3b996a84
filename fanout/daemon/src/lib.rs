//! `millrace fanout`: RTP from one sender to many receivers, forwarded in the kernel, and the client that asks for it.

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

pub const DEFAULT_SOCKET: &str = "/run/millrace/fanout.sock";

#[cfg(test)]
mod tests {
    use millrace_fanout::kernel::{FurtherRun, LegOutcome, Outcome};
    use millrace_testkit::documented::{FANOUT, assert_named};

    use crate::EVENTS;

    #[test]
    fn outcomes_of_the_fan_out() {
        assert_named(FANOUT, "packet", Outcome::ALL.map(Outcome::name));
        assert_named(FANOUT, "copy", LegOutcome::ALL.map(LegOutcome::name));
        assert_named(FANOUT, "further run", FurtherRun::ALL.map(FurtherRun::name));
        assert_named(FANOUT, "event", EVENTS);
    }
}
