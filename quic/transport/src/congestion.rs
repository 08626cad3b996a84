//! The congestion controller given to quinn. Its window is the part of the shared congestion window that the data plane
//! leaves to quinn.

use std::{any::Any, sync::Arc, time::Instant};

use quinn::congestion::{Controller, ControllerFactory};

use crate::shared::SharedConnection;

/// Losses, acknowledgements and round trips of quinn's packets reach the shared recovery through the crypto traits, so
/// quinn's reports of these events are ignored here. Only the path MTU that quinn reports is used.
pub(crate) struct QuinnWindow(pub Arc<SharedConnection>);

impl ControllerFactory for QuinnWindow {
    fn build(self: Arc<Self>, _now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        self.0.on_mtu(current_mtu);
        self.clone_box()
    }
}

impl Controller for QuinnWindow {
    fn on_congestion_event(&mut self, _: Instant, _: Instant, _: bool, _: u64) {}

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.0.on_mtu(new_mtu);
    }

    fn window(&self) -> u64 {
        self.0.stack_window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self(Arc::clone(&self.0)))
    }

    fn initial_window(&self) -> u64 {
        self.window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
