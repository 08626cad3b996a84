//! The relay as it is run: settings, engine, gate, certificate, HTTP and metrics around the library's relay.

pub mod access;
pub mod config;
mod engine;
mod events;
mod guard;
pub mod http;
pub mod lasting;
pub mod metrics;
mod page;
pub mod serve;
pub mod server;
pub mod status;
pub mod text;
pub mod tls;

#[cfg(test)]
mod tests {
    use millrace_relay_kernel::program::{EgressOutcome, FrameOutcome, FurtherRun, OpeningOutcome, Outcome};
    use millrace_testkit::documented::{OPERATIONS, assert_named};

    #[test]
    fn outcomes_of_the_kernel_engine() {
        assert_named(OPERATIONS, "received", Outcome::ALL.map(Outcome::name));
        assert_named(OPERATIONS, "frames", FrameOutcome::ALL.map(FrameOutcome::name));
        assert_named(OPERATIONS, "openings", OpeningOutcome::ALL.map(OpeningOutcome::name));
        assert_named(OPERATIONS, "further runs", FurtherRun::ALL.map(FurtherRun::name));
        let copies = EgressOutcome::ALL.map(EgressOutcome::name);
        assert_named(OPERATIONS, "copies", copies.into_iter().chain(["not_arriving", "client_share"]));
    }
}
