//! Parses BTF (<https://docs.kernel.org/bpf/btf.html>) as clang writes it, as far as shared structures need it.

use crate::Result;

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;

const INT: u32 = 1;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const RESTRICT: u32 = 11;
const FUNC_PROTO: u32 = 13;
const VAR: u32 = 14;
const DATASEC: u32 = 15;
const DECL_TAG: u32 = 17;
const ENUM64: u32 = 19;

/// The BTF types of an object file.
pub struct Btf<'a> {
    strings: &'a [u8],
    /// The types by ID. ID 0 is `void`, whose record is empty.
    types: Vec<BtfRecord<'a>>,
}

struct BtfRecord<'a> {
    name: u32,
    info: u32,
    /// The type's size in bytes. For pointers, typedefs and the like: the ID of the type that they refer to.
    size: u32,
    rest: &'a [u8],
}

/// A type of BTF, with only those of its properties that the generation of Rust types needs.
pub enum BtfTypeKind<'a> {
    Int {
        bytes: u32,
        is_signed: bool,
    },
    Enum {
        bytes: u32,
    },
    Array {
        of: u32,
        len: u32,
    },
    Struct {
        name: &'a str,
    },
    Typedef {
        name: &'a str,
        to: u32,
    },
    /// A modifier of another type: `const`, `volatile` or `restrict`.
    Modifier {
        to: u32,
    },
    Other,
}

impl<'a> Btf<'a> {
    /// Parses the contents of an object's section `.BTF`.
    pub fn parse(data: &'a [u8]) -> Result<Self> {
        let magic = data.get(..2).ok_or("BTF is cut")?;
        if u16::from_ne_bytes(magic.try_into()?) != MAGIC {
            return Err("BTF of another byte order, or none".into());
        }
        let header = |at: usize| word(data, at).map(|word| word as usize);
        let start = header(4)?;
        let type_at = header(8)?;
        let type_len = header(12)?;
        let string_at = header(16)?;
        let string_len = header(20)?;
        debug_assert!(start >= HEADER);
        let part = |at: usize, len: usize| data.get(start + at..start + at + len).ok_or("BTF is cut");
        let mut bytes = part(type_at, type_len)?;
        let strings = part(string_at, string_len)?;
        let mut types = vec![BtfRecord { name: 0, info: 0, size: 0, rest: &[] }];
        while !bytes.is_empty() {
            let name = word(bytes, 0)?;
            let info = word(bytes, 4)?;
            let size = word(bytes, 8)?;
            // The length of the data after a record depends on the kind, and on the number of members.
            let len = match info >> 24 & 0x1f {
                INT | VAR | DECL_TAG => 4,
                ARRAY => 12,
                STRUCT | UNION | DATASEC | ENUM64 => 12 * (info & 0xffff) as usize,
                ENUM | FUNC_PROTO => 8 * (info & 0xffff) as usize,
                _ => 0,
            };
            let rest = bytes.get(12..12 + len).ok_or("BTF is cut")?;
            types.push(BtfRecord { name, info, size, rest });
            bytes = &bytes[12 + len..];
        }
        Ok(Self { strings, types })
    }

    /// Returns the ID of the structure with this name.
    pub fn structure(&self, name: &str) -> Option<u32> {
        let found = self.types.iter().position(|it| kind(it) == STRUCT && self.string(it.name) == name)?;
        u32::try_from(found).ok()
    }

    /// Reports whether the C code has marked a structure with `btf_decl_tag(tag)`.
    pub fn is_tagged(&self, id: u32, tag: &str) -> bool {
        self.types.iter().any(|it| kind(it) == DECL_TAG && it.size == id && self.string(it.name) == tag)
    }

    /// Returns name, type and offset in bytes of each field of a structure.
    pub fn members(&self, id: u32) -> Result<Vec<(&'a str, u32, u32)>> {
        let it = self.get(id)?;
        let fields = it.rest.chunks_exact(12).map(|field| {
            let name = word(field, 0)?;
            let member = word(field, 4)?;
            let bits = word(field, 8)?;
            // The highest bit of `info` (kind_flag) means that the offsets of fields also contain the sizes of bit
            // fields.
            if it.info >> 31 != 0 || bits % 8 != 0 {
                return Err("a bit field".into());
            }
            Ok((self.string(name), member, bits / 8))
        });
        fields.collect()
    }

    /// Returns the kind of a type.
    pub fn kind(&self, id: u32) -> Result<BtfTypeKind<'a>> {
        let it = self.get(id)?;
        Ok(match kind(it) {
            INT => {
                let is_signed = word(it.rest, 0)? >> 24 & 1 != 0 && self.string(it.name) != "char";
                BtfTypeKind::Int { bytes: it.size, is_signed }
            }
            ENUM => BtfTypeKind::Enum { bytes: it.size },
            ARRAY => BtfTypeKind::Array { of: word(it.rest, 0)?, len: word(it.rest, 8)? },
            STRUCT => BtfTypeKind::Struct { name: self.string(it.name) },
            TYPEDEF => BtfTypeKind::Typedef { name: self.string(it.name), to: it.size },
            VOLATILE | CONST | RESTRICT => BtfTypeKind::Modifier { to: it.size },
            _ => BtfTypeKind::Other,
        })
    }

    /// Returns the size of a type in bytes.
    pub fn size(&self, id: u32) -> Result<u32> {
        let it = self.get(id)?;
        Ok(match kind(it) {
            ARRAY => word(it.rest, 8)? * self.size(word(it.rest, 0)?)?,
            TYPEDEF | VOLATILE | CONST | RESTRICT => self.size(it.size)?,
            _ => it.size,
        })
    }

    /// Returns the type behind typedefs, modifiers and arrays.
    pub fn resolved(&self, id: u32) -> u32 {
        match self.kind(id) {
            Ok(
                BtfTypeKind::Typedef { to, .. }
                | BtfTypeKind::Modifier { to }
                | BtfTypeKind::Array { of: to, .. },
            ) => self.resolved(to),
            _ => id,
        }
    }

    fn get(&self, id: u32) -> Result<&BtfRecord<'a>> {
        Ok(self.types.get(id as usize).ok_or("a type that is not there")?)
    }

    fn string(&self, at: u32) -> &'a str {
        let bytes = self.strings.get(at as usize..).unwrap_or_default();
        let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

fn kind(it: &BtfRecord<'_>) -> u32 {
    it.info >> 24 & 0x1f
}

fn word(bytes: &[u8], at: usize) -> Result<u32> {
    let bytes = bytes.get(at..at + 4).ok_or("BTF is cut")?;
    Ok(u32::from_ne_bytes(bytes.try_into()?))
}
