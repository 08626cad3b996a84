//! The choice of the engine that the relay runs with.

use std::{net::SocketAddr, sync::Arc};

use millrace_relay::RelayEngine;
use millrace_relay_kernel::{Error, KernelSetup, RelayKernel};
use millrace_transport::{ID_LEN, interfaces::with_addresses};

use super::config::{Config, EngineChoice};

const CONFIGURED: &str = "as configured";

/// The engine that runs, and what can be changed about it.
pub struct ChosenEngine {
    /// The engine that was loaded at start-up. It forwards while it has interfaces.
    kernel: Option<Arc<RelayKernel>>,
    pub engine: Arc<RelayEngine>,
}

impl ChosenEngine {
    /// `outgoing`: ports that the relay connects from.
    ///
    /// # Errors
    /// The engine that was asked for by name cannot run here.
    pub fn start(config: &Config, outgoing: &[u16]) -> Result<Self, Error> {
        match config.engine {
            EngineChoice::User => Ok(Self::user(CONFIGURED)),
            EngineChoice::Kernel => Ok(Self::kernel(load(config, outgoing)?)),
            // Packets that the kernel engine sends pass by the host's output rules. Nobody gets that without asking
            // for it.
            EngineChoice::Auto if config.interfaces.is_empty() => {
                Ok(Self::user("auto: the kernel engine wants an interface by name"))
            }
            EngineChoice::Auto => Ok(match load(config, outgoing) {
                Ok(kernel) => Self::kernel(kernel),
                Err(error) => Self::user(format!("auto: {error}")),
            }),
        }
    }

    fn user(reason: impl Into<String>) -> Self {
        Self { kernel: None, engine: Arc::new(RelayEngine::user(reason)) }
    }

    fn kernel(kernel: Arc<RelayKernel>) -> Self {
        let engine = Arc::new(RelayEngine::with(Arc::clone(&kernel) as _));
        Self { kernel: Some(kernel), engine }
    }

    /// Runs with what `config` says now about engine and interfaces. What is under way goes on: each packet is sent by
    /// the kernel or by userspace.
    ///
    /// # Errors
    /// That cannot be; then nothing has changed.
    pub fn change(&self, config: &Config) -> Result<(), Error> {
        match (&self.kernel, config.engine) {
            (None, EngineChoice::Kernel) => Err(Error::NotLoaded),
            (None, _) => Ok(()),
            (Some(kernel), EngineChoice::User) => {
                kernel.set_interfaces(Vec::new())?;
                self.engine.set_reason(CONFIGURED);
                Ok(())
            }
            (Some(kernel), _) => kernel.set_interfaces(interfaces(config)?),
        }
    }
}

/// Returns the interfaces that media arrives on: as configured, or otherwise those of the listen addresses.
fn interfaces(config: &Config) -> Result<Vec<String>, Error> {
    let mut interfaces = config.interfaces.clone();
    if interfaces.is_empty() {
        interfaces = with_addresses(config.listen.iter().map(|addr| addr.ip()));
    }
    if interfaces.is_empty() { Err(Error::NoInterface) } else { Ok(interfaces) }
}

fn load(config: &Config, outgoing: &[u16]) -> Result<Arc<RelayKernel>, Error> {
    let interfaces = interfaces(config)?;
    let listen = config.listen.iter().map(SocketAddr::port);
    let mut ports: Vec<u16> = listen.chain(outgoing.iter().copied()).collect();
    ports.sort_unstable();
    ports.dedup();
    if ports.contains(&0) {
        return Err(Error::NoPort);
    }
    RelayKernel::start(KernelSetup {
        ports,
        id_len: ID_LEN,
        interfaces: &interfaces,
        reattach: config.reattach,
        keystream_bytes: config.keystream_bytes,
        limits: config.kernel,
    })
}
