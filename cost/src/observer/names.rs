//! What the kernel side and reports call the same things.

use millrace_bpf::cost;

use crate::report::{Event, Method, Missing};

impl From<cost::Event> for Event {
    fn from(event: cost::Event) -> Self {
        match event {
            cost::Event::NetRx => Self::NetRx,
            cost::Event::NetTx => Self::NetTx,
            cost::Event::Send => Self::Send,
            cost::Event::Receive => Self::Receive,
            cost::Event::IoUring => Self::IoUring,
        }
    }
}

impl From<Event> for cost::Event {
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

impl From<cost::Method> for Method {
    fn from(method: cost::Method) -> Self {
        match method {
            cost::Method::Functions => Self::Functions,
            cost::Method::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<Method> for cost::Method {
    fn from(method: Method) -> Self {
        match method {
            Method::Functions => Self::Functions,
            Method::SystemCalls => Self::SystemCalls,
        }
    }
}

impl From<cost::Missing> for Missing {
    fn from(missing: cost::Missing) -> Self {
        Self { event: Some(missing.event.into()), what: missing.what.to_owned(), reason: missing.reason }
    }
}
