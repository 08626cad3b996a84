//! Structures that C and Rust share. A test of each crate compares its own with the BTF of the compiled objects.

#![allow(unsafe_code)]

/// Plain data: every bit pattern is a value and there are no padding bytes.
///
/// # Safety
/// Only for `repr(C)` structures of integers and integer arrays without implicit padding.
pub unsafe trait Plain: Copy {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        // SAFETY: the length was checked, any bytes are a valid `Self`, and the read may be unaligned.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// All bytes 0.
    fn zeroed() -> Self {
        // SAFETY: any bytes are a valid `Self`.
        unsafe { std::mem::zeroed() }
    }

    fn as_bytes(&self) -> &[u8] {
        // SAFETY: `self` is `size_of::<Self>()` initialised bytes, none of them padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

// SAFETY: an integer.
unsafe impl Plain for u64 {}

/// A structure of integers as C has it, copied as bytes.
#[macro_export]
macro_rules! mirror {
    ($(#[$meta:meta])* $rust:ident = $c:literal { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $rust { $(pub $field: $type),* }

        // SAFETY: `repr(C)`, integers only; the layout test finds padding.
        #[allow(unsafe_code)]
        unsafe impl $crate::intf::Plain for $rust {}

        #[cfg(test)]
        impl $rust {
            pub const LAYOUT: $crate::intf::Layout = $crate::intf::Layout {
                name: $c,
                size: size_of::<$rust>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($rust, $field), size_of::<$type>())),*],
            };
        }
    };
}

pub use crate::mirror;

/// A structure that lives in memory shared with the kernel.
#[macro_export]
macro_rules! shared {
    ($rust:ident = $c:literal { $($field:ident: $type:ty),* $(,)? }) => {
        #[repr(C)]
        pub struct $rust { $(pub $field: $type),* }

        #[cfg(test)]
        impl $rust {
            pub const LAYOUT: $crate::intf::Layout = $crate::intf::Layout {
                name: $c,
                size: size_of::<$rust>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($rust, $field), size_of::<$type>())),*],
            };
        }
    };
}

pub use crate::shared;

#[cfg(any(test, feature = "testing"))]
pub use crate::testing::{Layout, assert_layouts, enum_names};

/// Structures and constants of this crate's headers.
pub(crate) mod generated {
    #![allow(dead_code, reason = "not all that C has is of use here")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}
