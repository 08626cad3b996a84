//! Declares which of the shared structures may live in this process' memory.

#![allow(unsafe_code)]

pub(super) use millrace_kernel::memory::{MappedArray, RingReader, Shared};

// SAFETY: atomics only; the layout test finds padding.
unsafe impl Shared for super::intf::Upstream {}
// SAFETY: the structure has only atomics; the layout test finds padding.
unsafe impl Shared for super::intf::Egress {}
// SAFETY: the structure has only atomics; the layout test finds padding.
unsafe impl Shared for super::intf::Track {}
// SAFETY: atomics, and parser states as integers in an `UnsafeCell` for the holder of the lock; the layout test finds
// padding.
unsafe impl Shared for super::intf::Ingress {}
// SAFETY: the structure has only atomics; the layout test finds padding.
unsafe impl Shared for super::intf::Deferral {}
// SAFETY: the structure has only atomics; the layout test finds padding.
unsafe impl Shared for super::intf::Arrival {}
// SAFETY: atomics, and the keystream as bytes in an `UnsafeCell` that one owner at a time writes; the layout test finds
// padding.
unsafe impl Shared for super::intf::Keystream {}
// SAFETY: atomics, and `paths` as integers in an `UnsafeCell` that one owner at a time writes; the layout test finds
// padding.
unsafe impl Shared for super::intf::Downstream {}
// SAFETY: atomics only; the layout test finds padding.
unsafe impl Shared for super::intf::Tracing {}
