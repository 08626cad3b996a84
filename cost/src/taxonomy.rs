//! From function names to parts of events. The rules are data: `taxonomy.toml`, and what an operator adds.

use std::path::Path;
use std::{fs, io};

use serde::Deserialize;

use crate::report::{Event, OTHER};

/// How far outwards [`callers`](Rule::callers) are looked for: compilers put a helper in between, or do not.
const CALLERS_WITHIN: usize = 2;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: io::Error },
    /// Says line and column.
    #[error("{path}: {source}")]
    Syntax { path: String, source: Box<toml::de::Error> },
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Taxonomy {
    #[serde(default)]
    event: Vec<EventRule>,
    #[serde(default)]
    observer: Vec<ObserverRule>,
    #[serde(default)]
    part: Vec<Rule>,
    #[serde(default)]
    user: Vec<UserRule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    name: String,
    functions: Vec<Pattern>,
    #[serde(default)]
    callers: Vec<Pattern>,
    #[serde(default)]
    events: Vec<Event>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventRule {
    /// Absent: none.
    event: Option<Event>,
    functions: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ObserverRule {
    functions: Vec<Pattern>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct UserRule {
    name: String,
    functions: Vec<Pattern>,
}

/// Rules that name a function: positions in the taxonomy, first match first. Looked up once per function, since
/// there are hundreds of patterns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    parts: Vec<usize>,
    root: Root,
    program: bool,
}

/// What a function says about everything that it calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Root {
    #[default]
    Nothing,
    /// It is that event, or none.
    Event(Option<Event>),
    /// It is the observer.
    Observer,
}

/// Whose a stack is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// The innermost event that it is in.
    pub event: Option<Event>,
    /// On top of that the observer was at work: its programs, or what the kernel does to call programs. The latter
    /// may be for other programs, which cannot be told from a stack without them.
    pub observer: bool,
}

impl Taxonomy {
    /// The one that is built in.
    ///
    /// # Errors
    /// None, as a test shows.
    pub fn builtin() -> Result<Self, Error> {
        Self::parse("the built-in taxonomy", include_str!("taxonomy.toml"))
    }

    pub fn parse(path: &str, text: &str) -> Result<Self, Error> {
        let syntax = |source| Error::Syntax { path: path.to_owned(), source: Box::new(source) };
        toml::from_str(text).map_err(syntax)
    }

    /// The rules of a file, then those that are built in.
    pub fn extended(file: &Path) -> Result<Self, Error> {
        let path = file.display().to_string();
        let text = fs::read_to_string(file).map_err(|source| Error::Read { path: path.clone(), source })?;
        let (mut first, then) = (Self::parse(&path, &text)?, Self::builtin()?);
        first.event.extend(then.event);
        first.observer.extend(then.observer);
        first.part.extend(then.part);
        first.user.extend(then.user);
        Ok(first)
    }

    /// What there is to say of a kernel function, or of a BPF program's.
    pub fn rules(&self, function: &str) -> Rules {
        let parts = self.part.iter().enumerate().filter(|(_, rule)| any(&rule.functions, function));
        let observer = || self.observer.iter().any(|rule| any(&rule.functions, function));
        let root = match self.event.iter().find(|rule| any(&rule.functions, function)) {
            Some(rule) => Root::Event(rule.event),
            None if observer() => Root::Observer,
            None => Root::Nothing,
        };
        let program = function.starts_with(PROGRAM);
        Rules { parts: parts.map(|(at, _)| at).collect(), root, program }
    }

    /// The part of a stack within `event`, innermost function first; [`OTHER`] if no rule fits.
    pub fn part<'a>(
        &'a self,
        event: Event,
        stack: impl Iterator<Item = (&'a str, &'a Rules)> + Clone,
    ) -> &'a str {
        let mut frames = stack;
        while let Some((function, rules)) = frames.next() {
            if function.starts_with(PROGRAM) {
                // Its own functions are called one from the other, the outermost one is the program.
                let callers =
                    frames.map(|(caller, _)| caller).take_while(|caller| caller.starts_with(PROGRAM));
                return callers.last().unwrap_or(function);
            }
            let callers = frames.clone().take(CALLERS_WITHIN).map(|(caller, _)| caller);
            if let Some(rule) = self.fitting(event, rules, callers) {
                return &rule.name;
            }
        }
        OTHER
    }

    /// The first rule for a function that needs no caller; before that, those that do: the nearest caller decides.
    fn fitting<'a>(
        &self,
        event: Event,
        rules: &Rules,
        mut callers: impl Iterator<Item = &'a str>,
    ) -> Option<&Rule> {
        let in_event = |rule: &&Rule| rule.events.is_empty() || rule.events.contains(&event);
        let mut rules = rules.parts.iter().filter_map(|at| self.part.get(*at)).filter(in_event).peekable();
        let mut with_callers = Vec::new();
        while let Some(rule) = rules.next_if(|rule| !rule.callers.is_empty()) {
            with_callers.push(rule);
        }
        let by_caller = |caller| with_callers.iter().copied().find(|rule| any(&rule.callers, caller));
        callers.find_map(by_caller).or_else(|| rules.next())
    }

    /// Whose a stack is, innermost function first.
    pub fn owner<'a>(&self, stack: impl Iterator<Item = &'a Rules>) -> Owner {
        let (mut observer, mut others_program) = (false, false);
        for rules in stack {
            match rules.root {
                Root::Event(event) => return Owner { event, observer },
                // What calls programs, and has called one of somebody else.
                Root::Observer if !rules.program && others_program => {}
                Root::Observer => observer = true,
                Root::Nothing => others_program |= rules.program,
            }
        }
        Owner { event: None, observer }
    }

    /// The part of a user-mode stack, innermost function first.
    pub fn user_part<'a>(&self, mut stack: impl Iterator<Item = &'a str>) -> &str {
        let rule = stack.find_map(|function| self.user.iter().find(|rule| any(&rule.functions, function)));
        rule.map_or(APPLICATION, |rule| &rule.name)
    }
}

/// What the names of BPF programs begin with.
pub const PROGRAM: &str = "bpf:";
/// User mode that no rule knows.
pub const APPLICATION: &str = "application";
/// Kernel mode of a chosen process.
pub const SYSTEM_CALL: &str = "system call";

fn any(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

/// A name in which `*` stands for any characters, or none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
struct Pattern(String);

impl Pattern {
    fn matches(&self, name: &str) -> bool {
        let Some((start, rest)) = self.0.split_once('*') else { return self.0 == name };
        let Some(mut name) = name.strip_prefix(start) else { return false };
        let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        for piece in middle.split('*') {
            let Some(at) = name.find(piece) else { return false };
            name = name.get(at + piece.len()..).unwrap_or_default();
        }
        name.ends_with(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(event: Event, stack: &[&str]) -> String {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        let rules: Vec<Rules> = stack.iter().map(|function| taxonomy.rules(function)).collect();
        taxonomy.part(event, stack.iter().copied().zip(&rules)).to_owned()
    }

    fn owner(stack: &[&str]) -> Owner {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        let rules: Vec<Rules> = stack.iter().map(|function| taxonomy.rules(function)).collect();
        taxonomy.owner(rules.iter())
    }

    fn event(stack: &[&str]) -> Option<Event> {
        owner(stack).event
    }

    #[test]
    fn patterns() {
        for (pattern, name, want) in [
            ("ip_rcv", "ip_rcv", true),
            ("ip_rcv", "ip_rcv_core", false),
            ("ip_rcv*", "ip_rcv_core", true),
            ("ip_rcv*", "ip_rcv", true),
            ("ip_rcv*", "xip_rcv", false),
            ("*_poll", "veth_poll", true),
            ("*_poll", "veth_polls", false),
            ("__*_sys_send*", "__x64_sys_sendto", true),
            ("__*_sys_send*", "__sys_sendto", false),
            ("*::crypto::*", "a::crypto::b", true),
            ("*::crypto::*", "crypto::b", false),
            ("a*b*c", "abc", true),
            ("a*bb*c", "abc", false),
            ("a*a", "a", false),
            ("*", "", true),
        ] {
            assert_eq!(Pattern(pattern.to_owned()).matches(name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn the_innermost_function_with_a_rule_decides() {
        let receive =
            ["ip_rcv", "__netif_receive_skb_one_core", "process_backlog", "__napi_poll", "net_rx_action"];
        let with = |inner: &[&'static str]| [inner, &receive].concat();
        for (inner, want) in [
            (&[][..], "IP receive v4"),
            (
                &["fib_table_lookup", "ip_route_input_slow", "ip_route_input_noref", "ip_rcv_finish_core"],
                "IP receive v4",
            ),
            (&["ip_local_deliver_finish", "ip_local_deliver"], "local delivery v4"),
            (&["skb_segment", "tcp_gso_segment", "inet_gso_segment", "skb_mac_gso_segment"], "GSO"),
            (&["skb_gro_receive", "udp_gro_receive", "inet_gro_receive", "dev_gro_receive"], "GRO"),
            (&["nf_hook_slow"], "netfilter prerouting v4"),
            (&["nft_do_chain", "nft_do_chain_ipv4", "nf_hook_slow"], "netfilter prerouting v4"),
            (&["nf_hook_slow", "nf_hook"], "netfilter prerouting v4"),
            (&["nf_conntrack_in", "nf_hook_slow"], "conntrack"),
            (&["nf_hook_slow", "ip_local_deliver"], "netfilter local-in v4"),
            (&["nf_hook_slow", "ip_forward"], "netfilter forward v4"),
            (&["memcpy", "ip_forward_finish", "ip_forward"], "forwarding v4"),
            (&["tcp_v4_rcv", "ip_protocol_deliver_rcu"], "TCP"),
            (
                &["veth_xmit", "dev_hard_start_xmit", "__dev_queue_xmit", "ip_finish_output2"],
                "driver transmit",
            ),
            (&["bpf:gate_xdp", "do_xdp_generic"], "bpf:gate_xdp"),
            (
                &["memcpy", "bpf:admit", "bpf:gate_xdp", "bpf_prog_run_generic_xdp", "bpf:other"],
                "bpf:gate_xdp",
            ),
        ] {
            assert_eq!(part(Event::NetRx, &with(inner)), want, "{inner:?}");
        }
        assert_eq!(part(Event::NetRx, &["somebody", "knows"]), OTHER);
    }

    #[test]
    fn a_rule_may_be_for_some_events_only() {
        assert_eq!(part(Event::Send, &["rep_movs_alternative", "memdup"]), "copy from user");
        assert_eq!(part(Event::Receive, &["rep_movs_alternative", "memdup"]), "copy to user");
        assert_eq!(part(Event::NetRx, &["rep_movs_alternative", "memdup"]), OTHER);
    }

    #[test]
    fn stacks_tell_their_event() {
        let send = ["ip_output", "udp_sendmsg", "__sys_sendto", "__x64_sys_sendto", "do_syscall_64"];
        assert_eq!(event(&send), Some(Event::Send));
        let interrupted = [&["ip_rcv", "net_rx_action", "handle_softirqs"][..], &send].concat();
        assert_eq!(event(&interrupted), Some(Event::NetRx));
        let timer = [&["call_timer_fn", "run_timer_softirq", "handle_softirqs"][..], &send].concat();
        assert_eq!(event(&timer), None);
        assert_eq!(event(&["vfs_write", "do_syscall_64"]), None);
    }

    #[test]
    fn the_observer_is_on_top_of_an_event() {
        let send = ["__dev_queue_xmit", "udp_sendmsg", "__sys_sendto", "__x64_sys_sendto", "do_syscall_64"];
        let softirq = ["handle_softirqs", "do_softirq", "__local_bh_enable_ip"];
        let calls = ["bpf_trace_run2", "__bpf_trace_softirq_exit"];
        let of = |parts: &[&[&'static str]]| owner(&parts.concat());
        let in_send = |observer| Owner { event: Some(Event::Send), observer };
        for (parts, want) in [
            (&[&["bpf:cost_softirq_exit"][..], &calls, &softirq, &send][..], in_send(true)),
            (&[&["ktime_get_mono_fast_ns", "bpf:cost_softirq_exit"], &calls, &softirq, &send], in_send(true)),
            // A subprogram has a symbol of its own, which says nothing of whose it is.
            (&[&["bpf:number_of", "bpf:cost_softirq_exit"], &calls, &softirq, &send], in_send(true)),
            (&[&calls, &softirq, &send], in_send(true)),
            (&[&["syscall_exit_work", "do_syscall_64"]], Owner { event: None, observer: true }),
            // Another program, at the same tracepoint or in the stack.
            (&[&["bpf:audit_late"], &calls, &softirq, &send], in_send(false)),
            (&[&["bpf:cost_model", "tcf_classify"], &send], in_send(false)),
            (
                &[&["bpf:cost_softirq_entry"], &calls, &["bpf:relay_ingress", "tcf_classify"], &send],
                in_send(true),
            ),
            // A softirq on top of the observer is not the observer.
            (
                &[
                    &["ip_rcv", "net_rx_action", "handle_softirqs", "irq_exit_rcu"],
                    &["bpf:cost_sys_exit"],
                    &calls,
                ],
                Owner { event: Some(Event::NetRx), observer: false },
            ),
            (&[&["__audit_syscall_exit", "syscall_exit_work", "do_syscall_64"]], Owner::default()),
            (&[&send], in_send(false)),
            (&[], Owner::default()),
        ] {
            assert_eq!(of(parts), want, "{parts:?}");
        }
    }

    /// The rules name each of them: other programs may begin with the same word.
    #[test]
    fn the_observers_programs_are_the_observer() {
        let programs = crate::kernel::programs().expect("the object opens");
        assert!(programs.len() > 64, "{programs:?}");
        for program in programs {
            assert!(owner(&[&format!("{PROGRAM}{program}")]).observer, "{program}");
        }
    }

    #[test]
    fn user_space() {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        for (stack, want) in [
            (
                &["ring_core_0_17_chacha20_poly1305_seal_avx2", "quinn_proto::connection::Connection::poll"]
                    [..],
                "crypto",
            ),
            (&["memcpy", "quinn_proto::connection::Connection::poll", "main"], "transport"),
            (&["main"], APPLICATION),
            (&[], APPLICATION),
        ] {
            assert_eq!(taxonomy.user_part(stack.iter().copied()), want, "{stack:?}");
        }
    }

    #[test]
    fn an_operators_rules_come_first() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, "[[part]]\nname = \"mine\"\nfunctions = [\"tcp_v4_*\"]\n").expect("written");
        let taxonomy = Taxonomy::extended(file.path()).expect("it parses");
        let rules = ["tcp_v4_rcv", "tcp_ack"].map(|function| taxonomy.rules(function));
        let part = |function, rules| taxonomy.part(Event::NetRx, [(function, rules)].into_iter()).to_owned();
        assert_eq!(part("tcp_v4_rcv", &rules[0]), "mine");
        assert_eq!(part("tcp_ack", &rules[1]), "TCP");
    }

    #[test]
    fn mistakes_say_where() {
        let error =
            Taxonomy::parse("mine.toml", "[[part]]\nname = \"x\"\nfunction = []\n").expect_err("a mistake");
        let text = error.to_string();
        assert!(text.contains("mine.toml") && text.contains("line 3"), "{text}");
    }
}
