//! The gate's log: packets that it refuses, and changes of its interfaces.

use std::time::Duration;

use millrace_gate::{Gate, Interface};
use tracing::{error, info, warn};

use millrace_gate::status::RefusalStatus;

/// Time between two updates of the gate's log.
pub const TICK: Duration = Duration::from_millis(250);

/// The state of the gate that was logged last.
#[derive(Default)]
pub struct GateWatch {
    interfaces: Vec<Interface>,
    trouble: Option<String>,
}

impl GateWatch {
    /// Logs refused packets and changes since the last call. Returns the refused packets.
    pub fn tick(&mut self, gate: &Gate) -> Vec<RefusalStatus> {
        let samples = gate.drain_samples();
        // An error is only logged, so that changes of interfaces are still reported.
        let samples = samples
            .inspect_err(|error| warn!(%error, "cannot read samples of refused packets from the kernel"))
            .unwrap_or_default();
        let refusals: Vec<_> = samples.iter().map(RefusalStatus::new).collect();
        refusals.iter().for_each(log_refusal);
        let interfaces = gate.interfaces();
        for now in &interfaces {
            log_interface(self.interfaces.iter().find(|before| before.name == now.name), now);
        }
        self.interfaces = interfaces;
        let trouble = gate.trouble();
        if let Some(trouble) = trouble.as_ref().filter(|now| self.trouble.as_ref() != Some(now)) {
            error!("the gate: {trouble}");
        }
        self.trouble = trouble;
        refusals
    }
}

fn log_interface(before: Option<&Interface>, now: &Interface) {
    let Interface { name, mode, attached, trouble, reattached } = now;
    if before == Some(now) {
        return;
    }
    match trouble {
        Some(reason) if *attached => {
            warn!(interface = name, reason, "still guarding the interface, but with a problem")
        }
        Some(reason) => error!(interface = name, reason, "not guarding the interface"),
        None if before.is_some_and(|before| before.reattached != *reattached) => {
            info!(interface = name, %mode, reattached, "guarding the interface again: the gate's program had been detached")
        }
        None => info!(interface = name, %mode, "guarding the interface"),
    }
}

fn log_refusal(refusal: &RefusalStatus) {
    let RefusalStatus { scope, source, destination, bytes, .. } = refusal;
    let rule = refusal.rules.join(",");
    let what = if refusal.refused { "refused" } else { "passed that the rule would refuse" };
    info!(target: "millrace::gate::sample", rule, scope, %source, %destination, bytes, "a packet was {what}");
}
