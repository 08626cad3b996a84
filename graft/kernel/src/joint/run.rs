//! Runs of the joints without a network.

use std::time::Duration;

use super::{Joint, Joints};
use crate::Error;

/// The kernel's `struct __sk_buff`, and its `tstamp`.
const SK_BUFF_BYTES: usize = 192;
const TIME_STAMP_AT: usize = 152;
/// Bytes that a packet may become longer by.
const RUN_ROOM: usize = 2048;

/// A packet's way through a joint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub verdict: i32,
    pub frame: Vec<u8>,
    pub time: Duration,
    /// When a frame that is sent is to leave, `CLOCK_MONOTONIC`; 0: at once.
    pub leaves_ns: u64,
}

impl Joints {
    /// Runs a joint on an Ethernet frame, with all that follows for counters and state.
    pub fn run(&self, joint: Joint, frame: &[u8]) -> Result<Run, Error> {
        self.run_with(joint, frame, None)
    }

    /// At XDP, as if it had come to this interface of the calling thread's network namespace, by this queue.
    pub fn run_at(&self, place: (u32, u32), frame: &[u8]) -> Result<Run, Error> {
        self.run_with(Joint::Rx, frame, Some(place))
    }

    fn run_with(&self, joint: Joint, frame: &[u8], place: Option<(u32, u32)>) -> Result<Run, Error> {
        let name = match joint {
            Joint::Tx => "joint_tx",
            Joint::Rx => "joint_rx",
            Joint::Repair => "joint_repair",
        };
        let mut after = vec![0; frame.len() + RUN_ROOM];
        let mut context = [0; SK_BUFF_BYTES];
        let has_context = joint != Joint::Rx;
        // The kernel's `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let mut arrived = place.map(|(interface, queue)| {
            let fields = [0, frame.len() as u32, 0, interface, queue, 0];
            fields.map(u32::to_ne_bytes).concat()
        });
        let input = libbpf_rs::ProgramInput {
            context_in: arrived.as_deref_mut(),
            data_in: Some(frame),
            data_out: Some(&mut after),
            context_out: has_context.then_some(&mut context),
            ..libbpf_rs::ProgramInput::default()
        };
        let output = self.object.program(name)?.test_run(input);
        let output = output.map_err(|source| millrace_kernel::Error::Read { what: "the verdict", source })?;
        let (verdict, time) = (output.return_value.cast_signed(), output.duration);
        let frame = output.data.map_or_else(Vec::new, |data| data.to_vec());
        let leaves_ns = context.get(TIME_STAMP_AT..).and_then(|rest| rest.first_chunk());
        Ok(Run { verdict, frame, time, leaves_ns: leaves_ns.map_or(0, |bytes| u64::from_ne_bytes(*bytes)) })
    }
}
