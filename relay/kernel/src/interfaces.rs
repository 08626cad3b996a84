//! The network interfaces that the BPF program is attached to.
//!
//! Interfaces may be removed and created again, and any privileged process can detach a program. No media is lost
//! meanwhile, since userspace sends what the kernel does not.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::program::RelayProgram;
use millrace_kernel::stack;
use millrace_transport::offload::OffloadInterface;
use nix::{libc, net::if_::if_nametoindex};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::Error;

/// The interfaces that the kernel should forward from.
pub(super) struct ForwardingInterfaces {
    places: Mutex<Vec<ForwardingInterface>>,
    /// True while the program is attached to at least one interface.
    any: AtomicBool,
    /// Whether to attach the program again after another process has detached it, or after the interface was created
    /// again.
    persist: bool,
}

struct ForwardingInterface {
    index: i32,
    interface: OffloadInterface,
}

impl ForwardingInterfaces {
    pub fn new(persist: bool) -> Self {
        Self { places: Mutex::default(), any: AtomicBool::new(false), persist }
    }

    pub fn list(&self) -> Vec<OffloadInterface> {
        self.places.lock().iter().map(|place| place.interface.clone()).collect()
    }

    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Attaches the program to the named interfaces of the calling thread's network namespace, and detaches it from all
    /// others.
    ///
    /// # Errors
    /// If the program cannot be attached to one of the interfaces, returns an error and changes nothing.
    pub fn set(&self, relay: &RelayProgram, names: &[String]) -> Result<(), Error> {
        let mut places = self.places.lock();
        let mut wanted: Vec<ForwardingInterface> = Vec::new();
        let is_in = |places: &[ForwardingInterface], index| places.iter().any(|place| place.index == index);
        for name in names {
            match attach(relay, name) {
                Ok(place) => wanted.push(place),
                Err(error) => {
                    // After a failure, the program is detached again from the interfaces to which this call has
                    // attached it.
                    let new = wanted.iter().filter(|place| !is_in(&places, place.index));
                    new.for_each(|place| relay.detach_from(place.index));
                    return Err(error);
                }
            }
        }
        // The program is detached from interfaces only after it was attached to all new ones, so a failure changes
        // nothing.
        places
            .iter()
            .filter(|place| !is_in(&wanted, place.index))
            .for_each(|place| relay.detach_from(place.index));
        *places = wanted;
        self.note(&places);
        Ok(())
    }

    /// Checks whether the program is still attached to all interfaces of the calling thread's network namespace.
    pub fn look(&self, relay: &RelayProgram) {
        let mut places = self.places.lock();
        for place in places.iter_mut() {
            let Some(reason) = place.trouble(relay) else { continue };
            // That the program was detached from an interface is logged once, until it is attached there again.
            if place.interface.attached.is_ok() {
                warn!(
                    interface = place.interface.name,
                    reason, "the kernel no longer forwards packets from this interface: userspace does"
                );
                relay.detach_from(place.index);
                place.interface.attached = Err(reason);
            }
            if self.persist && place.reattach(relay) {
                info!(
                    interface = place.interface.name,
                    "the kernel again forwards packets from this interface"
                );
            }
        }
        self.note(&places);
    }

    fn note(&self, places: &[ForwardingInterface]) {
        self.any.store(places.iter().any(|place| place.interface.attached.is_ok()), Ordering::Relaxed);
    }
}

impl ForwardingInterface {
    /// Returns the reason if the program is no longer attached to the interface.
    fn trouble(&self, relay: &RelayProgram) -> Option<String> {
        let there = if_nametoindex(self.interface.name.as_str()).ok();
        match there.map(|index| index as i32) {
            None => Some("the interface is gone".to_owned()),
            // An interface that is created again under the same name has another index.
            Some(index) if index != self.index => Some("the interface is another one now".to_owned()),
            Some(index) if relay.is_attached(index) => None,
            Some(_) => Some("somebody has detached the program".to_owned()),
        }
    }

    /// Tries to attach the program to the interface again. Repeated failures for the same reason are logged once.
    fn reattach(&mut self, relay: &RelayProgram) -> bool {
        match attach(relay, &self.interface.name) {
            Ok(place) => {
                *self = place;
                true
            }
            // The disappearance of the interface was logged already.
            Err(Error::Interface { .. }) => false,
            Err(error) => {
                let reason = error.to_string();
                if self.interface.attached != Err(reason.clone()) {
                    warn!(
                        interface = self.interface.name,
                        reason,
                        "cannot attach the relay's program to the interface, so userspace forwards its packets"
                    );
                    self.interface.attached = Err(reason);
                }
                false
            }
        }
    }
}

fn attach(relay: &RelayProgram, name: &str) -> Result<ForwardingInterface, Error> {
    let index = if_nametoindex(name)
        .map_err(|errno| Error::Interface { name: name.to_owned(), source: errno.into() })?;
    let index = index as i32;
    check(name, index)?;
    let mechanism = relay.attach(index).map_err(|source| Error::Attach { name: name.to_owned(), source })?;
    Ok(ForwardingInterface {
        index,
        interface: OffloadInterface { name: name.to_owned(), attached: Ok(mechanism.to_string()) },
    })
}

/// Refuses interfaces whose packets begin neither with an Ethernet header nor, as on tun devices, with an IP header.
/// Also refuses loopback, from which no other host is reached, and interfaces of a VRF: the program looks routes up as
/// for processes outside of any VRF, so copies would leave by the wrong interface.
fn check(name: &str, index: i32) -> Result<(), Error> {
    let error = |source| Error::Interface { name: name.to_owned(), source };
    if let Some(vrf) = stack::vrf(index).map_err(error)? {
        return Err(Error::Vrf { name: name.to_owned(), vrf });
    }
    let kind = millrace_transport::interfaces::kind(name).map_err(|errno| error(errno.into()))?;
    match kind {
        Some(libc::ARPHRD_ETHER) => Ok(()),
        Some(libc::ARPHRD_LOOPBACK) => Err(Error::Loopback { name: name.to_owned() }),
        _ if stack::is_tun(index).map_err(error)? => Ok(()),
        _ => Err(Error::NotEthernet { name: name.to_owned() }),
    }
}
