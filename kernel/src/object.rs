//! Opens and loads BPF objects that are embedded in the binary.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Once;

use libbpf_rs::{
    MapCore, MapFlags, MapHandle, MapMut, ObjectBuilder, OpenMapMut, OpenObject, PrintLevel, Program,
    ProgramMut, set_print,
};

use crate::Error;
use crate::intf::Plain;
use crate::memory::{MappedArray, Shared};

/// Aligned bytes of an object. libelf needs an aligned image, and `include_bytes!` alone does not promise alignment.
#[repr(C, align(8))]
pub struct Image<Bytes: ?Sized>(pub Bytes);

/// Embeds the object `$name`, which the calling crate's build script has compiled.
#[macro_export]
macro_rules! embedded {
    ($name:literal) => {{
        static IMAGE: &$crate::object::Image<[u8]> =
            &$crate::object::Image(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name)));
        $crate::object::Embedded { name: $name, image: &IMAGE.0 }
    }};
}
pub use crate::embedded;

/// A compiled object that is part of this binary.
#[derive(Clone, Copy)]
pub struct Embedded {
    /// The object's file name.
    pub name: &'static str,
    /// The contents of the object's ELF file.
    pub image: &'static [u8],
}

/// An object that is open and may still be configured.
pub struct UnloadedObject {
    name: &'static str,
    object: OpenObject,
}

/// A loaded object.
pub struct LoadedObject {
    name: &'static str,
    object: libbpf_rs::Object,
}

impl Embedded {
    /// Opens the object, so that it can be configured and loaded.
    pub fn open(self) -> Result<UnloadedObject, Error> {
        capture_log();
        let object = ObjectBuilder::default()
            .open_memory(self.image)
            .map_err(|source| Error::Open { object: self.name, source })?;
        Ok(UnloadedObject { name: self.name, object })
    }
}

impl UnloadedObject {
    /// Sets the object's configuration, its only `const volatile` structure.
    pub fn configure<T: Plain>(&mut self, config: &T) -> Result<(), Error> {
        let missing = Error::Missing { object: self.name, what: "configuration of that size" };
        let mut map = self.map(".rodata.config")?;
        match map.initial_value_mut() {
            Some(value) if value.len() == size_of::<T>() => value.copy_from_slice(config.as_bytes()),
            _ => return Err(missing),
        }
        Ok(())
    }

    /// Returns a map, whose size can be set before loading.
    pub fn map(&mut self, name: &'static str) -> Result<OpenMapMut<'_>, Error> {
        let missing = Error::Missing { object: self.name, what: name };
        self.object.maps_mut().find(|map| map.name() == OsStr::new(name)).ok_or(missing)
    }

    /// Returns libbpf's object, whose maps can be resized before loading.
    pub fn object_mut(&mut self) -> &mut OpenObject {
        &mut self.object
    }

    /// Selects for loading a program that is not loaded by default. If `function` is given, the program attaches to
    /// this kernel function, and otherwise to the hook that its ELF section names.
    pub fn enable(&mut self, name: &str, function: Option<&str>) -> Result<(), Error> {
        let missing = Error::Missing { object: self.name, what: "program of that name" };
        let mut program = self.object.progs_mut().find(|program| program.name() == name).ok_or(missing)?;
        program.set_autoload(true);
        if let Some(function) = function {
            const OF_THE_KERNEL: i32 = 0;
            program
                .set_attach_target(OF_THE_KERNEL, Some(function.to_owned()))
                .map_err(|source| Error::Open { object: self.name, source })?;
        }
        Ok(())
    }

    /// Returns the names of all programs, also of those that will not be loaded.
    pub fn programs(&self) -> Vec<String> {
        self.object.progs().map(|program| program.name().to_string_lossy().into_owned()).collect()
    }

    /// Finds all calls of a BPF helper in a program. Returns the fourth argument of each call, or `None` for a call
    /// whose fourth argument is not a constant.
    #[cfg(any(test, feature = "testing"))]
    pub fn fourth_arguments(&self, program: &str, helper: i32) -> Vec<Option<i32>> {
        const CALL: u8 = 0x85;
        const MOVE_CONSTANT: u8 = 0xb7;
        const FOURTH: u8 = 4;
        let program = self.object.progs().find(|it| it.name() == program).expect("a program");
        let instructions = program.insns();
        let calls = (0..instructions.len())
            .filter(|at| instructions[*at].code == CALL && instructions[*at].imm == helper);
        let argument = |at: usize| {
            let set = instructions[..at].iter().rev().find(|it| it.dst_reg() == FOURTH)?;
            (set.code == MOVE_CONSTANT).then_some(set.imm)
        };
        calls.map(argument).collect()
    }

    /// Loads the object into the kernel.
    pub fn load(self) -> Result<LoadedObject, Error> {
        let name = self.name;
        take_log();
        let refused = |source: libbpf_rs::Error| match source.kind() {
            libbpf_rs::ErrorKind::WouldBlock => Error::Interrupted { object: name },
            _ => Error::Load { object: name, source, log: take_log() },
        };
        let object = self.object.load().map_err(refused)?;
        Ok(LoadedObject { name, object })
    }
}

impl LoadedObject {
    /// Returns a map.
    pub fn map(&mut self, name: &'static str) -> Result<MapMut<'_>, Error> {
        let missing = Error::Missing { object: self.name, what: name };
        self.object.maps_mut().find(|map| map.name() == OsStr::new(name)).ok_or(missing)
    }

    /// Returns a handle of a map, which stays valid after the object is dropped.
    pub fn handle(&mut self, name: &'static str) -> Result<MapHandle, Error> {
        MapHandle::try_from(&self.map(name)?).map_err(|source| Error::Read { what: name, source })
    }

    /// Maps an array with the flag `BPF_F_MMAPABLE` into this process.
    pub fn table<T: Shared>(&mut self, name: &'static str) -> Result<MappedArray<T>, Error> {
        let layout = Error::Missing { object: self.name, what: "map of the expected layout" };
        let map = self.map(name)?;
        let is_as_expected = map.value_size() as usize == size_of::<T>();
        let len = NonZero::new(map.max_entries()).filter(|_| is_as_expected).ok_or(layout)?;
        MappedArray::new(map.as_fd(), len).map_err(|source| Error::Memory { what: name, source })
    }

    /// Returns a program.
    pub fn program(&self, name: &'static str) -> Result<ProgramMut<'_>, Error> {
        let missing = Error::Missing { object: self.name, what: name };
        self.program_by_name(name).map_err(|_| missing)
    }

    /// Returns a program whose name is only known at run time.
    pub fn program_by_name(&self, name: &str) -> Result<ProgramMut<'_>, Error> {
        let missing = Error::Missing { object: self.name, what: "program of that name" };
        self.object.progs_mut().find(|program| program.name() == OsStr::new(name)).ok_or(missing)
    }

    /// Returns the kernel's IDs of the programs that were loaded.
    pub fn program_ids(&self) -> Vec<u32> {
        let loaded = self.object.progs().filter(|program| program.autoload());
        loaded.filter_map(|program| Program::id_from_fd(program.as_fd()).ok()).collect()
    }

    /// Returns copies of the descriptors of the programs that were loaded.
    pub fn program_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let loaded = self.object.progs().filter(|program| program.autoload());
        loaded.map(|program| program.as_fd().try_clone_to_owned()).collect()
    }

    /// Returns the values of a per-CPU array of `u64`, each summed over the CPUs.
    pub fn counters(&mut self, map: &'static str) -> Result<Vec<u64>, Error> {
        let map_handle = self.map(map)?;
        (0..map_handle.max_entries())
            .map(|index| {
                let per_cpu = map_handle
                    .lookup_percpu(&index.to_ne_bytes(), MapFlags::ANY)
                    .map_err(|source| Error::Read { what: map, source })?;
                Ok(per_cpu.iter().flatten().filter_map(|value| u64::from_bytes(value)).sum())
            })
            .collect()
    }
}

/// Writes an entry of a map. Error messages call the map `what`.
pub fn write(map: &MapHandle, what: &'static str, key: &[u8], value: &[u8]) -> Result<(), Error> {
    map.update(key, value, MapFlags::ANY).map_err(|source| Error::Write { what, source })
}

const LOG_KEPT_BYTES: usize = 4096;

thread_local! {
    static LOG: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Captures libbpf's output, which would otherwise go to stderr. If loading fails, the last part of the output, with
/// the verifier's reason, becomes a part of the returned error.
pub fn capture_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_print(Some((PrintLevel::Warn, |_, message| LOG.with_borrow_mut(|log| append(log, &message)))));
    });
}

fn append(log: &mut String, message: &str) {
    log.push_str(message);
    if log.len() > LOG_KEPT_BYTES {
        let cut = (log.len() - LOG_KEPT_BYTES..).find(|&at| log.is_char_boundary(at)).unwrap_or(0);
        log.drain(..cut);
    }
}

/// Returns the captured output of libbpf, and clears it.
pub fn take_log() -> String {
    LOG.take()
}
