//! Finds the names of user-mode functions of profiled processes, and counts their samples.

use std::collections::HashMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use blazesym::Pid;
use blazesym::symbolize::source::{Process, Source};
use blazesym::symbolize::{Input, Symbolizer};

use crate::report::{EventPart, FunctionCost, ProcessProfile};
use crate::share::share;
use crate::taxonomy::{SYSTEM_CALL, Taxonomy};

/// The name, in the breakdown of a process's CPU time, for stacks in which no function has a name.
const UNKNOWN: &str = "unknown";
/// The name, in the breakdown of a process's CPU time, for softirqs that interrupted the process. They are not its own
/// work.
const INTERRUPTED: &str = "interrupted by networking";
const TOP_FUNCTIONS: usize = 20;
/// Largest number of cached addresses.
const ADDRESSES: usize = 1 << 16;

pub struct Users {
    symbolizer: Symbolizer,
    processes: HashMap<u32, KnownProcess>,
    /// Number of cached addresses of all processes.
    addresses: usize,
}

/// Cached names of a process's functions, valid as long as its executable memory is unchanged.
#[derive(Default)]
struct KnownProcess {
    /// The value of [`memory`] for the process when the names were read. It changes with the process's executable code.
    memory: Option<u64>,
    /// True if the process's executable code was compared with `memory` since the last [`Users::refresh`].
    checked: bool,
    names: HashMap<u64, Option<Box<str>>>,
}

impl Default for Users {
    fn default() -> Self {
        let symbolizer = Symbolizer::builder().enable_code_info(false).enable_inlined_fns(false).build();
        Self { symbolizer, processes: HashMap::new(), addresses: 0 }
    }
}

impl Users {
    /// Forces a check of each process's memory map at its next stack. Call this before a buffer of stacks is read:
    /// since the last buffer, a process may have run another program, loaded a library or compiled functions, or its
    /// number may have been reused. If a buffer has samples from before and after such a change, all of them get the
    /// later names.
    pub fn refresh(&mut self) {
        self.processes.values_mut().for_each(|known| known.checked = false);
    }

    /// Returns the names of a stack's functions, innermost first; `None` for a function without a symbol.
    pub fn names(&mut self, pid: u32, stack: &[u64]) -> Vec<Option<&str>> {
        if self.addresses >= ADDRESSES {
            self.processes.clear();
            self.addresses = 0;
        }
        let Self { symbolizer, processes, addresses } = self;
        let known = processes.entry(pid).or_default();
        if !std::mem::replace(&mut known.checked, true) {
            let memory = memory(pid);
            // If the process has exited, its cached names are still valid for its samples.
            if memory.is_some() && memory != known.memory {
                *addresses -= known.names.len();
                known.names.clear();
                known.memory = memory;
            }
        }
        let new: Vec<u64> =
            stack.iter().copied().filter(|address| !known.names.contains_key(address)).collect();
        let before = known.names.len();
        look_up(symbolizer, pid, &new, &mut known.names);
        *addresses += known.names.len() - before;
        stack.iter().map(|address| known.names.get(address)?.as_deref()).collect()
    }
}

fn look_up(symbolizer: &Symbolizer, pid: u32, addresses: &[u64], into: &mut HashMap<u64, Option<Box<str>>>) {
    if addresses.is_empty() {
        return;
    }
    let source = Source::Process(Process::new(Pid::from(pid)));
    // The symbol lookup fails if the process has exited. The stack's addresses are then cached without names.
    let symbols = symbolizer.symbolize(&source, Input::AbsAddr(addresses)).unwrap_or_default();
    let mut symbols = symbols.into_iter();
    for address in addresses {
        let symbol = symbols.next();
        let name =
            symbol.as_ref().and_then(|symbol| symbol.as_sym()).map(|symbol| symbol.name.as_ref().into());
        into.insert(*address, name);
    }
}

/// Returns a number that changes when a process runs another program, loads or unloads code, or writes symbols of
/// compiled code to `/tmp/perf-PID.map`. Another process with the same PID has another number. `None` if the process
/// has exited or its memory map cannot be read.
fn memory(pid: u32) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok().filter(|maps| !maps.is_empty())?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process's name may contain parentheses and spaces. After it, the start time is the 20th field of
    // proc_pid_stat(5).
    let started = stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?;
    let compiled = fs::metadata(format!("/proc/{pid}/root/tmp/perf-{pid}.map")).ok();
    let mut hasher = DefaultHasher::new();
    let is_executable = |line: &&str| line.split(' ').nth(1).is_some_and(|rights| rights.contains('x'));
    maps.lines().filter(is_executable).for_each(|line| line.hash(&mut hasher));
    (started, compiled.map(|file| (file.len(), file.modified().ok()))).hash(&mut hasher);
    Some(hasher.finish())
}

/// The context in which a process was sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessPlace<'a> {
    /// A softirq that interrupted the process.
    Softirq,
    /// A system call or exception of the process.
    Kernel,
    /// User mode, with the names of functions, innermost first.
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
    pub fn add(&mut self, taxonomy: &Taxonomy, place: ProcessPlace<'_>) {
        self.samples += 1;
        let part = match place {
            ProcessPlace::Softirq => INTERRUPTED,
            ProcessPlace::Kernel => SYSTEM_CALL,
            ProcessPlace::User(functions) => {
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

    pub fn finish(&self, ns_per_sample: f64, period: Duration) -> ProcessProfile {
        let ns = |samples: u64| (samples as f64 * ns_per_sample) as u64;
        let mut parts: Vec<EventPart> = self
            .parts
            .iter()
            .map(|(name, samples)| EventPart {
                name: name.as_ref().to_owned(),
                ns: ns(*samples),
                share: share(ns(*samples), period),
                samples: *samples,
                interval: None,
            })
            .collect();
        parts.sort_unstable_by(|a, b| b.samples.cmp(&a.samples).then(a.name.cmp(&b.name)));
        let mut functions: Vec<FunctionCost> = self
            .functions
            .iter()
            .map(|(name, samples)| FunctionCost {
                name: name.as_ref().to_owned(),
                ns: ns(*samples),
                samples: *samples,
                interval: None,
            })
            .collect();
        functions.sort_unstable_by(|a, b| b.samples.cmp(&a.samples).then(a.name.cmp(&b.name)));
        functions.truncate(TOP_FUNCTIONS);
        ProcessProfile {
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

    /// Names belong to the code in memory. They change after exec, and when a process ID is reused.
    #[test]
    fn user_symbols_are_read_again_when_the_address_space_changed() {
        let mut users = Users::default();
        let pid = std::process::id();
        let address = memory as fn(u32) -> Option<u64> as usize as u64;
        let wrong = || HashMap::from([(address, Some("of another program".into()))]);
        users.processes.insert(pid, KnownProcess { memory: memory(pid), checked: false, names: wrong() });
        users.addresses = 1;
        assert_eq!(users.names(pid, &[address]), [Some("of another program")], "it is the same memory");
        users.processes.entry(pid).or_default().memory = Some(0);
        assert_eq!(users.names(pid, &[address]), [Some("of another program")], "it was looked at before");
        users.refresh();
        let name = users.names(pid, &[address])[0].unwrap_or_default().to_owned();
        assert!(name.contains("users::memory"), "{name}");
        assert_eq!(users.addresses, 1);
        // A process that has exited keeps its cached names.
        let gone = u32::MAX;
        users.processes.insert(gone, KnownProcess { memory: Some(0), checked: false, names: wrong() });
        assert_eq!(users.names(gone, &[address]), [Some("of another program")]);
    }

    /// A shell replaces itself by another program, which has the same process ID.
    #[test]
    fn exec_replaces_the_symbols_of_a_process() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read line; exec cat"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("a shell");
        millrace_testkit::wait_until(
            "the shell",
            || fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default(),
            |name| name == "sh\n",
        );
        let before = memory(child.id());
        let mut stdin = child.stdin.take().expect("a pipe");
        std::io::Write::write_all(&mut stdin, b"\n").expect("written");
        millrace_testkit::wait_until(
            "its exec",
            || memory(child.id()),
            |now| now.is_some() && *now != before,
        );
        drop(stdin);
        child.wait().expect("it ends");
        assert_eq!(memory(child.id()), None);
    }

    #[test]
    fn user_samples_become_a_profile() {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        let mut fold = ProfileFold::default();
        fold.add(&taxonomy, ProcessPlace::Kernel);
        fold.add(&taxonomy, ProcessPlace::Softirq);
        fold.add(
            &taxonomy,
            ProcessPlace::User(&[Some("memcpy"), None, Some("quinn::endpoint::Endpoint::poll")]),
        );
        fold.add(&taxonomy, ProcessPlace::User(&[Some("memcpy"), Some("main")]));
        fold.add(&taxonomy, ProcessPlace::User(&[None]));
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
    fn user_mode_addresses_are_resolved_to_function_names() {
        let mut users = Users::default();
        let address = a_function_with_a_name as *const () as u64;
        let names = users.names(std::process::id(), &[address, 1]);
        assert!(names[0].is_some_and(|name| name.ends_with("a_function_with_a_name")), "{names:?}");
        assert_eq!(names[1], None);
        assert_eq!(a_function_with_a_name(), 7);
    }
}
