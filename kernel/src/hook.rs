//! Where programs are attached, and by what: the words for it, in errors too.

use std::{fmt, io};

use nix::libc;

/// Of TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

/// By which a program is attached to TC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    Tcx,
    Clsact,
}

impl fmt::Display for Hook {
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

/// Where on the way of a packet an XDP program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Native where the driver can, else generic.
    #[default]
    Auto,
    /// In the driver, before there is a socket buffer.
    Native,
    /// In the stack, after that was made: works everywhere, and is slower.
    Generic,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Generic => "generic",
        })
    }
}

/// What an operator can do about an error, in words that follow it.
pub fn remedy(error: &io::Error, mode: Mode) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EBUSY) => " (another XDP program is there: `bpftool net` names it)",
        Some(libc::EEXIST) => " (another XDP program is there, in the other mode: `bpftool net` names it)",
        _ if mode == Mode::Native && is_for_want_of_support(error) => {
            " (the driver has no XDP, or none for packets of this size: mode generic works with every driver)"
        }
        _ => "",
    }
}

/// The right that descriptors of another process' programs need.
pub fn needed_to_share(error: &io::Error) -> &'static str {
    if error.raw_os_error() == Some(libc::EPERM) { " (that needs CAP_SYS_ADMIN)" } else { "" }
}

/// The answers of drivers without XDP, or without it for packets of this size.
pub fn is_for_want_of_support(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ERANGE))
}
