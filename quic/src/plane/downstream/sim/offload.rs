//! A simulated offload next to the data plane.

use std::{collections::HashMap, ops::Range, sync::Arc};

use super::{Codepoint, OVERHEAD, Sim, SimArrival};
use crate::{
    frame,
    plane::{
        downstream::{OffloadBudget, OffloadedPacket, PriorityLevel, StreamGrant, StreamKey},
        source::mem::Mem,
    },
};

/// A simulated offload. It forwards incoming data, possibly before the data plane's source has that data, and reports
/// its packets later.
#[derive(Default)]
pub struct SimulatedOffload {
    delegated: HashMap<StreamKey, (StreamGrant, Arc<Mem>)>,
    unreported: Vec<OffloadedPacket>,
    budget: OffloadBudget,
    waiting: Option<PriorityLevel>,
    used: OffloadBudget,
    pub declined: u64,
}

impl SimulatedOffload {
    pub fn on_max_stream_data(&mut self, id: u64, max: u64) {
        for (delegation, _) in self.delegated.values_mut().filter(|(delegation, _)| delegation.id == id) {
            delegation.max_offset = delegation.max_offset.max(max);
        }
    }
}

impl Sim {
    /// Lets the offload send the bytes of `source` on the stream, if the data plane allows that.
    pub fn delegate(&mut self, key: StreamKey, source: &Arc<Mem>) {
        if let Some(delegation) = self.down.delegate(key) {
            self.offload.delegated.insert(key, (delegation, source.clone()));
        }
    }

    /// Passes bytes of a stream to the offload, which sends them if its budget allows. The source gets the same bytes
    /// separately.
    pub fn offload_sees(&mut self, key: StreamKey, range: Range<u64>, fin: bool) {
        let Some((delegation, source)) = self.offload.delegated.get(&key) else { return };
        let delegation = *delegation;
        let tag = source.tag;
        let len = (range.end - range.start) as usize;
        let mut frames = Vec::new();
        frame::write_stream_header(delegation.id, range.start, len, fin, &mut frames);
        frames.extend(range.clone().map(|offset| Mem::byte(tag, offset)));
        let size = frames.len() + OVERHEAD;
        let used = OffloadBudget {
            bytes: self.offload.used.bytes + size as u64,
            data: self.offload.used.data + len as u64,
        };
        let OffloadBudget { bytes, data } = self.offload.budget;
        let behind = self.offload.waiting.is_some_and(|waiting| delegation.level >= waiting);
        if behind || range.end > delegation.max_offset || used.bytes > bytes || used.data > data {
            self.offload.declined += 1;
            return;
        }
        self.offload.used = used;
        let number = self.number();
        self.offload.unreported.push(OffloadedPacket {
            sent: self.now,
            number,
            size,
            key,
            offset: range.start,
            len: len as u16,
            fin,
        });
        self.carry(size, SimArrival::Packet { number, frames: Some(frames), marks: Codepoint::NotEct });
    }

    /// Passes the offload's packet reports to the data plane out of order, and withdraws the offload's send budget.
    pub fn reclaim_budget(&mut self) {
        let mut reports = std::mem::take(&mut self.offload.unreported);
        if reports.len() > 1 {
            let middle = self.random(reports.len() as u64) as usize;
            reports.rotate_left(middle);
        }
        reports.iter().for_each(|report| self.down.on_offloaded_sent(report));
        self.offload.budget = OffloadBudget::default();
        self.offload.used = OffloadBudget::default();
        while let Some(key) = self.down.poll_recall() {
            self.offload.delegated.remove(&key);
            self.down.on_returned(key);
        }
    }

    /// Gives the offload the budget that the data plane allows now.
    pub fn grant_budget(&mut self) {
        self.offload.budget = self.down.budget();
        self.offload.waiting = self.down.waiting();
    }
}
