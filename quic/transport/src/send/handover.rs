//! The handover of sealed packets between threads, so that packets of one connection leave in the order of their
//! numbers.
//!
//! Several threads seal packets of a connection, one after the other, but send them without the connection's lock. If a
//! thread is interrupted between sealing and sending, other threads would send later packets first, and the peer would
//! consider the earlier packets lost. So if another batch has unsent packets of the connection, a thread hands its
//! packets to the sender of that batch.

use std::mem;

use parking_lot::Mutex;

use super::packets::SealedPackets;

/// The handover of one connection.
///
/// A connection is *free*, or *held* by one batch. [`Self::settle`] makes it held. That method is called under the
/// connection's lock, so the order of its calls is the order of packet numbers. While a connection is held, packets
/// that other threads seal wait in this object and not in the threads' own batches. The thread with the holding batch
/// flushes it, then calls [`Self::take`] and flushes again, until `take` returns false and frees the connection.
/// [`Self::finish`] frees the connection at once, and sends the waiting packets with the handover's lock held.
/// [`Self::give_up`] frees the connection without sending. While no method runs, no packet waits in a free connection's
/// handover.
#[derive(Debug, Default)]
pub(crate) struct SendHandover(Mutex<HandoverTurn>);

#[derive(Debug, Default)]
struct HandoverTurn {
    /// The batch that holds the connection, because the batch has unsent packets of the connection.
    batch: Option<u64>,
    /// Packets that other threads have handed over to the holding batch.
    packets: SealedPackets,
}

impl SendHandover {
    /// Registers the packets from index `from` on, which were sealed and added to batch `id`. If earlier packets of the
    /// connection wait in another batch or in this object, the new ones are moved from the batch to this object.
    /// Returns whether the batch has become the holder of the connection.
    ///
    /// This is called under the connection's lock, so that no other thread seals meanwhile.
    pub(super) fn settle(&self, id: u64, packets: &mut SealedPackets, from: usize) -> bool {
        let mut turn = self.0.lock();
        match turn.batch {
            None => {
                turn.batch = Some(id);
                true
            }
            // The batch has the connection's unsent packets already, and no earlier packets wait in this object.
            Some(batch) if batch == id && turn.packets.is_empty() => false,
            Some(_) => {
                packets.move_to(from, &mut turn.packets);
                false
            }
        }
    }

    /// Moves into `packets` the packets that other threads handed over while the batch was sent. Returns whether there
    /// were any. If there were none, the connection becomes free.
    pub(super) fn take(&self, packets: &mut SealedPackets) -> bool {
        let mut turn = self.0.lock();
        if turn.packets.is_empty() {
            turn.batch = None;
            return false;
        }
        // The buffer is freed, since a connection's packets are seldom handed over.
        mem::take(&mut turn.packets).move_to(0, packets);
        true
    }

    /// Frees the connection after the holder's last flush. `send` gets the packets that still wait; until it returns,
    /// no other thread can hand over packets.
    pub(super) fn finish(&self, send: impl FnOnce(&mut SealedPackets)) {
        let mut turn = self.0.lock();
        turn.batch = None;
        send(&mut mem::take(&mut turn.packets));
    }

    /// Frees the connection because the holding batch is dropped without being sent. Packets that were handed over to
    /// it are dropped, too.
    pub(super) fn give_up(&self) {
        *self.0.lock() = HandoverTurn::default();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::send::PacketFlow;

    #[test]
    fn handover_keeps_no_buffer_after_its_packets_were_taken() {
        let handover = SendHandover::default();
        let to = PacketFlow::from(SocketAddr::from((Ipv4Addr::LOCALHOST, 9)));
        let batch = || {
            let mut packets = SealedPackets::default();
            packets.push(to, |out| {
                out.extend([7; 1200]);
                true
            });
            packets
        };
        let [mut first, mut second] = [batch(), batch()];
        assert!(handover.settle(1, &mut first, 0));
        assert!(!handover.settle(2, &mut second, 0), "the first batch holds the connection");
        assert!(handover.0.lock().packets.capacity() >= 1200);
        assert!(handover.take(&mut first) && first.len() == 2);
        assert_eq!(handover.0.lock().packets.capacity(), 0);
    }
}
