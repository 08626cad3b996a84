//! Which engine the relay runs with.

use std::{net::IpAddr, sync::Arc};

use nix::ifaddrs::getifaddrs;
use parking_lot::Mutex;

use super::config::{Config, EngineChoice};
use crate::{
    engine::kernel::{Error, Kernel, Setup},
    quic,
};

const CONFIGURED: &str = "as configured";

/// The engine that runs, and why it is this one.
pub struct Engine {
    /// What was loaded at start-up; it forwards while it has interfaces.
    pub kernel: Option<Arc<Kernel>>,
    why_user: Mutex<String>,
}

impl Engine {
    /// # Errors
    /// The engine that was asked for by name cannot run here.
    pub fn start(config: &Config) -> Result<Self, Error> {
        match config.engine {
            EngineChoice::User => Ok(Self::user(CONFIGURED)),
            EngineChoice::Kernel => Ok(Self::kernel(load(config)?)),
            // What the kernel sends passes by the host's rules for what leaves it: nobody gets that unasked.
            EngineChoice::Auto if config.interfaces.is_empty() => {
                Ok(Self::user("auto: the kernel engine wants an interface by name"))
            }
            EngineChoice::Auto => Ok(match load(config) {
                Ok(kernel) => Self::kernel(kernel),
                Err(error) => Self::user(format!("auto: {error}")),
            }),
        }
    }

    fn user(reason: impl Into<String>) -> Self {
        Self { kernel: None, why_user: Mutex::new(reason.into()) }
    }

    fn kernel(kernel: Arc<Kernel>) -> Self {
        Self { kernel: Some(kernel), why_user: Mutex::default() }
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
                CONFIGURED.clone_into(&mut self.why_user.lock());
                Ok(())
            }
            (Some(kernel), _) => kernel.set_interfaces(interfaces(config)?),
        }
    }

    /// Name and reason.
    pub fn describe(&self) -> (&'static str, String) {
        let attached = self.kernel.as_ref().map(|kernel| kernel.attached()).unwrap_or_default();
        if attached.is_empty() {
            return ("user", self.why_user.lock().clone());
        }
        let attached: Vec<_> = attached.iter().map(ToString::to_string).collect();
        ("kernel", format!("attached to {}", attached.join(", ")))
    }
}

/// Where media arrives: as configured, else where the listen addresses are.
pub(super) fn interfaces(config: &Config) -> Result<Vec<String>, Error> {
    let mut interfaces = config.interfaces.clone();
    if interfaces.is_empty() {
        interfaces = with_addresses(config.listen.iter().map(|addr| addr.ip()));
    }
    if interfaces.is_empty() { Err(Error::NoInterface) } else { Ok(interfaces) }
}

fn load(config: &Config) -> Result<Arc<Kernel>, Error> {
    let interfaces = interfaces(config)?;
    let mut ports: Vec<u16> = config.listen.iter().map(|addr| addr.port()).collect();
    ports.sort_unstable();
    ports.dedup();
    if ports.contains(&0) {
        return Err(Error::NoPort);
    }
    Kernel::start(Setup {
        ports,
        id_len: quic::ID_LEN,
        interfaces: &interfaces,
        reattach: config.reattach,
        keystream_bytes: config.keystream_bytes,
        limits: config.kernel,
    })
}

/// Interfaces that have one of the addresses; no media comes by loopback.
fn with_addresses(addresses: impl Iterator<Item = IpAddr>) -> Vec<String> {
    let wanted: Vec<_> = addresses.filter(|ip| !ip.is_unspecified() && !ip.is_loopback()).collect();
    let Ok(all) = getifaddrs() else { return Vec::new() };
    let ip = |address: nix::sys::socket::SockaddrStorage| {
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or(address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    };
    let has_one = |address: Option<_>| address.and_then(ip).is_some_and(|ip| wanted.contains(&ip));
    let mut names: Vec<_> = all
        .filter(|interface| has_one(interface.address))
        .map(|interface| interface.interface_name)
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}
