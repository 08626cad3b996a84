//! What the kernel side and reports call the same things.

use crate::kernel;

use crate::report::{Event, Method, Missing};

impl From<kernel::Event> for Event {
    fn from(event: kernel::Event) -> Self {
        match event {
            kernel::Event::NetRx => Self::NetRx,
            kernel::Event::NetTx => Self::NetTx,
            kernel::Event::Send => Self::Send,
            kernel::Event::Receive => Self::Receive,
            kernel::Event::IoUring => Self::IoUring,
        }
    }
}

impl From<Event> for kernel::Event {
    fn from(event: Event) -> Self {
        match event {
            Event::NetRx => Self::NetRx,
            Event::NetTx => Self::NetTx,
            Event::Send => Self::Send,
            Event::Receive => Self::Receive,
            Event::IoUring => Self::IoUring,
        }
    }
}

impl From<kernel::Method> for Method {
    fn from(method: kernel::Method) -> Self {
        match method {
            kernel::Method::Functions => Self::Functions,
            kernel::Method::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<Method> for kernel::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::Functions => Self::Functions,
            Method::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<kernel::Missing> for Missing {
    fn from(missing: kernel::Missing) -> Self {
        Self { event: Some(missing.event.into()), what: missing.what.to_owned(), reason: missing.reason }
    }
}
