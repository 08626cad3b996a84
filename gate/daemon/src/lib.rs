//! The gate's daemon, which guards QUIC servers on this machine. The decisions are made in `millrace-gate`.
#![deny(missing_docs)]

pub mod control;
pub mod daemon;
mod lists;
pub mod metrics;
pub mod serve;
pub mod text;
pub mod trace;
pub mod watch;

#[cfg(test)]
mod tests {
    use millrace_gate::{Event, Pass, Rule};
    use millrace_testkit::documented::{REASONS, assert_named};

    #[test]
    fn every_verdict_and_event_of_the_gate_is_documented() {
        assert_named(REASONS, "name", Rule::ALL.map(Rule::name));
        assert_named(REASONS, "name", Pass::ALL.map(Pass::name));
        assert_named(REASONS, "name", Event::ALL.map(Event::name));
    }
}
