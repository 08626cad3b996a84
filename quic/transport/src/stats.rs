//! Counters of the layer between quinn and the data plane on one connection.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of packets, and of received frames that were rewritten for quinn, since the connection began.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct SeamCounters {
            $(pub $name: SeamCounter,)*
        }

        impl SeamCounters {
            pub fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// 1-RTT packets sealed for quinn.
    quinn_packets,
    /// UDP payload of quinn's 1-RTT packets, bytes.
    quinn_bytes,
    /// 1-RTT packets sealed for the data plane.
    data_plane_packets,
    /// UDP payload of the data plane's 1-RTT packets, bytes.
    data_plane_bytes,
    /// Packet numbers that were skipped, to detect peers that acknowledge packets they did not receive.
    skipped_numbers,
    /// ACK frames that acknowledge a packet of quinn for the first time.
    acks_for_quinn,
    /// ACK frames that newly acknowledge no packet of quinn, but only packets of the data plane.
    acks_for_data_plane,
    /// ACK frames that named packets that were never sent. Most of these close the connection.
    acks_refused,
    /// MAX_STREAM_DATA and STOP_SENDING frames for streams of the data plane.
    stream_frames_consumed,
    /// STREAM frames with repeated bytes, which were removed. Only connections that may have a kernel offload count
    /// them.
    stream_frames_cut,
    /// Received packets whose number was received before, or is so old that this is unknown.
    replayed_packets,
    /// Number of times that quinn was given more connection flow control credit.
    credit_grants,
    /// Number of key updates that the data plane has followed: key generations after the first with which it sealed a
    /// packet.
    key_updates,
    /// Changes of the peer's address that quinn reported.
    address_changes,
}

#[derive(Debug, Default)]
pub(crate) struct SeamCounter(AtomicU64);

impl SeamCounter {
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}
