//! The kernel's symbols, those of modules and BPF programs included: `/proc/kallsyms`.

use std::ops::Range;
use std::{fs, io};

use millrace_kernel::programs::Function;

use crate::taxonomy::PROGRAM;

const KALLSYMS: &str = "/proc/kallsyms";
/// What the kernel calls BPF programs: this, 16 hexadecimal digits of their tag, and `_NAME`.
const JITTED: &str = "bpf_prog_";
const TAG_DIGITS: usize = 16;
/// The module that compiled programs and what leads to them are said to be in.
const JIT: &str = "[bpf]";
/// Where no other symbol follows, a function ends here at the latest: behind it may be what was loaded since.
const MAX_BYTES: u64 = 1 << 16;
/// Trampolines and dispatchers have no sizes either; the kernel makes each on a page.
const IMAGE_BYTES: u64 = 4096;

/// Functions by address. The number of one stays the same until others are read.
#[derive(Debug, Default)]
pub struct Symbols {
    kernel: Table,
    /// Absent: they cannot be listed, and the kernel's symbols have those that were loaded when these were read.
    programs: Option<Table>,
}

/// Ascending, none overlaps another.
#[derive(Debug, Default)]
struct Table {
    ranges: Vec<Range<u64>>,
    names: Vec<Box<str>>,
}

impl Table {
    fn find(&self, address: u64) -> Option<usize> {
        let at = self.ranges.partition_point(|range| range.start <= address).checked_sub(1)?;
        self.ranges.get(at)?.contains(&address).then_some(at)
    }

    fn name(&self, number: usize) -> &str {
        self.names.get(number).map_or("", |name| name)
    }
}

impl FromIterator<(Range<u64>, Box<str>)> for Table {
    fn from_iter<T: IntoIterator<Item = (Range<u64>, Box<str>)>>(functions: T) -> Self {
        let mut functions: Vec<_> = functions.into_iter().collect();
        functions.sort_by_key(|(range, _)| range.start);
        // Of aliases the first one counts.
        functions.dedup_by_key(|(range, _)| range.start);
        let starts: Vec<u64> =
            functions.iter().skip(1).map(|(range, _)| range.start).chain([u64::MAX]).collect();
        let bounded = functions.into_iter().zip(starts);
        let (ranges, names) =
            bounded.map(|((range, name), next)| (range.start..range.end.min(next), name)).unzip();
        Self { ranges, names }
    }
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
        Self { kernel: text.lines().filter_map(function).collect(), programs: None }
    }

    #[cfg(test)]
    pub fn parse_for_tests(text: &str) -> Self {
        Self::parse(text)
    }

    /// All programs that are loaded now.
    pub fn set_programs<'a>(&mut self, functions: impl Iterator<Item = &'a Function>) {
        let range =
            |function: &Function| function.start..function.start.saturating_add(function.bytes.into());
        let named = |function: &'a Function| (range(function), format!("{PROGRAM}{}", function.name).into());
        self.programs = Some(functions.map(named).collect());
    }

    pub fn has_programs(&self) -> bool {
        self.programs.is_some()
    }

    /// The function that an address is in: its number.
    pub fn find(&self, address: u64) -> Option<usize> {
        let Some(programs) = &self.programs else { return self.kernel.find(address) };
        let of_program = programs.find(address).map(|number| self.kernel.names.len() + number);
        // A program that only the kernel's symbols know has gone since they were read.
        let lives = |number: &usize| !self.kernel.name(*number).starts_with(PROGRAM);
        of_program.or_else(|| self.kernel.find(address).filter(lives))
    }

    pub fn name(&self, number: usize) -> &str {
        match (number.checked_sub(self.kernel.names.len()), &self.programs) {
            (Some(number), Some(programs)) => programs.name(number),
            _ => self.kernel.name(number),
        }
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.kernel.names.len() + self.programs.as_ref().map_or(0, |programs| programs.names.len())
    }
}

/// Where it is at most, and its name, if the line is about code.
fn function(line: &str) -> Option<(Range<u64>, Box<str>)> {
    let mut fields = line.split_ascii_whitespace();
    let start = u64::from_str_radix(fields.next()?, 16).ok().filter(|start| *start != 0)?;
    let kind = fields.next()?;
    matches!(kind, "t" | "T" | "w" | "W").then_some(())?;
    let name = fields.next()?;
    let is_image = fields.next() == Some(JIT) && !name.starts_with(JITTED);
    let bytes = if is_image { IMAGE_BYTES } else { MAX_BYTES };
    Some((start..start.saturating_add(bytes), plain(name)))
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
ffffffffc0200000 t bpf_trampoline_6442540000\t[bpf]
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
    fn nothing_reaches_into_what_was_loaded_behind_it() {
        assert_eq!(name(0xffff_ffff_c000_fff0).as_deref(), Some("veth_xmit"));
        assert_eq!(name(0xffff_ffff_c001_0000), None);
        assert_eq!(name(0xffff_ffff_c020_0ff0).as_deref(), Some("bpf_trampoline_6442540000"));
        assert_eq!(name(0xffff_ffff_c020_1000), None);
        assert_eq!(name(u64::MAX), None);
    }

    #[test]
    fn the_list_of_programs_is_right_about_programs() {
        let mut symbols = Symbols::parse(TEXT);
        let function = |start, bytes, name: &str| Function { start, bytes, name: name.to_owned() };
        let programs = [
            function(0xffff_ffff_c010_1000, 16, "late"),
            function(0xffff_ffff_c000_0800, 16, "in the gap"),
            function(0xffff_ffff_c020_0000, 16, "where a trampoline was"),
        ];
        symbols.set_programs(programs.iter());
        let name = |address| symbols.find(address).map(|number| symbols.name(number));
        assert_eq!(name(0xffff_ffff_c010_100f), Some("bpf:late"));
        assert_eq!(name(0xffff_ffff_c010_1010), None);
        assert_eq!(name(0xffff_ffff_c000_0800), Some("bpf:in the gap"));
        assert_eq!(name(0xffff_ffff_c020_0008), Some("bpf:where a trampoline was"));
        // In the kernel's symbols, and gone.
        assert_eq!(name(0xffff_ffff_c010_0004), None);
        assert_eq!(name(0xffff_ffff_8100_0300), Some("ip_rcv"));
    }

    #[test]
    fn hidden_addresses_are_none() {
        assert_eq!(Symbols::parse("0000000000000000 T ip_rcv\n").len(), 0);
    }
}
