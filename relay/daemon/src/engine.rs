//! Chooses the relay's engine, and changes it when settings are read again.

use std::{net::SocketAddr, sync::Arc};

use millrace_relay::RelayEngine;
use millrace_relay_kernel::{Error, KernelSetup, RelayKernel};
use millrace_transport::{ID_LEN, interfaces::with_addresses};

use super::config::{Config, EngineChoice};

const CONFIGURED: &str = "as configured";

/// The engine that the relay uses to send packets, and the kernel engine, if one is loaded.
pub struct ChosenEngine {
    /// The kernel engine, if it was loaded at start-up. It forwards packets while its BPF program is attached to an
    /// interface.
    kernel: Option<Arc<RelayKernel>>,
    pub engine: Arc<RelayEngine>,
}

impl ChosenEngine {
    /// Starts the engine that the settings choose. `outgoing` has the ports from which the relay connects to other
    /// relays.
    ///
    /// # Errors
    /// Fails if engine `kernel` was chosen and cannot run on this machine.
    pub fn start(config: &Config, outgoing: &[u16]) -> Result<Self, Error> {
        match config.engine {
            EngineChoice::User => Ok(Self::user(CONFIGURED)),
            EngineChoice::Kernel => Ok(Self::kernel(load(config, outgoing)?)),
            // Packets of the kernel engine bypass the host's output firewall rules. An operator must choose that, by
            // naming an interface or the engine.
            EngineChoice::Auto if config.interfaces.is_empty() => {
                Ok(Self::user("auto: the kernel engine needs the setting interface"))
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

    /// Applies the settings of the engine and its interfaces. Media flows on during the change: each packet is sent
    /// either by the kernel or by userspace.
    ///
    /// # Errors
    /// Fails if the settings cannot be applied; the engine and its interfaces are then unchanged.
    pub fn change(&self, config: &Config) -> Result<(), Error> {
        match (&self.kernel, config.engine) {
            // BPF programs are loaded only at start-up, so a reload cannot change from engine user to engine kernel.
            (None, EngineChoice::Kernel) => Err(Error::NotLoaded),
            (None, _) => Ok(()),
            (Some(kernel), EngineChoice::User) => {
                // The kernel engine stays loaded without interfaces, so a later reload can attach it again without a
                // restart.
                kernel.set_interfaces(Vec::new())?;
                self.engine.set_reason(CONFIGURED);
                Ok(())
            }
            (Some(kernel), _) => kernel.set_interfaces(interfaces(config)?),
        }
    }
}

/// Returns the interfaces on which media arrives: the configured ones, or those with the listen addresses.
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
    // The BPF program is loaded before the listen addresses are bound, so port 0 gives it no port number to match.
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
