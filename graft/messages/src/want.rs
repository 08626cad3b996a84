//! The services and the quality that an application requests.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Name of encryption as a service. Sessions provide encryption themselves, whatever packet functions they use.
pub const ENCRYPTION: &str = "encryption";
/// Most services that a request may name: more than the number of services that exist.
const SERVICES_MAX: usize = 16;
const SERVICE_BYTES_MAX: usize = 32;

/// A request for services by name (`reliability`, `partial-order`, ..., see docs/guide/messages.md) and for a
/// quality.
///
/// ```
/// use millrace_messages::{Qos, Want};
///
/// let qos = Qos { max_delay_ms: Some(200), ..Qos::default() };
/// let want = Want { services: ["reliability".to_owned()].into(), qos, adapt: true };
/// assert_eq!(want.check(), Ok(()));
/// ```
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Want {
    /// Names of the requested transport services.
    pub services: BTreeSet<String>,
    /// The requested quality.
    pub qos: Qos,
    /// True if the daemons may change to another graft (list of packet functions) when the present one does not provide
    /// the requested quality.
    pub adapt: bool,
}

/// A requested quality. A field that is `None` requests nothing.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Qos {
    /// Longest acceptable delay in one direction, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_delay_ms: Option<u32>,
    /// Lowest acceptable throughput, in Mbit/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_throughput_mbit: Option<f64>,
    /// Largest acceptable share of lost messages, in per cent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_loss_percent: Option<f64>,
}

impl Qos {
    /// Returns the longest acceptable delay in one direction.
    pub fn max_delay(&self) -> Option<Duration> {
        self.max_delay_ms.map(|ms| Duration::from_millis(ms.into()))
    }
}

impl Want {
    /// Checks the numbers and names of the request.
    ///
    /// # Errors
    /// A number is negative or not finite, or there are too many names or too long ones.
    pub fn check(&self) -> Result<(), String> {
        let is_positive = |value: Option<f64>| value.is_none_or(|value| value.is_finite() && value >= 0.0);
        if !is_positive(self.qos.min_throughput_mbit) {
            return Err("min_throughput is a number of Mbit/s, and not negative".to_owned());
        }
        if !is_positive(self.qos.max_loss_percent) {
            return Err("max_loss is a number of per cent, and not negative".to_owned());
        }
        if self.services.len() > SERVICES_MAX
            || self.services.iter().any(|name| name.len() > SERVICE_BYTES_MAX)
        {
            return Err(format!(
                "services are at most {SERVICES_MAX} names of at most {SERVICE_BYTES_MAX} bytes"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_or_infinite_service_limits_are_refused() {
        for (value, is_good) in
            [(0.0, true), (1.5, true), (-1.0, false), (f64::NAN, false), (f64::INFINITY, false)]
        {
            let loss = Some(value);
            let rate = Some(value);
            let qos = Qos { max_loss_percent: loss, ..Qos::default() };
            assert_eq!(Want { qos, ..Want::default() }.check().is_ok(), is_good);
            let qos = Qos { min_throughput_mbit: rate, ..Qos::default() };
            assert_eq!(Want { qos, ..Want::default() }.check().is_ok(), is_good);
        }
        let services = (0..17).map(|at| at.to_string()).collect();
        assert!(Want { services, ..Want::default() }.check().is_err());
        let services = ["x".repeat(33)].into();
        assert!(Want { services, ..Want::default() }.check().is_err());
    }
}
