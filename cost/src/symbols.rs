//! Reads the symbols of the kernel, its modules and BPF programs from `/proc/kallsyms`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use millrace_kernel::programs::ProgramFunction;

use crate::taxonomy::PROGRAM;

const KALLSYMS: &str = "/proc/kallsyms";
const MODULES: &str = "/proc/modules";
const READ_BYTES: usize = 1 << 16;
/// The prefix of BPF programs in kallsyms. The 16 hexadecimal digits of the program's tag and `_NAME` follow.
const JITTED: &str = "bpf_prog_";
const TAG_DIGITS: usize = 16;
/// The module name in kallsyms of compiled BPF programs, trampolines and dispatchers.
const JIT: &str = "[bpf]";
/// Size in bytes that a function is assumed to have if no other symbol follows soon: kallsyms has no sizes.
const MAX_BYTES: u32 = 1 << 16;
/// Size in bytes of trampolines and dispatchers: the kernel allocates one page for each.
const IMAGE_BYTES: u32 = 4096;

/// The kernel's functions by address. A function's number is valid until symbols or programs are read again.
#[derive(Debug, Default)]
pub struct Symbols {
    kernel: SymbolTable,
    /// Modules that were loaded when `kernel` was read.
    modules: Vec<Module>,
    /// Addresses of modules that were loaded later. Without this list, `kernel` would name their functions after the
    /// module before them in memory.
    strange: Vec<Range<u64>>,
    /// Functions of the loaded BPF programs. `None` if these cannot be listed: then `kernel` has the programs that were
    /// loaded when it was read.
    programs: Option<SymbolTable>,
}

#[derive(Debug, PartialEq, Eq)]
struct Module {
    name: Box<str>,
    /// Addresses of the module's code. From Linux 6.4 on, the range is too long by the size of its data, which is
    /// elsewhere.
    range: Range<u64>,
}

/// Functions in the order of their addresses, without overlaps. A kernel has 200,000 names: they are in one string,
/// whose memory is reused at each reading.
#[derive(Debug, Default)]
struct SymbolTable {
    functions: Vec<PlacedSymbol>,
    names: String,
}

#[derive(Debug, Clone, Copy)]
struct PlacedSymbol {
    start: u64,
    bytes: u32,
    name_at: u32,
    name_bytes: u32,
}

impl SymbolTable {
    fn find(&self, address: u64) -> Option<usize> {
        let at = self.functions.partition_point(|function| function.start <= address).checked_sub(1)?;
        let function = self.functions.get(at)?;
        (address - function.start < function.bytes.into()).then_some(at)
    }

    fn name(&self, number: usize) -> &str {
        let name = self.functions.get(number).and_then(|function| {
            let at = function.name_at as usize;
            self.names.get(at..at + function.name_bytes as usize)
        });
        name.unwrap_or_default()
    }

    fn clear(&mut self) {
        self.functions.clear();
        self.names.clear();
    }

    /// Adds a function. Lookups find it after [`settle`](Self::settle).
    fn push(&mut self, start: u64, bytes: u32, name: &str) {
        let length = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX);
        let name_at = length(&self.names);
        let name_bytes = length(name);
        self.names.push_str(name);
        self.functions.push(PlacedSymbol { start, bytes, name_at, name_bytes });
    }

    /// Sorts the functions, removes aliases, and ends each function where the next one begins.
    fn settle(&mut self) {
        // The first name of an address counts, and its aliases are removed.
        self.functions.sort_unstable_by_key(|function| (function.start, function.name_at));
        self.functions.dedup_by_key(|function| function.start);
        let mut next = u64::MAX;
        for function in self.functions.iter_mut().rev() {
            let room = u32::try_from(next - function.start).unwrap_or(u32::MAX);
            function.bytes = function.bytes.min(room);
            next = function.start;
        }
    }
}

impl Symbols {
    /// Reads the kernel's symbols. Also fails if the kernel hides addresses (`kernel.kptr_restrict`, no CAP_SYSLOG).
    pub fn read() -> io::Result<Self> {
        let mut symbols = Self::default();
        symbols.read_again()?;
        Ok(symbols)
    }

    /// Reads the kernel's symbols again, into the memory of the old ones. Keeping both would take twice the memory.
    ///
    /// # Errors
    /// Fails like [`read`](Self::read). After an error no function has a name until the next successful reading.
    pub fn read_again(&mut self) -> io::Result<()> {
        // Modules are listed before the symbols. A module loaded in between is then unknown, and the symbols are read
        // again.
        let modules = modules()?;
        let file = BufReader::with_capacity(READ_BYTES, File::open(KALLSYMS)?);
        self.parse(file, &modules)?;
        match self.kernel.functions.is_empty() {
            true => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the kernel hides its addresses (kernel.kptr_restrict)",
            )),
            false => Ok(()),
        }
    }

    fn parse(&mut self, mut lines: impl BufRead, modules: &str) -> io::Result<()> {
        self.kernel.clear();
        self.strange.clear();
        self.modules = modules.lines().filter_map(module).collect();
        let mut line = String::new();
        while lines.read_line(&mut line)? > 0 {
            if let Some((start, bytes, name)) = function(&line) {
                self.kernel.push(start, bytes, &name);
            }
            line.clear();
        }
        self.kernel.settle();
        Ok(())
    }

    #[cfg(test)]
    pub fn parse_for_tests(text: &str) -> Self {
        let mut symbols = Self::default();
        symbols.parse(text.as_bytes(), "").expect("text");
        symbols
    }

    /// Lists the loaded modules again. Modules loaded after the symbols were read have no symbols. Reports whether the
    /// set of such modules has changed.
    ///
    /// # Errors
    /// Fails if the modules cannot be listed.
    pub fn refresh_modules(&mut self) -> io::Result<bool> {
        Ok(self.see_modules(&modules()?))
    }

    pub(crate) fn see_modules(&mut self, listed: &str) -> bool {
        let new = listed.lines().filter_map(module).filter(|module| !self.modules.contains(module));
        let strange: Vec<Range<u64>> = new.map(|module| module.range).collect();
        let changed = strange != self.strange;
        self.strange = strange;
        changed
    }

    /// Replaces the functions of BPF programs.
    pub fn set_programs<'a>(&mut self, functions: impl Iterator<Item = &'a ProgramFunction>) {
        let table = self.programs.get_or_insert_default();
        table.clear();
        for function in functions {
            table.push(function.start, function.bytes, &format!("{PROGRAM}{}", function.name));
        }
        table.settle();
    }

    /// Removes the list of BPF programs, because they can no longer be listed. Reports whether there was a list.
    pub fn forget_programs(&mut self) -> bool {
        self.programs.take().is_some()
    }

    /// Returns the number of the function that contains an address.
    pub fn find(&self, address: u64) -> Option<usize> {
        let of_kernel = || match self.strange.iter().any(|range| range.contains(&address)) {
            true => None,
            false => self.kernel.find(address),
        };
        let Some(programs) = &self.programs else { return of_kernel() };
        let of_program = programs.find(address).map(|number| self.kernel.functions.len() + number);
        // A BPF program that has a kernel symbol but is not in the list of loaded programs was unloaded since the
        // symbols were read.
        let lives = |number: &usize| !self.kernel.name(*number).starts_with(PROGRAM);
        of_program.or_else(|| of_kernel().filter(lives))
    }

    pub fn name(&self, number: usize) -> &str {
        match (number.checked_sub(self.kernel.functions.len()), &self.programs) {
            (Some(number), Some(programs)) => programs.name(number),
            _ => self.kernel.name(number),
        }
    }

    /// Returns the number of functions.
    pub fn len(&self) -> usize {
        self.kernel.functions.len() + self.programs.as_ref().map_or(0, |programs| programs.functions.len())
    }
}

/// Returns the text of `/proc/modules`, or nothing on a kernel without modules.
fn modules() -> io::Result<String> {
    match fs::read_to_string(MODULES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// Parses a line of `/proc/modules`, such as `veth 36864 0 - Live 0xffffffffc0000000`.
fn module(line: &str) -> Option<Module> {
    let mut fields = line.split_ascii_whitespace();
    let name = fields.next()?;
    let bytes = fields.next()?.parse::<u64>().ok()?;
    let start = fields.find_map(|field| u64::from_str_radix(field.strip_prefix("0x")?, 16).ok())?;
    Some(Module { name: name.into(), range: start..start.saturating_add(bytes) })
}

/// Parses a line of kallsyms: returns a function's start, largest possible size and name, or `None` for other symbols.
fn function(line: &str) -> Option<(u64, u32, Box<str>)> {
    let mut fields = line.split_ascii_whitespace();
    let start = u64::from_str_radix(fields.next()?, 16).ok().filter(|start| *start != 0)?;
    let kind = fields.next()?;
    matches!(kind, "t" | "T" | "w" | "W").then_some(())?;
    let name = fields.next()?;
    let is_image = fields.next() == Some(JIT) && !name.starts_with(JITTED);
    let bytes = if is_image { IMAGE_BYTES } else { MAX_BYTES };
    Some((start, bytes, plain(name)))
}

/// Returns the name of a function in reports. `bpf_prog_0123456789abcdef_relay_ingress` becomes `bpf:relay_ingress`,
/// and suffixes that compilers add, such as `.isra.0`, are removed.
pub fn plain(name: &str) -> Box<str> {
    let program = name.strip_prefix(JITTED).and_then(|rest| rest.split_at_checked(TAG_DIGITS));
    match program {
        Some((tag, rest)) if tag.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
            // A program without a name is identified by its tag.
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
        let symbols = Symbols::parse_for_tests(TEXT);
        symbols.find(address).map(|number| symbols.name(number).to_owned())
    }

    #[test]
    fn address_belongs_to_the_preceding_symbol() {
        assert_eq!(name(0xffff_ffff_8100_0300).as_deref(), Some("ip_rcv"));
        assert_eq!(name(0xffff_ffff_8100_0000).as_deref(), Some("_stext"));
        assert_eq!(name(0xffff_ffff_8100_0234).as_deref(), Some("nf_hook"));
        assert_eq!(name(0xffff_ffff_c000_0010).as_deref(), Some("veth_xmit"));
        assert_eq!(name(0xffff_ffff_0000_0000), None);
    }

    #[test]
    fn bpf_program_symbols_become_program_names() {
        assert_eq!(name(0xffff_ffff_c010_0004).as_deref(), Some("bpf:relay_ingress"));
        assert_eq!(name(0xffff_ffff_c010_1004).as_deref(), Some("bpf:6deef7357e7b4530"));
    }

    #[test]
    fn address_past_the_end_of_a_function_has_no_symbol() {
        assert_eq!(name(0xffff_ffff_c000_fff0).as_deref(), Some("veth_xmit"));
        assert_eq!(name(0xffff_ffff_c001_0000), None);
        assert_eq!(name(0xffff_ffff_c020_0ff0).as_deref(), Some("bpf_trampoline_6442540000"));
        assert_eq!(name(0xffff_ffff_c020_1000), None);
        assert_eq!(name(u64::MAX), None);
    }

    #[test]
    fn list_of_loaded_bpf_programs_overrides_bpf_symbols_of_kallsyms() {
        let mut symbols = Symbols::parse_for_tests(TEXT);
        let function = |start, bytes, name: &str| ProgramFunction { start, bytes, name: name.to_owned() };
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
        // This BPF program has a kernel symbol but is not in the list of loaded programs: it was unloaded.
        assert_eq!(name(0xffff_ffff_c010_0004), None);
        assert_eq!(name(0xffff_ffff_8100_0300), Some("ip_rcv"));
        assert!(symbols.forget_programs() && !symbols.forget_programs());
        let number = symbols.find(0xffff_ffff_c010_0004).expect("a function");
        assert_eq!(symbols.name(number), "bpf:relay_ingress");
    }

    /// A module loaded after the symbols were read has no names, and never gets those of the module before it in
    /// memory.
    #[test]
    fn address_in_a_module_loaded_later_gets_no_symbol_of_another_module() {
        const BEFORE: &str = "veth 4096 0 - Live 0xffffffffc0000000\n";
        const AFTER: &str = "dummy 8192 0 - Live 0xffffffffc0001000\nveth 4096 1 - Live 0xffffffffc0000000\n";
        let mut symbols = Symbols::default();
        symbols.parse(TEXT.as_bytes(), BEFORE).expect("text");
        let name = |symbols: &Symbols, address| symbols.find(address).map(|at| symbols.name(at).to_owned());
        let inside = 0xffff_ffff_c000_1010;
        let behind = 0xffff_ffff_c000_3010;
        assert_eq!(name(&symbols, inside).as_deref(), Some("veth_xmit"), "nothing else is known to be there");
        assert!(!symbols.see_modules(BEFORE));
        assert!(symbols.see_modules(AFTER) && !symbols.see_modules(AFTER));
        assert_eq!(name(&symbols, inside), None);
        assert_eq!(name(&symbols, 0xffff_ffff_c000_0010).as_deref(), Some("veth_xmit"));
        assert_eq!(name(&symbols, behind).as_deref(), Some("veth_xmit"));
        let text = format!("{TEXT}ffffffffc0001000 t dummy_xmit\t[dummy]\n");
        symbols.parse(text.as_bytes(), AFTER).expect("text");
        assert!(!symbols.see_modules(AFTER));
        assert_eq!(name(&symbols, inside).as_deref(), Some("dummy_xmit"));
        // Another module was loaded at the address of a module that was unloaded.
        assert!(symbols.see_modules(&AFTER.replace("dummy", "other")));
        assert_eq!(name(&symbols, inside), None);
    }

    /// Reads the running kernel's symbols twice. The second reading must not allocate.
    #[test]
    fn symbols_are_read_again_into_the_same_memory() {
        let Ok(mut symbols) = Symbols::read() else {
            println!("SKIP symbols_are_read_again_into_the_same_memory: needs root");
            return;
        };
        let memory =
            |symbols: &Symbols| (symbols.kernel.functions.capacity(), symbols.kernel.names.capacity());
        let place = |symbols: &Symbols| (symbols.kernel.functions.as_ptr(), symbols.kernel.names.as_ptr());
        let before = memory(&symbols);
        let at = place(&symbols);
        symbols.read_again().expect("symbols");
        // Other tests load programs at the same time. If there are more symbols than before, an allocation is allowed.
        assert!(
            memory(&symbols) == before && place(&symbols) == at || symbols.len() > before.0,
            "{before:?}"
        );
        assert!(before.0 < 4 * symbols.len() && before.1 < 1 << 26, "{before:?}");
    }

    #[test]
    fn hidden_kernel_addresses_give_no_symbols() {
        assert_eq!(Symbols::parse_for_tests("0000000000000000 T ip_rcv\n").len(), 0);
    }
}
