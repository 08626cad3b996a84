//! Counts sampled stacks by CPU, kernel event (such as a softirq or system call) and part of the network stack (such as
//! UDP), and keeps whole stacks for flame graphs.

use std::collections::HashMap;
use std::hash::Hash;
use std::io;

use millrace_kernel::programs::ProgramFunctions;

use crate::report::{Event, FunctionCost, OTHER, OtherFunctions, ProfiledStack, Stacks};
use crate::symbols::Symbols;
use crate::taxonomy::{FunctionRules, StackOwner, Taxonomy};

/// The number of a name in a [`NameTable`].
pub type PartNumber = u32;

/// Names of functions and of parts of the network stack, each stored once.
#[derive(Debug, Default)]
pub struct NameTable {
    numbers: HashMap<Box<str>, PartNumber>,
    names: Vec<Box<str>>,
}

impl NameTable {
    pub fn number(&mut self, name: &str) -> PartNumber {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = PartNumber::try_from(self.names.len()).unwrap_or(PartNumber::MAX);
        self.numbers.insert(name.into(), number);
        self.names.push(name.into());
        number
    }

    pub fn name(&self, number: PartNumber) -> &str {
        usize::try_from(number).ok().and_then(|at| self.names.get(at)).map_or("", |name| name)
    }
}

/// Finds the function that contains an address, and the taxonomy's rules for this function: they assign it to a part of
/// the network stack. Both are cached.
#[derive(Debug)]
pub struct Resolver {
    symbols: Symbols,
    programs: ProgramFunctions,
    taxonomy: Taxonomy,
    /// The taxonomy's rules for each function, indexed by the function's number. `None` until they are first needed.
    rules: Vec<Option<FunctionRules>>,
    /// Function numbers by address. `None` is an address without a symbol.
    addresses: HashMap<u64, Option<usize>>,
    /// True if an address had no symbol: a module may have been loaded since the symbols were read.
    pub outdated: bool,
}

/// Largest number of cached addresses. Networking uses a small part of the kernel's addresses.
const ADDRESSES: usize = 1 << 16;
pub(crate) const UNKNOWN: &str = "[unknown]";

impl Resolver {
    pub fn new(symbols: Symbols, taxonomy: Taxonomy) -> Self {
        let rules = vec![None; symbols.len()];
        let programs = ProgramFunctions::default();
        Self { symbols, programs, taxonomy, rules, addresses: HashMap::new(), outdated: false }
    }

    /// Reads the lists of modules and BPF programs again. Takes a few system calls if neither list has changed.
    ///
    /// # Errors
    /// Fails if the modules or the BPF programs cannot be listed.
    pub fn refresh(&mut self) -> io::Result<()> {
        let modules = self.symbols.refresh_modules();
        if *modules.as_ref().unwrap_or(&false) {
            self.addresses.clear();
        }
        match self.programs.refresh() {
            Ok(true) => {
                self.symbols.set_programs(self.programs.iter());
                self.forget();
            }
            Ok(false) => {}
            Err(error) => {
                // Fall back to `/proc/kallsyms`, which has the programs that were loaded when it was read.
                if self.symbols.forget_programs() {
                    self.forget();
                }
                return Err(error);
            }
        }
        modules.map(drop)
    }

    /// Replaces the symbols with those that `read` stores, and keeps the taxonomy.
    ///
    /// # Errors
    /// Returns the error of `read`.
    pub fn renew(&mut self, read: impl FnOnce(&mut Symbols) -> io::Result<()>) -> io::Result<()> {
        let done = read(&mut self.symbols);
        self.forget();
        self.outdated = false;
        done
    }

    /// Clears the caches except for addresses that still have no symbol. Such an address must not set `outdated` again,
    /// or the symbols would be read at every report.
    fn forget(&mut self) {
        let Self { symbols, rules, addresses, .. } = self;
        rules.clear();
        rules.resize(symbols.len(), None);
        addresses.retain(|address, number| number.is_none() && symbols.find(*address).is_none());
    }

    pub fn taxonomy(&self) -> &Taxonomy {
        &self.taxonomy
    }

    /// Writes the numbers of the functions of a stack to `into`, innermost function first.
    pub fn functions(&mut self, stack: &[u64], into: &mut Vec<Option<usize>>) {
        into.clear();
        for (at, address) in stack.iter().enumerate() {
            // Outer frames are return addresses. If a function ends in a call, its return address is in the next
            // function.
            let address = address.saturating_sub(u64::from(at > 0));
            into.push(self.find(address));
        }
    }

    fn find(&mut self, address: u64) -> Option<usize> {
        if let Some(known) = self.addresses.get(&address) {
            return *known;
        }
        let number = self.symbols.find(address);
        self.outdated |= number.is_none();
        if self.addresses.len() >= ADDRESSES {
            self.addresses.clear();
        }
        self.addresses.insert(address, number);
        if let Some(number) = number
            && let Some(slot @ None) = self.rules.get_mut(number)
        {
            *slot = Some(self.taxonomy.rules(self.symbols.name(number)));
        }
        number
    }

    pub fn name(&self, number: Option<usize>) -> &str {
        number.map_or(UNKNOWN, |number| self.symbols.name(number))
    }

    fn frames<'a>(
        &'a self,
        functions: &'a [Option<usize>],
    ) -> impl Iterator<Item = (&'a str, &'a FunctionRules)> + Clone {
        functions
            .iter()
            .flatten()
            .filter_map(|number| Some((self.symbols.name(*number), self.rules.get(*number)?.as_ref()?)))
    }

    pub fn part<'a>(&'a self, event: Event, functions: &'a [Option<usize>]) -> &'a str {
        self.taxonomy.part(event, self.frames(functions))
    }

    pub fn owner(&self, functions: &[Option<usize>]) -> StackOwner {
        self.taxonomy.owner(self.frames(functions).map(|(_, rules)| rules))
    }
}

/// Counts of sampled stacks in one period.
#[derive(Debug, Default)]
pub struct Fold {
    names: NameTable,
    parts: HashMap<(u32, Event), HashMap<PartNumber, u64>>,
    /// Number of samples that no rule assigns to a part of the network stack, by kernel event (such as a softirq) and
    /// innermost function.
    others: HashMap<(Event, PartNumber), u64>,
    /// Number of samples by CPU, kernel event (such as a softirq), profiled process, and functions from the outermost
    /// on. `None` if stacks are not kept.
    stacks: Option<HashMap<StackKey, u64>>,
}

type StackKey = (u32, Option<Event>, Option<u32>, Box<[PartNumber]>);

impl Fold {
    pub fn new(keep_stacks: bool) -> Self {
        Self { stacks: keep_stacks.then(HashMap::new), ..Self::default() }
    }

    /// Counts a kernel stack, given innermost function first.
    pub fn add(&mut self, resolver: &Resolver, cpu: u32, event: Event, functions: &[Option<usize>]) {
        let part = resolver.part(event, functions);
        let part_number = self.names.number(part);
        count(self.parts.entry((cpu, event)).or_default(), part_number);
        if part == OTHER {
            let innermost = resolver.name(functions.first().copied().flatten());
            let number = self.names.number(innermost);
            count(&mut self.others, (event, number));
        }
    }

    /// Stores a whole stack, given innermost function first. Does nothing if stacks are not kept.
    pub fn add_stack<'a>(
        &mut self,
        cpu: u32,
        event: Option<Event>,
        pid: Option<u32>,
        functions: impl Iterator<Item = &'a str>,
    ) {
        let Some(stacks) = &mut self.stacks else { return };
        let mut frames: Vec<PartNumber> = functions.map(|function| self.names.number(function)).collect();
        frames.reverse();
        count(stacks, (cpu, event, pid, frames.into()));
    }

    /// Returns the parts of the network stack that a CPU ran in a kernel event, such as a softirq. Each part has its
    /// number of samples; most samples come first.
    pub fn parts(&self, cpu: u32, event: Event) -> Vec<(&str, u64)> {
        let parts = self.parts.get(&(cpu, event)).into_iter().flatten();
        let mut parts: Vec<_> = parts.map(|(name, samples)| (self.names.name(*name), *samples)).collect();
        parts.sort_unstable_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        parts
    }

    /// Returns, for each kernel event such as a softirq, the `top` innermost functions that no rule assigns to a part
    /// of the network stack. `ns_per_sample` is the mean time on all CPUs that one sample of an event stands for.
    pub fn other_functions(&self, top: usize, ns_per_sample: impl Fn(Event) -> f64) -> Vec<OtherFunctions> {
        let of_event = |event: Event| {
            let mut functions: Vec<FunctionCost> = self
                .others
                .iter()
                .filter(|((of, _), _)| *of == event)
                .map(|((_, name), samples)| FunctionCost {
                    name: self.names.name(*name).to_owned(),
                    ns: (*samples as f64 * ns_per_sample(event)) as u64,
                    samples: *samples,
                    interval: None,
                })
                .collect();
            functions.sort_unstable_by(|a, b| b.samples.cmp(&a.samples).then(a.name.cmp(&b.name)));
            functions.truncate(top);
            (!functions.is_empty()).then_some(OtherFunctions { event, functions })
        };
        Event::ALL.into_iter().filter_map(of_event).collect()
    }

    /// Returns the kept stacks, most time first, or `None` if stacks are not kept. `ns_per_sample` is the time that one
    /// sample on a CPU stands for, in a kernel event such as a softirq or, with `None`, outside of all events.
    pub fn stacks(&self, ns_per_sample: impl Fn(u32, Option<Event>) -> f64) -> Option<Stacks> {
        let kept = self.stacks.as_ref()?;
        let mut used: HashMap<PartNumber, u32> = HashMap::new();
        let mut functions = Vec::new();
        let mut stacks = Vec::with_capacity(kept.len());
        for ((cpu, event, pid, frames), samples) in kept {
            let frames = frames.iter().map(|name| {
                *used.entry(*name).or_insert_with(|| {
                    functions.push(self.names.name(*name).to_owned());
                    u32::try_from(functions.len() - 1).unwrap_or(u32::MAX)
                })
            });
            stacks.push(ProfiledStack {
                cpu: *cpu,
                event: *event,
                pid: *pid,
                frames: frames.collect(),
                samples: *samples,
                ns: (*samples as f64 * ns_per_sample(*cpu, *event)) as u64,
            });
        }
        stacks.sort_unstable_by_key(|stack| std::cmp::Reverse(stack.ns));
        Some(Stacks { functions, stacks })
    }
}

fn count<K: Eq + Hash>(counts: &mut HashMap<K, u64>, key: K) {
    *counts.entry(key).or_default() += 1;
}

/// Returns `total * samples / of`, rounded down, without overflow. If the values of `samples` in several calls add up
/// to `of`, the results add up to `total`, except for rounding.
pub fn share_out(total: u64, samples: u64, of: u64) -> u64 {
    if of == 0 {
        return 0;
    }
    u64::try_from(u128::from(total) * u128::from(samples) / u128::from(of)).unwrap_or(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
ffffffff81000100 T ip_rcv
ffffffff81000200 T tcp_v4_rcv
ffffffff81000300 T somebody
ffffffff81000400 T net_rx_action
ffffffff81000500 T end
";
    const IP: u64 = 0xffff_ffff_8100_0110;
    const TCP: u64 = 0xffff_ffff_8100_0210;
    const SOMEBODY: u64 = 0xffff_ffff_8100_0310;
    const RX: u64 = 0xffff_ffff_8100_0410;

    fn resolver() -> Resolver {
        Resolver::new(Symbols::parse_for_tests(TEXT), Taxonomy::builtin().expect("it parses"))
    }

    fn fold(stacks: &[&[u64]]) -> Fold {
        let mut resolver = resolver();
        let mut fold = Fold::new(true);
        let mut functions = Vec::new();
        for stack in stacks {
            resolver.functions(stack, &mut functions);
            fold.add(&resolver, 0, Event::NetRx, &functions);
            let names: Vec<&str> = functions.iter().map(|number| resolver.name(*number)).collect();
            fold.add_stack(0, Some(Event::NetRx), None, names.into_iter());
        }
        fold
    }

    #[test]
    fn stacks_are_assigned_to_parts_of_the_network_stack() {
        let fold = fold(&[&[IP, RX], &[TCP, IP, RX], &[TCP + 4, IP, RX], &[SOMEBODY, RX], &[RX]]);
        assert_eq!(fold.parts(0, Event::NetRx), [("TCP", 2), ("other", 2), ("IP receive v4", 1)]);
        assert!(fold.parts(1, Event::NetRx).is_empty());
        assert!(fold.parts(0, Event::Send).is_empty());
        let others = fold.other_functions(10, |_| 10.0);
        let names: Vec<_> = others[0].functions.iter().map(|f| (f.name.as_str(), f.samples, f.ns)).collect();
        assert_eq!(names, [("net_rx_action", 1, 10), ("somebody", 1, 10)]);
    }

    #[test]
    fn equal_stacks_are_folded_into_one() {
        let fold = fold(&[&[TCP, IP, RX], &[TCP + 4, IP, RX], &[IP, RX]]);
        let stacks = fold.stacks(|_, _| 100.0).expect("they are kept");
        let names = |stack: &ProfiledStack| -> Vec<&str> {
            stack.frames.iter().map(|at| stacks.functions[*at as usize].as_str()).collect()
        };
        assert_eq!(stacks.stacks.len(), 2);
        assert_eq!(names(&stacks.stacks[0]), ["net_rx_action", "ip_rcv", "tcp_v4_rcv"]);
        assert_eq!((stacks.stacks[0].samples, stacks.stacks[0].ns), (2, 200));
    }

    /// If a function ends in a call, its return address is the first address of the next function.
    #[test]
    fn return_address_after_a_final_call_belongs_to_the_caller() {
        let mut functions = Vec::new();
        let mut resolver = resolver();
        resolver.functions(&[0xffff_ffff_8100_0200, 0xffff_ffff_8100_0200], &mut functions);
        let names: Vec<&str> = functions.iter().map(|number| resolver.name(*number)).collect();
        assert_eq!(names, ["tcp_v4_rcv", "ip_rcv"]);
    }

    #[test]
    fn address_without_a_symbol_reloads_the_symbols() {
        let mut resolver = resolver();
        resolver.functions(&[IP], &mut Vec::new());
        assert!(!resolver.outdated);
        resolver.functions(&[7], &mut Vec::new());
        assert!(resolver.outdated);
        assert_eq!(resolver.name(None), UNKNOWN);
        let read = |symbols: &mut Symbols| {
            *symbols = Symbols::parse_for_tests(TEXT);
            Ok(())
        };
        resolver.renew(read).expect("symbols");
        resolver.functions(&[7], &mut Vec::new());
        assert!(!resolver.outdated, "the new symbols have none for this address either");
        resolver.functions(&[8], &mut Vec::new());
        assert!(resolver.outdated);
    }

    #[test]
    fn module_loaded_later_marks_symbols_outdated() {
        let mut resolver = resolver();
        resolver.functions(&[IP], &mut Vec::new());
        assert!(!resolver.outdated);
        assert!(resolver.symbols.see_modules("late 4096 0 - Live 0xffffffff81000100\n"));
        resolver.addresses.clear();
        let mut functions = Vec::new();
        resolver.functions(&[IP], &mut functions);
        assert_eq!((resolver.name(functions[0]), resolver.outdated), (UNKNOWN, true));
    }

    #[test]
    fn time_divided_among_samples_never_exceeds_the_total() {
        assert_eq!(share_out(1000, 1, 4), 250);
        assert_eq!(share_out(1000, 0, 0), 0);
        assert_eq!(share_out(u64::MAX, 3, 3), u64::MAX);
        assert_eq!((1..=3).map(|samples| share_out(100, samples, 6)).sum::<u64>(), 99);
    }
}
