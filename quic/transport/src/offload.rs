//! The offload: a second sender next to the data plane, which forwards packets when they arrive, before any process wakes.
//!
//! [`Offload`] is all that a connection knows of it. The plane *delegates* a stream to it (as NFS delegates a file): from
//! then on the offload sends on that stream by itself, within an [`OffloadBudget`] of congestion window and credit that it is
//! granted, and says afterwards what it sent. A stream that is over, or that somebody here has to act on, is *recalled*,
//! and *returned* once nothing more can be under way. Whatever an offload does not send the plane sends, so an offload
//! may decline anything at any time.
//!
//! There are fewer offloads than connections. A connection *claims* one ([`OffloadClaim`]) and says how much it is worth to it. It is notified
//! when it gets one and when it has to give it back ([`OffloadOwner`]). In the meantime it keeps all the state that an offload needs.
//!
//! [`OffloadEngine`] makes offloads. The engine that forwards in the kernel is `Kernel` of `millrace-relay-kernel`.

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
    sync::{Arc, Weak, atomic::AtomicU64},
    time::Instant,
};

use millrace_moq::data::Position;
use millrace_quic::{
    keys::{KeySuite, TrafficSecret},
    packet::ConnectionId,
    plane::downstream::{OffloadBudget, StreamKey},
    webtransport::Binding,
};
use quinn::AsyncUdpSocket;
use thiserror::Error;

use crate::trace;

pub use state::LockedOffload;

/// Makes offloads for the connections of endpoints.
pub trait OffloadEngine: Send + Sync {
    /// Serves the connections of an endpoint with this socket, within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    fn attach(self: Arc<Self>, socket: UdpSocket) -> io::Result<Attached>;

    /// Returns the interfaces that it forwards from, or should.
    fn interfaces(&self) -> Vec<OffloadInterface>;

    /// Returns the engine's own figures, over all connections.
    fn status(&self) -> Status;

    /// Starts to collect events about single packets, or stops with `None`.
    fn set_trace(&self, filter: Option<trace::PacketFilter>);

    /// Passes the events since the last call to `read`, and returns how many were lost for want of room.
    fn drain_trace(&self, read: &mut dyn FnMut(trace::OffloadTraceEvent)) -> u64;
}

/// An endpoint that an [`OffloadEngine`] serves.
pub struct Attached {
    /// The socket that the QUIC stack reads and writes.
    pub socket: Arc<dyn AsyncUdpSocket>,
    /// Makes the claims of its connections.
    pub enter: OffloadEntry,
    /// The cipher suites that an offload can seal and open packets of.
    pub suites: &'static [KeySuite],
}

/// Adds a connection to those that may have an offload.
pub type OffloadEntry = Box<dyn Fn(Weak<dyn OffloadOwner>) -> Box<dyn OffloadClaim> + Send + Sync>;

/// A connection's claim to an offload; over when it is dropped.
pub trait OffloadClaim: Send + Sync {
    /// Says what an offload is worth to the connection; at first nothing.
    fn set_worth(&self, worth: Worth);

    /// The connection is over: nothing is worth anything to it any more.
    fn end(&self);

    /// Returns whether the connection has an offload at the moment, or why not.
    fn standing(&self) -> OffloadStanding;
}

/// The worth of an offload to a connection, the least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Worth {
    /// The peer has shown no right to anything.
    #[default]
    Nothing,
    /// The connection has neither subscriptions nor publications.
    Idle,
    /// The peer has subscribed or fetched, and publishes nothing.
    Subscriber,
    /// A publisher. Without an offload on this connection, nothing that it publishes is forwarded to anybody.
    Publisher,
    /// The connection leads to the relay that this one has its media from.
    Upstream,
}

/// Whether a connection has an offload, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadStanding {
    /// An offload is worth nothing to the connection.
    Unproven,
    /// The connection waits for an offload that is free.
    Waiting,
    /// A publisher has taken it, and the connection waits.
    Taken,
    /// The connection has an offload.
    Held,
}

impl OffloadStanding {
    /// Returns the words for it in the status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unproven => "no right yet",
            Self::Waiting => "waiting",
            Self::Taken => "taken for a publisher",
            Self::Held => "held",
        }
    }
}

/// The offload of one connection, from [`OffloadOwner::on_offload`] until [`OffloadOwner::on_released`]. Nothing here waits.
pub trait Offload: Send + Sync {
    /// The packet number word that all senders of the connection draw from. It does not move before anything is granted, nor after
    /// [`OffloadOwner::on_released`].
    fn numbers(&self) -> &AtomicU64;

    /// The connection has nothing granted or delegated any more. [`OffloadOwner::on_released`] says when nothing more is under way.
    fn release(self: Arc<Self>);

    /// Returns whether it can forward anything at the moment.
    fn is_active(&self) -> bool;

    /// Sets the session's number in traces.
    fn set_session(&self, session: u32);

    /// Sets the layout of the application's streams and datagrams on the connection, in both directions. Called at most once, before
    /// anything is delegated or arrives. Without it they are bare.
    fn set_binding(&self, binding: Binding);

    /// The keys of a generation to seal with, which follow from `secret` but for the header key, that of generation 0.
    /// They are installed in some moments, until when the offload does not use them.
    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]);

    /// This end seals with a newer generation from now on.
    fn on_key_update(&self);

    /// The keys of a generation to open with. They are installed in some moments.
    fn set_open_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]);

    /// The peer seals with this generation from now on.
    fn on_open_generation(&self, generation: u16);

    /// The peer's packets have this connection ID, as well as those before; in some moments.
    fn add_id(self: Arc<Self>, id: &ConnectionId);

    /// Removes a connection ID that the peer does not use any more. It takes effect in some moments.
    fn remove_id(self: Arc<Self>, id: &ConnectionId);

    /// Sets the path of further packets. [`OffloadOwner::on_path`] reports when it is in use; until then packets may go by the old one.
    fn set_path(self: Arc<Self>, path: OffloadPath);

    /// The largest UDP payload that the path takes, bytes.
    fn set_mtu(&self, bytes: u32);

    /// The largest DATAGRAM frame that the peer takes, bytes.
    fn set_max_datagram(&self, bytes: u32);

    /// Limits what it may send, in totals since the connection began; returns the totals that it may have reached before
    /// it saw this.
    fn grant(&self, total: OffloadBudget) -> OffloadBudget;

    /// The connection is over: it sends nothing more.
    fn stop(&self);

    /// Sets the urgency of data that waits in userspace, so that only more urgent data is forwarded. A smaller level is more urgent.
    /// `None`: nothing waits.
    fn set_waiting(&self, level: Option<u16>);

    /// Packets of the peer with at most so many bytes of UDP payload need not wake the process, until it has sent `total`
    /// bytes since the connection began.
    fn set_deferral(&self, bytes: u32, total: u64);

    /// Delivers the packets whose wake-up was deferred to the process, and returns whether there were any.
    fn read_deferred(&self) -> bool;

    /// Returns when a packet arrived that was read `now` and ends with these bytes.
    fn arrival(&self, now: Instant, end: [u8; 8]) -> Instant;

    /// A packet with this number was opened by the QUIC stack. Returns whether the offload has opened it, too, or may have.
    fn on_received(&self, number: u64) -> bool;

    /// This end keeps bytes of a stream of the peer, and perhaps their end, from a packet that the offload did not open.
    fn leave(&self, stream: u64, bytes: &Range<u64>, fin: bool);

    /// Returns whether media arrives on this connection: [`Self::ingress`] was called.
    fn has_ingress(&self) -> bool;

    /// Lets the engine forward a stream or datagrams of the peer to its own connections, while the result is held. `seen` is what has
    /// arrived before, and `held` is kept alive as long as the result. Returns `None` if there is no room.
    fn ingress(
        self: Arc<Self>,
        origin: OffloadOrigin,
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadIngress>>;

    /// Lets the engine open streams for further streams of the peer under a track alias, behind the subgroup `last` (group and ID).
    /// Otherwise it is like [`Self::ingress`].
    fn openings(
        self: Arc<Self>,
        alias: u64,
        last: (u64, u64),
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn OffloadOpenings>>;

    /// Takes a unidirectional stream of the peer for this end, so that it is not bound from now on. Returns its earlier binding.
    fn accept(&self, stream: u64) -> Option<Arc<dyn OffloadIngress>>;

    /// Low bits of the IDs of this end's unidirectional streams.
    fn set_stream_bits(&self, bits: u32);

    /// Lets it open unidirectional streams while the connection has fewer than `limit`. This end has opened those before index `next`.
    /// Returns the index of the next one, which stays the same if the limit is 0.
    fn set_streams(&self, next: u64, limit: u64) -> u64;

    /// Lets it open a stream of this connection for the stream that `ingress` will be bound to. The ingress is from an offload of the same
    /// engine.
    ///
    /// # Errors
    /// The same as for [`Self::delegate`].
    fn prepare(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        request: &OpeningRequest,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards what arrives at `ingress`, of an offload of the same engine, on a stream of this connection.
    ///
    /// # Errors
    /// The offload cannot forward it, now or ever, so the plane sends it.
    fn delegate(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        stream: &StreamCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards datagrams that arrive at `ingress`, of an offload of the same engine, on this connection.
    ///
    /// # Errors
    /// The same as for [`Self::delegate`].
    fn delegate_datagrams(
        self: Arc<Self>,
        ingress: &Arc<dyn OffloadIngress>,
        datagrams: &DatagramCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Takes a stream back. [`OffloadOwner::on_returned`] says when nothing more is under way.
    fn recall(self: Arc<Self>, key: StreamKey, delegation: Option<Box<dyn Delegation>>);

    /// Passes every packet sent since the last call to `read`, with its time, which is never later than `now`.
    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, OffloadSentPacket));

    /// Returns how many times it was short of window or credit.
    fn short_of_room(&self) -> u64;

    /// Returns counts of what this offload did on the connection.
    fn status(&self) -> ConnectionStatus;
}

/// The connection behind an offload.
pub trait OffloadOwner: Send + Sync {
    /// Gives this offload to the connection. The offload knows nothing of it yet.
    fn on_offload(&self, now: Instant, offload: Arc<dyn Offload>);

    /// Asks for the offload, which is needed elsewhere: the connection takes everything back, and calls [`Offload::release`].
    fn on_offload_recalled(&self, now: Instant);

    /// The offload sends nothing more, and all that it sent can be drained. It is to be dropped then.
    fn on_released(&self, now: Instant);

    /// Called when [`Offload::drain`] has sent packets to return.
    fn on_sent(&self, now: Instant);

    /// These streams are returned: the offload sends no more on them, and all that it sent can be drained.
    fn on_returned(&self, now: Instant, keys: &[StreamKey]);

    /// Called when the offload has begun to send to this path.
    fn on_path(&self, now: Instant, path: &OffloadPath);

    /// The offload has dropped everything that it may have opened streams for under these tags.
    fn on_gone(&self, now: Instant, tags: &[u64]);
}

/// An ingress or openings, as an offload has made them.
pub trait OffloadResult: Send + Sync {
    /// Returns whether the offload has been released, so that this is of no use any more.
    fn is_over(&self) -> bool;
}

/// A stream of the peer, or a track's datagrams, as the offload may forward it. When it is dropped nothing of it is
/// forwarded any more.
pub trait OffloadIngress: OffloadResult + Any {
    /// This end has the stream's bytes up to `position`. Forwarded bytes follow those that were forwarded before, or those that this end
    /// has, and are well-formed there.
    fn advance(&self, position: &Position);

    /// Returns whether bytes may have been forwarded that differ from this end's, because the peer has sent two versions. Then no more is
    /// forwarded, and the copies should be ended.
    fn is_contradicted(&self) -> bool;

    /// Says whether only the forwarded copies are waited for: then arriving data need not wake the process.
    fn set_exclusive(&self, exclusive: bool);

    /// Tells it from every other one.
    fn serial(&self) -> u64;

    /// The subscription knows what one of the streams prepared for this ingress carries.
    fn on_adopted(&self);

    /// Takes an object of a track's datagrams, by group and ID, that has come in another way. Returns whether the offload has not
    /// forwarded it, nor will.
    fn claim_object(&self, object: (u64, u64)) -> bool;

    /// Everything of a track's datagrams up to this object may have come before: while nothing is forwarded, what will be begins
    /// behind it.
    fn skip_to(&self, largest: (u64, u64));
}

/// Openings of a track: each is an [`OffloadIngress`] that is bound to the next stream that begins. When this is dropped no more are
/// bound.
pub trait OffloadOpenings: OffloadResult {
    /// Returns how many openings to add, for this many subscribers each.
    fn missing(&self, subscribers: usize) -> usize;

    /// Makes an opening; `None` if there is no room.
    fn make(&self) -> Option<Arc<dyn OffloadIngress>>;

    /// Binds `opening` to a later stream, in the order of calls.
    fn put(&self, opening: Arc<dyn OffloadIngress>);

    /// Returns the openings that are not bound yet.
    fn waiting(&self) -> Vec<Arc<dyn OffloadIngress>>;

    /// Takes a subgroup that has begun in another way, by group and ID, so that only later ones are bound from now on. Returns whether
    /// neither it nor a later one was bound or taken before.
    fn claim(&self, subgroup: (u64, u64)) -> bool;

    /// Binds nothing more. Returns the last subgroup that was bound or taken.
    fn close(&self) -> (u64, u64);

    /// Returns whether a stream was bound that nobody has accepted yet.
    fn has_bound(&self) -> bool;
}

/// A forwarding from an ingress to one connection, which ends when this is dropped.
pub trait Delegation: Send + Sync {
    /// The peer's limit of the stream has risen.
    fn set_max_offset(&self, max: u64);

    /// Returns whether it forwards from this ingress.
    fn is_of(&self, ingress: &Arc<dyn OffloadIngress>) -> bool;

    /// Forbids the offload to open the stream, and returns the end that opens it. It may have been opened already.
    fn close(&self) -> OpeningSide;

    /// The offload has opened the stream.
    fn on_opened(&self);
}

/// The end that opens a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpeningSide {
    /// The plane opens the stream. The offload does not any more.
    Userspace,
    /// The offload opens it, with this ID; `None`: it is about to.
    Offload(Option<u64>),
}

/// The part of a connection that came before the offload saw any of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BeforeOffload {
    /// The largest packet number plus one.
    pub packets: u64,
    /// Unidirectional streams that were accepted.
    pub streams: u64,
    /// IDs of streams that have begun to arrive. Bytes of these that arrive again are not forwarded.
    pub begun: Vec<u64>,
}

/// The source of an [`OffloadIngress`].
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
    /// Value that [`OffloadSentPacket::tag`] repeats.
    pub key: StreamKey,
    /// The stream's ID on the subscriber's connection.
    pub id: u64,
    /// The copy's offset minus the ingress's.
    pub shift: i64,
    /// The ingress's offset where forwarding starts.
    pub from: u64,
    /// The peer's MAX_STREAM_DATA.
    pub max_offset: u64,
    /// Urgency: smaller is more urgent, as in [`Offload::set_waiting`].
    pub level: u16,
    /// The track's number in traces.
    pub track: u32,
    /// The subgroup's group ID, for traces.
    pub group: u64,
}

/// One subscriber's copy of a track's new streams: those whose first object is at or behind the first location, up to the last group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningTerms {
    /// The subscription, as of [`NewStream::owner`](millrace_quic::plane::downstream::NewStream::owner).
    pub owner: u64,
    /// The track's towards the subscriber.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    /// The last group that is forwarded.
    pub last_group: u64,
    /// See [`DatagramCopy::level`].
    pub level: u16,
    /// The track's number in traces.
    pub track: u32,
}

/// A stream that the offload may open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningRequest {
    /// Value that [`OffloadSentPacket::tag`] repeats.
    pub tag: u64,
    /// The peer's limit of new streams.
    pub max_offset: u64,
    /// The track, the groups and the urgency that the copy has.
    pub terms: OpeningTerms,
}

/// One subscriber's copy of a track's datagrams, from the first location up to the last group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramCopy {
    /// Value that [`OffloadSentPacket::tag`] repeats.
    pub tag: u64,
    /// The track's towards the subscriber.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    /// The last group that is forwarded.
    pub last_group: u64,
    /// See [`StreamCopy::level`]. The low 8 bits, the publisher's part, apply to datagrams that carry none themselves.
    pub level: u16,
    /// The track's number in traces.
    pub track: u32,
}

/// The path that packets take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadPath {
    /// This end's address.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// The peer's connection ID.
    pub id: ConnectionId,
    /// DSCP and ECN.
    pub traffic_class: u8,
}

/// A packet that an offload sent, with one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadSentPacket {
    /// The tag of the copy: of [`StreamCopy`], [`OpeningRequest`] or [`DatagramCopy`].
    pub tag: u64,
    /// The packet number.
    pub number: u64,
    /// UDP payload, bytes.
    pub size: u16,
    /// The frame's contents.
    pub carried: OffloadedFrame,
}

/// The contents of the one frame in a packet that an offload sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadedFrame {
    /// `credit`: stream bytes that it has used of its budget.
    Stream {
        /// The stream's ID on the subscriber's connection.
        id: u64,
        /// Offset of the first byte on that stream.
        offset: u64,
        /// Stream bytes in the frame.
        len: u16,
        /// The frame ends the stream.
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

/// The reason why the plane sends something itself.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct Declined(pub String);

/// An interface that media is to be forwarded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OffloadInterface {
    /// The interface's name, such as `eth0`.
    pub name: String,
    /// The mechanism by which it is attached, or why it is not any more.
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

/// Counts by name.
pub type OffloadCounts = Vec<(&'static str, u64)>;

/// Counts of an engine since it was started.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Streams that are delegated at the moment.
    pub streams: u64,
    /// Streams that it may open.
    pub prepared: u64,
    /// Packets whose wake-up was deferred.
    pub deferred: u64,
    /// Deferred packets that were dropped for want of room.
    pub deferred_dropped: u64,
    /// Times that it polled for something to report, because nothing else triggered that.
    pub ticks: u64,
    /// Connections whose changes (path, keys, streams to be returned) wait to be carried out.
    pub commands_waiting: u64,
    /// Changes of connections so far.
    pub commands: u64,
    /// Changes that newer ones have replaced before they were carried out.
    pub commands_coalesced: u64,
    /// Connections that wait for an offload.
    pub offloads_waiting: u64,
    /// Offloads that were taken from subscribers, for publishers.
    pub offloads_taken: u64,
    /// Tables: the name, the entries in use, and all entries.
    pub records: Vec<(&'static str, u32, u32)>,
    /// Outcomes of packets that arrived; `None`: the engine does not count them.
    pub received: Option<OffloadCounts>,
    /// Outcomes of frames of streams that may be forwarded.
    pub frames: Option<OffloadCounts>,
    /// Outcomes of streams that began without being delegated.
    pub openings: Option<OffloadCounts>,
    /// Outcomes of copies.
    pub copies: Option<OffloadCounts>,
    /// Outcomes of the further program runs that a packet needs if it has more copies than one run makes.
    pub further_runs: Option<OffloadCounts>,
}

/// Counts of an offload since its connection began.
#[derive(Clone, Debug, Default)]
pub struct ConnectionStatus {
    /// The reason why it sends and opens nothing on the connection.
    pub refused: Option<&'static str>,
    /// Whether the connection has an offload.
    pub standing: Option<OffloadStanding>,
    /// The offload has the keys and the path to the peer, so it may send.
    pub is_ready: bool,
    /// Outcomes of copies that it could have sent on the connection.
    pub copies: OffloadCounts,
    /// Packets sent, including those that are not drained yet.
    pub sent: u64,
    /// Packets of the peer whose wake-up was deferred; those of a publisher do not count here.
    pub deferred: u64,
    /// Keystream use of the packets that it sealed, and of those that it opened.
    pub keystreams: [KeystreamCounts; 2],
}

/// Packets by whether their keystream had been computed ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeystreamCounts {
    /// Packets whose keystream was there.
    pub hit: u64,
    /// Another packet's was in its place.
    pub stale: u64,
    /// Packets that had no keystream computed for them.
    pub miss: u64,
}

impl ConnectionStatus {
    /// Adds what an earlier offload of the same connection did.
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
