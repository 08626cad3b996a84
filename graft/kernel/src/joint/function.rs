//! A function's object file: its programs at the joints, its parameters, its state.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, OpenObject, ProgramType};
use millrace_kernel::object::take_log;
use millrace_kernel::raw;

use super::super::Error;
use super::super::object::{Parameter, form, open, parameters, set, with_btf};
use super::intf::MigrateCall;
use super::{Joint, Room};

/// Maps that functions share with the dispatcher, by name.
pub(super) const SHARED: [&str; 5] = ["works", "shared", "programs_tx", "programs_rx", "programs_repair"];
/// The same, for those that need it.
pub(super) const KEPT: &str = "kept_packets";
const STATE: &str = "state";
const OLD_STATE: &str = "old_state";
/// What the name of the program ends with that moves state from the version before.
const MIGRATE: &str = "_migrate";

/// An object file that was opened, and not given to the kernel yet.
pub struct Function {
    open: OpenObject,
    name: String,
    joints: Vec<Joint>,
    parameters: Vec<Parameter>,
    only_recovered: bool,
}

impl Function {
    /// # Errors
    /// It is not one function, written against this ABI.
    pub fn open(image: &[u8]) -> Result<Self, Error> {
        let mut open = open(image)?;
        let (name, joints) = programs(&open)?;
        let parameters = with_btf(&mut open, parameters)?;
        for shared in SHARED {
            if !open.maps().any(|map| map.name() == shared) {
                return Err(form(format!("it has no map {shared}: include graft_packet.h")));
            }
        }
        Ok(Self { open, name, joints, parameters, only_recovered: false })
    }

    /// Whether it has a program that makes its state out of another version's.
    pub fn migrates(&self) -> bool {
        self.open.progs().any(|program| program.name().to_string_lossy().ends_with(MIGRATE))
    }

    /// What its programs' names begin with.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn joints(&self) -> &[Joint] {
        &self.joints
    }

    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Another value than it was compiled with.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), Error> {
        set(&mut self.open, &self.parameters, name, value)
    }

    /// Its program at TC ingress is for what other functions have recovered there: lists without such ones do without it.
    pub fn only_recovered(&mut self, only: bool) {
        self.only_recovered = only;
    }

    /// Bytes of its maps in the kernel.
    pub fn bytes(&mut self, room: &Room) -> Result<u64, Error> {
        let shared: Vec<_> = SHARED.into_iter().chain([KEPT, OLD_STATE]).collect();
        room.bytes(&mut self.open, &shared)
    }

    /// With the dispatcher's maps in place of its own, and with the state of a version that has the same.
    pub(super) fn load(
        mut self,
        room: &Room,
        shared: &BTreeMap<&'static str, MapHandle>,
        alike: Option<&Loaded>,
    ) -> Result<Loaded, Error> {
        room.fit(&mut self.open)?;
        let state = alike.and_then(|alike| alike.state.as_ref());
        for mut map in self.open.maps_mut() {
            let name = map.name().to_string_lossy().into_owned();
            if let Some(there) = shared.get(name.as_str()).or(state.filter(|_| name == STATE)) {
                map.reuse_fd(there.as_fd()).map_err(Error::Open)?;
            }
        }
        take_log();
        let object = self.open.load().map_err(|source| Error::Load { source, log: take_log() })?;
        let state = object.maps().find(|map| map.name() == STATE);
        let state = state.map(|map| MapHandle::try_from(&map)).transpose().map_err(Error::Open)?;
        let old = object.maps().find(|map| map.name() == OLD_STATE);
        let old = old.map(|map| MapHandle::try_from(&map)).transpose().map_err(Error::Open)?;
        let (mut programs, mut migrate) = (BTreeMap::new(), None);
        for program in object.progs() {
            let name = program.name().to_string_lossy().into_owned();
            let fd = program.as_fd().try_clone_to_owned().map_err(Error::Descriptor)?;
            match joint_of(&name) {
                Some((_, joint)) => drop(programs.insert(joint, fd)),
                None => migrate = Some(fd),
            }
        }
        Ok(Loaded { _object: object, programs, state, old, migrate, only_recovered: self.only_recovered })
    }
}

/// A function in the kernel.
pub(super) struct Loaded {
    _object: libbpf_rs::Object,
    pub programs: BTreeMap<Joint, OwnedFd>,
    state: Option<MapHandle>,
    /// Where the program finds the state that the version before has.
    old: Option<MapHandle>,
    migrate: Option<OwnedFd>,
    pub only_recovered: bool,
}

impl Loaded {
    /// Its own state of a session begins anew.
    pub fn forget(&self, session: u32) -> Result<(), Error> {
        let Some(state) = &self.state else { return Ok(()) };
        let zeros = vec![0; state.value_size() as usize];
        state.update(&session.to_ne_bytes(), &zeros, MapFlags::ANY).map_err(Error::State)
    }

    /// Its own state of a session, as it is.
    pub fn state(&self, session: u32) -> Result<Option<Vec<u8>>, Error> {
        let Some(state) = &self.state else { return Ok(None) };
        state.lookup(&session.to_ne_bytes(), MapFlags::ANY).map_err(Error::State)
    }

    /// Makes its state of a session out of that of the version before, as far as it concerns these joints.
    ///
    /// # Errors
    /// It has no program for that, or for another state; or its program says no.
    pub fn migrate(&self, session: u32, from: &Self, joints: &[Joint]) -> Result<(), Error> {
        let (Some(program), Some(place)) = (&self.migrate, &self.old) else { return Err(Error::NoMigration) };
        let old = from.state(session)?.filter(|old| old.len() == place.value_size() as usize);
        let old = old.ok_or(Error::NoMigration)?;
        place.update(&0u32.to_ne_bytes(), &old, MapFlags::ANY).map_err(Error::State)?;
        let bits = joints.iter().fold(0, |bits, joint| bits | 1 << *joint as u32);
        let mut call = MigrateCall { session, joints: bits, error: 0 };
        raw::run(program, &mut call).map_err(Error::Descriptor)?;
        if call.error == 0 { Ok(()) } else { Err(Error::NoMigration) }
    }

    pub fn descriptor(&self, joint: Joint) -> Option<[u8; 4]> {
        Some(self.programs.get(&joint)?.as_raw_fd().to_ne_bytes())
    }
}

/// `number_tx`: the function's name, and the joint.
fn joint_of(program: &str) -> Option<(&str, Joint)> {
    let (name, end) = program.rsplit_once('_')?;
    let joint = Joint::ALL.into_iter().find(|joint| joint.name() == end)?;
    Some((name, joint))
}

/// Nothing but programs of one function at joints: whatever else were in it would be loaded, too.
fn programs(open: &OpenObject) -> Result<(String, Vec<Joint>), Error> {
    let (mut found, mut migrates) = (Vec::new(), Vec::new());
    for program in open.progs() {
        let full = program.name().to_string_lossy().into_owned();
        if let Some(name) = full.strip_suffix(MIGRATE)
            && program.prog_type() == ProgramType::Syscall
        {
            migrates.push(name.to_owned());
            continue;
        }
        let known = joint_of(&full).filter(|(_, joint)| joint.kind() == program.prog_type());
        let Some((name, joint)) = known else {
            return Err(form(format!(
                "program {full} is of no joint: NAME_tx in section tcx/egress, NAME_rx in xdp.frags, NAME_repair in tcx/ingress"
            )));
        };
        found.push((name.to_owned(), joint));
    }
    let name = found.first().map(|(name, _)| name.clone()).ok_or_else(|| form("it has no programs"))?;
    match found.iter().map(|(name, _)| name).chain(&migrates).find(|other| **other != name) {
        Some(other) => Err(form(format!("it has programs of two functions, {name} and {other}"))),
        None => Ok((name, found.into_iter().map(|(_, joint)| joint).collect())),
    }
}

impl Joint {
    fn kind(self) -> ProgramType {
        match self {
            Self::Rx => ProgramType::Xdp,
            Self::Tx | Self::Repair => ProgramType::SchedCls,
        }
    }
}
