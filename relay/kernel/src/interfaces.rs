//! Where the fast path is attached, and whether it still is.
//!
//! Interfaces go and come back, and anybody with the privilege can detach a program. Nothing is lost meanwhile, since
//! userspace sends what the kernel does not.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::program::Relay;
use millrace_transport::offload::Interface;
use nix::{libc, net::if_::if_nametoindex};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::Error;

/// The interfaces that media is to be forwarded from.
pub(super) struct Interfaces {
    places: Mutex<Vec<Place>>,
    /// One is attached to.
    any: AtomicBool,
    /// Attach again where somebody else detached the program, or the interface was made anew.
    persist: bool,
}

struct Place {
    index: i32,
    interface: Interface,
}

impl Interfaces {
    pub fn new(persist: bool) -> Self {
        Self { places: Mutex::default(), any: AtomicBool::new(false), persist }
    }

    pub fn list(&self) -> Vec<Interface> {
        self.places.lock().iter().map(|place| place.interface.clone()).collect()
    }

    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Attaches to these, in the calling thread's network namespace, and to no others.
    ///
    /// # Errors
    /// One cannot be attached to; then nothing has changed.
    pub fn set(&self, relay: &Relay, names: &[String]) -> Result<(), Error> {
        let mut places = self.places.lock();
        let mut wanted: Vec<Place> = Vec::new();
        let is_in = |places: &[Place], index| places.iter().any(|place| place.index == index);
        for name in names {
            match attach(relay, name) {
                Ok(place) => wanted.push(place),
                Err(error) => {
                    let new = wanted.iter().filter(|place| !is_in(&places, place.index));
                    new.for_each(|place| relay.detach_from(place.index));
                    return Err(error);
                }
            }
        }
        places
            .iter()
            .filter(|place| !is_in(&wanted, place.index))
            .for_each(|place| relay.detach_from(place.index));
        *places = wanted;
        self.note(&places);
        Ok(())
    }

    /// Finds out where it is attached no more, in the calling thread's network namespace.
    pub fn look(&self, relay: &Relay) {
        let mut places = self.places.lock();
        for place in places.iter_mut() {
            let Some(reason) = place.trouble(relay) else { continue };
            if place.interface.attached.is_ok() {
                warn!(interface = place.interface.name, reason, "the kernel forwards from there no more");
                relay.detach_from(place.index);
                place.interface.attached = Err(reason);
            }
            if self.persist && place.again(relay) {
                info!(interface = place.interface.name, "the kernel forwards from there again");
            }
        }
        self.note(&places);
    }

    fn note(&self, places: &[Place]) {
        self.any.store(places.iter().any(|place| place.interface.attached.is_ok()), Ordering::Relaxed);
    }
}

impl Place {
    /// Why it is not attached.
    fn trouble(&self, relay: &Relay) -> Option<String> {
        let there = if_nametoindex(self.interface.name.as_str()).ok();
        match there.map(|index| index as i32) {
            None => Some("the interface is gone".to_owned()),
            Some(index) if index != self.index => Some("the interface is another one now".to_owned()),
            Some(index) if relay.is_attached(index) => None,
            Some(_) => Some("somebody has detached the program".to_owned()),
        }
    }

    /// Tries to attach again. What is in the way may stay there for long, and is logged once.
    fn again(&mut self, relay: &Relay) -> bool {
        match attach(relay, &self.interface.name) {
            Ok(place) => {
                *self = place;
                true
            }
            Err(Error::Interface { .. }) => false,
            Err(error) => {
                let reason = error.to_string();
                if self.interface.attached != Err(reason.clone()) {
                    warn!(interface = self.interface.name, reason, "it cannot be attached to");
                    self.interface.attached = Err(reason);
                }
                false
            }
        }
    }
}

fn attach(relay: &Relay, name: &str) -> Result<Place, Error> {
    let index = if_nametoindex(name)
        .map_err(|errno| Error::Interface { name: name.to_owned(), source: errno.into() })?;
    check(name)?;
    let index = index as i32;
    let mechanism = relay.attach(index).map_err(|source| Error::Attach { name: name.to_owned(), source })?;
    Ok(Place { index, interface: Interface { name: name.to_owned(), attached: Ok(mechanism.to_string()) } })
}

/// Refuses interfaces whose packets do not begin with an Ethernet header (tunnels), and loopback, which has one but
/// leads nowhere.
fn check(name: &str) -> Result<(), Error> {
    let kind = millrace_transport::interfaces::kind(name)
        .map_err(|errno| Error::Interface { name: name.to_owned(), source: errno.into() })?;
    match kind {
        Some(libc::ARPHRD_ETHER) => Ok(()),
        Some(libc::ARPHRD_LOOPBACK) => Err(Error::Loopback { name: name.to_owned() }),
        _ => Err(Error::NotEthernet { name: name.to_owned() }),
    }
}
