//! The packet number counter of a connection.

use std::{
    borrow::Borrow,
    sync::{Arc, atomic::AtomicU64},
};

use millrace_quic::number::PacketNumbers;

use crate::offload::Offload;

/// The packet numbers that all senders of a connection draw from.
pub(crate) type NumberAllocator = PacketNumbers<NumberWord>;

/// The location of the atomic counter. It changes when the connection gets an offload or loses it, with the
/// connection's lock held. Senders in this process draw numbers only under the same lock.
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
