//! Congestion controls from object files, registered with TCP as `struct_ops`.
//!
//! On Linux 6.4 and newer a congestion control is registered by a BPF link: the kernel removes it when the last
//! descriptor of the link is closed, also when this process is killed. Older kernels keep a control until its map entry
//! is deleted. Dropping a [`CongestionProgram`] deletes the entry. If a process was killed, [`remove_leftovers`]
//! deletes it. Sockets that use a removed control keep it, since they hold a reference.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{AsRawLibbpf, Link, MapMut, MapType};
use millrace_kernel::fork::{ForkSafeLink, keep_from_children};
use millrace_kernel::object::take_log;
use millrace_kernel::raw::{check, detach, owned};
use nix::libc;

use super::Error;
use super::object::{GraftObject, NAME_PREFIX};
use super::pins::PinDirectory;
use super::recipe::{Recipe, RecipeParts, Verification};

const PIN_PREFIX: &str = "cc-";
const BY_LINK: u32 = libbpf_sys::BPF_F_LINK;

/// How long each step of loading a congestion control took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Time to read the object file. At the first load it includes the relocation by libbpf, whose result is cached.
    pub open: Duration,
    /// Time of the kernel's verifier and JIT compiler.
    pub load: Duration,
    /// The part of `load` that the kernel's verifier took, if the kernel reported it.
    pub verification: Option<Verification>,
    /// Time to register the congestion control with TCP.
    pub attach: Duration,
}

/// A congestion control that is registered with TCP. Dropping it removes it from TCP, unless it is pinned.
pub struct CongestionProgram {
    // Fields are dropped in this order. The link has to be closed before its map, which is in `_body`.
    link: Option<Registration>,
    _body: LoadedControl,
    name: String,
    by_link: bool,
    timing: Timing,
}

/// The loaded callbacks of a congestion control.
enum LoadedControl {
    /// The callbacks were relocated and loaded by libbpf: at the first load, or if the relocated instructions cannot be
    /// cached.
    Object(libbpf_rs::Object),
    Parts(RecipeParts),
}

struct Registration {
    _kept: ForkSafeLink,
    link: RegisteredControl,
    by_link: bool,
    /// True if the BPF link is pinned, so that the congestion control stays registered when this value is dropped.
    pinned: bool,
}

enum RegisteredControl {
    Libbpf(Link),
    Raw(OwnedFd),
}

impl AsFd for RegisteredControl {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Libbpf(link) => link.as_fd(),
            Self::Raw(fd) => fd.as_fd(),
        }
    }
}

impl Registration {
    fn new(link: RegisteredControl, by_link: bool) -> Self {
        Self { _kept: keep_from_children(&link), link, by_link, pinned: false }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.by_link && !self.pinned {
            // Before Linux 6.11 `struct_ops` links cannot be detached; closing the descriptor ends them.
            let _ = detach(self.link.as_fd());
        }
    }
}

impl CongestionProgram {
    /// Relocates the graft with libbpf, so that a later load takes less time. No program is left in the kernel.
    pub fn prepare(image: &[u8]) -> Result<(), Error> {
        match Recipe::find_loaded(image) {
            Some(_) => Ok(()),
            None => Ready::load_either(image, &[]).map(drop),
        }
    }

    /// Returns whether the graft was relocated before. If so, loading it takes only system calls.
    pub fn is_prepared(image: &[u8]) -> bool {
        Recipe::find_loaded(image).is_some()
    }

    /// Loads a congestion control and registers it with TCP. `parameters` replace the values that were compiled into
    /// the object file.
    pub fn register(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        Ready::load_either(image, parameters)?.register()
    }

    /// Registers a congestion control in place of the one with the same name that an earlier process pinned in `pins`.
    /// A socket that is created during the call gets the old or the new one.
    pub fn take_over(image: &[u8], parameters: &[(String, u64)], pins: &PinDirectory) -> Result<Self, Error> {
        let mut ready = Ready::load_either(image, parameters)?;
        let pinned = pins.open(&pin(&ready.name)).map(RegisteredControl::Raw);
        let Some(link) = pinned.filter(|_| ready.by_link) else { return ready.register() };
        if ready.update(&link).is_err() {
            // The pinned congestion control cannot be replaced atomically. It is removed first, so for a moment TCP has
            // no congestion control of this name.
            drop(link);
            pins.end(&pin(&ready.name));
            return ready.register();
        }
        pins.remove(&pin(&ready.name));
        let registration = Registration::new(link, true);
        Ok(ready.with(Some(registration)))
    }

    /// Pins the congestion control, so that it outlives this process until another process takes it over or removes it.
    pub fn keep(&mut self, pins: &PinDirectory) -> Result<(), Error> {
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

    /// Removes the pin, so that the congestion control is removed from TCP when this process ends.
    pub fn let_go(&mut self, pins: &PinDirectory) {
        if let Some(registration) = &mut self.link {
            pins.remove(&pin(&self.name));
            registration.pinned = false;
        }
    }

    /// Loads a graft only for the verifier's check, without registering it. Returns how long loading took.
    pub fn verify(image: &[u8], parameters: &[(String, u64)]) -> Result<Timing, Error> {
        Ok(Ready::load_either(image, parameters)?.timing)
    }

    /// Registers a congestion control without a BPF link, as on kernels before 6.4. Tests use it on newer kernels.
    pub fn register_without_link(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        Ready::load(image, parameters, false)?.register()
    }

    /// Replaces this congestion control by one from another object file, with the same name. Established sockets keep
    /// the old one until their congestion control is set again.
    ///
    /// # Errors
    /// If the kernel refuses the new congestion control, the old one stays registered. Kernels before 6.4 cannot
    /// replace one atomically: there, no congestion control is registered after such an error.
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
            // Without a BPF link, the kernel cannot replace a congestion control. TCP refuses a second one of the same
            // name, so the old one is removed first.
            old => {
                drop(old);
                next.register()?
            }
        };
        Ok(())
    }

    /// Returns the congestion control's name in TCP (`TCP_CONGESTION`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the congestion control is registered by a BPF link, so that the kernel removes it even if this
    /// process is killed.
    pub fn is_by_link(&self) -> bool {
        self.by_link
    }

    /// Returns how long loading and registering the congestion control took.
    pub fn timing(&self) -> Timing {
        self.timing
    }
}

/// Returns the file name under which a congestion control is pinned in the BPF file system. That file system does not
/// allow dots in names, and names of congestion controls have none.
fn pin(name: &str) -> String {
    format!("{PIN_PREFIX}{name}")
}

/// A congestion control that the kernel has loaded and TCP does not know yet.
struct Ready {
    body: LoadedControl,
    name: String,
    by_link: bool,
    timing: Timing,
}

impl Ready {
    fn load_either(image: &[u8], parameters: &[(String, u64)]) -> Result<Self, Error> {
        match Self::load(image, parameters, true) {
            // Kernels before 6.4 refuse the flag BPF_F_LINK with EINVAL. The graft is then loaded again without the
            // flag. If the verifier returned EINVAL for another reason, this load fails as well.
            Err(Error::Load { source, .. }) if source.kind() == libbpf_rs::ErrorKind::InvalidInput => {
                Self::load(image, parameters, false)
            }
            other => other,
        }
    }

    fn load(image: &[u8], parameters: &[(String, u64)], by_link: bool) -> Result<Self, Error> {
        let start = Instant::now();
        // A congestion control that was loaded from a recipe (cached relocated instructions) can only be registered by
        // a BPF link.
        let known = Recipe::find_loaded(image).filter(|_| by_link);
        if let Some(ready) = known.and_then(|recipe| Self::load_from_recipe(&recipe, parameters, start)) {
            return Ok(ready);
        }
        let ready = Self::load_with_libbpf(image, parameters, by_link)?;
        let LoadedControl::Object(object) = &ready.body else { return Ok(ready) };
        let recipe = if by_link { Recipe::keep(image, object)? } else { None };
        // The object is loaded again from its new recipe (cached relocated instructions). The kernel replaces a
        // congestion control that was loaded from a recipe only by one that was loaded from a recipe, too.
        let again = recipe.and_then(|recipe| Self::load_from_recipe(&recipe, parameters, start));
        Ok(again.unwrap_or(ready))
    }

    /// Loads the graft from a recipe (cached relocated instructions). Returns `None` if the kernel refuses: the caller
    /// then loads it with libbpf, which reports the reason.
    fn load_from_recipe(recipe: &Recipe, parameters: &[(String, u64)], start: Instant) -> Option<Self> {
        let opened = Instant::now();
        let parts = recipe.load(parameters).ok()?;
        let timing = Timing {
            open: opened - start,
            load: opened.elapsed(),
            verification: Some(parts.verification),
            attach: Duration::ZERO,
        };
        Some(Self {
            body: LoadedControl::Parts(parts),
            name: recipe.name().to_owned(),
            by_link: true,
            timing,
        })
    }

    fn load_with_libbpf(image: &[u8], parameters: &[(String, u64)], by_link: bool) -> Result<Self, Error> {
        let start = Instant::now();
        let mut object = GraftObject::open(image)?;
        parameters.iter().try_for_each(|(name, value)| object.set(name, *value))?;
        if let Some(mut map) = object.congestion_control().filter(|_| by_link) {
            map.set_map_flags(BY_LINK).map_err(Error::Open)?;
        }
        let opened = Instant::now();
        take_log();
        let name = object.name().to_owned();
        let loaded = object.open.load().map_err(|source| Error::Load { source, log: take_log() })?;
        let timing = Timing { open: opened - start, load: opened.elapsed(), ..Timing::default() };
        Ok(Self { body: LoadedControl::Object(loaded), name, by_link, timing })
    }

    fn register(mut self) -> Result<CongestionProgram, Error> {
        let start = Instant::now();
        let link = match &mut self.body {
            LoadedControl::Object(object) => attach(object),
            LoadedControl::Parts(parts) => parts.register().map(RegisteredControl::Raw).map_err(number),
        };
        let link = link.map_err(|source| Error::Register { name: self.name.clone(), source })?;
        self.timing.attach = start.elapsed();
        let registration = Registration::new(link, self.by_link);
        Ok(self.with(Some(registration)))
    }

    /// Replaces the congestion control that `link` has registered by this one, in one system call.
    fn update(&mut self, link: &RegisteredControl) -> nix::Result<()> {
        match (&mut self.body, link) {
            (LoadedControl::Parts(parts), link) => parts.replace(link.as_fd()).map_err(number),
            (LoadedControl::Object(object), RegisteredControl::Libbpf(link)) => update(object, link),
            // libbpf can update only links that it has created itself.
            (LoadedControl::Object(_), RegisteredControl::Raw(_)) => Err(nix::Error::EOPNOTSUPP),
        }
    }

    fn with(self, link: Option<Registration>) -> CongestionProgram {
        let Self { body, name, by_link, timing } = self;
        CongestionProgram { link, _body: body, name, by_link, timing }
    }
}

fn number(error: std::io::Error) -> nix::Error {
    nix::Error::from_raw(error.raw_os_error().unwrap_or_default())
}

fn struct_ops(object: &mut libbpf_rs::Object) -> nix::Result<MapMut<'_>> {
    let mut maps = object.maps_mut();
    maps.find(|map| libbpf_rs::MapCore::map_type(map) == MapType::StructOps).ok_or(nix::Error::ENOENT)
}

fn attach(object: &mut libbpf_rs::Object) -> nix::Result<RegisteredControl> {
    // libbpf returns NULL and leaves the kernel's error in errno.
    struct_ops(object)?.attach_struct_ops().map(RegisteredControl::Libbpf).map_err(|_| nix::Error::last())
}

fn update(object: &mut libbpf_rs::Object, link: &Link) -> nix::Result<()> {
    let map = struct_ops(object)?;
    // SAFETY: link and map are open, and the map's object outlives the call; libbpf keeps no pointer to either.
    let result = unsafe {
        libbpf_sys::bpf_link__update_map(link.as_libbpf_object().as_ptr(), map.as_libbpf_object().as_ptr())
    };
    check(result).map_err(number)
}

/// Removes congestion controls that killed processes left registered, on kernels before 6.4. Returns how many were
/// removed.
///
/// # Errors
/// The kernel refuses to open or to delete the BPF map of a congestion control.
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
        // SAFETY: the call takes no pointers, and returns a new descriptor or an error.
        let map = unsafe { owned(libbpf_sys::bpf_map_get_fd_by_id(id)) }?;
        // A struct_ops map has one entry; deleting this entry unregisters the congestion control.
        let key = 0_u32;
        // SAFETY: the descriptor is open; the key is as long as this map's, and outlives the call.
        let gone = unsafe { libbpf_sys::bpf_map_delete_elem(map.as_raw_fd(), (&raw const key).cast()) };
        match check(gone) {
            Ok(()) => removed += 1,
            // ENOENT or EINPROGRESS: the control was loaded but never registered, or another process has already
            // removed it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINPROGRESS)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(removed)
}
