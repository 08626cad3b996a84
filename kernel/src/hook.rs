//! Places where programs are attached, and mechanisms to attach them, with their names for messages.

use std::{fmt, io};

use nix::libc;

/// A hook of TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelHook {
    /// Received packets, before the stack sees them.
    Ingress,
    /// Packets that are sent, behind the stack.
    Egress,
}

/// A mechanism to attach a program to TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// A link of TCX (Linux 6.6), which ends with its descriptor.
    Tcx,
    /// A filter of the clsact qdisc, on older kernels.
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
    /// The stack calls the program with a socket buffer: works everywhere, and is slower.
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

/// Returns advice for the operator, which follows the error.
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

/// Names the privilege that descriptors of another process' programs need.
pub fn needed_to_share(error: &io::Error) -> &'static str {
    if error.raw_os_error() == Some(libc::EPERM) { " (that needs CAP_SYS_ADMIN)" } else { "" }
}

/// Returns whether the driver does not support XDP, or not for packets of this size.
pub fn is_for_want_of_support(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE))
}
