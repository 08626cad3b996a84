//! Interfaces: attached to, again if somebody has detached what is there, and made to obey time stamps where a graft paces.

use millrace_graft_kernel::joint::Joints;
use millrace_kernel::qdisc;
use millrace_kernel::xdp::Mode;
use nix::net::if_::if_nametoindex;

use super::super::function::Service;
use super::super::settings::Settings;
use super::{Event, Runtime};
use crate::Error;

pub(super) struct Place {
    pub name: String,
    pub index: i32,
    pub mode: Mode,
}

impl Place {
    pub fn new(joints: &mut Joints, name: &str, mode: Mode) -> Result<Self, Error> {
        let index = index_of(name)?;
        Ok(Self { name: name.to_owned(), index, mode: joints.attach(index, mode)? })
    }
}

fn index_of(name: &str) -> Result<i32, Error> {
    let failed = |source| Error::Interface { name: name.to_owned(), source };
    let index = if_nametoindex(name).map_err(failed)?;
    i32::try_from(index).map_err(|_| failed(nix::Error::ERANGE))
}

/// A graft that paces needs all interfaces to do what it says.
///
/// # Errors
/// The first one that does not, and how it would.
pub(super) fn check_pacing(settings: &Settings) -> Result<(), Error> {
    let mut grafts = settings.grafts.values();
    let Some(graft) = grafts.find(|graft| graft.services.contains(&Service::Pacing)) else { return Ok(()) };
    for interface in &settings.interfaces {
        let failed = |error: std::io::Error| {
            let errno = nix::Error::from_raw(error.raw_os_error().unwrap_or_default());
            Error::Interface { name: interface.clone(), source: errno }
        };
        if let Some(kind) = qdisc::other_than_fq(index_of(interface)?).map_err(failed)? {
            let (graft, interface) = (graft.name.clone(), interface.clone());
            return Err(Error::NotPaced { graft, interface, kind });
        }
    }
    Ok(())
}

impl Runtime {
    pub(super) fn look_at_places(&mut self, events: &mut Vec<Event>) {
        let wanted = self.settings.mode;
        for place in &mut self.places {
            if self.joints.is_attached(place.index) {
                continue;
            }
            self.joints.detach_from(place.index);
            let error = match Place::new(&mut self.joints, &place.name, wanted) {
                Ok(new) => {
                    *place = new;
                    None
                }
                Err(error) => Some(error.to_string()),
            };
            events.push(Event::Detached { interface: place.name.clone(), error });
        }
    }
}
