//! The object file of a congestion control: its name, programs and parameters, before the kernel loads it.

use std::ffi::OsStr;

use libbpf_rs::btf::types::{DataSec, Int, MemberAttr, Struct, Var};
use libbpf_rs::btf::{Btf, BtfKind, BtfType, ReferencesType as _};
use libbpf_rs::{AsRawLibbpf, MapType, ObjectBuilder, OpenMapMut, OpenObject, ProgramType};
use millrace_kernel::object::capture_log;

use super::Error;

/// Prefix of the names of grafts in TCP. It distinguishes them from the kernel's own congestion controls.
pub const NAME_PREFIX: &str = "mr_";

const NAME_BYTES: usize = 16;
pub(super) const CONFIG: &str = ".rodata.config";

/// A parameter of a graft: a member of the C structure `config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraftParameter {
    /// The parameter's name.
    pub name: String,
    /// The value that was compiled into the object file.
    pub default: u64,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// The object file of a congestion control, opened and not loaded.
pub struct GraftObject {
    pub(crate) open: OpenObject,
    name: String,
    flags: u32,
    parameters: Vec<GraftParameter>,
}

impl GraftObject {
    /// Opens the object file of a congestion control and checks what it contains.
    ///
    /// # Errors
    /// The object does not hold exactly one congestion control, or was not written against this ABI.
    pub fn open(image: &[u8]) -> Result<Self, Error> {
        let mut open = open(image)?;
        check_programs(&open)?;
        let (name, flags) = with_btf(&mut open, congestion_name)?;
        let parameters = with_btf(&mut open, parameters)?;
        Ok(Self { open, name, flags, parameters })
    }

    /// Returns the congestion control's name in TCP.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the parameters that the object file declares.
    pub fn parameters(&self) -> &[GraftParameter] {
        &self.parameters
    }

    /// Returns the flags of the object's `struct tcp_congestion_ops`.
    pub(super) fn flags(&self) -> u32 {
        self.flags
    }

    /// Returns the values of all parameters as bytes, laid out as the C structure.
    pub(super) fn config(&mut self) -> Vec<u8> {
        let mut map = map(&mut self.open, CONFIG);
        map.as_mut().and_then(|map| map.initial_value_mut()).map(|value| value.to_vec()).unwrap_or_default()
    }

    /// Sets a parameter, in place of the value that was compiled into the object file.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), Error> {
        set(&mut self.open, &self.parameters, name, value)
    }

    /// Returns the struct_ops map, whose registration makes the congestion control known to TCP.
    pub(crate) fn congestion_control(&mut self) -> Option<OpenMapMut<'_>> {
        self.open.maps_mut().find(|map| map.map_type() == MapType::StructOps)
    }
}

/// Returns the offset of a member in a C structure, in bytes; `None` for a bit field.
pub(super) fn offset_of(of: &Struct<'_>, member: &str) -> Option<usize> {
    match of.iter().find(|it| it.name == Some(OsStr::new(member)))?.attr {
        MemberAttr::Normal { offset } => Some(offset as usize / 8),
        MemberAttr::BitField { .. } => None,
    }
}

/// Sets a parameter of an opened object, in place of the value that was compiled into it.
pub(super) fn set(
    open: &mut OpenObject,
    parameters: &[GraftParameter],
    name: &str,
    value: u64,
) -> Result<(), Error> {
    let found = parameters.iter().find(|parameter| parameter.name == name);
    let parameter = found.ok_or_else(|| Error::NoParameter(name.to_owned()))?;
    let bytes = value.to_le_bytes();
    // The objects are little endian, so a parameter of fewer than 8 bytes is the low bytes of the value.
    let (low, high) = bytes.split_at(parameter.bytes);
    if high.iter().any(|byte| *byte != 0) {
        return Err(Error::Parameter { name: name.to_owned(), value, bytes: parameter.bytes });
    }
    let mut map = map(open, CONFIG).ok_or_else(|| form("the object file has no section .rodata.config"))?;
    let place = map.initial_value_mut().and_then(|all| all.get_mut(parameter.offset..)?.get_mut(..low.len()));
    place
        .ok_or_else(|| form("the parameters in section .rodata.config have no values"))?
        .copy_from_slice(low);
    Ok(())
}

pub(super) fn open(image: &[u8]) -> Result<OpenObject, Error> {
    capture_log();
    // libelf needs an aligned image. A slice from include_bytes! may be unaligned, while the memory of a `Vec` is
    // aligned.
    let image = image.to_vec();
    ObjectBuilder::default().open_memory(&image).map_err(Error::Open)
}

/// Calls `read` with the BTF of an object file.
#[allow(unsafe_code)]
pub(super) fn with_btf<T>(
    open: &mut OpenObject,
    read: impl FnOnce(&Btf<'_>, &mut OpenObject) -> Result<T, Error>,
) -> Result<T, Error> {
    // SAFETY: the object outlives the use of its BTF in this function.
    let raw = unsafe { open.as_libbpf_object().as_ref() };
    let btf = Btf::from_bpf_object(raw).map_err(Error::Open)?;
    let btf = btf.ok_or_else(|| form("the object file has no BTF: compile it with -g"))?;
    read(&btf, open)
}

pub(super) fn form(what: impl Into<String>) -> Error {
    Error::Form(what.into())
}

fn map<'a>(open: &'a mut OpenObject, name: &str) -> Option<OpenMapMut<'a>> {
    open.maps_mut().find(|map| map.name() == OsStr::new(name))
}

/// Checks that all programs are callbacks of one congestion control, since the kernel would load any other program as
/// well.
fn check_programs(open: &OpenObject) -> Result<(), Error> {
    let controls = open.maps().filter(|map| map.map_type() == MapType::StructOps).count();
    if controls != 1 {
        return Err(form(format!(
            "the object file has {controls} congestion controls (section .struct_ops), not 1"
        )));
    }
    match open.progs().find(|program| program.prog_type() != ProgramType::StructOps) {
        Some(other) => {
            Err(form(format!("program {} is no callback of a congestion control", other.name().display())))
        }
        None => Ok(()),
    }
}

/// Returns the name and the flags of the object's `struct tcp_congestion_ops`.
fn congestion_name(btf: &Btf<'_>, open: &mut OpenObject) -> Result<(String, u32), Error> {
    let ops: Option<Struct<'_>> = btf.type_by_name("tcp_congestion_ops");
    let ops = ops.ok_or_else(|| form("section .struct_ops has no struct tcp_congestion_ops"))?;
    let Some(at) = offset_of(&ops, "name") else {
        return Err(form("struct tcp_congestion_ops has no member `name`: include graft.h"));
    };
    let flags_at = offset_of(&ops, "flags");
    let mut control = open.maps_mut().find(|map| map.map_type() == MapType::StructOps);
    let value = control.as_mut().and_then(|map| map.initial_value_mut()).map(|value| &*value);
    let bytes = value.and_then(|value| value.get(at..at + NAME_BYTES)).unwrap_or_default();
    let flags = flags_at.and_then(|at| value.and_then(|value| value.get(at..)?.first_chunk()));
    let flags = flags.map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    // A name without a terminating zero is too long for TCP, and is treated as empty, which is refused.
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(0);
    let name = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    match name.starts_with(NAME_PREFIX) && is_plain && name.len() > NAME_PREFIX.len() {
        true => Ok((name, flags)),
        false => Err(form(format!(
            "the congestion control is called {name:?}: the name has to be {NAME_PREFIX} and letters, at most 15 bytes"
        ))),
    }
}

pub(super) fn parameters(btf: &Btf<'_>, open: &mut OpenObject) -> Result<Vec<GraftParameter>, Error> {
    let section: Option<DataSec<'_>> = btf.type_by_name(CONFIG);
    let Some(section) = section else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in section.iter() {
        let variable: Var<'_> = btf
            .type_by_id(entry.ty)
            .ok_or_else(|| form("a variable in section .rodata.config has no type"))?;
        // Parameters are identified by their names only, so the section .rodata.config may contain only one structure.
        if variable.name() != Some(OsStr::new("config")) {
            return Err(form("section .rodata.config may only have the variable `config`"));
        }
        let config = variable.referenced_type().skip_mods_and_typedefs();
        let config = Struct::try_from(config).map_err(|_| form("variable `config` is not a structure"))?;
        for member in config.iter() {
            found.push(parameter(btf, member.name, member.ty, member.attr, entry.offset as usize)?);
        }
    }
    let mut map = map(open, CONFIG);
    let values = map.as_mut().and_then(|map| map.initial_value_mut());
    if let Some(values) = values {
        for parameter in &mut found {
            let bytes = values.get(parameter.offset..parameter.offset + parameter.bytes).unwrap_or_default();
            // In little endian the last byte is the most significant one.
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
) -> Result<GraftParameter, Error> {
    let name = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let kind: Option<BtfType<'_>> = btf.type_by_id(ty);
    let kind = kind.map(|kind| kind.skip_mods_and_typedefs()).filter(|kind| kind.kind() == BtfKind::Int);
    let int = kind.and_then(|kind| Int::try_from(kind).ok());
    match (int, attr) {
        (Some(int), MemberAttr::Normal { offset }) if matches!(int.bits, 8 | 16 | 32 | 64) => {
            Ok(GraftParameter {
                name,
                default: 0,
                offset: base + offset as usize / 8,
                bytes: usize::from(int.bits) / 8,
            })
        }
        _ => Err(form(format!("parameter {name} is not an integer of 8, 16, 32 or 64 bits"))),
    }
}
