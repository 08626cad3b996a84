//! The defences that are compared: programs or rules between the attackers and the server.

use std::{
    fs::File, io::Write as _, net::SocketAddr, os::fd::AsRawFd as _, path::PathBuf, process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use millrace_kernel::programs::{ProgramKind, RunTime};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::Value;

use super::super::process::BenchProcess;
use crate::lab::LabNode;
use crate::program::product;

const START_LIMIT: Duration = Duration::from_secs(10);
/// The directory where libxdp pins its programs (bpffs).
const BPF_FS: &str = "/sys/fs/bpf";
const NFT_TABLE: &str = "millrace_bench";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Defence {
    /// No defence
    None,
    /// The server closes connections over its limits after their handshake, as applications do
    User,
    /// The server ignores connections over its limits before their handshake
    UserEarly,
    /// Millrace's packet gate (XDP), which drops refused packets silently
    Gate,
    /// Millrace's packet gate (XDP), which answers refused packets
    GateAnswer,
    /// nftables at the input hook, with connection tracking
    Nftables,
    /// nftables before connection tracking and routing, which recognises Initials by their first byte
    NftablesRaw,
    /// nftables at the interface's own (ingress) hook
    NftablesIngress,
    /// xdp-filter (xdp-tools): drops every packet on the attackers' interface
    XdpFilter,
}

impl Defence {
    pub fn is_in_user_space(self) -> bool {
        matches!(self, Self::User | Self::UserEarly)
    }

    pub fn is_gate(self) -> bool {
        matches!(self, Self::Gate | Self::GateAnswer)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::User => "user",
            Self::UserEarly => "user-early",
            Self::Gate => "gate",
            Self::GateAnswer => "gate-answer",
            Self::Nftables => "nftables",
            Self::NftablesRaw => "nftables-raw",
            Self::NftablesIngress => "nftables-ingress",
            Self::XdpFilter => "xdp-filter",
        }
    }
}

/// Limits on clients' connections, which each defence enforces by its own means.
#[derive(Debug, Clone, Copy)]
pub enum DefenceLimits {
    /// Number of connections that one client may have.
    Connections(u32),
    /// Rates of new connections per second: of one client (also its burst), and of all clients together.
    New { client: u32, all: u32 },
}

impl DefenceLimits {
    /// Returns the arguments that make the server enforce these limits.
    pub fn user_arguments(self, defence: Defence) -> Vec<String> {
        let mut arguments = match self {
            Self::Connections(most) => vec!["--connections".into(), most.to_string()],
            Self::New { all, .. } => vec!["--new-per-second".into(), all.to_string()],
        };
        arguments.extend((defence == Defence::UserEarly).then(|| "--early".to_owned()));
        arguments
    }

    fn policy(self, port: u16, answer: bool) -> String {
        let rules = match self {
            Self::Connections(most) => format!("quota = {{ connections = {most}, answer = {answer} }}"),
            Self::New { client, all } => format!(
                "client_initials = {{ per_second = {client}, burst = {client} }}\n\
                 unknown_initials = {{ per_second = {all}, burst = {all} }}"
            ),
        };
        format!("[[scope]]\nname = \"web\"\nport = {port}\n[scope.rules]\n{rules}\n")
    }

    /// Returns nftables rules for these limits. The limit on all clients comes first, as in Millrace's packet gate:
    /// once it is exceeded, no client is looked up.
    fn nft_rules(self, hook: NftHook, port: u16) -> anyhow::Result<String> {
        let rules = match self {
            Self::Connections(_) if hook != NftHook::Input => {
                bail!("nftables cannot limit connections at a hook before connection tracking")
            }
            Self::Connections(most) => {
                format!(
                    "ct state new add @clients {{ ip saddr ct count over {most} }} counter name refused drop"
                )
            }
            Self::New { client, all } => format!(
                "limit rate over {all}/second burst {all} packets counter name refused drop\n\
                 update @clients {{ ip saddr limit rate over {client}/second burst {client} packets }} \
                     counter name refused drop"
            ),
        };
        let set_flags = match self {
            Self::Connections(_) => "flags dynamic",
            Self::New { .. } => "flags dynamic,timeout; timeout 10s",
        };
        Ok(format!(
            "table {} {NFT_TABLE} {{\n\
             counter refused {{ }}\n\
             set clients {{ type ipv4_addr; size 65535; {set_flags}; }}\n\
             chain guard {{ type filter hook {}; policy accept;\n\
             udp dport != {port} accept\n\
             {} accept\n\
             {rules}\n}}\n}}\n",
            hook.family(),
            hook.place(),
            hook.not_new(),
        ))
    }
}

/// The netfilter hook where nftables sees packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NftHook<'a> {
    Input,
    Raw,
    Ingress { device: &'a str },
}

impl NftHook<'_> {
    fn family(self) -> &'static str {
        match self {
            Self::Input | Self::Raw => "inet",
            Self::Ingress { .. } => "netdev",
        }
    }

    fn place(self) -> String {
        match self {
            Self::Input => "input priority filter".into(),
            Self::Raw => "prerouting priority raw".into(),
            Self::Ingress { device } => format!("ingress device {device} priority 0"),
        }
    }

    /// Returns the nftables match for packets that open no connection. With connection tracking, these are packets of
    /// answered flows. Without it, these are packets whose first four bits are not those of a version 1 Initial.
    fn not_new(self) -> &'static str {
        match self {
            Self::Input => "ct state established",
            Self::Raw | Self::Ingress { .. } => "@th,64,4 != 0xc",
        }
    }
}

/// The host that a defence protects, with its interfaces, the server's address, and a directory for files.
pub struct DefencePlace<'a> {
    pub node: &'a LabNode,
    /// Names of the server's interfaces; `attacked` is the one where attackers' packets arrive.
    pub devices: Vec<String>,
    pub attacked: String,
    pub server: SocketAddr,
    pub directory: PathBuf,
}

/// An installed defence. It is removed when this is dropped.
pub struct DefenceGuard<'a> {
    place: &'a DefencePlace<'a>,
    defence: Defence,
    gate: Option<BenchProcess>,
    xdp_filter: Option<XdpFilter>,
}

impl<'a> DefenceGuard<'a> {
    pub fn install(
        place: &'a DefencePlace<'a>,
        defence: Defence,
        limits: DefenceLimits,
    ) -> anyhow::Result<Self> {
        let mut guard = Self { place, defence, gate: None, xdp_filter: None };
        match defence {
            Defence::User if matches!(limits, DefenceLimits::New { .. }) => {
                bail!("a limit after the handshake has no effect: forged addresses never finish one")
            }
            Defence::GateAnswer if matches!(limits, DefenceLimits::New { .. }) => {
                bail!("answers would go to forged addresses: what they cost others is not measured")
            }
            Defence::None | Defence::User | Defence::UserEarly => {}
            Defence::Gate | Defence::GateAnswer => {
                guard.gate = Some(start_gate(place, limits, defence == Defence::GateAnswer)?);
            }
            Defence::Nftables => load_nftables(place, limits, NftHook::Input)?,
            Defence::NftablesRaw => load_nftables(place, limits, NftHook::Raw)?,
            Defence::NftablesIngress => {
                load_nftables(place, limits, NftHook::Ingress { device: &place.attacked })?;
            }
            Defence::XdpFilter => guard.xdp_filter = Some(load_xdp_filter(place, limits)?),
        }
        Ok(guard)
    }

    /// Returns how many packets the defence has refused; `None` if it does not count them.
    pub fn refused(&self) -> anyhow::Result<Option<u64>> {
        match self.defence {
            Defence::None | Defence::User | Defence::UserEarly => Ok(None),
            Defence::Gate | Defence::GateAnswer => self.refused_by_gate().map(Some),
            Defence::Nftables | Defence::NftablesRaw | Defence::NftablesIngress => {
                let json = run(self.place.node, "nft", &["-j", "list", "counters"], "")?;
                find(&serde_json::from_str(&json)?, "packets").context("nftables' counter").map(Some)
            }
            Defence::XdpFilter => {
                let filter = self.xdp_filter.as_ref().context("xdp-filter is not loaded")?;
                let text = filter.run(self.place.node, &["status"])?;
                Ok(text
                    .lines()
                    .find_map(|line| line.trim().strip_prefix("XDP_DROP"))
                    .and_then(|rest| rest.split_whitespace().next()?.replace(',', "").parse().ok()))
            }
        }
    }

    fn refused_by_gate(&self) -> anyhow::Result<u64> {
        let socket = self.place.directory.join("gate.sock");
        let program = product()?;
        let output = std::process::Command::new(program)
            .args(["gate", "status", "--json", "--socket"])
            .arg(socket)
            .output()?;
        ensure!(output.status.success(), "gate status: {}", String::from_utf8_lossy(&output.stderr));
        let status: millrace_gate::status::Status = serde_json::from_slice(&output.stdout)?;
        Ok(status.scopes.iter().flat_map(|scope| &scope.rules).map(|rule| rule.packets).sum())
    }

    /// Returns the process ID of Millrace's packet gate, if the gate is the installed defence.
    pub fn process(&self) -> Option<u32> {
        self.gate.as_ref().map(BenchProcess::id)
    }

    /// Returns the run time of the gate's packet programs so far. The kernel measures it only while BPF statistics are
    /// enabled.
    pub fn bpf_time(&self) -> anyhow::Result<Option<RunTime>> {
        let Some(gate) = self.process() else { return Ok(None) };
        let mut total = RunTime::list_functions(gate, Some(ProgramKind::Xdp))?;
        total += RunTime::list_functions(gate, Some(ProgramKind::Tc))?;
        Ok(Some(total))
    }
}

impl Drop for DefenceGuard<'_> {
    fn drop(&mut self) {
        // Errors are ignored: rules and programs that are left are removed with the server's namespace.
        let _ = match self.defence {
            Defence::None | Defence::User | Defence::UserEarly | Defence::Gate | Defence::GateAnswer => {
                return;
            }
            Defence::Nftables | Defence::NftablesRaw => delete_nftables(self.place, NftHook::Input),
            Defence::NftablesIngress => {
                delete_nftables(self.place, NftHook::Ingress { device: &self.place.attacked })
            }
            Defence::XdpFilter => match &self.xdp_filter {
                Some(filter) => filter.run(self.place.node, &["unload", &self.place.attacked]),
                None => return,
            },
        };
    }
}

fn start_gate(place: &DefencePlace<'_>, limits: DefenceLimits, answer: bool) -> anyhow::Result<BenchProcess> {
    let policy = place.directory.join("gate.toml");
    let socket = place.directory.join("gate.sock");
    std::fs::write(&policy, limits.policy(place.server.port(), answer))?;
    let mut command = place.node.command(product()?);
    command.args(["gate", "--http", "off", "--mode", "native", "--log-level", "warn", "--interface"]);
    command.arg(place.devices.join(",")).arg("--policy").arg(policy).arg("--socket").arg(&socket);
    let mut gate = BenchProcess::start("gate", command, &place.directory)?;
    let answers = || std::os::unix::net::UnixStream::connect(&socket).is_ok() && is_guarded(place);
    gate.wait_until("guarding", START_LIMIT, answers)?;
    Ok(gate)
}

/// Reports whether every interface of the server has an XDP program.
fn is_guarded(place: &DefencePlace<'_>) -> bool {
    place.devices.iter().all(|device| {
        let link = run(place.node, "ip", &["-d", "link", "show", "dev", device], "");
        link.is_ok_and(|text| text.contains("prog/xdp"))
    })
}

fn load_nftables(place: &DefencePlace<'_>, limits: DefenceLimits, hook: NftHook<'_>) -> anyhow::Result<()> {
    let rules = limits.nft_rules(hook, place.server.port())?;
    run(place.node, "nft", &["-f", "-"], &rules).map(drop).context("nftables")
}

fn delete_nftables(place: &DefencePlace<'_>, hook: NftHook<'_>) -> anyhow::Result<String> {
    run(place.node, "nft", &["delete", "table", hook.family(), NFT_TABLE], "")
}

/// Loads xdp-filter, which has lists of addresses but no limits. It is loaded without any entry on the interface where
/// only attackers' packets arrive, and drops all of them. That is its best case.
fn load_xdp_filter(place: &DefencePlace<'_>, limits: DefenceLimits) -> anyhow::Result<XdpFilter> {
    if let DefenceLimits::Connections(_) = limits {
        bail!("xdp-filter has lists of addresses and ports, but no limits on connections");
    }
    let filter = XdpFilter::new()?;
    let device = place.attacked.as_str();
    let arguments = ["load", "--mode", "native", "--policy", "deny", "--features", "ipv4,udp", device];
    filter.run(place.node, &arguments).context("xdp-filter (xdp-tools)")?;
    Ok(filter)
}

/// xdp-filter with a BPF file system of its own, since few machines have one mounted. The file system is in a mount
/// namespace that ends when this is dropped.
struct XdpFilter {
    mounts: File,
}

impl XdpFilter {
    fn new() -> anyhow::Result<Self> {
        // unshare(CLONE_NEWNS) changes only the calling thread, so a thread of its own makes the namespace.
        let made = std::thread::scope(|scope| scope.spawn(Self::make_mounts).join());
        let mounts = made.map_err(|_| anyhow!("the thread that mounts {BPF_FS} panicked"))??;
        Ok(Self { mounts })
    }

    fn make_mounts() -> anyhow::Result<File> {
        unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
            .context("cannot make the namespace's mounts private")?;
        mount(Some("bpf"), BPF_FS, Some("bpf"), MsFlags::empty(), none)
            .with_context(|| format!("cannot mount {BPF_FS}"))?;
        File::open("/proc/thread-self/ns/mnt").context("cannot open the mount namespace")
    }

    fn run(&self, node: &LabNode, arguments: &[&str]) -> anyhow::Result<String> {
        let mounts = format!("--mount=/proc/{}/fd/{}", std::process::id(), self.mounts.as_raw_fd());
        let mut all = vec![mounts.as_str(), "--", "xdp-filter"];
        all.extend(arguments);
        run(node, "nsenter", &all, "")
    }
}

/// Runs a program inside a node and returns its standard output.
pub fn run(node: &LabNode, program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    let mut child = node
        .command(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A write error is ignored: nft stops reading at the first faulty rule and reports that itself.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the first number with this key at any depth of the JSON value.
fn find(json: &Value, key: &str) -> Option<u64> {
    match json {
        Value::Object(fields) => {
            fields.get(key).and_then(Value::as_u64).or_else(|| fields.values().find_map(|it| find(it, key)))
        }
        Value::Array(items) => items.iter().find_map(|item| find(item, key)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_policies_are_valid() {
        for limits in [DefenceLimits::Connections(1), DefenceLimits::New { client: 10, all: 2000 }] {
            for answer in [false, true] {
                let policy = millrace_gate::Policy::parse(&limits.policy(4433, answer)).expect("a policy");
                let is_quota = matches!(limits, DefenceLimits::Connections(_));
                let answers = policy.rules.scopes.first().map(|scope| scope.policy.answers.len());
                assert_eq!(answers, Some(usize::from(answer && is_quota)));
            }
        }
    }

    #[test]
    fn only_the_nftables_input_hook_limits_connections() {
        let hooks = [NftHook::Input, NftHook::Raw, NftHook::Ingress { device: "eth0" }];
        let connections = hooks.map(|hook| DefenceLimits::Connections(1).nft_rules(hook, 4433).is_ok());
        assert_eq!(connections, [true, false, false]);
        for hook in hooks {
            let rules = DefenceLimits::New { client: 10, all: 2000 }.nft_rules(hook, 4433).expect("rules");
            let at = |what: &str| rules.find(what).unwrap_or_else(|| panic!("{what} in {rules}"));
            assert!(
                at("dport != 4433") < at("over 2000/second") && at("over 2000/second") < at("over 10/second")
            );
        }
    }

    #[test]
    fn numbers_in_nested_json_are_found() {
        let json =
            serde_json::json!({"nftables": [{"a": 1}, {"counter": {"name": "refused", "packets": 7}}]});
        assert_eq!(find(&json, "packets"), Some(7));
        assert_eq!(find(&json, "bytes"), None);
    }
}
