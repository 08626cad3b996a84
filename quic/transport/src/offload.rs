//! The offload: another sender next to the data plane, which forwards packets when they arrive, before any process
//! wakes.
//!
//! [`Offload`] is a connection's interface to its offload. The data plane *delegates* a stream to the offload (as NFS
//! delegates a file). From then on the offload sends on that stream by itself, within an [`OffloadBudget`] of
//! congestion window and credit, and reports each packet afterwards. The data plane *recalls* a stream from the offload
//! when the stream has ended, or when the data plane has to reset it. The stream is *returned* once the offload sends
//! no more on it. The data plane sends everything that the offload does not, so an offload may decline anything at any
//! time.
//!
//! There may be fewer offloads than connections. A connection *claims* an offload ([`OffloadClaim`]) and sets how
//! valuable the offload is. The connection is notified when it gets an offload and when it has to release it
//! ([`OffloadOwner`]). It always stores the state that a new offload would need.
//!
//! [`OffloadEngine`] provides offloads. The engine that forwards in the kernel is `Kernel` of `millrace-relay-kernel`.

mod adoption;
mod deferral;
mod delivered;
mod openings;
mod places;
pub(crate) mod state;
mod trial;

use std::{
    any::Any,
    fmt, io,
    net::{SocketAddr, UdpSocket},
    ops::Range,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Instant,
};

use millrace_moq::data::Position;
use millrace_quic::{
    keys::TrafficSecret,
    packet::ConnectionId,
    plane::downstream::{OffloadBudget, StreamKey},
    webtransport::Binding,
};
use quinn::AsyncUdpSocket;
use thiserror::Error;

use crate::trace;

pub use state::LockedOffload;

/// The provider of offloads for the connections of endpoints.
pub trait OffloadEngine: Send + Sync {
    /// Serves the connections of an endpoint's shard with this socket, within a tokio runtime.
    ///
    /// # Errors
    /// Fails if the socket cannot be registered with the runtime.
    fn attach(self: Arc<Self>, socket: UdpSocket) -> io::Result<Attached>;

    /// Returns the network interfaces from which the engine forwards packets, or should forward them.
    fn interfaces(&self) -> Vec<OffloadInterface>;

    /// Returns the engine's counters over all connections.
    fn status(&self) -> Status;

    /// Starts to collect events about single packets that pass `filter`, or stops with `None`.
    fn set_trace(&self, filter: Option<trace::PacketFilter>);

    /// Calls `read` with each event since the last call of this method. Returns how many events were lost because the
    /// buffer was full.
    fn drain_trace(&self, read: &mut dyn FnMut(trace::OffloadTraceEvent)) -> u64;
}

/// A shard of an endpoint that an [`OffloadEngine`] serves.
pub struct Attached {
    /// The socket that the QUIC stack reads and writes.
    pub socket: Arc<dyn AsyncUdpSocket>,
    /// The function that creates an [`OffloadClaim`] for a connection of the shard.
    pub enter: OffloadEntry,
    /// A flag that is true while another process reads the socket ([`takeover`](crate::takeover)). Then `socket` returns
    /// only packets that it has set aside before. `None`: it sets none aside.
    pub is_left: Option<Arc<AtomicBool>>,
}

/// A function that registers a connection, so that it may get a kernel offload, and returns its [`OffloadClaim`].
pub type OffloadEntry = Box<dyn Fn(Weak<dyn OffloadOwner>) -> Box<dyn OffloadClaim> + Send + Sync>;

/// A connection's registration with the engine, by which the connection may get a kernel offload. Dropping it ends the
/// registration.
pub trait OffloadClaim: Send + Sync {
    /// Sets how valuable a kernel offload is for the connection, which is [`Worth::Nothing`] at first.
    fn set_worth(&self, worth: Worth);

    /// Notes that the connection has ended and needs no offload any more.
    fn end(&self);

    /// Returns whether the connection has a kernel offload at present, and the reason if it has none.
    fn standing(&self) -> OffloadStanding;
}

/// How valuable a kernel offload is for a connection, in ascending order. More valuable connections get offloads first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Worth {
    /// The peer has not proved yet that it may subscribe or publish, so the connection gets no offload.
    #[default]
    Nothing,
    /// The connection has neither subscriptions nor publications.
    Idle,
    /// The peer has subscribed or fetched, and does not publish.
    Subscriber,
    /// The peer publishes. If its connection has no offload, no offload forwards its media to subscribers.
    Publisher,
    /// The connection leads to the relay from which this relay gets its media.
    Upstream,
}

/// Whether a connection has a kernel offload, and if not, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadStanding {
    /// The connection gets no offload, because its [`Worth`] is still `Nothing`.
    Unproven,
    /// The connection waits for a free offload.
    Waiting,
    /// The connection's kernel offload was reassigned to a publisher's connection, and this connection waits for
    /// another one.
    Taken,
    /// The connection has a kernel offload.
    Held,
}

impl OffloadStanding {
    /// Returns the text for this value in the operator's status output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unproven => "no right yet",
            Self::Waiting => "waiting",
            Self::Taken => "taken for a publisher",
            Self::Held => "held",
        }
    }
}

/// The kernel offload of one connection, from [`OffloadOwner::on_offload`] until [`OffloadOwner::on_released`]. No
/// method blocks.
///
/// The owner first passes its state: keys, connection IDs, path, MTU and the peer's limits. The offload sends nothing
/// before the first [`Self::grant`]. From then on, both draw packet numbers from one counter ([`Self::numbers`]), the
/// owner delegates streams ([`Self::delegate`]) and reads what was sent ([`Self::drain`]). Methods with `self:
/// Arc<Self>` may take effect later. To end the offload, the owner withdraws the limits with `grant` and takes all
/// streams back ([`Self::recall`]). Then it calls [`Self::release`], and after `on_released` it reads the last packets
/// with `drain`. [`Self::stop`] is for a connection that has ended, and needs no such order.
pub trait Offload: Send + Sync {
    /// Returns the packet number counter that all senders of the connection draw from. The kernel offload draws no
    /// number before the first [`Self::grant`], nor after [`OffloadOwner::on_released`].
    fn numbers(&self) -> &AtomicU64;

    /// Releases the kernel offload. Before the call, the connection has to withdraw the limits ([`Self::grant`]) and
    /// all delegated streams. [`OffloadOwner::on_released`] is called when the offload has stopped.
    fn release(self: Arc<Self>);

    /// Returns whether the kernel offload can forward packets at present.
    fn is_active(&self) -> bool;

    /// Sets the number by which packet traces identify the MoQ session on this connection.
    fn set_session(&self, session: u32);

    /// Sets whether the application's streams and datagrams are plain QUIC ones or belong to a WebTransport session, in
    /// both directions. This is called at most once, before anything is forwarded from or to this connection. Without
    /// this call the binding is [`Binding::Bare`].
    fn set_binding(&self, binding: Binding);

    /// Sets the keys of a key generation for sealing packets. They are derived from `secret`, except the header key,
    /// which is that of generation 0. The kernel offload installs the keys asynchronously, and does not use them before
    /// they are installed.
    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]);

    /// Notes that this endpoint seals with a newer key generation from now on.
    fn on_key_update(&self);

    /// Sets the keys of a key generation for opening packets. The kernel offload installs them asynchronously.
    fn set_open_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]);

    /// Notes that the peer seals with this key generation from now on.
    fn on_open_generation(&self, generation: u16);

    /// Adds a connection ID that the peer may use in its packets. The change takes effect asynchronously.
    fn add_id(self: Arc<Self>, id: &ConnectionId);

    /// Removes a connection ID that the peer does not use any more. The change takes effect asynchronously.
    fn remove_id(self: Arc<Self>, id: &ConnectionId);

    /// Sets the network path of the packets that the kernel offload sends from now on. [`OffloadOwner::on_path`]
    /// reports when the offload uses the new path. Until then packets may take the old one.
    fn set_path(self: Arc<Self>, path: OffloadPath);

    /// Sets the path MTU: the largest UDP payload that the path carries, bytes.
    fn set_mtu(&self, bytes: u32);

    /// Sets the largest DATAGRAM frame that the peer accepts, bytes.
    fn set_max_datagram(&self, bytes: u32);

    /// Sets the total number of bytes that the kernel offload may send, counted from when it began. Returns the totals
    /// that the offload may have sent already before the new limits took effect.
    fn grant(&self, total: OffloadBudget) -> OffloadBudget;

    /// Stops the kernel offload because the connection has ended. The offload sends no more packets.
    fn stop(&self);

    /// Sets the priority level of data that waits in userspace, so that the kernel offload forwards only more urgent
    /// data. A smaller level is more urgent. `None` means that no data waits.
    fn set_waiting(&self, level: Option<u16>);

    /// Lets the kernel offload defer the wake-up of the process for the peer's packets with at most `bytes` bytes of
    /// UDP payload. The permission ends when the offload has sent `total` bytes since it began.
    fn set_deferral(&self, bytes: u32, total: u64);

    /// Delivers the deferred packets, which did not wake the process, to the process now. Returns whether there were
    /// any.
    fn read_deferred(&self) -> bool;

    /// Returns the arrival time of a packet that the process read at `now`. The packet's last bytes `end` identify it.
    fn arrival(&self, now: Instant, end: [u8; 8]) -> Instant;

    /// Notes that the QUIC stack has decrypted the packet with this number. Returns whether the kernel offload has
    /// decrypted the packet, too, or may have.
    fn on_received(&self, number: u64) -> bool;

    /// Notes that userspace received bytes of a peer's stream, and perhaps the stream's end, in a packet that the
    /// kernel offload did not decrypt.
    fn leave(&self, stream: u64, bytes: &Range<u64>, fin: bool);

    /// Returns whether [`Self::ingress`] was called, so that media arrives on this connection.
    fn has_ingress(&self) -> bool;

    /// Lets the engine forward a stream or datagrams of this peer to other connections, until the returned handle
    /// (ingress) is dropped. `seen` tells which packets and streams this endpoint received before. The value `held` is
    /// kept alive as long as the handle. Returns `None` if the engine's tables are full.
    fn ingress(
        self: Arc<Self>,
        origin: OffloadOrigin,
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadIngress>>;

    /// Lets the engine forward the peer's new streams of a track (`alias`) from their first byte on. The engine opens
    /// the subscribers' streams itself. Only subgroups after `last` (group and ID) are forwarded. The other parameters
    /// are those of [`Self::ingress`].
    fn openings(
        self: Arc<Self>,
        alias: u64,
        last: (u64, u64),
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadOpenings>>;

    /// Notes that this endpoint has accepted a unidirectional stream of the peer, so that the engine does not start to
    /// forward it any more. If the engine forwards this stream already, returns its handle (ingress).
    fn accept(&self, stream: u64) -> Option<Arc<dyn OffloadIngress>>;

    /// Sets the low bits that all IDs of this endpoint's unidirectional streams have.
    fn set_stream_bits(&self, bits: u32);

    /// Lets the kernel offload open unidirectional streams as long as fewer than `limit` were opened on the connection.
    /// All streams with an index below `next` have been opened. Returns the index of the next stream to be opened,
    /// which no longer changes if the limit is 0.
    fn set_streams(&self, next: u64, limit: u64) -> u64;

    /// Lets the kernel offload open a stream on this subscriber's connection as a copy of a publisher's stream that has
    /// not begun. `ingress` is the handle of that future stream, made by [`OffloadOpenings::make`] of the same engine.
    ///
    /// # Errors
    /// Fails for the same reason as [`Self::delegate`].
    fn prepare(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        request: &OpeningRequest,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards the bytes of the incoming stream `ingress`, which has to be from the same engine, on a stream of this
    /// connection.
    ///
    /// # Errors
    /// Fails if the offload cannot forward the stream, now or ever. The data plane then sends the stream.
    fn delegate(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        stream: &StreamCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards a track's incoming datagrams, `ingress`, which has to be from the same engine, on this connection.
    ///
    /// # Errors
    /// Fails for the same reason as [`Self::delegate`].
    fn delegate_datagrams(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        datagrams: &DatagramCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Recalls a stream from the kernel offload. [`OffloadOwner::on_returned`] reports when the offload has stopped
    /// sending on it.
    fn recall(self: Arc<Self>, key: StreamKey, delegation: Option<Box<dyn Delegation>>);

    /// Calls `read` for every packet that the kernel offload has sent since the last call, with the send time, which is
    /// never later than `now`.
    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, OffloadSentPacket));

    /// Returns how many copies of frames for the subscriber the kernel offload could not send for lack of congestion
    /// window or credit.
    fn short_of_room(&self) -> u64;

    /// Returns the kernel offload's counters on this connection.
    fn status(&self) -> ConnectionStatus;
}

/// A connection that may get a kernel offload.
pub trait OffloadOwner: Send + Sync {
    /// Assigns this offload to the connection, which has to pass its keys, path and other state to it.
    fn on_offload(&self, now: Instant, offload: Arc<dyn Offload>);

    /// Requests that the connection releases its offload, which another connection needs. The connection withdraws the
    /// kernel offload's limits and all delegated streams, and calls [`Offload::release`].
    fn on_offload_recalled(&self, now: Instant);

    /// Notes that the released kernel offload sends no more packets. The connection reads the last packets that it sent
    /// with [`Offload::drain`], and then drops the offload.
    fn on_released(&self, now: Instant);

    /// Notes that [`Offload::drain`] has new sent packets to return.
    fn on_sent(&self, now: Instant);

    /// Notes that the kernel offload sends no more packets of these streams. [`Offload::drain`] returns the last ones
    /// that it sent.
    fn on_returned(&self, now: Instant, keys: &[StreamKey]);

    /// Notes that the kernel offload has begun to send on this path.
    fn on_path(&self, now: Instant, path: &OffloadPath);

    /// Notes that an incoming stream is no longer forwarded. `tags` name the outgoing streams of this connection that
    /// were prepared as its copies. The connection resets an outgoing stream that the kernel offload has opened and
    /// whose data the data plane does not have.
    fn on_gone(&self, now: Instant, tags: &[u64]);
}

/// An object that a kernel offload has created: an [`OffloadIngress`] or an [`OffloadOpenings`].
pub trait OffloadResult: Send + Sync {
    /// Returns whether the kernel offload has been released, so that this object has no effect any more.
    fn is_over(&self) -> bool;
}

/// Handle of an incoming stream, or of a track's incoming datagrams, that the kernel offload may forward. Dropping it
/// ends the forwarding.
pub trait OffloadIngress: OffloadResult + Any {
    /// Notes that this endpoint has received the stream's bytes up to `position`. The kernel offload forwards
    /// only well-formed bytes that directly follow such received bytes, or bytes that it has forwarded itself.
    fn advance(&self, position: &Position);

    /// Returns whether forwarded bytes may differ from those that this endpoint received, because the peer has sent two
    /// versions. If so, the kernel offload has stopped forwarding, and the caller should reset the copies.
    fn is_contradicted(&self) -> bool;

    /// Sets whether this incoming data is needed only for the kernel offload's copies. If so, its arrival need not wake
    /// the process.
    fn set_exclusive(&self, exclusive: bool);

    /// Returns a number that is unique to this incoming stream or these datagrams.
    fn serial(&self) -> u64;

    /// Notes that the data plane now has the data of one of the copies that the kernel offload opened, and can
    /// retransmit it.
    fn on_adopted(&self);

    /// Claims an object (group and ID) of a track's datagrams for userspace, because it has arrived from another
    /// publisher. Returns true if the kernel offload has not forwarded the object, and never will.
    fn claim_object(&self, object: (u64, u64)) -> bool;

    /// Notes that datagrams up to this object may have arrived before the kernel offload saw the track. If no datagram
    /// was forwarded yet, the offload forwards only datagrams after this object.
    fn skip_to(&self, largest: (u64, u64));
}

/// The openings of a track: handles prepared for incoming streams that have not begun. When a new stream of the track
/// begins, the engine assigns the next opening to it and forwards the stream. After this object is dropped, no further
/// stream gets an opening.
pub trait OffloadOpenings: OffloadResult {
    /// Returns how many more openings (handles for incoming streams that have not begun) the caller should add. Each
    /// opening takes table entries for `subscribers` copies.
    fn missing(&self, subscribers: usize) -> usize;

    /// Creates an opening (a handle for an incoming stream that has not begun), or returns `None` if the engine's
    /// tables are full.
    fn make(&self) -> Option<Arc<dyn OffloadIngress>>;

    /// Adds `opening`, the handle for an incoming stream that has not begun. The engine assigns openings to new streams
    /// in the order of these calls.
    fn put(&self, opening: Arc<dyn OffloadIngress>);

    /// Returns the openings (handles for incoming streams that have not begun) that are not assigned to a stream yet.
    fn waiting(&self) -> Vec<Arc<dyn OffloadIngress>>;

    /// Claims a subgroup (group and ID) for userspace, because it has begun to arrive from another publisher. From now
    /// on the engine forwards only new streams of later subgroups. Returns true if neither this subgroup nor a later
    /// one was forwarded or claimed before.
    fn claim(&self, subgroup: (u64, u64)) -> bool;

    /// Stops the forwarding of streams that begin from now on. Returns the last subgroup (group and ID) that the engine
    /// forwards, or that was claimed for userspace.
    fn close(&self) -> (u64, u64);

    /// Returns whether the engine forwards a new stream of the track that this endpoint has not accepted yet.
    fn has_bound(&self) -> bool;
}

/// The forwarding of one incoming stream, or of a track's incoming datagrams, to one connection. Dropping it ends the
/// forwarding.
pub trait Delegation: Send + Sync {
    /// Sets the larger MAX_STREAM_DATA limit that the peer has sent for the stream.
    fn set_max_offset(&self, max: u64);

    /// Returns whether the forwarded data is that of the incoming stream or datagrams `ingress`.
    fn is_of(&self, ingress: &Arc<dyn OffloadIngress>) -> bool;

    /// Forbids the kernel offload to open the outgoing stream that was prepared for this forwarding. Returns which side
    /// opens the stream, the data plane or the offload, because the offload may have opened it already.
    fn close(&self) -> OpeningSide;

    /// Notes that the kernel offload has opened the outgoing stream that was prepared for this forwarding.
    fn on_opened(&self);
}

/// The side that opens a stream: the data plane or the kernel offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpeningSide {
    /// The data plane has to open the stream. The kernel offload has not opened it and never will.
    Userspace,
    /// The kernel offload has opened the stream with this ID, or is about to open it (`None`).
    Offload(Option<u64>),
}

/// The packets and streams that a connection received before its offload saw any packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BeforeOffload {
    /// The largest received packet number plus one.
    pub packets: u64,
    /// Number of the peer's unidirectional streams that were accepted.
    pub streams: u64,
    /// IDs of streams that have begun to arrive. Retransmitted bytes of these streams are not forwarded.
    pub begun: Vec<u64>,
}

/// The peer's stream or datagrams that an [`OffloadIngress`] forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadOrigin {
    /// A stream of the peer, by its ID.
    Stream(u64),
    /// Datagrams of the peer under this track alias.
    Datagrams(u64),
}

/// One subscriber's copy of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCopy {
    /// Identifies this copy in reports: [`OffloadSentPacket::tag`] has the same value.
    pub key: StreamKey,
    /// The stream's ID on the subscriber's connection.
    pub id: u64,
    /// Offset of a byte on the subscriber's stream minus its offset on the publisher's stream, bytes.
    pub shift: i64,
    /// Offset on the publisher's stream at which forwarding starts.
    pub from: u64,
    /// The peer's MAX_STREAM_DATA limit for the stream, bytes.
    pub max_offset: u64,
    /// Priority level. A smaller level is more urgent, as in [`Offload::set_waiting`].
    pub level: u16,
    /// The number by which packet traces identify the track.
    pub track: u32,
    /// The subgroup's group ID, for traces.
    pub group: u64,
}

/// One subscriber's copies of a track's new streams, which the kernel offload opens. A stream is copied if its first
/// object is at or after `first` (group and object ID), and its group is not after `last_group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningTerms {
    /// The subscription's number, as in [`NewStream::owner`](millrace_quic::plane::downstream::NewStream::owner).
    pub owner: u64,
    /// The track alias on the subscriber's connection.
    pub alias: u64,
    /// Group and object ID of the first object that is forwarded.
    pub first: (u64, u64),
    /// The last group that is forwarded.
    pub last_group: u64,
    /// Priority level of the copies, as in [`DatagramCopy::level`].
    pub level: u16,
    /// The number by which packet traces identify the track.
    pub track: u32,
}

/// A stream that the kernel offload may open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningRequest {
    /// Identifies this copy in reports: [`OffloadSentPacket::tag`] has the same value.
    pub tag: u64,
    /// The peer's initial flow control limit of each new stream, bytes.
    pub max_offset: u64,
    /// Track, groups and priority level of the copy.
    pub terms: OpeningTerms,
}

/// One subscriber's copies of a track's datagrams: those from `first` (group and object ID) up to `last_group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramCopy {
    /// Identifies this copy in reports: [`OffloadSentPacket::tag`] has the same value.
    pub tag: u64,
    /// The track alias on the subscriber's connection.
    pub alias: u64,
    /// Group and object ID of the first object that is forwarded.
    pub first: (u64, u64),
    /// The last group that is forwarded.
    pub last_group: u64,
    /// Priority level, as in [`StreamCopy::level`]. The low 8 bits, the publisher's priority, apply to datagrams that
    /// name no priority.
    pub level: u16,
    /// The number by which packet traces identify the track.
    pub track: u32,
}

/// The network path that the kernel offload's packets take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadPath {
    /// This endpoint's address and UDP port.
    pub local: SocketAddr,
    /// The peer's address and UDP port.
    pub remote: SocketAddr,
    /// The peer's connection ID, which is the destination ID of packets.
    pub id: ConnectionId,
    /// Traffic class of the packets: DSCP and ECN.
    pub traffic_class: u8,
}

/// A packet that a kernel offload sent, with one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadSentPacket {
    /// The tag of the [`StreamCopy`], [`OpeningRequest`] or [`DatagramCopy`].
    pub tag: u64,
    /// The packet number.
    pub number: u64,
    /// Size of the UDP payload, bytes.
    pub size: u16,
    /// The frame's contents.
    pub carried: OffloadedFrame,
}

/// The contents of the one frame in a packet that a kernel offload sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadedFrame {
    /// A STREAM frame.
    Stream {
        /// The stream's ID on the subscriber's connection.
        id: u64,
        /// Offset of the first byte on that stream.
        offset: u64,
        /// Number of stream bytes in the frame.
        len: u16,
        /// True if the frame ends the stream.
        fin: bool,
        /// Connection credit that the frame has used, bytes.
        credit: u64,
    },
    /// A DATAGRAM frame with one object.
    Datagram {
        /// The object's group ID.
        group: u64,
        /// The object's ID.
        object: u64,
    },
}

/// Error: the reason why the kernel offload does not forward a stream or datagrams, so that the data plane sends them.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct Declined(pub String);

/// A network interface from which the engine is to forward arriving media.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadInterface {
    /// The interface's name, such as `eth0`.
    pub name: String,
    /// The mechanism by which the BPF program is attached to the interface, or the reason why it is not attached any
    /// more.
    pub attached: Result<String, String>,
}

impl fmt::Display for OffloadInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.attached {
            Ok(mechanism) => write!(f, "{} by {mechanism}", self.name),
            Err(reason) => write!(f, "no more to {}: {reason}", self.name),
        }
    }
}

/// A list of named counts: the name and the value of each.
pub type OffloadCounts = Vec<(&'static str, u64)>;

/// Counts of an engine since it was started.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Streams that are delegated to offloads at present.
    pub streams: u64,
    /// Outgoing streams that the engine may open when the publisher's next streams begin.
    pub prepared: u64,
    /// Packets from subscribers that did not wake the process when they arrived, because from their length they were
    /// likely plain acknowledgements.
    pub deferred: u64,
    /// Packets that did not wake the process, and were dropped because the receive buffer for such packets was full.
    pub deferred_dropped: u64,
    /// Number of times that the engine polled its offloads for packets that they had sent, without an event that
    /// announced such packets.
    pub ticks: u64,
    /// Connections with requested changes (path, keys, streams to be returned) that the engine has not carried out yet.
    pub commands_waiting: u64,
    /// Changes of connections (path, keys, streams to be returned) that were requested from the engine so far.
    pub commands: u64,
    /// Requested changes of connections that were replaced by newer requests before the engine carried them out.
    pub commands_coalesced: u64,
    /// Connections that wait for a kernel offload.
    pub offloads_waiting: u64,
    /// Number of times that a kernel offload was reassigned from a subscriber's connection to a publisher's.
    pub offloads_taken: u64,
    /// The engine's tables: name, number of entries in use, and number of all entries.
    pub records: Vec<(&'static str, u32, u32)>,
    /// Counts of received packets by what the engine did with them, or `None` if the engine does not count them.
    pub received: Option<OffloadCounts>,
    /// Counts of STREAM frames of streams that may be forwarded, by what the engine did with them.
    pub frames: Option<OffloadCounts>,
    /// Counts of publishers' streams that began, by whether the engine forwarded them, and if not, why.
    pub openings: Option<OffloadCounts>,
    /// Counts of copies of frames for subscribers, by whether they were sent, and if not, why.
    pub copies: Option<OffloadCounts>,
    /// Counts of additional runs of the forwarding program, by result. A packet needs several runs if it has more
    /// copies than one run can send.
    pub further_runs: Option<OffloadCounts>,
}

/// Counts of a kernel offload since its connection began.
#[derive(Clone, Debug, Default)]
pub struct ConnectionStatus {
    /// Whether the connection has a kernel offload, and if not, why.
    pub standing: Option<OffloadStanding>,
    /// True if the kernel offload has the keys and the path to the peer, so that it may send. If it decrypts the peer's
    /// packets, it has the keys and the connection IDs for that, too.
    pub is_ready: bool,
    /// Counts of copies of publishers' frames for this connection, by whether they were sent, and if not, why.
    pub copies: OffloadCounts,
    /// Packets that the kernel offload sent, including those that it has not reported yet ([`Offload::drain`]).
    pub sent: u64,
    /// Number of the peer's packets that did not wake the process when they arrived. A publisher's packets do not count
    /// here.
    pub deferred: u64,
    /// Counts of packets by whether a precomputed keystream was available: the first element for packets that the
    /// kernel offload sealed, the second for packets that it decrypted.
    pub keystreams: [KeystreamCounts; 2],
}

/// Numbers of packets, by whether their keystream had been computed before they arrived or were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeystreamCounts {
    /// Packets whose precomputed keystream was available.
    pub hit: u64,
    /// Packets whose keystream slot contained the keystream of another packet number.
    pub stale: u64,
    /// Packets whose keystream slot was empty.
    pub miss: u64,
}

impl ConnectionStatus {
    /// Adds the counts of an earlier offload of the same connection.
    fn add(&mut self, past: &Self) {
        for (name, count) in &past.copies {
            match self.copies.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += count,
                None => self.copies.push((name, *count)),
            }
        }
        self.sent += past.sent;
        self.deferred += past.deferred;
        for (sum, KeystreamCounts { hit, stale, miss }) in self.keystreams.iter_mut().zip(past.keystreams) {
            *sum = KeystreamCounts { hit: sum.hit + hit, stale: sum.stale + stale, miss: sum.miss + miss };
        }
    }
}
