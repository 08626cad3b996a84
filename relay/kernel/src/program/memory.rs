//! Which of the shared structures may live in this process' memory.

#![allow(unsafe_code)]

pub(super) use millrace_kernel::memory::{Ring, Shared, Table};

// SAFETY: atomics only; the layout test finds padding.
unsafe impl Shared for super::intf::Upstream {}
// SAFETY: as above.
unsafe impl Shared for super::intf::Egress {}
// SAFETY: as above.
unsafe impl Shared for super::intf::Track {}
// SAFETY: as above; the states are integers in an `UnsafeCell`, for whoever has the lock.
unsafe impl Shared for super::intf::Ingress {}
// SAFETY: as above.
unsafe impl Shared for super::intf::Deferral {}
// SAFETY: as above.
unsafe impl Shared for super::intf::Arrival {}
// SAFETY: as above; the keystream is bytes in an `UnsafeCell`, written by one owner at a time.
unsafe impl Shared for super::intf::Keystream {}
// SAFETY: as above; `paths` are integers in an `UnsafeCell`, written by one owner at a time.
unsafe impl Shared for super::intf::Downstream {}
// SAFETY: atomics only; the layout test finds padding.
unsafe impl Shared for super::intf::Tracing {}
