//! Values of policy files.

use std::time::Duration;

use millrace_kernel::prefix::{ParseError, Prefix};
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::kernel::Position;

/// Where the gate's watching program stands among others.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    First,
    Last,
}

impl From<Order> for Position {
    fn from(order: Order) -> Self {
        match order {
            Order::First => Self::First,
            Order::Last => Self::Last,
        }
    }
}

/// A UDP port.
#[derive(Clone, Copy)]
pub(super) struct Port(pub u16);

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let port = u16::deserialize(deserializer).ok().filter(|port| *port > 0);
        port.map(Self).ok_or_else(|| D::Error::custom("is a number, 1 to 65535"))
    }
}

/// A time as a number of seconds.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct Seconds(pub Duration);

impl TryFrom<f64> for Seconds {
    type Error = String;

    fn try_from(seconds: f64) -> Result<Self, String> {
        const MAX: f64 = 365.0 * 86_400.0;
        let time = Some(seconds).filter(|seconds| (0.0..=MAX).contains(seconds)).map(Duration::from_secs_f64);
        time.map(Self).ok_or_else(|| format!("is a number of seconds, 0 to {MAX}"))
    }
}

/// An address prefix that is blocked or allowed.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Listed(pub Prefix);

impl TryFrom<String> for Listed {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse().map(Self)
    }
}
