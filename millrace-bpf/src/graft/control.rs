//! A congestion control that is registered with TCP.
//!
//! By a link (6.4 and newer) it goes when the last descriptor does, so also when this process is killed. Older kernels
//! keep it until somebody deletes it: dropping does, and what a killed process left [`remove_leftovers`] removes. Either
//! way sockets that use it go on with it, since they hold it.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{AsRawLibbpf, Link, MapMut, MapType};
use nix::libc;

use super::Error;
use super::object::{NAME_PREFIX, Object};
use crate::fork::{Kept, keep_from_children};
use crate::object::take_log;
use crate::raw::{check, detach, owned};

const BY_LINK: u32 = libbpf_sys::BPF_F_LINK;

/// How long the steps took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Reading the object file.
    pub open: Duration,
    /// Relocation, verifier and JIT.
    pub load: Duration,
    /// Registration.
    pub attach: Duration,
}

/// A congestion control; dropping it takes it back from TCP.
pub struct Control {
    // Dropped before the map that it is of.
    link: Option<Registration>,
    _object: libbpf_rs::Object,
    name: String,
    by_link: bool,
    timing: Timing,
}

struct Registration {
    _kept: Kept,
    link: Link,
    by_link: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.by_link {
            // Before 6.11 links of this kind cannot be detached, only closed.
            let _ = detach(self.link.as_fd());
        }
    }
}

impl Control {
    /// Loads and registers it, with these values instead of those that it was compiled with.
    pub fn register(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        Ready::load_either(image, parameters)?.register()
    }

    /// Has the verifier judge it; it is not registered.
    pub fn verify(image: &[u8], parameters: &[(String, u64)]) -> Result<Timing, Error> {
        Ok(Ready::load_either(image, parameters)?.timing)
    }

    /// The same as on kernels before 6.4.
    pub fn register_without_link(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        Ready::load(image, parameters, false)?.register()
    }

    /// Another one takes its place, under the same name. Sockets that live keep the old one until it is set for them again.
    ///
    /// # Errors
    /// The old one stays, unless the kernel has no links and does not take it back either.
    pub fn replace(&mut self, image: &[u8], parameters: &[(String, u64)]) -> Result<(), Error> {
        let mut next = Ready::load(image, parameters, self.by_link)?;
        if next.name != self.name {
            return Err(Error::OtherName(next.name, self.name.clone()));
        }
        let link = self.link.take();
        *self = match link {
            Some(registration) if self.by_link => {
                let start = Instant::now();
                if let Err(source) = next.update(&registration.link) {
                    self.link = Some(registration);
                    return Err(Error::Register { name: next.name, source });
                }
                next.timing.attach = start.elapsed();
                next.with(Some(registration))
            }
            // Nobody can have it for a moment in between: TCP knows a name once.
            old => {
                drop(old);
                next.register()?
            }
        };
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the kernel takes it back by itself when this process ends, however it does.
    pub fn is_by_link(&self) -> bool {
        self.by_link
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }
}

/// Loaded, and not registered yet.
struct Ready {
    object: libbpf_rs::Object,
    name: String,
    by_link: bool,
    timing: Timing,
}

impl Ready {
    fn load_either(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        match Self::load(image, parameters, true) {
            // A kernel before 6.4 knows no such flag; the verifier may say the same of something else.
            Err(Error::Load { source, .. }) if source.kind() == libbpf_rs::ErrorKind::InvalidInput => {
                Self::load(image, parameters, false)
            }
            other => other,
        }
    }

    fn load(image: &[u8], parameters: &[(String, u64)], by_link: bool) -> Result<Self, Error> {
        let start = Instant::now();
        let mut object = Object::open(image)?;
        parameters.iter().try_for_each(|(name, value)| object.set(name, *value))?;
        if let Some(mut map) = object.congestion_control().filter(|_| by_link) {
            map.set_map_flags(BY_LINK).map_err(Error::Open)?;
        }
        let opened = Instant::now();
        take_log();
        let name = object.name().to_owned();
        let loaded = object.open.load().map_err(|source| Error::Load { source, log: take_log() })?;
        let timing = Timing { open: opened - start, load: opened.elapsed(), attach: Duration::ZERO };
        Ok(Self { object: loaded, name, by_link, timing })
    }

    fn map(&mut self) -> Option<MapMut<'_>> {
        self.object.maps_mut().find(|map| libbpf_rs::MapCore::map_type(map) == MapType::StructOps)
    }

    fn register(mut self) -> Result<Control, Error> {
        let start = Instant::now();
        let (name, by_link) = (self.name.clone(), self.by_link);
        let refused = |source: nix::Error| Error::Register { name: name.clone(), source };
        let mut map = self.map().ok_or_else(|| refused(nix::Error::ENOENT))?;
        // libbpf says by errno what the kernel said.
        let link = map.attach_struct_ops().map_err(|_| refused(nix::Error::last()))?;
        let kept = keep_from_children(&link);
        self.timing.attach = start.elapsed();
        Ok(self.with(Some(Registration { _kept: kept, link, by_link })))
    }

    /// In the place of what a link is of.
    fn update(&mut self, link: &Link) -> nix::Result<()> {
        let map = self.map().ok_or(nix::Error::ENOENT)?;
        // SAFETY: both are open, and the map's object outlives the call; libbpf keeps no pointer to it.
        let result = unsafe {
            libbpf_sys::bpf_link__update_map(
                link.as_libbpf_object().as_ptr(),
                map.as_libbpf_object().as_ptr(),
            )
        };
        check(result).map_err(|error| nix::Error::from_raw(error.raw_os_error().unwrap_or_default()))
    }

    fn with(self, link: Option<Registration>) -> Control {
        let Self { object, name, by_link, timing } = self;
        Control { link, _object: object, name, by_link, timing }
    }
}

/// Takes back what killed processes left registered, on kernels without links. Returns how many.
///
/// # Errors
/// The kernel refuses to open or to delete one.
pub fn remove_leftovers() -> std::io::Result<usize> {
    let is_leftover = |name: &str, flags: u32, kind: MapType| {
        kind == MapType::StructOps && flags & BY_LINK == 0 && name.starts_with(NAME_PREFIX)
    };
    let maps = MapInfoIter::default();
    let ids: Vec<u32> = maps
        .filter(|info| is_leftover(&info.name.to_string_lossy(), info.map_flags, info.ty))
        .map(|info| info.id)
        .collect();
    let mut removed = 0;
    for id in ids {
        // SAFETY: no pointers are passed; the call makes the descriptor.
        let map = unsafe { owned(libbpf_sys::bpf_map_get_fd_by_id(id)) }?;
        let key = 0_u32;
        // SAFETY: the descriptor is open; the key is as long as this map's, and outlives the call.
        let gone = unsafe { libbpf_sys::bpf_map_delete_elem(map.as_raw_fd(), (&raw const key).cast()) };
        match check(gone) {
            Ok(()) => removed += 1,
            // It was loaded and never registered, or taken back while somebody held it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINPROGRESS)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}
