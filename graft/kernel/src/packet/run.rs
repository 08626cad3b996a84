//! Runs the dispatcher's programs on single frames without a network, for tests and measurements (BPF_PROG_TEST_RUN).

use std::time::Duration;

use super::{FunctionHook, PacketHooks};
use crate::Error;

/// Bytes of the kernel's `struct __sk_buff`, and the offset of its member `tstamp`.
const SK_BUFF_BYTES: usize = 192;
const TIME_STAMP_AT: usize = 152;
/// Largest number of bytes by which programs may lengthen a packet in a test run.
const RUN_ROOM: usize = 2048;

/// The result of running one hook's programs on one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketRun {
    /// The program's return value (`TC_ACT_*`, `XDP_*`).
    pub verdict: i32,
    /// The Ethernet frame after the run.
    pub frame: Vec<u8>,
    /// Time that the run took.
    pub time: Duration,
    /// Departure time that the programs set for a sent frame, ns (`CLOCK_MONOTONIC`); 0: none.
    pub leaves_ns: u64,
}

impl PacketHooks {
    /// Runs a hook's programs on an Ethernet frame. The run changes counters and session states as a packet from the
    /// network would.
    pub fn run(&self, hook: FunctionHook, frame: &[u8]) -> Result<PacketRun, Error> {
        self.run_with(hook, frame, None)
    }

    /// Runs the XDP hook on a frame, as if the frame had arrived at this interface and queue, given as a pair. The
    /// interface is in the calling thread's network namespace.
    pub fn run_at(&self, place: (u32, u32), frame: &[u8]) -> Result<PacketRun, Error> {
        self.run_with(FunctionHook::Rx, frame, Some(place))
    }

    fn run_with(
        &self,
        hook: FunctionHook,
        frame: &[u8],
        place: Option<(u32, u32)>,
    ) -> Result<PacketRun, Error> {
        let name = match hook {
            FunctionHook::Tx => "packet_tx",
            FunctionHook::Rx => "packet_rx",
            FunctionHook::Repair => "packet_repair",
        };
        let mut after = vec![0; frame.len() + RUN_ROOM];
        let mut context = [0; SK_BUFF_BYTES];
        let has_context = hook != FunctionHook::Rx;
        // Fields of the kernel's `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index,
        // egress_ifindex.
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
        let verdict = output.return_value.cast_signed();
        let time = output.duration;
        let frame = output.data.map_or_else(Vec::new, |data| data.to_vec());
        let leaves_ns = context.get(TIME_STAMP_AT..).and_then(|rest| rest.first_chunk());
        Ok(PacketRun {
            verdict,
            frame,
            time,
            leaves_ns: leaves_ns.map_or(0, |bytes| u64::from_ne_bytes(*bytes)),
        })
    }
}
