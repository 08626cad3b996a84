//! The interfaces of sessions: BPF programs are attached to them, and attached again if another process has detached
//! them. If a session's packet functions pace packets, the interface must obey time stamps of departure.

use millrace_graft_kernel::packet::PacketHooks;
use millrace_kernel::qdisc;
use millrace_kernel::xdp::XdpMode;
use nix::net::if_::if_nametoindex;

use super::super::function::FunctionService;
use super::super::settings::Settings;
use super::{PacketEvent, PacketRuntime};
use crate::Error;

/// An interface to which the BPF programs are attached.
pub(super) struct RuntimeInterface {
    pub name: String,
    pub index: i32,
    pub mode: XdpMode,
}

impl RuntimeInterface {
    pub fn new(hooks: &mut PacketHooks, name: &str, mode: XdpMode) -> Result<Self, Error> {
        let index = index_of(name)?;
        Ok(Self { name: name.to_owned(), index, mode: hooks.attach(index, mode)? })
    }
}

fn index_of(name: &str) -> Result<i32, Error> {
    let failed = |source| Error::Interface { name: name.to_owned(), source };
    let index = if_nametoindex(name).map_err(failed)?;
    i32::try_from(index).map_err(|_| failed(nix::Error::ERANGE))
}

/// Checks the queueing disciplines: if the packet functions of a session pace packets, all interfaces have to obey time
/// stamps of departure.
///
/// # Errors
/// The error names the first interface that does not obey them, and the remedy.
pub(super) fn check_pacing(settings: &Settings) -> Result<(), Error> {
    let mut grafts = settings.grafts.values();
    let Some(graft) = grafts.find(|graft| graft.services.contains(&FunctionService::Pacing)) else {
        return Ok(());
    };
    for interface in &settings.interfaces {
        let failed = |error: std::io::Error| {
            let errno = nix::Error::from_raw(error.raw_os_error().unwrap_or_default());
            Error::Interface { name: interface.clone(), source: errno }
        };
        // Only the queueing discipline `fq` sends a packet at its time stamp of departure.
        if let Some(kind) = qdisc::other_than_fq(index_of(interface)?).map_err(failed)? {
            let graft = graft.name.clone();
            let interface = interface.clone();
            return Err(Error::NotPaced { graft, interface, kind });
        }
    }
    Ok(())
}

impl PacketRuntime {
    pub(super) fn look_at_places(&mut self, events: &mut Vec<PacketEvent>) {
        let wanted = self.settings.mode;
        for place in &mut self.places {
            if self.hooks.is_attached(place.index) {
                continue;
            }
            // Some programs of the interface may still be attached.
            self.hooks.detach_from(place.index);
            let error = match RuntimeInterface::new(&mut self.hooks, &place.name, wanted) {
                Ok(new) => {
                    *place = new;
                    None
                }
                Err(error) => Some(error.to_string()),
            };
            events.push(PacketEvent::Detached { interface: place.name.clone(), error });
        }
    }
}
