//! Errors of this crate's operations.

use crate::hook::{KernelHook, Mechanism, XdpMode, needed_to_share, remedy};

/// The reason why a BPF program cannot be used, with the message of the kernel or libbpf. Fields are named `r#source`,
/// which `thiserror` does not recognise as the source of the error. Otherwise an error chain would print that message
/// twice.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("cannot open the embedded object {object}: {source:#}")]
    Open { object: &'static str, r#source: libbpf_rs::Error },
    #[error("the embedded object {object} has no {what}")]
    Missing { object: &'static str, what: &'static str },
    /// `log` is the last part of the output of libbpf and the verifier.
    #[error("the kernel refused {object}: {source:#}\n{log}")]
    Load { object: &'static str, r#source: libbpf_rs::Error, log: String },
    /// The verifier returned EAGAIN, as it does when a signal arrives, in all of libbpf's five attempts.
    #[error(
        "the kernel did not get to the end of verifying {object} in five attempts, because signals interrupted each: \
         start it again, and do not trace, profile or stop it during start-up"
    )]
    Interrupted { object: &'static str },
    #[error("cannot attach to {hook} of interface {ifindex} by {mechanism}: {source}")]
    Interface { ifindex: i32, hook: KernelHook, mechanism: Mechanism, r#source: std::io::Error },
    #[error(
        "cannot attach to XDP of interface {ifindex} in mode {mode}: {source}{}",
        remedy(source, *mode)
    )]
    Xdp { ifindex: i32, mode: XdpMode, r#source: std::io::Error },
    /// Another process already uses XDP on the interface for the same product: the gate, or packet grafts. An interface
    /// may have one of each.
    #[error("interface {ifindex} has another {noun} at XDP already")]
    Turn { ifindex: i32, noun: &'static str },
    #[error(
        "cannot share XDP of interface {ifindex} with the process that has it: {source}{}",
        needed_to_share(source)
    )]
    Join { ifindex: i32, r#source: std::io::Error },
    #[error(
        "cannot attach to XDP of interface {ifindex} in mode generic: it is a {kind}, and the interfaces below it may merge \
         packets first; attach to those"
    )]
    Merged { ifindex: i32, kind: String },
    #[error(
        "cannot attach to XDP of interface {ifindex}: it is the end of a tunnel ({kind}), whose packets other interfaces may merge first; \
         end the tunnel on another host, and attach to the interface by which its packets come from there"
    )]
    Tunnel { ifindex: i32, kind: String },
    #[error(
        "cannot attach to XDP of interface {ifindex}: its packets begin with a header that the program does not read (hardware type \
         {hardware} of linux/if_arp.h)"
    )]
    Link { ifindex: i32, hardware: u16 },
    #[error(
        "cannot attach to interface {ifindex}: its packets have no Ethernet header (tun, WireGuard, PPP), and only the \
         gate reads such packets"
    )]
    Bare { ifindex: i32 },
    #[error("cannot attach to tracepoint {tracepoint}: {source:#}")]
    Tracepoint { tracepoint: &'static str, r#source: libbpf_rs::Error },
    #[error("cannot attach to function {function}: {source:#}")]
    Function { function: &'static str, r#source: libbpf_rs::Error },
    #[error(
        "the kernel allows no programs on its functions (lockdown mode); use method `system-calls`, which needs none"
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
    #[error("the kernel's table has no room for more {what}")]
    Full { what: &'static str },
    /// The BPF map that `what` names is full of entries that programs may still use. `RelayProgram::settle` of
    /// `millrace-relay-kernel` frees them once the present runs of the programs have ended.
    #[error("no room for more {what} before program runs have ended")]
    Unsettled { what: &'static str },
    #[error("{0}")]
    Config(&'static str),
    /// A fault in a gate's rules: the text of `rules::Error` of `millrace-gate`.
    #[error("{0}")]
    Rules(String),
    #[error("cannot run {program}: {source}")]
    Run { program: &'static str, r#source: std::io::Error },
    #[error("cannot get random numbers from the kernel: {source}")]
    Random { r#source: std::io::Error },
    #[error(
        "this kernel does not wait for running programs when a map of maps changes, so keys would change while they are in use"
    )]
    NoBarrier,
    /// A sysctl cannot be set that BPF programs need to look up the routes of packets that they send from this host.
    #[error("cannot write {path}: {source}")]
    Sysctl { path: &'static str, r#source: std::io::Error },
}

impl Error {
    /// Reports whether the operation failed because this process lacks a privilege.
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
