//! Generates Rust's types and constants for everything that C and Rust share, from the C headers.
//!
//! The build compiles an object with a variable for each structure and each constant of the crate's headers `*_intf.h`.
//! It reads the structures from the object's BTF, and the constants from the object's read-only data. The crate
//! includes the generated file, `OUT_DIR/intf.rs`:
//!
//! * `struct relay_config` becomes `RelayConfig`, which implements `millrace_kernel::intf::Plain`.
//! * A structure that the kernel and the process change at the same time is marked `SHARED` in C. Its words become
//!   atomics, and its other fields are in an `UnsafeCell`. A structure of words inside it gets a second type with
//!   atomics, such as `SharedRelayRing`.
//! * `#define RELAY_PORTS 4` and `RELAY_STREAM` of an `enum` become constants with these names.
//! * The compiler checks that each structure has the same size as in C.
//!
//! `__be16`, `__be32` and `address_words` are in network byte order, so they become arrays of bytes. `char` becomes
//! `u8`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

use crate::Result;
use crate::btf::{Btf, BtfTypeKind};

/// Settings of the generator: Rust names of types, and structures that implement `Ord`.
#[derive(Default)]
pub struct TypeNames {
    /// Rust paths of structures that other crates define, by their C names.
    pub foreign: BTreeMap<&'static str, &'static str>,
    /// C names of the structures whose Rust types implement `Ord`.
    pub ordered: BTreeSet<&'static str>,
    /// Rust path of the trait `Plain`.
    pub plain: &'static str,
}

/// Structures and constants that the headers of a crate define.
#[derive(Default)]
pub struct Defined {
    structures: Vec<String>,
    constants: Vec<String>,
}

impl Defined {
    /// Adds the structures and constants that a header defines. A definition is recognized by how its line begins,
    /// because the formatter does not indent definitions.
    pub fn read(&mut self, header: &Path) -> Result<()> {
        let text = fs::read_to_string(header)?;
        let mut in_enum = false;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("struct ").and_then(|rest| rest.strip_suffix(" {")) {
                self.structures.push(name.to_owned());
            } else if line.starts_with("enum ") && line.ends_with('{') {
                in_enum = true;
            } else if line.starts_with('}') {
                in_enum = false;
            } else if in_enum {
                self.constants.extend(enumerator(line));
            } else if let Some(rest) = line.strip_prefix("#define ") {
                self.constants.extend(defined(rest));
            }
        }
        Ok(())
    }

    /// Returns a C file with a variable for each structure and constant.
    pub fn source(&self, headers: &[String]) -> String {
        let mut source = String::new();
        for header in headers {
            let _ = writeln!(source, "#include \"{header}\"");
        }
        for name in &self.structures {
            let _ = writeln!(source, "struct {name} of_{name};");
        }
        for name in &self.constants {
            let _ = writeln!(source, "const volatile long long value_{name} = (long long)({name});");
        }
        source
    }

    /// Returns the definitions in Rust. `image` is the object that [`source`](Self::source) was compiled to.
    pub fn rust(&self, image: &[u8], names: &TypeNames) -> Result<String> {
        let file = object::File::parse(image)?;
        let btf = Btf::parse(file.section_by_name(".BTF").ok_or("the object has no BTF")?.data()?)?;
        let mut writer = TypeWriter {
            btf: &btf,
            names,
            own: self.structures.iter().cloned().collect(),
            out: String::new(),
        };
        for name in &self.constants {
            let value = constant(&file, &format!("value_{name}"))?;
            let kind = if u32::try_from(value).is_ok() { "u32" } else { "u64" };
            let _ = writeln!(writer.out, "pub const {name}: {kind} = {value};");
        }
        for name in &self.structures {
            // Some structures that only BPF programs use have no equivalent in Rust. The generated file then has a
            // comment with the reason.
            if let Err(why) = writer.structure(name) {
                let _ = writeln!(writer.out, "\n// struct {name} is left out: {why}");
            }
        }
        Ok(writer.out)
    }
}

/// Returns the name of the enumerator in a line such as `\tRELAY_STREAM = 0, /* why */`.
fn enumerator(line: &str) -> Option<String> {
    let name: String =
        line.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
    (line.starts_with('\t') && name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
}

/// Returns the name of a macro from its definition, such as `RELAY_PORTS 4 /* why */`. Returns `None` if the macro
/// takes arguments or is not a number.
fn defined(rest: &str) -> Option<String> {
    let (name, value) = rest.split_once(char::is_whitespace)?;
    let value = value.split("/*").next().unwrap_or_default().trim();
    // A backslash means that the value is on the next line.
    let is_number = value == "\\"
        || value.contains(|c: char| c.is_ascii_alphanumeric())
            && value.chars().all(|c| c.is_ascii_alphanumeric() || " _()~+-*/<>|&".contains(c))
            && !value.contains("__");
    (is_number && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))
        .then(|| name.to_owned())
}

fn constant(file: &object::File<'_>, name: &str) -> Result<u64> {
    let symbol = file.symbol_by_name(name).ok_or_else(|| format!("{name} is not in the object"))?;
    let section = file.section_by_index(symbol.section_index().ok_or("a constant without a section")?)?;
    let at = usize::try_from(symbol.address())?;
    let data = section.data()?;
    let bytes = data.get(at..at + 8).ok_or("a constant behind the end of its section")?;
    Ok(u64::from_ne_bytes(bytes.try_into()?))
}

struct TypeWriter<'a> {
    btf: &'a Btf<'a>,
    names: &'a TypeNames,
    own: BTreeSet<String>,
    out: String,
}

impl TypeWriter<'_> {
    fn structure(&mut self, name: &str) -> Result<()> {
        let id = self.btf.structure(name).ok_or_else(|| format!("struct {name} is not in the BTF"))?;
        if self.btf.is_tagged(id, "shared") {
            return self.shared(name, id, &rust_name(name));
        }
        // A structure that consists of words, and that is a field of a structure marked `SHARED`, gets two Rust types:
        // one with atomics and one without.
        if self.is_nested_in_shared(id) && self.is_words(id) {
            self.shared(name, id, &format!("Shared{}", rust_name(name)))?;
        }
        self.plain(name, id)
    }

    fn plain(&mut self, name: &str, id: u32) -> Result<()> {
        let rust = rust_name(name);
        let plain = self.names.plain;
        let fields = self.fields(id, Self::plain_type)?;
        let bytes = self.btf.size(id)?;
        let order = if self.names.ordered.contains(&name) { ", PartialOrd, Ord" } else { "" };
        let _ = write!(
            self.out,
            "\n/// `struct {name}`.\n#[repr(C)]\n#[derive(Debug, Clone, Copy, PartialEq, Eq{order})]\npub struct {rust} {{\n{fields}}}\n\n\
             const _: () = assert!(size_of::<{rust}>() == {bytes});\n\n\
             // SAFETY: `repr(C)`, integers only, without padding: millrace-kernel-build has checked
             // it.\n#[allow(unsafe_code)]\n\
             unsafe impl {plain} for {rust} {{}}\n\n\
             impl Default for {rust} {{\n    fn default() -> Self {{\n        {plain}::zeroed()\n    }}\n}}\n",
        );
        Ok(())
    }

    fn shared(&mut self, name: &str, id: u32, rust: &str) -> Result<()> {
        let fields = self.fields(id, Self::shared_type)?;
        let bytes = self.btf.size(id)?;
        let _ = write!(
            self.out,
            "\n/// `struct {name}`, in memory that the kernel changes as well.\n#[repr(C)]\npub struct {rust} {{\n{fields}}}\n\n\
             const _: () = assert!(size_of::<{rust}>() == {bytes});\n",
        );
        Ok(())
    }

    /// Returns the fields of a structure in Rust, one per line.
    ///
    /// # Errors
    /// Fails if the structure has padding, a bit field, or a field without a type in Rust, such as a union.
    fn fields(&self, id: u32, kind: impl Fn(&Self, u32) -> Result<Option<String>>) -> Result<String> {
        let mut fields = String::new();
        let mut end = 0;
        for (field, member, offset) in self.btf.members(id)? {
            if offset != end {
                return Err(format!("{} bytes of padding before {field}", offset - end).into());
            }
            let kind = kind(self, member)?.ok_or_else(|| format!("field `{field}` has no type in Rust"))?;
            end = offset + self.btf.size(member)?;
            let field = if matches!(field, "type" | "in" | "loop" | "match") {
                format!("r#{field}")
            } else {
                field.to_owned()
            };
            let _ = writeln!(fields, "    pub {field}: {kind},");
        }
        if end != self.btf.size(id)? {
            return Err("padding at its end".into());
        }
        Ok(fields)
    }

    fn plain_type(&self, id: u32) -> Result<Option<String>> {
        Ok(match self.btf.kind(id)? {
            BtfTypeKind::Typedef { name: "__be16", .. } => Some("[u8; 2]".to_owned()),
            BtfTypeKind::Typedef { name: "__be32", .. } => Some("[u8; 4]".to_owned()),
            BtfTypeKind::Typedef { name: "address_words", .. } => Some("[u8; 16]".to_owned()),
            BtfTypeKind::Typedef { to, .. } | BtfTypeKind::Modifier { to } => self.plain_type(to)?,
            BtfTypeKind::Int { bytes, is_signed } => {
                Some(format!("{}{}", if is_signed { 'i' } else { 'u' }, 8 * bytes))
            }
            BtfTypeKind::Enum { bytes } => Some(format!("u{}", 8 * bytes)),
            BtfTypeKind::Array { of, len } => self.plain_type(of)?.map(|of| format!("[{of}; {len}]")),
            BtfTypeKind::Struct { name } if self.own.contains(name) => match self.btf.members(id)?[..] {
                // A structure with an array as its only field becomes that array.
                [(_, member, 0)] if matches!(self.btf.kind(member)?, BtfTypeKind::Array { .. }) => {
                    self.plain_type(member)?
                }
                _ => Some(rust_name(name)),
            },
            BtfTypeKind::Struct { name } => self.names.foreign.get(name).map(|path| (*path).to_owned()),
            BtfTypeKind::Other => None,
        })
    }

    fn shared_type(&self, id: u32) -> Result<Option<String>> {
        Ok(match self.btf.kind(id)? {
            BtfTypeKind::Typedef { to, name } if !is_bytes(name) => self.shared_type(to)?,
            BtfTypeKind::Modifier { to } => self.shared_type(to)?,
            BtfTypeKind::Int { bytes: bytes @ (4 | 8), .. } => {
                Some(format!("std::sync::atomic::AtomicU{}", 8 * bytes))
            }
            BtfTypeKind::Array { of, len } if self.is_word(of)? => {
                self.shared_type(of)?.map(|of| format!("[{of}; {len}]"))
            }
            BtfTypeKind::Struct { name } if self.own.contains(name) && self.btf.is_tagged(id, "shared") => {
                Some(rust_name(name))
            }
            BtfTypeKind::Struct { name } if self.own.contains(name) && self.is_words(id) => {
                Some(format!("Shared{}", rust_name(name)))
            }
            _ => self.plain_type(id)?.map(|plain| format!("std::cell::UnsafeCell<{plain}>")),
        })
    }

    fn is_word(&self, id: u32) -> Result<bool> {
        Ok(match self.btf.kind(id)? {
            BtfTypeKind::Typedef { name, .. } if is_bytes(name) => false,
            BtfTypeKind::Typedef { to, .. } | BtfTypeKind::Modifier { to } => self.is_word(to)?,
            BtfTypeKind::Int { bytes, .. } => bytes >= 4,
            BtfTypeKind::Array { of, .. } => self.is_word(of)?,
            _ => false,
        })
    }

    fn is_words(&self, id: u32) -> bool {
        let words = |members: Vec<(&str, u32, u32)>| {
            members.iter().all(|(_, member, _)| self.is_word(*member).unwrap_or(false))
        };
        self.btf.members(id).is_ok_and(words)
    }

    fn is_nested_in_shared(&self, id: u32) -> bool {
        let tagged = self
            .own
            .iter()
            .filter_map(|name| self.btf.structure(name))
            .filter(|other| self.btf.is_tagged(*other, "shared"));
        tagged
            .filter_map(|other| self.btf.members(other).ok())
            .flatten()
            .any(|(_, member, _)| self.btf.resolved(member) == id)
    }
}

/// Reports whether the C type with this name becomes an array of bytes in Rust.
fn is_bytes(name: &str) -> bool {
    name.starts_with("__be") || name == "address_words"
}

/// Returns the Rust name of a C structure: `RelayConfig` for `relay_config`.
fn rust_name(name: &str) -> String {
    name.split('_').map(|part| part[..1].to_uppercase() + &part[1..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c_enumerators_and_numeric_macros_become_constants() {
        let lines = [
            ("\tRELAY_STREAM = 0, /* why */", Some("RELAY_STREAM")),
            ("\tRELAY_LAST,", Some("RELAY_LAST")),
            (" * RELAY_NONE", None),
            ("\tlower,", None),
        ];
        for (line, name) in lines {
            assert_eq!(enumerator(line).as_deref(), name, "{line}");
        }
        let definitions = [
            ("PORTS 4 /* why */", Some("PORTS")),
            ("END (~0ULL - 1)", Some("END")),
            ("NEXT_LINE \\", Some("NEXT_LINE")),
            ("BYTES (16 + sizeof(x))", Some("BYTES")),
            ("MAX(a, b) a", None),
            ("SHARED __attribute__((unused))", None),
            ("TEXT \"words\"", None),
            ("lower 1", None),
            ("GUARD_H", None),
        ];
        for (definition, name) in definitions {
            assert_eq!(defined(definition).as_deref(), name, "{definition}");
        }
    }

    #[test]
    fn c_names_become_camel_case_in_generated_rust() {
        assert_eq!(rust_name("relay_config"), "RelayConfig");
        assert_eq!(rust_name("gf128"), "Gf128");
    }
}
