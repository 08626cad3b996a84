//! Which engine the relay runs with.

use std::sync::Arc;

use millrace_transport::offload;
use parking_lot::Mutex;

/// The engine that runs, and why it is this one.
pub struct Engine {
    /// What was loaded at start-up; it forwards while it has interfaces.
    pub offload: Option<Arc<dyn offload::Engine>>,
    why_user: Mutex<String>,
}

impl Engine {
    pub fn user(reason: impl Into<String>) -> Self {
        Self { offload: None, why_user: Mutex::new(reason.into()) }
    }

    pub fn with(offload: Arc<dyn offload::Engine>) -> Self {
        Self { offload: Some(offload), why_user: Mutex::default() }
    }

    /// Why userspace sends, while it does so alone.
    pub fn set_reason(&self, reason: impl Into<String>) {
        *self.why_user.lock() = reason.into();
    }

    /// Where media is forwarded from, or should be.
    pub fn interfaces(&self) -> Vec<offload::Interface> {
        self.offload.as_ref().map(|offload| offload.interfaces()).unwrap_or_default()
    }

    /// Name and reason.
    pub fn describe(&self) -> (&'static str, String) {
        let attached = self.interfaces();
        if attached.is_empty() {
            return ("user", self.why_user.lock().clone());
        }
        let attached: Vec<_> = attached.iter().map(ToString::to_string).collect();
        ("kernel", format!("attached to {}", attached.join(", ")))
    }
}
