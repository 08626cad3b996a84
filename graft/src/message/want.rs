//! What an application asks for.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Asked for as a service, though it is the session's and no graft's.
pub const ENCRYPTION: &str = "encryption";
/// More are none that there are.
const SERVICES_MAX: usize = 16;
const SERVICE_BYTES_MAX: usize = 32;

/// Services by their names (`reliability`, `partial-order`, ...: docs/messages.md has them), and how well.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Want {
    pub services: BTreeSet<String>,
    pub qos: Qos,
    /// When it is not kept to, another graft may come that does.
    pub adapt: bool,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Qos {
    /// One way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_delay_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_throughput_mbit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_loss_percent: Option<f64>,
}

impl Qos {
    pub fn max_delay(&self) -> Option<Duration> {
        self.max_delay_ms.map(|ms| Duration::from_millis(ms.into()))
    }
}

impl Want {
    /// # Errors
    /// What no path and no graft could give meaning to.
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
    fn numbers_are_numbers() {
        for (value, is_good) in
            [(0.0, true), (1.5, true), (-1.0, false), (f64::NAN, false), (f64::INFINITY, false)]
        {
            let (loss, rate) = (Some(value), Some(value));
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
