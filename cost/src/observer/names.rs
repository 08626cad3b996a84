//! Conversions between the types of [`crate::kernel`] and those of reports.

use crate::kernel;

use crate::report::{Event, MissingMeasurement, ReportMethod};

impl From<kernel::KernelEvent> for Event {
    fn from(event: kernel::KernelEvent) -> Self {
        match event {
            kernel::KernelEvent::NetRx => Self::NetRx,
            kernel::KernelEvent::NetTx => Self::NetTx,
            kernel::KernelEvent::Send => Self::Send,
            kernel::KernelEvent::Receive => Self::Receive,
            kernel::KernelEvent::IoUring => Self::IoUring,
            kernel::KernelEvent::Local => Self::Local,
        }
    }
}

/// Returns the kind of kernel work that the BPF programs time for this event, or `None` if `event` is only sampled.
pub(super) fn timed(event: Event) -> Option<kernel::KernelEvent> {
    kernel::KernelEvent::ALL.into_iter().find(|timed| Event::from(*timed) == event)
}

impl From<kernel::TimingMethod> for ReportMethod {
    fn from(method: kernel::TimingMethod) -> Self {
        match method {
            kernel::TimingMethod::Functions => Self::Functions,
            kernel::TimingMethod::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<ReportMethod> for kernel::TimingMethod {
    fn from(method: ReportMethod) -> Self {
        match method {
            ReportMethod::Functions => Self::Functions,
            ReportMethod::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<kernel::MissingPoint> for MissingMeasurement {
    fn from(missing: kernel::MissingPoint) -> Self {
        Self::new(Some(missing.event.into()), missing.what, missing.reason)
    }
}
