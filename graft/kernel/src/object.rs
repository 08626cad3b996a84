//! A graft's object file: what it is, before the kernel is asked.

use std::ffi::OsStr;

use libbpf_rs::btf::types::{DataSec, Int, MemberAttr, Struct, Var};
use libbpf_rs::btf::{Btf, BtfKind, BtfType, ReferencesType as _};
use libbpf_rs::{AsRawLibbpf, MapType, ObjectBuilder, OpenMapMut, OpenObject, ProgramType};
use millrace_kernel::object::capture_log;

use super::Error;

/// Congestion controls of ours have names that tell them from the kernel's.
pub const NAME_PREFIX: &str = "mr_";

const NAME_BYTES: usize = 16;
pub(super) const CONFIG: &str = ".rodata.config";

/// A member of the structure `config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// As it was compiled.
    pub default: u64,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// An object file that was opened.
pub struct Object {
    pub(crate) open: OpenObject,
    name: String,
    flags: u32,
    parameters: Vec<Parameter>,
}

impl Object {
    /// # Errors
    /// It is not one congestion control, written against this ABI.
    pub fn open(image: &[u8]) -> Result<Self, Error> {
        let mut open = open(image)?;
        check_programs(&open)?;
        let (name, flags) = with_btf(&mut open, congestion_name)?;
        let parameters = with_btf(&mut open, parameters)?;
        Ok(Self { open, name, flags, parameters })
    }

    /// Of the congestion control, as TCP knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Of its `tcp_congestion_ops`.
    pub(super) fn flags(&self) -> u32 {
        self.flags
    }

    /// All values of parameters, as they lie.
    pub(super) fn config(&mut self) -> Vec<u8> {
        let mut map = map(&mut self.open, CONFIG);
        map.as_mut().and_then(|map| map.initial_value_mut()).map(|value| value.to_vec()).unwrap_or_default()
    }

    /// Another value than it was compiled with.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), Error> {
        set(&mut self.open, &self.parameters, name, value)
    }

    /// The map that is registered.
    pub(crate) fn congestion_control(&mut self) -> Option<OpenMapMut<'_>> {
        self.open.maps_mut().find(|map| map.map_type() == MapType::StructOps)
    }
}

/// In bytes.
pub(super) fn offset_of(of: &Struct<'_>, member: &str) -> Option<usize> {
    match of.iter().find(|it| it.name == Some(OsStr::new(member)))?.attr {
        MemberAttr::Normal { offset } => Some(offset as usize / 8),
        MemberAttr::BitField { .. } => None,
    }
}

/// Another value than it was compiled with.
pub(super) fn set(
    open: &mut OpenObject,
    parameters: &[Parameter],
    name: &str,
    value: u64,
) -> Result<(), Error> {
    let found = parameters.iter().find(|parameter| parameter.name == name);
    let parameter = found.ok_or_else(|| Error::NoParameter(name.to_owned()))?;
    let bytes = value.to_le_bytes();
    let (low, high) = bytes.split_at(parameter.bytes);
    if high.iter().any(|byte| *byte != 0) {
        return Err(Error::Parameter { name: name.to_owned(), value, bytes: parameter.bytes });
    }
    let mut map = map(open, CONFIG).ok_or_else(|| form("it has no section .rodata.config"))?;
    let place = map.initial_value_mut().and_then(|all| all.get_mut(parameter.offset..)?.get_mut(..low.len()));
    place.ok_or_else(|| form("its parameters have no values"))?.copy_from_slice(low);
    Ok(())
}

pub(super) fn open(image: &[u8]) -> Result<OpenObject, Error> {
    capture_log();
    // libelf wants it aligned, as a `Vec` is.
    let image = image.to_vec();
    ObjectBuilder::default().open_memory(&image).map_err(Error::Open)
}

/// What the BTF of an object file says.
#[allow(unsafe_code)]
pub(super) fn with_btf<T>(
    open: &mut OpenObject,
    read: impl FnOnce(&Btf<'_>, &mut OpenObject) -> Result<T, Error>,
) -> Result<T, Error> {
    // SAFETY: the object outlives the use of its BTF in this function.
    let raw = unsafe { open.as_libbpf_object().as_ref() };
    let btf = Btf::from_bpf_object(raw).map_err(Error::Open)?;
    let btf = btf.ok_or_else(|| form("it has no BTF: compile it with -g"))?;
    read(&btf, open)
}

pub(super) fn form(what: impl Into<String>) -> Error {
    Error::Form(what.into())
}

fn map<'a>(open: &'a mut OpenObject, name: &str) -> Option<OpenMapMut<'a>> {
    open.maps_mut().find(|map| map.name() == OsStr::new(name))
}

/// Nothing but callbacks of the congestion control: whatever else were in it would be loaded, too.
fn check_programs(open: &OpenObject) -> Result<(), Error> {
    let controls = open.maps().filter(|map| map.map_type() == MapType::StructOps).count();
    if controls != 1 {
        return Err(form(format!("it has {controls} congestion controls (section .struct_ops), not 1")));
    }
    match open.progs().find(|program| program.prog_type() != ProgramType::StructOps) {
        Some(other) => {
            Err(form(format!("program {} is no callback of a congestion control", other.name().display())))
        }
        None => Ok(()),
    }
}

/// And its flags.
fn congestion_name(btf: &Btf<'_>, open: &mut OpenObject) -> Result<(String, u32), Error> {
    let ops: Option<Struct<'_>> = btf.type_by_name("tcp_congestion_ops");
    let ops = ops.ok_or_else(|| form("its .struct_ops is no struct tcp_congestion_ops"))?;
    let Some(at) = offset_of(&ops, "name") else {
        return Err(form("its struct tcp_congestion_ops has no name: include graft.h"));
    };
    let flags_at = offset_of(&ops, "flags");
    let mut control = open.maps_mut().find(|map| map.map_type() == MapType::StructOps);
    let value = control.as_mut().and_then(|map| map.initial_value_mut()).map(|value| &*value);
    let bytes = value.and_then(|value| value.get(at..at + NAME_BYTES)).unwrap_or_default();
    let flags = flags_at.and_then(|at| value.and_then(|value| value.get(at..)?.first_chunk()));
    let flags = flags.map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(0);
    let name = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    match name.starts_with(NAME_PREFIX) && is_plain && name.len() > NAME_PREFIX.len() {
        true => Ok((name, flags)),
        false => Err(form(format!(
            "its congestion control is called {name:?}: it is to be {NAME_PREFIX} and letters, at most 15"
        ))),
    }
}

pub(super) fn parameters(btf: &Btf<'_>, open: &mut OpenObject) -> Result<Vec<Parameter>, Error> {
    let section: Option<DataSec<'_>> = btf.type_by_name(CONFIG);
    let Some(section) = section else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in section.iter() {
        let variable: Var<'_> = btf.type_by_id(entry.ty).ok_or_else(|| form("a variable without a type"))?;
        if variable.name() != Some(OsStr::new("config")) {
            return Err(form("section .rodata.config is for one variable, `config`"));
        }
        let config = variable.referenced_type().skip_mods_and_typedefs();
        let config = Struct::try_from(config).map_err(|_| form("`config` is no structure"))?;
        for member in config.iter() {
            found.push(parameter(btf, member.name, member.ty, member.attr, entry.offset as usize)?);
        }
    }
    let mut map = map(open, CONFIG);
    let values = map.as_mut().and_then(|map| map.initial_value_mut());
    if let Some(values) = values {
        for parameter in &mut found {
            let bytes = values.get(parameter.offset..parameter.offset + parameter.bytes).unwrap_or_default();
            parameter.default = bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        }
    }
    Ok(found)
}

fn parameter(
    btf: &Btf<'_>,
    name: Option<&OsStr>,
    ty: libbpf_rs::btf::TypeId,
    attr: MemberAttr,
    base: usize,
) -> Result<Parameter, Error> {
    let name = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let kind: Option<BtfType<'_>> = btf.type_by_id(ty);
    let kind = kind.map(|kind| kind.skip_mods_and_typedefs()).filter(|kind| kind.kind() == BtfKind::Int);
    let int = kind.and_then(|kind| Int::try_from(kind).ok());
    match (int, attr) {
        (Some(int), MemberAttr::Normal { offset }) if matches!(int.bits, 8 | 16 | 32 | 64) => Ok(Parameter {
            name,
            default: 0,
            offset: base + offset as usize / 8,
            bytes: usize::from(int.bits) / 8,
        }),
        _ => Err(form(format!("parameter {name} is no whole number of 8, 16, 32 or 64 bits"))),
    }
}
