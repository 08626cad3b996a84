//! Tests of the data plane over a simulated link.

mod cost;
mod datagrams;
mod delivery;
mod ends;
mod late;
mod limits;
mod model;
mod offload;
mod priority;
mod room;
mod window;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use proptest::prelude::*;

use super::{
    sim::{CODES, MTU, ReceiverCredit, Sim, SimLink, stream_of},
    *,
};
use crate::{
    frame::{Frame, Walker},
    plane::{
        congestion::CongestionAlgorithm,
        recovery::NeverSent,
        source::mem::{Fast, Mem},
    },
};

const SECOND: Duration = Duration::from_secs(1);

/// The application error code that tests reset streams with.
const CANCELLED: u64 = 1;

fn sim(link: SimLink) -> Sim {
    Sim::new(1, link, ReceiverCredit::default(), Config::new(CODES))
}

/// Returns stream ID, offset, length and FIN of a packet's STREAM frames.
fn stream_frames(frames: &[u8]) -> Vec<(u64, u64, usize, bool)> {
    Walker::new(frames)
        .filter_map(|frame| match frame.expect("well-formed").1 {
            Frame::Stream(stream) => Some((stream.id, stream.offset, stream.data.len(), stream.fin)),
            _ => None,
        })
        .collect()
}

fn events(sim: &mut Sim) -> Vec<DownstreamEvent> {
    sim.transmit();
    std::mem::take(&mut sim.events)
}

/// Returns an event of a stream of the simulator's only owner.
fn event(key: StreamKey, kind: EventKind) -> DownstreamEvent {
    DownstreamEvent { key, owner: 1, kind }
}

fn datagram(text: &[u8], subscriber: u8, expires: Option<Instant>) -> NewDatagram {
    let priority = Priority { subscriber, ..Priority::default() };
    NewDatagram {
        payload: Bytes::copy_from_slice(text),
        priority,
        expires,
        late: None,
        label: Label::default(),
    }
}
