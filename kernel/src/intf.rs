//! Conversion of structures that C and Rust share to bytes and back. `millrace-kernel-build` generates the types from
//! the C headers.

#![allow(unsafe_code)]

/// A type of plain data: every bit pattern is a valid value, and there are no padding bytes.
///
/// # Safety
/// Implement it only for `repr(C)` structures of integers and integer arrays without implicit padding.
pub unsafe trait Plain: Copy {
    /// Copies a value out of bytes. Returns `None` if their number is not the type's size.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        // SAFETY: the length was checked, any bytes are a valid `Self`, and the read may be unaligned.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// Returns the value whose bytes are all 0.
    fn zeroed() -> Self {
        // SAFETY: any bytes are a valid `Self`.
        unsafe { std::mem::zeroed() }
    }

    /// Returns the value's bytes in memory, as the kernel reads them.
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: `self` is `size_of::<Self>()` initialised bytes, none of them padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

// SAFETY: every bit pattern is a valid integer.
unsafe impl Plain for u64 {}

#[cfg(any(test, feature = "testing"))]
pub use crate::testing::enum_names;

/// Structures and constants of this crate's headers.
pub(crate) mod generated {
    #![allow(dead_code, reason = "Rust needs only a part of the headers' structures and constants")]
    #![allow(missing_docs, reason = "the headers describe them")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}
