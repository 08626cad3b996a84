//! The handover of sealed packets between threads, so that packets of one connection leave in the order of their
//! numbers.
//!
//! Several threads seal packets of a connection, one after the other, but send them without the connection's lock. A
//! thread that is interrupted in between would be overtaken, and receivers report late packets as lost. So if another
//! batch has unsent packets of the connection, a thread hands its packets to the sender of that batch.

use parking_lot::Mutex;

use super::packets::SealedPackets;

/// The handover of one connection.
///
/// A connection is *free*, or *held* by one batch. [`Self::settle`] makes it held. It is called under the connection's
/// lock, so the order of calls is the order of packet numbers. While a connection is held, packets that other threads
/// seal wait here and not in their own batches. The holder flushes, then calls [`Self::take`] and flushes again, until
/// `take` returns false and frees the connection. [`Self::finish`] frees it at once, and sends the waiting packets with
/// the lock held. [`Self::give_up`] frees it without sending. Between calls, no packet waits for a free connection.
#[derive(Debug, Default)]
pub(crate) struct SendHandover(Mutex<HandoverTurn>);

#[derive(Debug, Default)]
struct HandoverTurn {
    /// The batch that has packets of the connection.
    batch: Option<u64>,
    /// Packets handed to the sender of that batch.
    packets: SealedPackets,
}

impl SendHandover {
    /// Registers the packets from index `from` on, which were sealed and added to batch `id`. If earlier packets of the
    /// connection wait elsewhere, the new ones are removed from the batch and wait behind them. Returns whether the
    /// batch has become the holder of the connection.
    ///
    /// This is called under the connection's lock, so that no other thread seals meanwhile.
    pub(super) fn settle(&self, id: u64, packets: &mut SealedPackets, from: usize) -> bool {
        let mut turn = self.0.lock();
        match turn.batch {
            None => {
                turn.batch = Some(id);
                true
            }
            // The batch is the holder already, and no earlier packets wait.
            Some(batch) if batch == id && turn.packets.is_empty() => false,
            Some(_) => {
                packets.move_to(from, &mut turn.packets);
                false
            }
        }
    }

    /// Adds the packets that were handed over while the batch was sent. Returns whether there were any. If not, the
    /// connection is free.
    pub(super) fn take(&self, packets: &mut SealedPackets) -> bool {
        let mut turn = self.0.lock();
        if turn.packets.is_empty() {
            turn.batch = None;
            return false;
        }
        turn.packets.move_to(0, packets);
        true
    }

    /// Frees the connection after the holder's last flush. `send` gets the remaining packets, while no more can be
    /// handed over.
    pub(super) fn finish(&self, send: impl FnOnce(&mut SealedPackets)) {
        let mut turn = self.0.lock();
        turn.batch = None;
        send(&mut turn.packets);
    }

    /// Frees the connection because the batch is dropped unsent. The packets handed over are dropped, too.
    pub(super) fn give_up(&self) {
        *self.0.lock() = HandoverTurn::default();
    }
}
