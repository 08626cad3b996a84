//! Runs the relay library as a daemon. Adds settings, the packet engine, the packet gate (an XDP filter), certificates,
//! HTTP and metrics.
#![deny(missing_docs)]

pub mod access;
pub mod config;
mod discovery;
mod engine;
mod events;
mod guard;
pub mod http;
pub mod lasting;
pub mod metrics;
mod page;
mod random;
pub mod serve;
pub mod server;
mod share;
pub mod status;
pub mod takeover;
pub mod text;
pub mod tls;

#[cfg(test)]
mod tests {
    use millrace_relay_kernel::program::{EgressOutcome, FrameOutcome, FurtherRun, OpeningOutcome, Outcome};
    use millrace_transport::offload::OffloadStanding;

    use millrace_testkit::documented::{OPERATIONS, REASONS, assert_named};

    #[test]
    fn fixable_packet_outcomes_have_a_remedy() {
        let received = [
            Outcome::SuperPacket,
            Outcome::BadSize,
            Outcome::TooLong,
            Outcome::OddHeaders,
            Outcome::OverBudget,
        ];
        let openings =
            [OpeningOutcome::Missed, OpeningOutcome::Full, OpeningOutcome::NoTrack, OpeningOutcome::Other];
        let copies = [
            EgressOutcome::TooLarge,
            EgressOutcome::RingFull,
            EgressOutcome::NoRoute,
            EgressOutcome::NoNeighbour,
            EgressOutcome::Lost,
            EgressOutcome::Window,
            EgressOutcome::Behind,
            EgressOutcome::StreamLimit,
            EgressOutcome::StreamCredit,
            EgressOutcome::DataCredit,
        ];
        let standings = [OffloadStanding::Waiting, OffloadStanding::Taken].map(OffloadStanding::name);
        let names = received.map(Outcome::name).into_iter().chain(openings.map(OpeningOutcome::name));
        for name in names.chain(copies.map(EgressOutcome::name)).chain(standings) {
            assert!(!crate::share::remedy(name, "eth0").is_empty(), "{name}");
        }
    }

    #[test]
    fn every_outcome_of_the_kernel_engine_is_documented() {
        assert_named(REASONS, "name", Outcome::ALL.map(Outcome::name));
        assert_named(REASONS, "name", FrameOutcome::ALL.map(FrameOutcome::name));
        assert_named(REASONS, "name", OpeningOutcome::ALL.map(OpeningOutcome::name));
        assert_named(REASONS, "name", FurtherRun::ALL.map(FurtherRun::name));
        assert_named(REASONS, "name", EgressOutcome::ALL.map(EgressOutcome::name));
        assert_named(OPERATIONS, "reason", ["not_arriving", "client_share"]);
    }
}
