//! The packet number word of a connection.

use std::{
    borrow::Borrow,
    sync::{Arc, atomic::AtomicU64},
};

use millrace_quic::number::PacketNumbers;

use crate::offload::Offload;

/// Drawn from by all senders of a connection.
pub(crate) type NumberAllocator = PacketNumbers<NumberWord>;

/// The place of the word. It moves when the connection gets an offload and when it has none any more, with the connection's lock held, under
/// which alone anybody here draws.
pub(crate) enum NumberWord {
    Own(AtomicU64),
    Offload(Arc<dyn Offload>),
}

impl NumberWord {
    /// Returns a word that is not in use yet.
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
