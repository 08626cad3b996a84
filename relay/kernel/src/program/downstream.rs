//! Connections that media leaves on.

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
use super::keystream::{self, Compute, Refill, Ring, Want};
use super::outcome::{EgressOutcome, Lookup};
use super::shared::{Shared, lock};

/// First byte, packet number and tag of a packet that the program builds; the connection ID may be empty.
const OVERHEAD_LEAST: usize = 1 + 4 + 16;

/// Where a connection's packets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// Both of the same family; IPv4 addresses mapped into IPv6 count as IPv4.
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The peer's connection ID, at most 20 bytes.
    pub id: Vec<u8>,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// IPv6: 20 bits.
    pub flow_label: u32,
}

/// A downstream as registrations name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DownstreamId {
    pub index: u32,
    /// Tells it from those that had the index before.
    pub epoch: u32,
}

/// A connection that media leaves on. When it is dropped, nothing is sent any more on its behalf, up to runs of
/// the program that have begun.
pub struct DownstreamRecord {
    shared: Arc<Shared>,
    id: DownstreamId,
    /// This end's, as the peer uses them.
    ids: Ids,
    ring: Mutex<Ring>,
    /// Held while keys or the path are changed.
    changing: Mutex<Changes>,
}

/// When runs of the program could last begin to use what is replaced next; `None`: none ever did.
#[derive(Default)]
struct Changes {
    path: Option<Moment>,
    /// The keys', by parity of the generation.
    keys: [Option<Moment>; 2],
}

impl DownstreamRecord {
    pub(super) fn new(shared: Arc<Shared>, path: &Path, mtu: u32, word: u64) -> Result<Self, Error> {
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
        let epoch = shared.next_epoch();
        entry.epoch.store(epoch, Ordering::Release);
        let id = DownstreamId { index, epoch };
        let ring = Mutex::new(Ring::new(shared.clone()));
        let ids = Ids::new(shared.clone(), index | intf::SUBSCRIBER);
        Ok(Self { shared, id, ids, ring, changing: Mutex::default() })
    }

    fn entry(&self) -> &intf::Downstream {
        self.shared.downstreams.get(self.id.index)
    }

    pub fn id(&self) -> DownstreamId {
        self.id
    }

    /// The packet number word that both senders draw from (`millrace_quic::number`).
    pub fn number(&self) -> &AtomicU64 {
        &self.entry().number
    }

    /// Installs the send keys of a generation, in place of those of the last but one. To be called before the
    /// number word moves to `generation`. From the third generation on it waits for program runs, which blocks
    /// the thread for some 10 ms, unless [`settle`](super::Relay::settle) was called since
    /// [`retire_keys`](Self::retire_keys).
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

    /// Stops the program's use of the keys that those of `generation` will replace. Returns whether runs have to be waited for
    /// before [`set_keys`](Self::set_keys), which otherwise does so itself.
    pub fn retire_keys(&self, generation: u16) -> bool {
        let moment = self.retire(&mut lock(&self.changing), generation);
        moment.is_some_and(|moment| !self.shared.barrier.is_over(moment))
    }

    /// Returns when runs could last begin that use the keys which those of `generation` replace.
    fn retire(&self, changing: &mut Changes, generation: u16) -> Option<Moment> {
        let parity = usize::from(generation & 1);
        if self.entry().generations[parity].swap(0, Ordering::SeqCst) != 0 {
            changing.keys[parity] = Some(self.shared.barrier.now());
        }
        changing.keys[parity]
    }

    /// The packet number that is drawn next.
    pub fn next_number(&self) -> u64 {
        keystream::split(self.number()).1
    }

    /// Precomputes the keystreams of the next packets that are missing, for no more text than the path takes. To be called
    /// again as packets leave. No system call.
    pub fn refill(&self, want: Want, compute: impl Compute) -> Refill {
        let next = keystream::split(self.number());
        let most = (self.entry().mtu.load(Ordering::Relaxed) as usize).saturating_sub(OVERHEAD_LEAST);
        let want = Want { text_bytes: want.text_bytes.min(most), ..want };
        lock(&self.ring).refill(&self.entry().ring, next, want, compute)
    }

    /// Packets whose keystream look-up ended so.
    pub fn lookups(&self, lookup: Lookup) -> u64 {
        self.entry().lookups[lookup as usize].load(Ordering::Relaxed)
    }

    /// Changes addresses or connection ID. From the second call on it waits for program runs, some 10 ms, unless
    /// [`settle`](super::Relay::settle) was called since the one before.
    pub fn set_path(&self, path: &Path) -> Result<(), Error> {
        let path = raw_path(path)?;
        let mut changing = lock(&self.changing);
        let entry = self.entry();
        let other = 1 - (entry.path.load(Ordering::Relaxed) & 1);
        if let Some(moment) = changing.path {
            self.shared.barrier.wait_since(moment)?;
        }
        // SAFETY: the lock excludes other writers. Before the first change no run has used the other path, and since
        // the last one every program run that may have used it has ended.
        unsafe { (&raw mut (*entry.paths.get())[other as usize]).write(path) };
        entry.path.store(other, Ordering::Release);
        changing.path = Some(self.shared.barrier.now());
        Ok(())
    }

    /// Returns whether runs have to be waited for before [`set_path`](Self::set_path), which otherwise does so itself.
    pub fn path_waits(&self) -> bool {
        lock(&self.changing).path.is_some_and(|moment| !self.shared.barrier.is_over(moment))
    }

    /// Largest UDP payload that the path takes, bytes.
    pub fn set_mtu(&self, bytes: u32) {
        self.entry().mtu.store(bytes, Ordering::Relaxed);
    }

    /// Largest DATAGRAM frame that the peer takes, bytes: its max_datagram_frame_size; at first none.
    pub fn set_max_datagram(&self, bytes: u32) {
        self.entry().max_datagram.store(bytes, Ordering::Relaxed);
    }

    /// Sets the total of UDP payload that the kernel may send on this connection, and returns the total that it
    /// has sent or is about to. To leave it a window of `n` bytes: `set_max_bytes(bytes() + n)`.
    ///
    /// When a limit is lowered below the returned total, the excess is the kernel's already; beyond that it
    /// sends nothing. Attempts that fail count for a moment, so the total may still fall.
    pub fn set_max_bytes(&self, total: u64) -> u64 {
        let entry = self.entry();
        entry.max_bytes.store(total, Ordering::SeqCst);
        entry.bytes.load(Ordering::SeqCst)
    }

    /// Sets the level of what waits in userspace: copies of this level, and less urgent ones, are left to userspace.
    pub fn set_waiting(&self, level: Option<u16>) {
        self.entry().waiting.store(level.map_or(u32::MAX, u32::from), Ordering::Relaxed);
    }

    /// UDP payload that the kernel has sent or is about to.
    pub fn bytes(&self) -> u64 {
        self.entry().bytes.load(Ordering::SeqCst)
    }

    /// Sets the total of stream bytes that the kernel may send on this connection: its budget of the peer's MAX_DATA.
    /// Returns the total that it has sent or is about to; as [`set_max_bytes`](Self::set_max_bytes). The kernel counts what it
    /// goes beyond its own last byte of a stream, so also what was left to userspace: registrations say how much.
    pub fn set_max_data(&self, total: u64) -> u64 {
        let entry = self.entry();
        entry.max_data.store(total, Ordering::SeqCst);
        entry.data.load(Ordering::SeqCst)
    }

    /// Stream bytes that the kernel has sent or is about to.
    pub fn data(&self) -> u64 {
        self.entry().data.load(Ordering::SeqCst)
    }

    /// Sets how many unidirectional streams of this end there may be, where userspace has opened those before `next` itself.
    /// Returns the index of the next one: those up to it are open by now, or about to be, and as long as no more may be
    /// opened nobody but the caller opens any.
    pub fn set_streams(&self, next: u64, limit: u64) -> u64 {
        let most = u64::from(u32::MAX);
        let (next, limit) = (next.min(most), limit.min(most));
        let mut reached = next;
        let update = |word: u64| {
            reached = next.max(word & most);
            Some(limit << 32 | reached)
        };
        let _ = self.entry().streams.fetch_update(Ordering::SeqCst, Ordering::SeqCst, update);
        reached
    }

    /// Low bits of the IDs of this end's unidirectional streams: 2 of a client's, 3 of a server's.
    pub fn set_stream_bits(&self, bits: u32) {
        self.entry().stream_bits.store(bits, Ordering::Relaxed);
    }

    /// Packets with this destination connection ID are the peer's, of a connection that is no
    /// [`UpstreamRecord`](super::UpstreamRecord): that has IDs of its own. `id` has the length that the fast path was configured for.
    pub fn add_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.add(id)
    }

    pub fn remove_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.remove(id)
    }

    pub fn remove_ids(&self) {
        self.ids.clear();
    }

    /// Where deferred packets of the peer are steered to.
    pub fn set_deferred_socket(&self, socket: &DeferredSocket) {
        self.entry().deferred_socket.store(socket.index + 1, Ordering::Relaxed);
    }

    /// Defers packets of the peer whose UDP payload has at most `bytes`, until [`bytes`](Self::bytes) exceeds `total`.
    pub fn set_deferral(&self, bytes: u32, total: u64) {
        let entry = self.entry();
        entry.deferred_bytes.store(bytes, Ordering::Relaxed);
        entry.deferred_until.store(total, Ordering::Relaxed);
    }

    /// Packets of the peer that were steered to the deferred socket.
    pub fn deferred_packets(&self) -> u64 {
        self.entry().deferred.load(Ordering::Relaxed)
    }

    /// What leaves is of the WebTransport session with this ID; `None`: it is on the bare connection, as at first. To be called
    /// before anything is forwarded.
    pub fn set_web(&self, session: Option<u64>) {
        self.entry().web.store(session.unwrap_or(intf::BARE), Ordering::Relaxed);
    }

    /// How events name the connection.
    pub fn set_session(&self, session: u32) {
        self.entry().session.store(session, Ordering::Relaxed);
    }

    /// Copies with this outcome so far.
    pub fn outcome(&self, outcome: EgressOutcome) -> u64 {
        self.entry().outcomes[outcome as usize].load(Ordering::Relaxed)
    }
}

impl Drop for DownstreamRecord {
    fn drop(&mut self) {
        self.entry().epoch.store(0, Ordering::SeqCst);
        self.ids.clear();
        self.shared.retire(|free| &mut free.downstreams, self.id.index);
    }
}

fn raw_path(path: &Path) -> Result<intf::Path, Error> {
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
