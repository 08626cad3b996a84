//! Declares which of the shared structures may live in this process' memory.

#![allow(unsafe_code)]

pub(super) use millrace_kernel::memory::{MappedArray, RingReader, Shared};

// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Upstream {}
// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Egress {}
// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Track {}
// SAFETY: all fields are atomics or, for the holder of the lock, parser states of integers in an `UnsafeCell`. The
// layout test proves that the structure has no padding.
unsafe impl Shared for super::intf::Ingress {}
// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Deferral {}
// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Arrival {}
// SAFETY: all fields are atomics, except the keystream: bytes in an `UnsafeCell`, which one owner at a time writes. The
// layout test proves that the structure has no padding.
unsafe impl Shared for super::intf::Keystream {}
// SAFETY: all fields are atomics, except `paths`: integers in an `UnsafeCell`, which one owner at a time writes. The
// layout test proves that the structure has no padding.
unsafe impl Shared for super::intf::Downstream {}
// SAFETY: all fields of the structure are atomics, and the layout test proves that it has no padding.
unsafe impl Shared for super::intf::Tracing {}
