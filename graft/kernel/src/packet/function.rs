//! The object file of a packet function: its programs at the hooks, its parameters and its state.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject, ProgramType};
use millrace_kernel::object::take_log;
use millrace_kernel::raw;

use super::super::Error;
use super::super::object::{GraftParameter, form, open, parameters, set, with_btf};
use super::intf::MigrateCall;
use super::{FunctionHook, SessionRoom};

/// Names of the maps that every function's object declares and that the dispatcher owns.
pub(super) const SHARED: [&str; 5] = ["works", "shared", "programs_tx", "programs_rx", "programs_repair"];
/// Name of the map of stored packets, which all functions that retransmit packets share.
pub(super) const KEPT: &str = "kept_packets";
const STATE: &str = "state";
const OLD_STATE: &str = "old_state";
/// Suffix of the program that converts the state of the previous version.
const MIGRATE: &str = "_migrate";

/// The object file of a packet function, opened and not loaded.
pub struct OpenedFunction {
    open: OpenObject,
    name: String,
    hooks: Vec<FunctionHook>,
    parameters: Vec<GraftParameter>,
    only_recovered: bool,
}

impl OpenedFunction {
    /// Opens the object file of a packet function and checks what it contains.
    ///
    /// # Errors
    /// The object does not hold exactly one function, or was not written against this ABI.
    pub fn open(image: &[u8]) -> Result<Self, Error> {
        let mut open = open(image)?;
        let (name, hooks) = programs(&open)?;
        let parameters = with_btf(&mut open, parameters)?;
        // graft_packet.h declares these maps. A function without them was written against another interface.
        for shared in SHARED {
            if !open.maps().any(|map| map.name() == shared) {
                return Err(form(format!("the object file has no map {shared}: include graft_packet.h")));
            }
        }
        Ok(Self { open, name, hooks, parameters, only_recovered: false })
    }

    /// Returns whether the object has a program that converts the state of the previous version.
    pub fn migrates(&self) -> bool {
        self.open.progs().any(|program| program.name().to_string_lossy().ends_with(MIGRATE))
    }

    /// Returns the function's name, which is the prefix of its programs' names.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the hooks at which the function has a program.
    pub fn hooks(&self) -> &[FunctionHook] {
        &self.hooks
    }

    /// Returns the parameters that the object file declares.
    pub fn parameters(&self) -> &[GraftParameter] {
        &self.parameters
    }

    /// Sets a parameter, in place of the value that was compiled into the object file.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), Error> {
        set(&mut self.open, &self.parameters, name, value)
    }

    /// Records that the function's program at TC ingress only handles packets that other functions have recovered.
    /// Lists without functions that recover packets then do not run the program.
    pub fn set_only_recovered(&mut self, only: bool) {
        self.only_recovered = only;
    }

    /// Returns the bytes of kernel memory that the function's own maps take for this number of sessions.
    pub fn bytes(&mut self, room: &SessionRoom) -> Result<u64, Error> {
        let shared: Vec<_> = SHARED.into_iter().chain([KEPT, OLD_STATE]).collect();
        room.bytes(&mut self.open, &shared)
    }

    /// Loads the function with the dispatcher's maps in place of the ones it declares. If `alike`, an already loaded
    /// version of the function, is given, both versions use its map of the sessions' states.
    pub(super) fn load(
        mut self,
        room: &SessionRoom,
        shared: &BTreeMap<&'static str, MapHandle>,
        alike: Option<&LoadedFunction>,
    ) -> Result<LoadedFunction, Error> {
        room.fit(&mut self.open)?;
        let state = alike.and_then(|alike| alike.state.as_ref());
        for mut map in self.open.maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if let Some(there) = shared.get(name.as_str()).or(state.filter(|_| name == STATE)) {
                // With this call, libbpf uses the existing map `there` instead of creating a new one.
                map.reuse_fd(there.as_fd()).map_err(Error::Open)?;
            }
        }
        take_log();
        let object = self.open.load().map_err(|source| Error::Load { source, log: take_log() })?;
        let state = object.maps().find(|map| map.name() == STATE);
        let state = state.map(|map| MapHandle::try_from(&map)).transpose().map_err(Error::Open)?;
        let old = object.maps().find(|map| map.name() == OLD_STATE);
        let old = old.map(|map| MapHandle::try_from(&map)).transpose().map_err(Error::Open)?;
        let mut programs = BTreeMap::new();
        let mut migrate = None;
        for program in object.progs() {
            let name = program.name().to_string_lossy().into_owned();
            let fd = program.as_fd().try_clone_to_owned().map_err(Error::Descriptor)?;
            match hook_of(&name) {
                Some((_, hook)) => drop(programs.insert(hook, fd)),
                // A program without a hook is the one that converts states, as programs() has checked.
                None => migrate = Some(fd),
            }
        }
        Ok(LoadedFunction {
            _object: object,
            programs,
            state,
            old,
            migrate,
            only_recovered: self.only_recovered,
        })
    }
}

/// A packet function that is loaded in the kernel.
pub(super) struct LoadedFunction {
    _object: libbpf_rs::Object,
    pub programs: BTreeMap<FunctionHook, OwnedFd>,
    state: Option<MapHandle>,
    /// The map from which the function's program that converts states reads the previous version's state.
    old: Option<MapHandle>,
    migrate: Option<OwnedFd>,
    pub only_recovered: bool,
}

impl LoadedFunction {
    /// Sets the state that a session has in this function to zero.
    pub fn forget(&self, session: u32) -> Result<(), Error> {
        let Some(state) = &self.state else { return Ok(()) };
        let zeros = vec![0; state.value_size() as usize];
        state.update(&session.to_ne_bytes(), &zeros, MapFlags::ANY).map_err(Error::State)
    }

    /// Returns the bytes of the state that a session has in this function; `None` if the function has no state.
    pub fn state(&self, session: u32) -> Result<Option<Vec<u8>>, Error> {
        let Some(state) = &self.state else { return Ok(None) };
        state.lookup(&session.to_ne_bytes(), MapFlags::ANY).map_err(Error::State)
    }

    /// Converts the state that a session has in the previous version of the function, for these hooks only.
    ///
    /// # Errors
    /// The function cannot convert states, or not those of this version, or its program returned an error.
    pub fn migrate(&self, session: u32, from: &Self, hooks: &[FunctionHook]) -> Result<(), Error> {
        let (Some(program), Some(place)) = (&self.migrate, &self.old) else { return Err(Error::NoMigration) };
        // The converting program knows only one layout of the previous version's state, so a state of another size is
        // refused.
        let old = from.state(session)?.filter(|old| old.len() == place.value_size() as usize);
        let old = old.ok_or(Error::NoMigration)?;
        place.update(&0u32.to_ne_bytes(), &old, MapFlags::ANY).map_err(Error::State)?;
        let bits = hooks.iter().fold(0, |bits, hook| bits | 1 << *hook as u32);
        let mut call = MigrateCall { session, hooks: bits, error: 0 };
        // The program runs once, in this thread, and writes its result to `call`.
        raw::run(program, &mut call).map_err(Error::Descriptor)?;
        if call.error == 0 { Ok(()) } else { Err(Error::NoMigration) }
    }

    pub fn descriptor(&self, hook: FunctionHook) -> Option<[u8; 4]> {
        Some(self.programs.get(&hook)?.as_raw_fd().to_ne_bytes())
    }
}

/// Splits a program's name into the function and the hook: `number_tx` is `number` at TC egress.
fn hook_of(program: &str) -> Option<(&str, FunctionHook)> {
    let (name, end) = program.rsplit_once('_')?;
    let hook = FunctionHook::ALL.into_iter().find(|hook| hook.name() == end)?;
    Some((name, hook))
}

/// Returns the function's name and its hooks. An object with any other program is refused, since the kernel would load
/// that program as well.
fn programs(open: &OpenObject) -> Result<(String, Vec<FunctionHook>), Error> {
    let mut found = Vec::new();
    let mut migrates = Vec::new();
    for program in open.progs() {
        let full = program.name().to_string_lossy().into_owned();
        if let Some(name) = full.strip_suffix(MIGRATE)
            && program.prog_type() == ProgramType::Syscall
        {
            migrates.push(name.to_owned());
            continue;
        }
        let known = hook_of(&full).filter(|(_, hook)| hook.kind() == program.prog_type());
        let Some((name, hook)) = known else {
            return Err(form(format!(
                "program {full} belongs to no hook: it has to be NAME_tx in section tcx/egress, NAME_rx in xdp.frags, NAME_repair in tcx/ingress"
            )));
        };
        found.push((name.to_owned(), hook));
    }
    let name =
        found.first().map(|(name, _)| name.clone()).ok_or_else(|| form("the object file has no programs"))?;
    // All programs of one object have to be of the same function.
    match found.iter().map(|(name, _)| name).chain(&migrates).find(|other| **other != name) {
        Some(other) => {
            Err(form(format!("the object file has programs of two functions, {name} and {other}")))
        }
        None => Ok((name, found.into_iter().map(|(_, hook)| hook).collect())),
    }
}

impl FunctionHook {
    fn kind(self) -> ProgramType {
        match self {
            Self::Rx => ProgramType::Xdp,
            Self::Tx | Self::Repair => ProgramType::SchedCls,
        }
    }
}
