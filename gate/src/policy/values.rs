//! Values of policy files.

use std::time::Duration;

use millrace_kernel::prefix::{ParseError, Prefix};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::kernel::TcPosition;

/// Whether the gate's TC program runs before or after all other programs at the interface's TC egress hook.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ProgramOrder {
    First,
    Last,
}

impl From<ProgramOrder> for TcPosition {
    fn from(order: ProgramOrder) -> Self {
        match order {
            ProgramOrder::First => Self::First,
            ProgramOrder::Last => Self::Last,
        }
    }
}

/// A UDP port.
#[derive(Clone, Copy)]
pub(super) struct UdpPort(pub u16);

impl<'de> Deserialize<'de> for UdpPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let port = u16::deserialize(deserializer).ok().filter(|port| *port > 0);
        port.map(Self).ok_or_else(|| D::Error::custom("must be a number from 1 to 65535"))
    }
}

/// A time as a number of seconds.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct PolicySeconds(pub Duration);

impl TryFrom<f64> for PolicySeconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        const MAX: f64 = 365.0 * 86_400.0;
        let time = Some(seconds).filter(|seconds| (0.0..=MAX).contains(seconds)).map(Duration::from_secs_f64);
        time.map(Self).ok_or_else(|| format!("must be a number of seconds from 0 to {MAX}"))
    }
}

/// An address prefix that is blocked or allowed.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct ListedPrefix(pub Prefix);

impl TryFrom<String> for ListedPrefix {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse().map(Self)
    }
}
