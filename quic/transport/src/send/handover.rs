//! Packets of one connection leave in the order of their numbers.
//!
//! Several threads seal packets of a connection, one after the other, but send them without the connection's lock. A thread that is
//! interrupted in between would be overtaken, and receivers take late packets for lost. If another batch has unsent packets of the
//! connection, a thread hands its packets to that batch's sender, and goes on.

use parking_lot::Mutex;

use super::packets::SealedPackets;

/// The handover of one connection.
///
/// A connection is *free*, or *held* by one batch. [`Self::settle`] moves it to held, with the connection's lock held, so the order of calls is
/// the order of packet numbers. While it is held, packets that other threads seal wait here and not in their own batches. The holder flushes,
/// then calls [`Self::take`] and flushes again, until `take` finds nothing and frees the connection. [`Self::finish`] frees it at once, and
/// sends what waits with the lock held. [`Self::give_up`] frees it without sending. Between calls, no packet waits for a free connection.
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
    /// Packets from `from` on were sealed and added to batch `id`. If others wait elsewhere that were sealed before, they are taken
    /// out again, and wait behind those. Returns whether the batch has become the one that has packets of the connection.
    ///
    /// To be called under the connection's lock, so that nobody seals meanwhile.
    pub(super) fn settle(&self, id: u64, packets: &mut SealedPackets, from: usize) -> bool {
        let mut turn = self.0.lock();
        match turn.batch {
            None => {
                turn.batch = Some(id);
                true
            }
            Some(batch) if batch == id && turn.packets.is_empty() => false,
            Some(_) => {
                packets.move_to(from, &mut turn.packets);
                false
            }
        }
    }

    /// The batch was sent. Adds the packets handed over in the meantime, and returns whether there were any. If so, the batch still has
    /// packets of the connection.
    pub(super) fn take(&self, packets: &mut SealedPackets) -> bool {
        let mut turn = self.0.lock();
        if turn.packets.is_empty() {
            turn.batch = None;
            return false;
        }
        turn.packets.move_to(0, packets);
        true
    }

    /// The batch was sent for the last time: `send` takes the packets handed over, while no more can be handed over.
    pub(super) fn finish(&self, send: impl FnOnce(&mut SealedPackets)) {
        let mut turn = self.0.lock();
        turn.batch = None;
        send(&mut turn.packets);
    }

    /// The batch is dropped without being sent, and the packets handed over are lost with it.
    pub(super) fn give_up(&self) {
        *self.0.lock() = HandoverTurn::default();
    }
}
