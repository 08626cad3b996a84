//! The relay's own gate: who may not even knock on its ports, decided at XDP.

use millrace_gate::{
    Gate, Mode, Policy, Rule,
    rules::{self, Place, Scope},
};
use std::net::SocketAddr;

use super::{
    config::{Config, GateChoice},
    engine, status,
};
use crate::engine::kernel;

const SCOPE: &str = "relay";

/// Why the relay's ports cannot be guarded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Interfaces(#[from] kernel::Error),
    /// What servers send would be taken for nonsense.
    #[error("the relay connects to an upstream from the same ports, and the gate only knows servers'")]
    Upstream,
    #[error(transparent)]
    Gate(#[from] millrace_gate::Error),
}

/// The gate, if there is one, and why not.
pub struct Guard {
    gate: Option<Gate>,
    why_not: String,
}

impl Guard {
    /// `listen`: what is served, ports filled in.
    ///
    /// # Errors
    /// The gate that was asked for cannot be.
    pub fn start(config: &Config, listen: &[SocketAddr]) -> Result<Self, Error> {
        let none = |why_not| Ok(Self { gate: None, why_not });
        match config.gate {
            GateChoice::Off => none("as configured".to_owned()),
            GateChoice::On => Ok(Self { gate: Some(start(config, listen)?), why_not: String::new() }),
            GateChoice::Auto => match start(config, listen) {
                Ok(gate) => Ok(Self { gate: Some(gate), why_not: String::new() }),
                Err(error) => none(format!("auto: {error}")),
            },
        }
    }

    pub fn describe(&self) -> status::Gate {
        let Some(gate) = &self.gate else { return status::Gate::off(&self.why_not) };
        let attached: Vec<_> =
            gate.attached().iter().map(|one| format!("{} by XDP, {}", one.interface, one.mode)).collect();
        let statistics = gate.statistics().ok();
        let scope = statistics.as_ref().and_then(|statistics| statistics.scope(SCOPE));
        let refused = scope.map(|scope| {
            let counts = Rule::ALL.map(|rule| (rule.name().to_owned(), scope.rule(rule).packets));
            counts.into_iter().filter(|(_, packets)| *packets > 0).collect()
        });
        status::Gate {
            on: true,
            reason: format!("attached to {}", attached.join(", ")),
            refused: refused.unwrap_or_default(),
        }
    }
}

fn start(config: &Config, listen: &[SocketAddr]) -> Result<Gate, Error> {
    if config.upstream.is_some() {
        return Err(Error::Upstream);
    }
    let interfaces = engine::interfaces(config)?;
    let gate = Gate::new(&policy(config, listen))?;
    for interface in &interfaces {
        gate.attach(interface, Mode::Auto)?;
    }
    Ok(gate)
}

fn policy(config: &Config, listen: &[SocketAddr]) -> Policy {
    let mut places: Vec<_> = listen
        .iter()
        .map(|addr| Place {
            address: Some(addr.ip()).filter(|ip| !ip.is_unspecified()),
            port: Some(addr.port()),
        })
        .collect();
    // The wildcards of both address families are one.
    places.sort_unstable();
    places.dedup();
    let mut policy = rules::Policy {
        live: rules::Live::Tracked { idle: config.idle_timeout },
        quota: config.gate_sessions,
        ..rules::Policy::default()
    };
    if policy.quota.is_some() {
        policy.modes.set(Rule::Quota, rules::Mode::Enforce);
    }
    let scope = Scope { name: SCOPE.to_owned(), places, policy, prefixes: Vec::new() };
    Policy { rules: rules::Rules { scopes: vec![scope], ..rules::Rules::default() }, ..Policy::default() }
}
