//! What can go wrong between userspace and the kernel.

use crate::hook::{Hook, Mechanism, Mode, needed_to_share, remedy};

/// Why a program could not be used, the kernel's or libbpf's own words included: nothing is left to a source, where it
/// would be said again (thiserror takes `r#source` for none).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open the embedded object {object}: {source:#}")]
    Open { object: &'static str, r#source: libbpf_rs::Error },
    #[error("the embedded object {object} has no {what}")]
    Missing { object: &'static str, what: &'static str },
    /// `log` is the end of what libbpf and the verifier said.
    #[error("the kernel refused {object}: {source:#}\n{log}")]
    Load { object: &'static str, r#source: libbpf_rs::Error, log: String },
    /// The verifier gives up (EAGAIN) when a signal comes, and libbpf asks five times.
    #[error(
        "the kernel did not get to the end of verifying {object} in five attempts, since signals interrupted each: start it \
         again, and do not trace, time or stop it meanwhile"
    )]
    Interrupted { object: &'static str },
    #[error("cannot attach to {hook} of interface {ifindex} by {mechanism}: {source}")]
    Interface { ifindex: i32, hook: Hook, mechanism: Mechanism, r#source: std::io::Error },
    #[error(
        "cannot attach to XDP of interface {ifindex} in mode {mode}: {source}{}",
        remedy(source, *mode)
    )]
    Xdp { ifindex: i32, mode: Mode, r#source: std::io::Error },
    /// One of a kind at a time; gate and grafts share an interface.
    #[error("interface {ifindex} has another {noun} at XDP already")]
    Turn { ifindex: i32, noun: &'static str },
    #[error(
        "cannot share XDP of interface {ifindex} with the process that has it: {source}{}",
        needed_to_share(source)
    )]
    Join { ifindex: i32, r#source: std::io::Error },
    #[error(
        "cannot attach to XDP of interface {ifindex} in mode generic: it is a {kind}, and the interfaces below it may merge \
         packets before; attach to those"
    )]
    Merged { ifindex: i32, kind: String },
    #[error(
        "cannot attach to XDP of interface {ifindex}: it is the end of a tunnel ({kind}), whose packets other interfaces may merge before; \
         end the tunnel on another host, and attach to the interface by which its packets come from there"
    )]
    Tunnel { ifindex: i32, kind: String },
    #[error(
        "cannot attach to XDP of interface {ifindex}: its packets begin with a header that the program does not read (hardware type \
         {hardware} of linux/if_arp.h)"
    )]
    Link { ifindex: i32, hardware: u16 },
    #[error(
        "cannot attach to interface {ifindex}: its packets have no Ethernet header, as those of tun, WireGuard and PPP, and only the \
         gate reads such"
    )]
    Bare { ifindex: i32 },
    #[error("cannot attach to tracepoint {tracepoint}: {source:#}")]
    Tracepoint { tracepoint: &'static str, r#source: libbpf_rs::Error },
    #[error("cannot attach to function {function}: {source:#}")]
    Function { function: &'static str, r#source: libbpf_rs::Error },
    #[error(
        "the kernel allows no programs on its functions, as in lockdown; method `system-calls` does without"
    )]
    NoFunctions,
    #[error("cannot sample CPU {cpu}: {source}")]
    Sampler { cpu: u32, r#source: std::io::Error },
    #[error("the kernel does not keep run-time statistics of BPF programs: {0}")]
    Statistics(std::io::Error),
    #[error("cannot read {what}: {source:#}")]
    Read { what: &'static str, r#source: libbpf_rs::Error },
    #[error("cannot change {what}: {source:#}")]
    Write { what: &'static str, r#source: libbpf_rs::Error },
    #[error("cannot map {what} into memory: {source}")]
    Memory { what: &'static str, r#source: std::io::Error },
    #[error("cannot get {what}: {source}")]
    Prepare { what: &'static str, r#source: std::io::Error },
    #[error("no room for more {what}")]
    Full { what: &'static str },
    /// [`Relay::settle`](crate::relay::Relay::settle) makes some.
    #[error("no room for more {what} before program runs have ended")]
    Unsettled { what: &'static str },
    #[error("{0}")]
    Config(&'static str),
    /// A gate's rules, by [`rules::Error`](crate::gate::rules::Error).
    #[error("{0}")]
    Rules(String),
    #[error("cannot run {program}: {source}")]
    Run { program: &'static str, r#source: std::io::Error },
    #[error("cannot get random numbers: {source}")]
    Random { r#source: std::io::Error },
    #[error(
        "this kernel does not wait for running programs when a map of maps changes: keys would be changed while they are in use"
    )]
    NoBarrier,
    /// Routes cannot be looked up on behalf of this host's own packets.
    #[error("cannot write {path}: {source}")]
    Sysctl { path: &'static str, r#source: std::io::Error },
}

impl Error {
    /// Whether this process lacks a privilege.
    pub fn is_denied(&self) -> bool {
        match self {
            Self::Load { source, .. } => source.kind() == libbpf_rs::ErrorKind::PermissionDenied,
            Self::Interface { source, .. } | Self::Join { source, .. } | Self::Sysctl { source, .. } => {
                source.kind() == std::io::ErrorKind::PermissionDenied
            }
            _ => false,
        }
    }
}
