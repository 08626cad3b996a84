use serde::{Deserialize, Serialize};

/// Outcome of the latest reading of a daemon's settings, as its status reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reload {
    /// Time of the reading, in seconds since 1970.
    pub time_s: f64,
    /// Reason why the settings of before stay in force. `None`: the new ones are.
    pub error: Option<String>,
}
