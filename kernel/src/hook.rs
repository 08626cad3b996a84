//! Hooks to which programs are attached, mechanisms to attach them, and the names of hooks and mechanisms in messages.

use std::{fmt, io};

use nix::libc;

/// A hook of TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelHook {
    /// The hook for received packets, before the network stack.
    Ingress,
    /// The hook for sent packets, after the network stack.
    Egress,
}

/// A mechanism to attach a program to TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// A TCX link (since Linux 6.6), which the kernel detaches when its last descriptor is closed.
    Tcx,
    /// A filter of the clsact qdisc, for older kernels.
    Clsact,
}

impl fmt::Display for KernelHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "TC ingress",
            Self::Egress => "TC egress",
        })
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "TCX",
            Self::Clsact => "clsact",
        })
    }
}

/// The point at which an XDP program sees a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum XdpMode {
    /// Native if the driver supports it, else generic.
    #[default]
    Auto,
    /// The driver calls the program before a socket buffer exists.
    Native,
    /// The network stack calls the program with a socket buffer. This works with every driver, but is slower.
    Generic,
}

impl fmt::Display for XdpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// Returns advice for the operator if attaching an XDP program has failed with `error`. Callers append the advice to
/// the text of the error.
pub fn remedy(error: &io::Error, mode: XdpMode) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => " (another XDP program is attached: `bpftool net` names it)",
        Some(libc::EEXIST) => " (another XDP program is attached in the other mode: `bpftool net` names it)",
        _ if mode == XdpMode::Native && is_for_want_of_support(error) => {
            " (the driver does not support XDP, or not at this MTU: mode generic works with every driver)"
        }
        _ => "",
    }
}

/// Returns a text that names the missing privilege, if the process may not open programs of another process.
pub fn needed_to_share(error: &io::Error) -> &'static str {
    if error.raw_os_error() == Some(libc::EPERM) { " (that needs CAP_SYS_ADMIN)" } else { "" }
}

/// Reports whether the error means that the driver does not support XDP at all, or not with the interface's MTU.
pub fn is_for_want_of_support(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE))
}
