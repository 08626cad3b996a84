//! The kernel's symbols, those of modules and BPF programs included: `/proc/kallsyms`.

use std::{fs, io};

use crate::taxonomy::PROGRAM;

const KALLSYMS: &str = "/proc/kallsyms";
/// What the kernel calls BPF programs: this, 16 hexadecimal digits of their tag, and `_NAME`.
const JITTED: &str = "bpf_prog_";
const TAG_DIGITS: usize = 16;

#[derive(Debug, Default)]
pub struct Symbols {
    /// Ascending; the second one is the position of the name.
    starts: Vec<(u64, u32)>,
    names: Vec<Box<str>>,
}

impl Symbols {
    /// # Errors
    /// Also if addresses are hidden from this process (`kernel.kptr_restrict`, no CAP_SYSLOG).
    pub fn read() -> io::Result<Self> {
        let symbols = Self::parse(&fs::read_to_string(KALLSYMS)?);
        if symbols.len() == 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the kernel hides its addresses (kernel.kptr_restrict)",
            ));
        }
        Ok(symbols)
    }

    fn parse(text: &str) -> Self {
        let mut entries: Vec<(u64, &str)> = text.lines().filter_map(function).collect();
        entries.sort_by_key(|(start, _)| *start);
        // Of aliases the first one counts.
        entries.dedup_by_key(|(start, _)| *start);
        let number = |at| u32::try_from(at).unwrap_or(u32::MAX);
        Self {
            starts: entries.iter().enumerate().map(|(at, (start, _))| (*start, number(at))).collect(),
            names: entries.into_iter().map(|(_, name)| plain(name)).collect(),
        }
    }

    #[cfg(test)]
    pub fn parse_for_tests(text: &str) -> Self {
        Self::parse(text)
    }

    /// The function that an address is in: its number, which stays the same while this value lives.
    pub fn find(&self, address: u64) -> Option<usize> {
        let after = self.starts.partition_point(|(start, _)| *start <= address);
        let (_, number) = self.starts.get(after.checked_sub(1)?)?;
        usize::try_from(*number).ok()
    }

    pub fn name(&self, number: usize) -> &str {
        self.names.get(number).map_or("", |name| name)
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }
}

/// Address and name, if the line is about code.
fn function(line: &str) -> Option<(u64, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let address = u64::from_str_radix(fields.next()?, 16).ok().filter(|address| *address != 0)?;
    let kind = fields.next()?;
    matches!(kind, "t" | "T" | "w" | "W").then_some(())?;
    Some((address, fields.next()?))
}

/// `bpf_prog_0123456789abcdef_relay_ingress` is `bpf:relay_ingress`; suffixes that compilers add are cut off.
pub fn plain(name: &str) -> Box<str> {
    let program = name.strip_prefix(JITTED).and_then(|rest| rest.split_at_checked(TAG_DIGITS));
    match program {
        Some((tag, rest)) if tag.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
            // A program without a name is told by its tag.
            let name = rest.strip_prefix('_').unwrap_or(tag);
            format!("{PROGRAM}{name}").into()
        }
        _ => match name.find('.').filter(|at| *at > 0) {
            Some(at) => name.get(..at).unwrap_or(name).into(),
            None => name.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
ffffffff81000300 T ip_rcv
ffffffff81000000 T _stext
ffffffff81000000 T startup_64
ffffffff81000100 t nf_hook.constprop.0
ffffffff81000200 d some_data
ffffffffc0000000 t veth_xmit\t[veth]
ffffffffc0100000 t bpf_prog_0123456789abcdef_relay_ingress\t[bpf]
ffffffffc0101000 t bpf_prog_6deef7357e7b4530\t[bpf]
";

    fn name(address: u64) -> Option<String> {
        let symbols = Symbols::parse(TEXT);
        symbols.find(address).map(|number| symbols.name(number).to_owned())
    }

    #[test]
    fn addresses_are_inside_of_the_function_before() {
        assert_eq!(name(0xffff_ffff_8100_0300).as_deref(), Some("ip_rcv"));
        assert_eq!(name(0xffff_ffff_8100_0000).as_deref(), Some("_stext"));
        assert_eq!(name(0xffff_ffff_8100_0234).as_deref(), Some("nf_hook"));
        assert_eq!(name(0xffff_ffff_c000_0010).as_deref(), Some("veth_xmit"));
        assert_eq!(name(0xffff_ffff_0000_0000), None);
    }

    #[test]
    fn programs_are_called_by_their_names() {
        assert_eq!(name(0xffff_ffff_c010_0004).as_deref(), Some("bpf:relay_ingress"));
        assert_eq!(name(0xffff_ffff_c010_1004).as_deref(), Some("bpf:6deef7357e7b4530"));
    }

    #[test]
    fn hidden_addresses_are_none() {
        assert_eq!(Symbols::parse("0000000000000000 T ip_rcv\n").len(), 0);
    }
}
