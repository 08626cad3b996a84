//! A congestion control that is registered with TCP.
//!
//! By a link (6.4 and newer) it goes when the last descriptor does, so also when this process is killed. Older kernels
//! keep it until somebody deletes it: dropping does, and what a killed process left [`remove_leftovers`] removes. Either
//! way sockets that use it go on with it, since they hold it.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{AsRawLibbpf, Link, MapMut, MapType};
use millrace_kernel::fork::{Kept, keep_from_children};
use millrace_kernel::object::take_log;
use millrace_kernel::raw::{check, detach, owned};
use nix::libc;

use super::Error;
use super::object::{NAME_PREFIX, Object};
use super::pins::Pins;
use super::recipe::{Parts, Recipe, Verification};

const PIN_PREFIX: &str = "cc-";
const BY_LINK: u32 = libbpf_sys::BPF_F_LINK;

/// How long the steps took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Reading the object file; and relocation, where it was not known.
    pub open: Duration,
    /// Verifier and JIT.
    pub load: Duration,
    /// The verifier's part of that, where it is known.
    pub verification: Option<Verification>,
    /// Registration.
    pub attach: Duration,
}

/// A congestion control; dropping it takes it back from TCP.
pub struct Control {
    // Dropped before the map that it is of.
    link: Option<Registration>,
    _body: Body,
    name: String,
    by_link: bool,
    timing: Timing,
}

/// What was loaded.
enum Body {
    /// By libbpf: the first time, and where a recipe does not do.
    Object(libbpf_rs::Object),
    Parts(Parts),
}

struct Registration {
    _kept: Kept,
    link: Registered,
    by_link: bool,
    /// It stays when this ends.
    pinned: bool,
}

enum Registered {
    Libbpf(Link),
    Raw(OwnedFd),
}

impl AsFd for Registered {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Libbpf(link) => link.as_fd(),
            Self::Raw(fd) => fd.as_fd(),
        }
    }
}

impl Registration {
    fn new(link: Registered, by_link: bool) -> Self {
        Self { _kept: keep_from_children(&link), link, by_link, pinned: false }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.by_link && !self.pinned {
            // Before 6.11 links of this kind cannot be detached, only closed.
            let _ = detach(self.link.as_fd());
        }
    }
}

impl Control {
    /// Has libbpf relocate it, so that it is loaded faster when it is wanted. Nothing stays in the kernel.
    pub fn prepare(image: &[u8]) -> Result<(), Error> {
        match Recipe::of(image) {
            Some(_) => Ok(()),
            None => Ready::load_either(image, &[]).map(drop),
        }
    }

    /// Whether it was relocated before, so that loading it is system calls alone.
    pub fn is_prepared(image: &[u8]) -> bool {
        Recipe::of(image).is_some()
    }

    /// Loads and registers it, with these values instead of those that it was compiled with.
    pub fn register(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        Ready::load_either(image, parameters)?.register()
    }

    /// The same in the place of one that an earlier process left in `pins`, under the same name: sockets that begin meanwhile have
    /// one of the two.
    pub fn take_over(image: &[u8], parameters: &[(String, u64)], pins: &Pins) -> Result<Self, Error> {
        let mut ready = Ready::load_either(image, parameters)?;
        let pinned = pins.open(&pin(&ready.name)).map(Registered::Raw);
        let Some(link) = pinned.filter(|_| ready.by_link) else { return ready.register() };
        if ready.update(&link).is_err() {
            // It was loaded by other means: nobody has the name for a moment.
            drop(link);
            pins.end(&pin(&ready.name));
            return ready.register();
        }
        pins.remove(&pin(&ready.name));
        let registration = Registration::new(link, true);
        Ok(ready.with(Some(registration)))
    }

    /// It stays when this process ends, until somebody takes it over or cleans it away.
    pub fn keep(&mut self, pins: &Pins) -> Result<(), Error> {
        let name = pin(&self.name);
        match &mut self.link {
            Some(registration) if registration.by_link => {
                pins.put(&name, registration.link.as_fd())?;
                registration.pinned = true;
                Ok(())
            }
            _ => Err(Error::NoLinks),
        }
    }

    /// It does not stay any more.
    pub fn let_go(&mut self, pins: &Pins) {
        if let Some(registration) = &mut self.link {
            pins.remove(&pin(&self.name));
            registration.pinned = false;
        }
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

/// What its pin is called: no dots, which are not allowed there.
fn pin(name: &str) -> String {
    format!("{PIN_PREFIX}{name}")
}

/// Loaded, and not registered yet.
struct Ready {
    body: Body,
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
        let known = Recipe::of(image).filter(|_| by_link);
        if let Some(ready) = known.and_then(|recipe| Self::by_recipe(&recipe, parameters, start)) {
            return Ok(ready);
        }
        let ready = Self::by_libbpf(image, parameters, by_link)?;
        let Body::Object(object) = &ready.body else { return Ok(ready) };
        let recipe = if by_link { Recipe::keep(image, object)? } else { None };
        // Both loads, so that what is registered by a recipe is always replaced by one.
        let again = recipe.and_then(|recipe| Self::by_recipe(&recipe, parameters, start));
        Ok(again.unwrap_or(ready))
    }

    /// What the kernel refuses is asked of libbpf, which says why.
    fn by_recipe(recipe: &Recipe, parameters: &[(String, u64)], start: Instant) -> Option<Self> {
        let opened = Instant::now();
        let parts = recipe.load(parameters).ok()?;
        let timing = Timing {
            open: opened - start,
            load: opened.elapsed(),
            verification: Some(parts.verification),
            attach: Duration::ZERO,
        };
        Some(Self { body: Body::Parts(parts), name: recipe.name().to_owned(), by_link: true, timing })
    }

    fn by_libbpf(image: &[u8], parameters: &[(String, u64)], by_link: bool) -> Result<Self, Error> {
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
        let timing = Timing { open: opened - start, load: opened.elapsed(), ..Timing::default() };
        Ok(Self { body: Body::Object(loaded), name, by_link, timing })
    }

    fn register(mut self) -> Result<Control, Error> {
        let start = Instant::now();
        let link = match &mut self.body {
            Body::Object(object) => attach(object),
            Body::Parts(parts) => parts.register().map(Registered::Raw).map_err(number),
        };
        let link = link.map_err(|source| Error::Register { name: self.name.clone(), source })?;
        self.timing.attach = start.elapsed();
        let registration = Registration::new(link, self.by_link);
        Ok(self.with(Some(registration)))
    }

    /// In the place of what a link is of.
    fn update(&mut self, link: &Registered) -> nix::Result<()> {
        match (&mut self.body, link) {
            (Body::Parts(parts), link) => parts.replace(link.as_fd()).map_err(number),
            (Body::Object(object), Registered::Libbpf(link)) => update(object, link),
            // libbpf updates links of its own only.
            (Body::Object(_), Registered::Raw(_)) => Err(nix::Error::EOPNOTSUPP),
        }
    }

    fn with(self, link: Option<Registration>) -> Control {
        let Self { body, name, by_link, timing } = self;
        Control { link, _body: body, name, by_link, timing }
    }
}

fn number(error: std::io::Error) -> nix::Error {
    nix::Error::from_raw(error.raw_os_error().unwrap_or_default())
}

fn struct_ops(object: &mut libbpf_rs::Object) -> nix::Result<MapMut<'_>> {
    let mut maps = object.maps_mut();
    maps.find(|map| libbpf_rs::MapCore::map_type(map) == MapType::StructOps).ok_or(nix::Error::ENOENT)
}

fn attach(object: &mut libbpf_rs::Object) -> nix::Result<Registered> {
    // libbpf says by errno what the kernel said.
    struct_ops(object)?.attach_struct_ops().map(Registered::Libbpf).map_err(|_| nix::Error::last())
}

fn update(object: &mut libbpf_rs::Object, link: &Link) -> nix::Result<()> {
    let map = struct_ops(object)?;
    // SAFETY: both are open, and the map's object outlives the call; libbpf keeps no pointer to it.
    let result = unsafe {
        libbpf_sys::bpf_link__update_map(link.as_libbpf_object().as_ptr(), map.as_libbpf_object().as_ptr())
    };
    check(result).map_err(number)
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
