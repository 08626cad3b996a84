//! The packet number counter of a connection.

use std::{
    borrow::Borrow,
    sync::{Arc, atomic::AtomicU64},
};

use millrace_quic::number::PacketNumbers;

use crate::offload::Offload;

/// The packet numbers that all senders of a connection draw from.
pub(crate) type NumberAllocator = PacketNumbers<NumberWord>;

/// The atomic counter: in this process's memory, or in memory shared with the kernel offload. It is replaced, with the
/// connection's lock held, when the connection gets or loses an offload. Senders in this process draw numbers only
/// under the same lock.
pub(crate) enum NumberWord {
    Own(AtomicU64),
    Offload(Arc<dyn Offload>),
}

impl NumberWord {
    /// Returns a new counter in this process's own memory.
    pub fn own() -> Self {
        Self::Own(AtomicU64::new(0))
    }
}

impl Borrow<AtomicU64> for NumberWord {
    fn borrow(&self) -> &AtomicU64 {
        match self {
            Self::Own(word) => word,
            Self::Offload(offload) => offload.numbers(),
        }
    }
}
