//! User-mode functions of chosen processes.

use std::collections::HashMap;
use std::time::Duration;

use blazesym::Pid;
use blazesym::symbolize::source::{Process, Source};
use blazesym::symbolize::{Input, Symbolizer};

use crate::report::{Function, Part, Profile};
use crate::share::share;
use crate::taxonomy::{SYSTEM_CALL, Taxonomy};

/// A stack in which nothing has a name may be anything.
const UNKNOWN: &str = "unknown";
/// Softirqs that interrupt a process are not its own doing.
const INTERRUPTED: &str = "interrupted by networking";
const TOP_FUNCTIONS: usize = 20;
/// Addresses that are remembered.
const ADDRESSES: usize = 1 << 16;

pub struct Users {
    symbolizer: Symbolizer,
    names: HashMap<(u32, u64), Option<Box<str>>>,
}

impl Default for Users {
    fn default() -> Self {
        let symbolizer = Symbolizer::builder().enable_code_info(false).enable_inlined_fns(false).build();
        Self { symbolizer, names: HashMap::new() }
    }
}

impl Users {
    /// Names of a stack's functions, innermost first; `None` where the process has no symbol.
    pub fn names(&mut self, pid: u32, stack: &[u64]) -> Vec<Option<&str>> {
        if self.names.len() >= ADDRESSES {
            self.names.clear();
        }
        let new: Vec<u64> =
            stack.iter().copied().filter(|address| !self.names.contains_key(&(pid, *address))).collect();
        self.look_up(pid, &new);
        stack.iter().map(|address| self.names.get(&(pid, *address))?.as_deref()).collect()
    }

    fn look_up(&mut self, pid: u32, addresses: &[u64]) {
        if addresses.is_empty() {
            return;
        }
        let source = Source::Process(Process::new(Pid::from(pid)));
        // It fails as a whole when the process is gone.
        let symbols = self.symbolizer.symbolize(&source, Input::AbsAddr(addresses)).unwrap_or_default();
        let mut symbols = symbols.into_iter();
        for address in addresses {
            let symbol = symbols.next();
            let name =
                symbol.as_ref().and_then(|symbol| symbol.as_sym()).map(|symbol| symbol.name.as_ref().into());
            self.names.insert((pid, *address), name);
        }
    }
}

/// Where a process was when it was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place<'a> {
    /// In a softirq that interrupted it.
    Softirq,
    Kernel,
    /// Functions, innermost first.
    User(&'a [Option<&'a str>]),
}

/// The samples of one process in one period.
#[derive(Debug, Default)]
pub struct ProfileFold {
    samples: u64,
    user_samples: u64,
    unknown: u64,
    parts: HashMap<Box<str>, u64>,
    functions: HashMap<Box<str>, u64>,
}

impl ProfileFold {
    pub fn add(&mut self, taxonomy: &Taxonomy, place: Place<'_>) {
        self.samples += 1;
        let part = match place {
            Place::Softirq => INTERRUPTED,
            Place::Kernel => SYSTEM_CALL,
            Place::User(functions) => {
                self.user_samples += 1;
                match functions.iter().flatten().next() {
                    Some(innermost) => {
                        *self.functions.entry((*innermost).into()).or_default() += 1;
                        taxonomy.user_part(functions.iter().flatten().copied())
                    }
                    None => {
                        self.unknown += 1;
                        UNKNOWN
                    }
                }
            }
        };
        *self.parts.entry(part.into()).or_default() += 1;
    }

    pub fn finish(&self, ns_per_sample: f64, period: Duration) -> Profile {
        let ns = |samples: u64| (samples as f64 * ns_per_sample) as u64;
        let mut parts: Vec<Part> = self
            .parts
            .iter()
            .map(|(name, samples)| Part {
                name: name.as_ref().to_owned(),
                ns: ns(*samples),
                share: share(ns(*samples), period),
                samples: *samples,
            })
            .collect();
        parts.sort_unstable_by(|a, b| b.samples.cmp(&a.samples).then(a.name.cmp(&b.name)));
        let mut functions: Vec<Function> = self
            .functions
            .iter()
            .map(|(name, samples)| Function {
                name: name.as_ref().to_owned(),
                ns: ns(*samples),
                samples: *samples,
            })
            .collect();
        functions.sort_unstable_by(|a, b| b.samples.cmp(&a.samples).then(a.name.cmp(&b.name)));
        functions.truncate(TOP_FUNCTIONS);
        Profile {
            samples: self.samples,
            user_samples: self.user_samples,
            parts,
            functions,
            unknown_samples: self.unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_a_profile() {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        let mut fold = ProfileFold::default();
        fold.add(&taxonomy, Place::Kernel);
        fold.add(&taxonomy, Place::Softirq);
        fold.add(&taxonomy, Place::User(&[Some("memcpy"), None, Some("quinn::endpoint::Endpoint::poll")]));
        fold.add(&taxonomy, Place::User(&[Some("memcpy"), Some("main")]));
        fold.add(&taxonomy, Place::User(&[None]));
        let profile = fold.finish(1000.0, Duration::from_micros(10));
        let parts: Vec<_> = profile.parts.iter().map(|part| (part.name.as_str(), part.samples)).collect();
        assert_eq!(
            parts,
            [
                ("application", 1),
                ("interrupted by networking", 1),
                ("system call", 1),
                ("transport", 1),
                ("unknown", 1)
            ]
        );
        assert_eq!((profile.samples, profile.user_samples, profile.unknown_samples), (5, 3, 1));
        assert_eq!((profile.functions[0].name.as_str(), profile.functions[0].ns), ("memcpy", 2000));
        assert!((profile.parts[0].share - 0.1).abs() < 1e-9);
    }

    #[inline(never)]
    fn a_function_with_a_name() -> u64 {
        std::hint::black_box(7)
    }

    #[test]
    fn functions_of_this_process_have_names() {
        let mut users = Users::default();
        let address = a_function_with_a_name as *const () as u64;
        let names = users.names(std::process::id(), &[address, 1]);
        assert!(names[0].is_some_and(|name| name.ends_with("a_function_with_a_name")), "{names:?}");
        assert_eq!(names[1], None);
        assert_eq!(a_function_with_a_name(), 7);
    }
}
