//! The choice of the engine that sends media: the kernel (`kernel`) or only userspace (`user`).

use std::sync::Arc;

use millrace_transport::offload;
use parking_lot::Mutex;

/// The engine that sends media (`kernel` or `user`), and the reason why it was chosen.
pub struct RelayEngine {
    /// The offload, which forwards media in the kernel, if it was loaded at start-up. It forwards only while it is
    /// attached to at least one network interface.
    pub offload: Option<Arc<dyn offload::OffloadEngine>>,
    why_user: Mutex<String>,
}

impl RelayEngine {
    /// Makes an engine without an offload, with which userspace sends every packet. `reason` appears in the relay's
    /// status.
    pub fn user(reason: impl Into<String>) -> Self {
        Self { offload: None, why_user: Mutex::new(reason.into()) }
    }

    /// Makes an engine with this offload. While the offload is attached to no interface, the status shows the reason
    /// set by [`Self::set_reason`].
    pub fn with(offload: Arc<dyn offload::OffloadEngine>) -> Self {
        Self { offload: Some(offload), why_user: Mutex::default() }
    }

    /// Sets the reason that the status shows while userspace sends every packet.
    pub fn set_reason(&self, reason: impl Into<String>) {
        *self.why_user.lock() = reason.into();
    }

    /// Returns the network interfaces that the offload is attached to, or should be attached to.
    pub fn interfaces(&self) -> Vec<offload::OffloadInterface> {
        self.offload.as_ref().map(|offload| offload.interfaces()).unwrap_or_default()
    }

    /// Returns the name of the engine in use and the reason why the relay uses it.
    pub fn describe(&self) -> (&'static str, String) {
        let attached = self.interfaces();
        if attached.is_empty() {
            return ("user", self.why_user.lock().clone());
        }
        let attached: Vec<_> = attached.iter().map(ToString::to_string).collect();
        ("kernel", format!("attached to {}", attached.join(", ")))
    }
}
