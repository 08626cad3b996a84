//! Assigns sampled stacks to kinds of kernel work (events), such as softirqs, and to parts of the network stack, such
//! as TCP. The rules are lists of function names in `taxonomy.toml` and in the operator's own file.

use std::path::Path;
use std::{fs, io};

use serde::Deserialize;

use crate::report::{Event, OTHER};

/// Number of outer frames in which [`callers`](TaxonomyRule::callers) are searched. Two, since a compiler may or may
/// not inline a helper in between.
const CALLERS_WITHIN: usize = 2;

/// The reason why a file with taxonomy rules cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: io::Error },
    /// The file is no valid TOML. The message has the line and column.
    #[error("{path}: {source}")]
    Syntax { path: String, source: Box<toml::de::Error> },
}

/// Rules that assign a sampled stack to a kind of kernel work (event), such as a softirq, and to a part of the network
/// stack, such as TCP, by the stack's functions.
///
/// The first rule that matches counts. `taxonomy.toml` is built in and documents each table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Taxonomy {
    /// Rules that determine to which kind of kernel work, such as a softirq or sends, a stack belongs.
    #[serde(default)]
    event: Vec<EventRule>,
    /// Functions of the observer itself.
    #[serde(default)]
    observer: Vec<FunctionsRule>,
    /// Functions that are networking, whichever function calls them.
    #[serde(default)]
    networking: Vec<FunctionsRule>,
    /// Rules that determine to which part of the network stack, such as TCP, a kernel stack belongs.
    #[serde(default)]
    part: Vec<TaxonomyRule>,
    /// Rules that determine to which part of a program, such as `crypto`, a user-mode stack belongs.
    #[serde(default)]
    user: Vec<UserRule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaxonomyRule {
    /// Name of the part of the network stack, such as `TCP`.
    name: String,
    /// Name patterns of the functions that the rule matches.
    functions: Vec<NamePattern>,
    /// Name patterns of callers. If there are any, one of the next two outer frames must match.
    #[serde(default)]
    callers: Vec<NamePattern>,
    /// Kinds of kernel work (events), such as softirqs and sends, in which the rule applies; all if empty.
    #[serde(default)]
    events: Vec<Event>,
    /// True if the functions are not networking by themselves, because other subsystems call them too.
    #[serde(default)]
    generic: bool,
    /// True if the functions belong to AF_UNIX or netlink sockets.
    #[serde(default)]
    local: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventRule {
    /// The kind of kernel work to which the stack belongs. `None` if it belongs to none, not even [`Event::Kernel`].
    event: Option<Event>,
    /// Name patterns of the functions that the rule matches.
    functions: Vec<NamePattern>,
    /// True if the rule needs a networking function among the callees. Without one, the stack belongs to
    /// [`Event::Kernel`].
    #[serde(default)]
    networking: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionsRule {
    /// Name patterns of the functions that the rule matches.
    functions: Vec<NamePattern>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct UserRule {
    /// Name of the part of the program, such as `crypto`, to which the functions belong.
    name: String,
    /// Name patterns of the functions that the rule matches.
    functions: Vec<NamePattern>,
}

/// The rules that match a function. They are looked up once for each function, since there are hundreds of patterns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionRules {
    /// Indexes of the matching rules in [`Taxonomy::part`], in ascending order.
    parts: Vec<usize>,
    root: CallRoot,
    program: bool,
    networking: bool,
    local: bool,
}

/// Meaning of a function on a stack for the functions that it calls: the kind of kernel work (event) to which their
/// time belongs, or that it is the observer's own time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum CallRoot {
    /// The function does not determine to which kind of kernel work its callees belong.
    #[default]
    Nothing,
    /// The callees belong to this kind of kernel work, or to none. If `networking` is set, a networking function must
    /// be among them.
    Event { event: Option<Event>, networking: bool },
    /// The function is the observer's, so its callees count as the observer's time.
    Observer,
}

/// The kind of kernel work (event) to which a stack belongs, and whether the observer's BPF programs were running in
/// it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StackOwner {
    /// The innermost kind of kernel work in the stack, such as a softirq within a send. [`Event::Kernel`] if no
    /// function is networking; `None` in user mode and when idle.
    pub event: Option<Event>,
    /// True if the observer's BPF programs ran, or the kernel's code that calls BPF programs. That code may have called
    /// a program that is not the observer's. If the stack does not show the program, the time counts for the observer.
    pub observer: bool,
}

impl Taxonomy {
    /// Returns the built-in taxonomy.
    ///
    /// # Errors
    /// Fails only if the built-in text does not parse, which a test rules out.
    pub fn builtin() -> Result<Self, Error> {
        Self::parse("the built-in taxonomy", include_str!("taxonomy.toml"))
    }

    /// Parses rules. `path` appears in the error's text only.
    ///
    /// # Errors
    /// Fails if the text is not TOML, or has an unknown key.
    pub fn parse(path: &str, text: &str) -> Result<Self, Error> {
        let syntax = |source| Error::Syntax { path: path.to_owned(), source: Box::new(source) };
        toml::from_str(text).map_err(syntax)
    }

    /// Returns the rules of a file, followed by the built-in ones.
    pub fn extended(file: &Path) -> Result<Self, Error> {
        let path = file.display().to_string();
        let text = fs::read_to_string(file).map_err(|source| Error::Read { path: path.clone(), source })?;
        let mut first = Self::parse(&path, &text)?;
        let then = Self::builtin()?;
        first.event.extend(then.event);
        first.observer.extend(then.observer);
        first.networking.extend(then.networking);
        first.part.extend(then.part);
        first.user.extend(then.user);
        Ok(first)
    }

    /// Returns the rules for a kernel function, or for a function of a BPF program.
    pub fn rules(&self, function: &str) -> FunctionRules {
        let parts: Vec<usize> = (0..)
            .zip(&self.part)
            .filter(|(_, rule)| matches_any(&rule.functions, function))
            .map(|(at, _)| at)
            .collect();
        let among = |rules: &[FunctionsRule]| rules.iter().any(|rule| matches_any(&rule.functions, function));
        let root = match self.event.iter().find(|rule| matches_any(&rule.functions, function)) {
            Some(rule) => CallRoot::Event { event: rule.event, networking: rule.networking },
            None if among(&self.observer) => CallRoot::Observer,
            None => CallRoot::Nothing,
        };
        let of_parts =
            |is: fn(&TaxonomyRule) -> bool| parts.iter().filter_map(|at| self.part.get(*at)).any(is);
        FunctionRules {
            root,
            program: function.starts_with(PROGRAM),
            networking: of_parts(|rule| !rule.generic) || among(&self.networking),
            local: of_parts(|rule| rule.local),
            parts,
        }
    }

    /// Returns the part of the network stack, such as TCP, to which a sampled stack belongs, or [`OTHER`] if no rule
    /// matches. `event` is its kind of kernel work. The innermost function comes first.
    pub fn part<'a>(
        &'a self,
        event: Event,
        stack: impl Iterator<Item = (&'a str, &'a FunctionRules)> + Clone,
    ) -> &'a str {
        let mut frames = stack;
        while let Some((function, rules)) = frames.next() {
            if function.starts_with(PROGRAM) {
                // Subprograms of a BPF program have names too. If consecutive frames are of BPF code, the outermost of
                // them is the program itself.
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

    /// Returns the rule that applies to a function. The rules with a list of callers that come before the first rule
    /// without one are tried first, with the nearest caller before the next. If none of them matches, the first rule
    /// without callers applies.
    fn fitting<'a>(
        &self,
        event: Event,
        rules: &FunctionRules,
        mut callers: impl Iterator<Item = &'a str>,
    ) -> Option<&TaxonomyRule> {
        let in_event = |rule: &&TaxonomyRule| rule.events.is_empty() || rule.events.contains(&event);
        let mut rules = rules.parts.iter().filter_map(|at| self.part.get(*at)).filter(in_event).peekable();
        let mut with_callers = Vec::new();
        while let Some(rule) = rules.next_if(|rule| !rule.callers.is_empty()) {
            with_callers.push(rule);
        }
        let by_caller = |caller| with_callers.iter().copied().find(|rule| matches_any(&rule.callers, caller));
        callers.find_map(by_caller).or_else(|| rules.next())
    }

    /// Returns the kind of kernel work (event) to which a stack belongs, and whether the observer's BPF programs were
    /// running in it. The stack's innermost function comes first.
    pub fn owner<'a>(&self, stack: impl Iterator<Item = &'a FunctionRules>) -> StackOwner {
        let mut observer = false;
        let mut others_program = false;
        let mut networking = false;
        let mut local = false;
        let mut frames = 0;
        let mut event = Event::Sockets;
        let mut conditional = true;
        for rules in stack {
            frames += 1;
            networking |= rules.networking;
            local |= rules.local;
            match rules.root {
                CallRoot::Event { event: None, .. } => return StackOwner { event: None, observer },
                CallRoot::Event { event: Some(root), networking } => {
                    (event, conditional) = (root, networking);
                    break;
                }
                // The kernel's code that calls BPF programs has called a program here that is not the observer's.
                CallRoot::Observer if !rules.program && others_program => {}
                CallRoot::Observer => observer = true,
                CallRoot::Nothing => others_program |= rules.program,
            }
        }
        let event = match event {
            _ if frames == 0 => None,
            _ if conditional && !networking => Some(Event::Kernel),
            // Time in TUN devices, in io_uring's threads and in softirqs is not counted as `Local`, even if the socket
            // is AF_UNIX or netlink.
            Event::Send | Event::Receive | Event::Sockets | Event::Poll | Event::Workers if local => {
                Some(Event::Local)
            }
            event => Some(event),
        };
        StackOwner { event, observer }
    }

    /// Returns the part of a program, such as `crypto`, to which a user-mode stack belongs. The innermost function
    /// comes first.
    pub fn user_part<'a>(&self, mut stack: impl Iterator<Item = &'a str>) -> &str {
        let rule =
            stack.find_map(|function| self.user.iter().find(|rule| matches_any(&rule.functions, function)));
        rule.map_or(APPLICATION, |rule| &rule.name)
    }
}

/// The prefix of BPF programs' names among the names of functions and of network stack parts.
pub const PROGRAM: &str = "bpf:";
/// The name, in the breakdown of a process's CPU time, for user-mode stacks that no rule matches.
pub const APPLICATION: &str = "application";
/// The name, in the breakdown of a profiled process's CPU time, for time in kernel mode.
pub const SYSTEM_CALL: &str = "system call";

fn matches_any(patterns: &[NamePattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

/// A name in which `*` matches any number of characters.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
struct NamePattern(String);

impl NamePattern {
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
        let rules: Vec<FunctionRules> = stack.iter().map(|function| taxonomy.rules(function)).collect();
        taxonomy.part(event, stack.iter().copied().zip(&rules)).to_owned()
    }

    fn owner(stack: &[&str]) -> StackOwner {
        let taxonomy = Taxonomy::builtin().expect("it parses");
        let rules: Vec<FunctionRules> = stack.iter().map(|function| taxonomy.rules(function)).collect();
        taxonomy.owner(rules.iter())
    }

    fn event(stack: &[&str]) -> Option<Event> {
        owner(stack).event
    }

    #[test]
    fn function_patterns_match_whole_and_prefix_names() {
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
            assert_eq!(NamePattern(pattern.to_owned()).matches(name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn innermost_function_with_a_rule_determines_the_stack_part() {
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
    fn taxonomy_rule_may_apply_to_some_events_only() {
        assert_eq!(part(Event::Send, &["rep_movs_alternative", "memdup"]), "copy from user");
        assert_eq!(part(Event::Receive, &["rep_movs_alternative", "memdup"]), "copy to user");
        assert_eq!(part(Event::NetRx, &["rep_movs_alternative", "memdup"]), OTHER);
    }

    #[test]
    fn functions_of_a_stack_determine_its_event() {
        let send = ["ip_output", "udp_sendmsg", "__sys_sendto", "__x64_sys_sendto", "do_syscall_64"];
        assert_eq!(event(&send), Some(Event::Send));
        let interrupted = [&["ip_rcv", "net_rx_action", "handle_softirqs"][..], &send].concat();
        assert_eq!(event(&interrupted), Some(Event::NetRx));
        let timer = [&["call_timer_fn", "run_timer_softirq", "handle_softirqs"][..], &send].concat();
        assert_eq!(event(&timer), Some(Event::Kernel));
        let retransmits = [&["tcp_retransmit_timer"][..], &timer].concat();
        assert_eq!(event(&retransmits), Some(Event::Timers));
        assert_eq!(event(&["vfs_write", "do_syscall_64"]), Some(Event::Kernel));
    }

    /// Stacks from work that BPF programs do not time, such as timers or TUN devices, get the right kind of kernel work
    /// (event).
    #[test]
    fn stack_of_untimed_work_is_assigned_to_its_kernel_event() {
        let call =
            |inner: &[&'static str]| [inner, &["do_syscall_64", "entry_SYSCALL_64_after_hwframe"]].concat();
        let thread = |inner: &[&'static str]| [inner, &["kthread", "ret_from_fork"]].concat();
        for (stack, want) in [
            (
                call(&["ip_rcv", "netif_receive_skb", "tun_get_user", "tun_chr_write_iter", "vfs_write"]),
                Event::Devices,
            ),
            (
                vec!["tun_sendmsg", "handle_tx", "vhost_run_work_list", "vhost_task_fn", "ret_from_fork"],
                Event::Devices,
            ),
            (call(&["tcp_v4_connect", "__inet_stream_connect", "__sys_connect"]), Event::Sockets),
            (call(&["inet_csk_accept", "inet_accept", "do_accept", "__sys_accept4"]), Event::Sockets),
            (call(&["tcp_close", "inet_release", "__sock_release", "sock_close", "__fput"]), Event::Sockets),
            (call(&["kmem_cache_alloc_noprof", "sock_alloc_inode", "__sys_socket"]), Event::Sockets),
            (call(&["tcp4_seq_show", "seq_read_iter", "vfs_read"]), Event::Sockets),
            (call(&["tcp_poll", "sock_poll", "do_sys_poll"]), Event::Poll),
            (
                call(&["process_backlog", "__napi_poll", "napi_busy_loop", "ep_poll", "do_epoll_wait"]),
                Event::Poll,
            ),
            (
                call(&["process_backlog", "__napi_poll", "napi_busy_loop", "tcp_recvmsg", "sock_recvmsg"]),
                Event::Receive,
            ),
            (call(&["schedule", "ep_poll", "do_epoll_wait"]), Event::Kernel),
            // The code that wakes a process from `poll` or `epoll` is not counted as `Poll`. It belongs to the softirq
            // or call that wakes the process.
            (
                call(&["ep_poll_callback", "sock_def_readable", "tcp_data_queue", "net_rx_action"]),
                Event::NetRx,
            ),
            (call(&["vhost_poll_wakeup", "tun_net_xmit", "udp_sendmsg", "__sys_sendto"]), Event::Send),
            (thread(&["mutex_lock", "rtnl_lock", "linkwatch_event", "worker_thread"]), Event::Workers),
            (thread(&["rt_mutex_lock", "raw_spin_rq_lock", "worker_thread"]), Event::Kernel),
            (call(&["unix_poll", "sock_poll", "do_sys_poll"]), Event::Local),
            (call(&["unix_stream_connect", "__sys_connect"]), Event::Local),
            (call(&["unix_stream_sendmsg", "sock_write_iter", "vfs_write"]), Event::Local),
            (call(&["rtnl_newlink", "rtnetlink_rcv_msg", "netlink_rcv_skb", "__sys_sendto"]), Event::Local),
            (thread(&["netif_receive_skb_list", "cpu_map_kthread_run"]), Event::Workers),
            (thread(&["wg_packet_rx_poll", "process_one_work", "worker_thread"]), Event::Workers),
            (thread(&["mptcp_worker", "process_one_work", "worker_thread"]), Event::Workers),
            (
                thread(&["__napi_poll", "napi_threaded_poll_loop", "run_backlog_napi", "smpboot_thread_fn"]),
                Event::NetRx,
            ),
            (thread(&["ext4_writepages", "process_one_work", "worker_thread"]), Event::Kernel),
            (thread(&["virtqueue_add_sgs", "virtio_queue_rq", "worker_thread"]), Event::Kernel),
            (
                vec!["tcp_tsq_handler", "tasklet_action_common", "tasklet_action", "handle_softirqs"],
                Event::Timers,
            ),
            (vec!["do_anonymous_page", "asm_exc_page_fault"], Event::Kernel),
        ] {
            assert_eq!(event(&stack), Some(want), "{stack:?}");
        }
        assert_eq!(event(&["pv_native_safe_halt", "default_idle", "default_idle_call", "do_idle"]), None);
        assert_eq!(event(&[]), None);
    }

    #[test]
    fn tunnel_receive_and_transmit_are_separate_parts() {
        let receives = ["vxlan_rcv", "udp_queue_rcv_one_skb", "ip_rcv", "net_rx_action"];
        assert_eq!(part(Event::NetRx, &receives), "tunnel receive");
        let sends = ["vxlan_xmit_one", "vxlan_xmit", "dev_hard_start_xmit", "__dev_queue_xmit"];
        assert_eq!(part(Event::Send, &sends), "tunnel transmit");
        assert_eq!(part(Event::NetRx, &["macvlan_handle_frame", "__netif_receive_skb_core"]), "receive");
    }

    #[test]
    fn observer_functions_in_an_event_are_recognized() {
        let send = ["__dev_queue_xmit", "udp_sendmsg", "__sys_sendto", "__x64_sys_sendto", "do_syscall_64"];
        let softirq = ["handle_softirqs", "do_softirq", "__local_bh_enable_ip"];
        let calls = ["bpf_trace_run2", "__bpf_trace_softirq_exit"];
        let of = |parts: &[&[&'static str]]| owner(&parts.concat());
        let in_send = |observer| StackOwner { event: Some(Event::Send), observer };
        for (parts, want) in [
            (&[&["bpf:cost_softirq_exit"][..], &calls, &softirq, &send][..], in_send(true)),
            (&[&["ktime_get_mono_fast_ns", "bpf:cost_softirq_exit"], &calls, &softirq, &send], in_send(true)),
            // A subprogram has a symbol of its own, whose name does not show the program.
            (&[&["bpf:number_of", "bpf:cost_softirq_exit"], &calls, &softirq, &send], in_send(true)),
            (&[&calls, &softirq, &send], in_send(true)),
            (
                &[&["syscall_exit_work", "do_syscall_64"]],
                StackOwner { event: Some(Event::Kernel), observer: true },
            ),
            // In these stacks, a BPF program that is not the observer's runs at a tracepoint where the observer's run
            // too, or elsewhere in the stack.
            (&[&["bpf:audit_late"], &calls, &softirq, &send], in_send(false)),
            (&[&["bpf:cost_model", "tcf_classify"], &send], in_send(false)),
            (
                &[&["bpf:cost_softirq_entry"], &calls, &["bpf:relay_ingress", "tcf_classify"], &send],
                in_send(true),
            ),
            // A softirq that interrupts the observer does not belong to the observer.
            (
                &[
                    &["ip_rcv", "net_rx_action", "handle_softirqs", "irq_exit_rcu"],
                    &["bpf:cost_sys_exit"],
                    &calls,
                ],
                StackOwner { event: Some(Event::NetRx), observer: false },
            ),
            (
                &[&["__audit_syscall_exit", "syscall_exit_work", "do_syscall_64"]],
                StackOwner { event: Some(Event::Kernel), observer: false },
            ),
            (&[&send], in_send(false)),
            (&[], StackOwner::default()),
        ] {
            assert_eq!(of(parts), want, "{parts:?}");
        }
    }

    /// The rules must list each of the observer's programs, since other programs' names may begin with `cost_` too.
    #[test]
    fn every_observer_program_has_a_taxonomy_rule() {
        let programs = crate::kernel::programs().expect("the object opens");
        assert!(programs.len() > 64, "{programs:?}");
        for program in programs {
            assert!(owner(&[&format!("{PROGRAM}{program}")]).observer, "{program}");
        }
    }

    #[test]
    fn user_stack_is_classified_as_crypto_transport_or_application() {
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
    fn operators_taxonomy_rules_precede_built_in_ones() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, "[[part]]\nname = \"mine\"\nfunctions = [\"tcp_v4_*\"]\n").expect("written");
        let taxonomy = Taxonomy::extended(file.path()).expect("it parses");
        let rules = ["tcp_v4_rcv", "tcp_ack"].map(|function| taxonomy.rules(function));
        let part = |function, rules| taxonomy.part(Event::NetRx, [(function, rules)].into_iter()).to_owned();
        assert_eq!(part("tcp_v4_rcv", &rules[0]), "mine");
        assert_eq!(part("tcp_ack", &rules[1]), "TCP");
    }

    #[test]
    fn taxonomy_errors_name_their_line() {
        let error =
            Taxonomy::parse("mine.toml", "[[part]]\nname = \"x\"\nfunction = []\n").expect_err("a mistake");
        let text = error.to_string();
        assert!(text.contains("mine.toml") && text.contains("line 3"), "{text}");
    }
}
