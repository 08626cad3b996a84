//! Structures and constants that the build generates from `bpf/graft_intf.h`.

pub(crate) use generated::{
    GRAFT_EVENT_BEGAN as EVENT_BEGAN, GRAFT_EVENT_ENDED as EVENT_ENDED, GraftBound as Bound,
    GraftChange as Change, GraftChanged as Changed, GraftChoice as Choice, GraftChoiceKey as ChoiceKey,
    GraftConnection as Connection, GraftConnectionKey as ConnectionKey, GraftEvent as Event,
    GraftFigures as Figures, GraftPeer as Peer, GraftRule as Rule, GraftSocket as Socket,
};

mod generated {
    #![allow(dead_code, reason = "the C header has more than Rust uses")]

    include!(concat!(env!("OUT_DIR"), "/graft_intf.rs"));
}

pub(crate) const RULES: usize = generated::GRAFT_RULES as usize;
pub(crate) const NAME_BYTES: usize = generated::GRAFT_NAME_BYTES as usize;
pub(crate) const CHOICES: usize = generated::GRAFT_CHOICES as usize;

pub(crate) const CLIENT: u8 = generated::GRAFT_CLIENT as u8;
pub(crate) const SERVER: u8 = generated::GRAFT_SERVER as u8;

pub(crate) const ASK: u8 = generated::GRAFT_ASK as u8;
pub(crate) const ASK_BOUND: u8 = generated::GRAFT_ASK_BOUND as u8;

pub(crate) const SET_CONGESTION: u16 = generated::GRAFT_SET_CONGESTION as u16;
pub(crate) const SET_PACING: u16 = generated::GRAFT_SET_PACING as u16;
pub(crate) const SET_SEND_BUFFER: u16 = generated::GRAFT_SET_SEND_BUFFER as u16;
pub(crate) const SET_RECEIVE_BUFFER: u16 = generated::GRAFT_SET_RECEIVE_BUFFER as u16;
pub(crate) const SET_WINDOW: u16 = generated::GRAFT_SET_WINDOW as u16;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn tcp_agreement_outcomes_are_named_as_in_the_bpf_program() {
        let names: Vec<_> =
            super::super::TcpOutcome::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_tcp.bpf.o", "graft_outcome", "graft_"));
    }
}
