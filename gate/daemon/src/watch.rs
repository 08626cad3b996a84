//! What a gate says in the log: what it refuses, and what becomes of its interfaces.

use std::time::Duration;

use millrace_gate::{Gate, Interface};
use tracing::{error, info, warn};

use millrace_gate::status::Refusal;

/// How often there may be something to say.
pub const TICK: Duration = Duration::from_millis(250);

/// What was said already.
#[derive(Default)]
pub struct Watch {
    interfaces: Vec<Interface>,
    trouble: Option<String>,
}

impl Watch {
    /// Says what is new since the last time; returns the refusals.
    pub fn tick(&mut self, gate: &Gate) -> Vec<Refusal> {
        let samples = gate.drain_samples();
        let samples = samples.inspect_err(|error| warn!(%error, "samples")).unwrap_or_default();
        let refusals: Vec<_> = samples.iter().map(Refusal::new).collect();
        refusals.iter().for_each(log_refusal);
        let interfaces = gate.interfaces();
        for now in &interfaces {
            log_interface(self.interfaces.iter().find(|before| before.name == now.name), now);
        }
        self.interfaces = interfaces;
        let trouble = gate.trouble();
        if let Some(trouble) = trouble.as_ref().filter(|now| self.trouble.as_ref() != Some(now)) {
            error!("{trouble}");
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
        Some(reason) if *attached => warn!(interface = name, reason, "guarding, but not as before"),
        Some(reason) => error!(interface = name, reason, "not guarding"),
        None if before.is_some_and(|before| before.reattached != *reattached) => {
            info!(interface = name, %mode, reattached, "guarding again, it was detached")
        }
        None => info!(interface = name, %mode, "guarding"),
    }
}

fn log_refusal(refusal: &Refusal) {
    let Refusal { scope, source, destination, bytes, .. } = refusal;
    let rule = refusal.rules.join(",");
    let what = if refusal.refused { "refused" } else { "would refuse" };
    info!(target: "millrace::gate::sample", rule, scope, %source, %destination, bytes, "{what}");
}
