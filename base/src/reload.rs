use serde::{Deserialize, Serialize};

/// Outcome of the latest reload of a daemon's settings, as its status reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reload {
    /// Time of the reload, in seconds since 1970.
    pub time_s: f64,
    /// Reason why the reload failed and the previous settings stay in force. `None`: the new settings are in force.
    pub error: Option<String>,
}
