//! Which engine the relay runs with.

use std::sync::Arc;

use millrace_transport::engine::kernel::Kernel;
use parking_lot::Mutex;

/// The engine that runs, and why it is this one.
pub struct Engine {
    /// What was loaded at start-up; it forwards while it has interfaces.
    pub kernel: Option<Arc<Kernel>>,
    why_user: Mutex<String>,
}

impl Engine {
    pub fn user(reason: impl Into<String>) -> Self {
        Self { kernel: None, why_user: Mutex::new(reason.into()) }
    }

    pub fn kernel(kernel: Arc<Kernel>) -> Self {
        Self { kernel: Some(kernel), why_user: Mutex::default() }
    }

    /// Why userspace sends, while it does so alone.
    pub fn set_reason(&self, reason: impl Into<String>) {
        *self.why_user.lock() = reason.into();
    }

    /// Name and reason.
    pub fn describe(&self) -> (&'static str, String) {
        let attached = self.kernel.as_ref().map(|kernel| kernel.attached()).unwrap_or_default();
        if attached.is_empty() {
            return ("user", self.why_user.lock().clone());
        }
        let attached: Vec<_> = attached.iter().map(ToString::to_string).collect();
        ("kernel", format!("attached to {}", attached.join(", ")))
    }
}
