//! The gate as it is run: a daemon that guards QUIC servers of this machine. What it decides by is in `millrace-gate`.

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
    use millrace_testkit::documented::{GATE, assert_named};

    #[test]
    fn verdicts_and_events_of_the_gate() {
        assert_named(GATE, "rule", Rule::ALL.map(Rule::name));
        assert_named(GATE, "passed", Pass::ALL.map(Pass::name));
        assert_named(GATE, "event", Event::ALL.map(Event::name));
    }
}
