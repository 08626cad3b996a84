//! The structures and constants of `bpf/relay_intf.h`, `bpf/subgroup_intf.h` and `bpf/web.h`, which the build generates
//! from these headers.

pub(crate) use generated::{
    RELAY_ARRIVALS as ARRIVALS, RELAY_CLOSED as CLOSED, RELAY_DATAGRAMS as DATAGRAMS, RELAY_END as END,
    RELAY_NUMBER_BITS as NUMBER_BITS, RELAY_OPENING as OPENING, RELAY_STREAM as STREAM,
    RELAY_SUBSCRIBER as SUBSCRIBER, RELAY_TRACK as TRACK, RELAY_UNBOUND as UNBOUND, RELAY_UNKNOWN as UNKNOWN,
    RELAY_UNOPENED as UNOPENED, WEB_BARE as BARE,
};
pub(crate) use generated::{
    RelayArrival as Arrival, RelayConfig as Config, RelayDeferral as Deferral, RelayDownstream as Downstream,
    RelayEgress as Egress, RelayEvent as Event, RelayForwarded as Forwarded, RelayId as Id,
    RelayIngress as Ingress, RelayKeystream as Keystream, RelayPath as Path, RelaySlot as Slot,
    RelayTracing as Tracing, RelayTrack as Track, RelayUpstream as Upstream, SharedRelayRing as Ring,
    SubgroupState as State,
};

mod generated {
    #![allow(dead_code, reason = "not all that C has is of use here")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

pub(crate) const ID_MAX: usize = generated::RELAY_ID_MAX as usize;
pub(crate) const PORTS: usize = generated::RELAY_PORTS as usize;
pub(crate) const OPENINGS: usize = generated::RELAY_OPENINGS as usize;
pub(crate) const OPAQUE: u8 = generated::SUBGROUP_OPAQUE as u8;
pub(crate) const BROKEN: u8 = generated::SUBGROUP_BROKEN as u8;
pub(crate) const HAS_PREVIOUS: u8 = generated::SUBGROUP_HAS_PREVIOUS as u8;
pub(crate) const WITH_PROPERTIES: u8 = generated::SUBGROUP_WITH_PROPERTIES as u8;
pub(crate) const ENDED: u8 = generated::SUBGROUP_ENDED as u8;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use crate::program::outcome::{EgressOutcome, FrameOutcome, FurtherRun, Lookup, OpeningOutcome, Outcome};

    #[test]
    fn packet_outcomes_have_the_programs_names_and_order() {
        let names = |kind: &str, prefix: &str| enum_names(env!("OUT_DIR"), "relay.bpf.o", kind, prefix);
        assert_eq!(names("relay_outcome", "relay_"), Outcome::ALL.map(Outcome::name));
        assert_eq!(names("relay_lookup", "relay_lookup_"), Lookup::ALL.map(Lookup::name));
        assert_eq!(
            names("relay_egress_outcome", "relay_egress_"),
            EgressOutcome::ALL.map(EgressOutcome::name)
        );
        assert_eq!(names("relay_further_run", "relay_run_"), FurtherRun::ALL.map(FurtherRun::name));
        assert_eq!(names("relay_frame_outcome", "relay_frame_"), FrameOutcome::ALL.map(FrameOutcome::name));
        assert_eq!(names("relay_opening", "relay_opening_"), OpeningOutcome::ALL.map(OpeningOutcome::name));
    }
}
