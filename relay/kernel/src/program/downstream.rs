//! Connections on which media is sent.

#![allow(unsafe_code)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use millrace_kernel::Error;
use millrace_kernel::barrier::Moment;
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::fan::NetPath;
use millrace_kernel::object::write;

use super::defer::DeferredSocket;
use super::ids::Ids;
use super::intf;
use super::keystream::{self, Compute, KeystreamRing, Refill, WantedRing};
use super::outcome::{EgressOutcome, Lookup};
use super::shared::{RelayMaps, lock};

/// The least overhead of a packet that the program builds, in bytes: first byte, packet number and tag. The connection
/// ID may be empty.
const OVERHEAD_LEAST: usize = 1 + 4 + 16;

/// The network path of a connection's packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPath {
    /// The relay's address. Both addresses of the path have the same family; IPv4 addresses mapped into IPv6 count as
    /// IPv4.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// The peer's connection ID, at most 20 bytes.
    pub id: Vec<u8>,
    /// The DSCP and ECN bits in the IP headers of the packets that the program sends.
    pub traffic_class: u8,
    /// The IPv6 flow label of the packets that the program sends, 20 bits.
    pub flow_label: u32,
}

/// The identity of a downstream connection (to a subscriber) in the program's reports about sent packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DownstreamId {
    /// Index of the connection's entry in the program's table of downstream connections.
    pub index: u32,
    /// Distinguishes the connection from earlier ones with the same index.
    pub epoch: u32,
}

/// A connection on which media is sent. When this is dropped, the program sends nothing more on it, except in runs that
/// have already begun.
///
/// # Invariants
///
/// * Totals (`max_bytes`, `max_data`) are limits in bytes since the connection began. The program adds to its total,
///   then reads the limit. Userspace stores the limit, then reads the total. Both are sequentially consistent, so at
///   least one sees the other's change: the program's total stays within the larger of the limit and the total that was
///   returned.
/// * There are two entries for keys and two for paths, and the program reads one of each. Userspace writes the unused
///   entry, and then switches to it with one store. If program runs may still read the entry, userspace first waits
///   until they have ended.
/// * A key generation is usable once its number plus 1 is stored. The caller stores it before packet numbers of that
///   generation are assigned. So each packet number that the program takes has keys, or the copy is left to userspace.
pub struct DownstreamRecord {
    shared: Arc<RelayMaps>,
    id: DownstreamId,
    /// Destination connection IDs of the peer's packets.
    ids: Ids,
    ring: Mutex<KeystreamRing>,
    /// This lock is held while keys or the network path are changed.
    changing: Mutex<Changes>,
}

/// The times after which no new program run uses the connection's previous network path and its previous keys. `None`:
/// the connection has had no previous path or keys.
#[derive(Default)]
struct Changes {
    path: Option<Moment>,
    /// Times for the key entries of even and of odd key generations, after which no new program run uses the entry's
    /// old keys.
    keys: [Option<Moment>; 2],
}

impl DownstreamRecord {
    pub(super) fn new(shared: Arc<RelayMaps>, path: &PacketPath, mtu: u32, word: u64) -> Result<Self, Error> {
        let path = raw_path(path)?;
        let index = shared.take(|free| &mut free.downstreams, "downstreams")?;
        let entry = shared.downstreams.get(index);
        let totals = [&entry.max_data, &entry.data, &entry.max_bytes, &entry.bytes];
        for total in totals.into_iter().chain([&entry.deferred_until, &entry.deferred, &entry.streams]) {
            total.store(0, Ordering::Relaxed);
        }
        entry.outcomes.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.generations.iter().for_each(|generation| generation.store(0, Ordering::Relaxed));
        entry.lookups.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.ring.run.store(0, Ordering::Relaxed);
        entry.number.store(word, Ordering::Relaxed);
        entry.web.store(intf::BARE, Ordering::Relaxed);
        entry.mtu.store(mtu, Ordering::Relaxed);
        entry.max_datagram.store(0, Ordering::Relaxed);
        entry.path.store(0, Ordering::Relaxed);
        entry.waiting.store(u32::MAX, Ordering::Relaxed);
        for word in [&entry.session, &entry.deferred_socket, &entry.deferred_bytes, &entry.stream_bits] {
            word.store(0, Ordering::Relaxed);
        }
        // SAFETY: the entry was free, so neither the kernel nor another handle uses it.
        unsafe { *entry.paths.get() = [path; 2] };
        // The program ignores connections whose entry has epoch 0, so the epoch is stored last.
        let epoch = shared.next_epoch();
        entry.epoch.store(epoch, Ordering::Release);
        let id = DownstreamId { index, epoch };
        let ring = Mutex::new(KeystreamRing::new(shared.clone()));
        let ids = Ids::new(shared.clone(), index | intf::SUBSCRIBER);
        Ok(Self { shared, id, ids, ring, changing: Mutex::default() })
    }

    fn entry(&self) -> &intf::Downstream {
        self.shared.downstreams.get(self.id.index)
    }

    /// Returns the identity of the connection in the program's reports about sent packets.
    pub fn id(&self) -> DownstreamId {
        self.id
    }

    /// Returns the packet number word, from which userspace and the program draw packet numbers
    /// (`millrace_quic::number`).
    pub fn number(&self) -> &AtomicU64 {
        &self.entry().number
    }

    /// Installs the send keys of a generation, replacing those of the last generation but one. Has to be called before
    /// the key generation in [`number`](Self::number) becomes `generation`. From the third generation on it waits for
    /// program runs, which blocks the thread for some 10 ms, unless [`settle`](super::RelayProgram::settle) was called
    /// since [`retire_keys`](Self::retire_keys).
    pub fn set_keys(&self, generation: u16, keys: &QuicKeys) -> Result<(), Error> {
        let mut changing = lock(&self.changing);
        if let Some(moment) = self.retire(&mut changing, generation) {
            self.shared.barrier.wait_since(moment)?;
        }
        let parity = u32::from(generation & 1);
        let index = 2 * self.id.index + parity;
        write(&self.shared.seal_keys, "seal_keys", &index.to_ne_bytes(), keys.as_bytes())?;
        self.entry().generations[parity as usize].store(u32::from(generation) + 1, Ordering::Release);
        Ok(())
    }

    /// Stops the program from using the old send keys that the keys of `generation` will replace. Returns whether
    /// [`set_keys`](Self::set_keys) would have to wait for program runs.
    pub fn retire_keys(&self, generation: u16) -> bool {
        let moment = self.retire(&mut lock(&self.changing), generation);
        moment.is_some_and(|moment| !self.shared.barrier.is_over(moment))
    }

    /// Revokes the send keys that the keys of `generation` will replace. Returns the time after which no program run
    /// can begin to use them.
    fn retire(&self, changing: &mut Changes, generation: u16) -> Option<Moment> {
        let parity = usize::from(generation & 1);
        if self.entry().generations[parity].swap(0, Ordering::SeqCst) != 0 {
            changing.keys[parity] = Some(self.shared.barrier.now());
        }
        changing.keys[parity]
    }

    /// Returns the packet number that the next packet on this connection gets.
    pub fn next_number(&self) -> u64 {
        keystream::split(self.number()).1
    }

    /// Precomputes the missing keystreams of the next packets, for as many bytes as the path's MTU allows. Has to be
    /// called repeatedly while packets are sent. Makes no system call.
    pub fn refill(&self, want: WantedRing, compute: impl Compute) -> Refill {
        let next = keystream::split(self.number());
        let most = (self.entry().mtu.load(Ordering::Relaxed) as usize).saturating_sub(OVERHEAD_LEAST);
        let want = WantedRing { text_bytes: want.text_bytes.min(most), ..want };
        lock(&self.ring).refill(&self.entry().ring, next.0, next.1, want, compute)
    }

    /// Returns the number of packets with this result of the keystream lookup.
    pub fn lookups(&self, lookup: Lookup) -> u64 {
        self.entry().lookups[lookup as usize].load(Ordering::Relaxed)
    }

    /// Changes the network path of the packets that are sent: addresses and connection ID. From the second call on it
    /// waits for program runs, some 10 ms, unless [`settle`](super::RelayProgram::settle) was called since the last
    /// change.
    pub fn set_path(&self, path: &PacketPath) -> Result<(), Error> {
        let path = raw_path(path)?;
        let mut changing = lock(&self.changing);
        let entry = self.entry();
        let other = 1 - (entry.path.load(Ordering::Relaxed) & 1);
        if let Some(moment) = changing.path {
            self.shared.barrier.wait_since(moment)?;
        }
        // SAFETY: the lock excludes other writers. No program run uses the unused path: either it was never in use, or
        // all runs that may have used it have ended.
        unsafe { (&raw mut (*entry.paths.get())[other as usize]).write(path) };
        entry.path.store(other, Ordering::Release);
        changing.path = Some(self.shared.barrier.now());
        Ok(())
    }

    /// Reports whether [`set_path`](Self::set_path) would have to wait for program runs.
    pub fn path_waits(&self) -> bool {
        lock(&self.changing).path.is_some_and(|moment| !self.shared.barrier.is_over(moment))
    }

    /// Sets the largest UDP payload that the path takes, in bytes.
    pub fn set_mtu(&self, bytes: u32) {
        self.entry().mtu.store(bytes, Ordering::Relaxed);
    }

    /// Sets the peer's max_datagram_frame_size, in bytes. It is 0 at first, so no datagrams are sent.
    pub fn set_max_datagram(&self, bytes: u32) {
        self.entry().max_datagram.store(bytes, Ordering::Relaxed);
    }

    /// Sets the most bytes of UDP payload that the kernel may send on this connection in total. Returns the total that
    /// it has sent or is about to send. `set_max_bytes(bytes() + n)` leaves it a window of `n` bytes.
    ///
    /// If the limit is set below the returned total, the kernel keeps the excess, and sends nothing beyond it. Copies
    /// that fail are counted for a moment, so the total may decrease again.
    pub fn set_max_bytes(&self, total: u64) -> u64 {
        let entry = self.entry();
        entry.max_bytes.store(total, Ordering::SeqCst);
        entry.bytes.load(Ordering::SeqCst)
    }

    /// Sets the priority level of data that waits in userspace. The program leaves copies of media with this priority
    /// level, or a less urgent one, to userspace.
    pub fn set_waiting(&self, level: Option<u16>) {
        self.entry().waiting.store(level.map_or(u32::MAX, u32::from), Ordering::Relaxed);
    }

    /// Returns the bytes of UDP payload that the kernel has sent or is about to send.
    pub fn bytes(&self) -> u64 {
        self.entry().bytes.load(Ordering::SeqCst)
    }

    /// Sets the most stream bytes that the kernel may send on this connection in total: its share of the peer's
    /// MAX_DATA. Returns the total that it has sent or is about to send, as [`set_max_bytes`](Self::set_max_bytes)
    /// does. Bytes that were skipped in a stream, and left to userspace, count as well. The program's report about each
    /// sent packet contains the packet's part of the total.
    pub fn set_max_data(&self, total: u64) -> u64 {
        let entry = self.entry();
        entry.max_data.store(total, Ordering::SeqCst);
        entry.data.load(Ordering::SeqCst)
    }

    /// Returns the stream bytes that the kernel has sent or is about to send.
    pub fn data(&self) -> u64 {
        self.entry().data.load(Ordering::SeqCst)
    }

    /// Sets how many unidirectional streams the relay may open on this connection in total. Userspace has opened the
    /// streams with an index below `next`. Returns the index of the next stream; all earlier streams are open or about
    /// to be. Once the limit is reached, the kernel opens no further streams, and only the caller may.
    pub fn set_streams(&self, next: u64, limit: u64) -> u64 {
        let most = u64::from(u32::MAX);
        let next = next.min(most);
        let limit = limit.min(most);
        let mut reached = next;
        let update = |word: u64| {
            reached = next.max(word & most);
            Some(limit << 32 | reached)
        };
        let _ = self.entry().streams.fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
        reached
    }

    /// Sets the low two bits of the IDs of the relay's unidirectional streams: 2 for a client, 3 for a server.
    pub fn set_stream_bits(&self, bits: u32) {
        self.entry().stream_bits.store(bits, Ordering::Relaxed);
    }

    /// Adds a destination connection ID of the peer's packets. Only for a connection without an
    /// [`UpstreamRecord`](super::UpstreamRecord), which otherwise holds the connection's IDs. `id` has the configured
    /// length.
    pub fn add_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.add(id)
    }

    /// Removes a destination connection ID that the peer does not use any more.
    pub fn remove_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.remove(id)
    }

    /// Removes all destination connection IDs of the peer's packets.
    pub fn remove_ids(&self) {
        self.ids.clear();
    }

    /// Sets the socket for packets of the peer that need not wake userspace at once (deferred packets).
    pub fn set_deferred_socket(&self, socket: &DeferredSocket) {
        self.entry().deferred_socket.store(socket.index + 1, Ordering::Relaxed);
    }

    /// Lets the program steer the peer's small packets, of at most `bytes` bytes of UDP payload, to the socket for
    /// packets that need not wake userspace. This ends when the sum of bytes sent, [`Self::bytes`], exceeds `total`.
    pub fn set_deferral(&self, bytes: u32, total: u64) {
        let entry = self.entry();
        entry.deferred_bytes.store(bytes, Ordering::Relaxed);
        entry.deferred_until.store(total, Ordering::Relaxed);
    }

    /// Returns how many packets of the peer were steered to the socket for packets that need not wake userspace at
    /// once.
    pub fn deferred_packets(&self) -> u64 {
        self.entry().deferred.load(Ordering::Relaxed)
    }

    /// Sets the ID of the WebTransport session in which media is sent. `None`, the initial value, stands for plain
    /// QUIC. Has to be called before anything is forwarded.
    pub fn set_web(&self, session: Option<u64>) {
        self.entry().web.store(session.unwrap_or(intf::BARE), Ordering::Relaxed);
    }

    /// Sets the number that stands for the connection in trace events.
    pub fn set_session(&self, session: u32) {
        self.entry().session.store(session, Ordering::Relaxed);
    }

    /// Returns how many of the copies for this connection the program sent, or left to userspace, for the given reason.
    pub fn outcome(&self, outcome: EgressOutcome) -> u64 {
        self.entry().outcomes[outcome as usize].load(Ordering::Relaxed)
    }
}

impl Drop for DownstreamRecord {
    fn drop(&mut self) {
        // Epoch 0 makes every later run of the BPF program ignore the connection's entry in the table.
        self.entry().epoch.store(0, Ordering::SeqCst);
        self.ids.clear();
        self.shared.retire(|free| &mut free.downstreams, self.id.index);
    }
}

fn raw_path(path: &PacketPath) -> Result<intf::Path, Error> {
    let mut way = NetPath::new(path.local, path.remote)
        .ok_or(Error::Config("both ends of a path have addresses of the same family"))?;
    way.flow_label = (path.flow_label & 0xfffff).to_be_bytes();
    way.traffic_class = path.traffic_class;
    let mut id = [0; intf::ID_MAX];
    id.get_mut(..path.id.len())
        .ok_or(Error::Config("connection IDs have 20 bytes at most"))?
        .copy_from_slice(&path.id);
    Ok(intf::Path { way, id_bytes: path.id.len() as u8, id, pad: [0; 3] })
}
