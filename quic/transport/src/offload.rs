//! The offload: a sender beside the plane, which forwards what arrives before any process wakes.
//!
//! [`Offload`] is all that a connection knows of it. The plane *delegates* a stream to it (as NFS delegates a file): from
//! then on the offload sends on that stream by itself, within a [`Budget`] of congestion window and credit that it is
//! granted, and says afterwards what it sent. A stream that is over, or that somebody here has to act on, is *recalled*,
//! and *returned* once nothing more can be under way. Whatever an offload does not send the plane sends, so an offload
//! may decline anything at any time.
//!
//! There are fewer offloads than connections. So a connection *claims* one ([`Claim`]), says what it is worth to it, and is told when it
//! gets one and when it has to give it back ([`Owner`]). It has all that an offload has to know of it in the meantime.
//!
//! [`Engine`] makes offloads. The engine that forwards in the kernel is `Kernel` of `millrace-relay-kernel`.

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
    keys::{Secret, Suite},
    packet::ConnectionId,
    plane::downstream::{Budget, StreamKey},
    webtransport::Binding,
};
use quinn::AsyncUdpSocket;
use thiserror::Error;

use crate::trace;

pub use state::LockedOffload;

/// Makes offloads for the connections of endpoints.
pub trait Engine: Send + Sync {
    /// Serves the connections of an endpoint with this socket, within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    fn attach(self: Arc<Self>, socket: UdpSocket) -> io::Result<Attached>;

    /// Where it forwards from, or should.
    fn interfaces(&self) -> Vec<Interface>;

    fn status(&self) -> Status;

    /// Has it collect what becomes of single packets, or stop.
    fn set_trace(&self, filter: Option<trace::Filter>);

    /// Hands over what was collected since the last call, and returns how much there was no room for.
    fn drain_trace(&self, read: &mut dyn FnMut(trace::Event)) -> u64;
}

/// An endpoint that an [`Engine`] serves.
pub struct Attached {
    /// What the QUIC stack reads and writes.
    pub socket: Arc<dyn AsyncUdpSocket>,
    /// Makes the claims of its connections.
    pub enter: Enter,
    /// The cipher suites that an offload can seal and open packets of.
    pub suites: &'static [Suite],
}

/// Adds a connection to those that may have an offload.
pub type Enter = Box<dyn Fn(Weak<dyn Owner>) -> Box<dyn Claim> + Send + Sync>;

/// A connection's claim to an offload; over when it is dropped.
pub trait Claim: Send + Sync {
    /// Says what an offload is worth to the connection; at first nothing.
    fn set_worth(&self, worth: Worth);

    /// The connection is over: nothing is worth anything to it any more.
    fn end(&self);

    fn standing(&self) -> Standing;
}

/// The worth of an offload to a connection, the least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Worth {
    /// The peer has shown no right to anything.
    #[default]
    Nothing,
    /// The connection has neither subscriptions nor publications.
    Idle,
    Subscriber,
    /// Without an offload here, nothing that it publishes is forwarded to anybody.
    Publisher,
    /// The connection leads to the relay that this one has its media from.
    Upstream,
}

/// Whether a connection has an offload, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// An offload is worth nothing to the connection.
    Unproven,
    Waiting,
    /// A publisher has taken it, and the connection waits.
    Taken,
    Held,
}

impl Standing {
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

/// The offload of one connection, from [`Owner::on_offload`] until [`Owner::on_released`]. Nothing here waits.
pub trait Offload: Send + Sync {
    /// The packet number word that all senders of the connection draw from. It does not move before anything is granted, nor after
    /// [`Owner::on_released`].
    fn numbers(&self) -> &AtomicU64;

    /// The connection has nothing granted or delegated any more. [`Owner::on_released`] says when nothing more is under way.
    fn release(self: Arc<Self>);

    /// Whether it can forward anything at the moment.
    fn is_active(&self) -> bool;

    /// How traces name the connection.
    fn set_session(&self, session: u32);

    /// How the application's streams and datagrams lie on the connection, in both directions. Called at most once, before anything
    /// is delegated or arrives; without it they are bare.
    fn set_binding(&self, binding: Binding);

    /// The keys of a generation to seal with, which follow from `secret` but for the header key, that of generation 0.
    /// They are installed in some moments, until when the offload does not use them.
    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &Secret, header: &[u8; 32]);

    /// This end seals with a newer generation from now on.
    fn on_key_update(&self);

    /// The keys of a generation to open with. They are installed in some moments.
    fn set_open_keys(self: Arc<Self>, generation: u16, secret: &Secret, header: &[u8; 32]);

    /// The peer seals with this generation from now on.
    fn on_open_generation(&self, generation: u16);

    /// The peer's packets have this connection ID, as well as those before; in some moments.
    fn add_id(self: Arc<Self>, id: &ConnectionId);

    fn remove_id(self: Arc<Self>, id: &ConnectionId);

    /// Where packets go from now on: [`Owner::on_path`] says from when. Until then it may send to where it did before.
    fn set_path(self: Arc<Self>, path: Path);

    /// The largest UDP payload that the path takes, bytes.
    fn set_mtu(&self, bytes: u32);

    /// The largest DATAGRAM frame that the peer takes, bytes.
    fn set_max_datagram(&self, bytes: u32);

    /// Limits what it may send, in totals since the connection began; returns the totals that it may have reached before
    /// it saw this.
    fn grant(&self, total: Budget) -> Budget;

    /// The connection is over: it sends nothing more.
    fn stop(&self);

    /// Something of this urgency waits in userspace, so that only what is more urgent is forwarded: smaller is more
    /// urgent. `None`: nothing waits.
    fn set_waiting(&self, level: Option<u16>);

    /// Packets of the peer with at most so many bytes of UDP payload need not wake the process, until it has sent `total`
    /// bytes since the connection began.
    fn set_deferral(&self, bytes: u32, total: u64);

    /// Has packets read whose wake-up was deferred; returns whether there were any.
    fn read_deferred(&self) -> bool;

    /// When the packet arrived that ends with these bytes and was read `now`.
    fn arrival(&self, now: Instant, end: [u8; 8]) -> Instant;

    /// A packet with this number was opened by the QUIC stack. Returns whether the offload has opened it, too, or may have.
    fn on_received(&self, number: u64) -> bool;

    /// This end keeps bytes of a stream of the peer, and perhaps their end, from a packet that the offload did not open.
    fn leave(&self, stream: u64, bytes: &Range<u64>, fin: bool);

    /// Whether media arrives on this connection: [`Self::ingress`] was called.
    fn has_ingress(&self) -> bool;

    /// What the peer sends as the offload may forward it: to its own connections, while the result is held. `seen` is
    /// what has arrived before, `held` what lives as long as that. `None`: there is no room.
    fn ingress(
        self: Arc<Self>,
        origin: Origin,
        seen: Seen,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn Ingress>>;

    /// Streams of the peer that begin under a track alias, behind the subgroup that is given by group and ID, as it may
    /// open streams for them: otherwise as [`Self::ingress`].
    fn openings(
        self: Arc<Self>,
        alias: u64,
        last: (u64, u64),
        seen: Seen,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn Openings>>;

    /// This end takes a unidirectional stream of the peer: it is not bound from now on. Returns what it was bound to before.
    fn accept(&self, stream: u64) -> Option<Arc<dyn Ingress>>;

    /// Low bits of the IDs of this end's unidirectional streams.
    fn set_stream_bits(&self, bits: u32);

    /// It may open unidirectional streams as long as there are fewer than `limit` on the connection, of which this end has opened
    /// those before index `next`. Returns the index of the next one; with a limit of 0 it stays that.
    fn set_streams(&self, next: u64, limit: u64) -> u64;

    /// Has it open a stream of this connection for what `ingress`, of an offload of the same engine, will be bound to.
    ///
    /// # Errors
    /// As of [`Self::delegate`].
    fn prepare(
        self: Arc<Self>,
        ingress: &Arc<dyn Ingress>,
        request: &OpeningRequest,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards what arrives at `ingress`, of an offload of the same engine, on a stream of this connection.
    ///
    /// # Errors
    /// It cannot, at the moment or at all: the plane sends.
    fn delegate(
        self: Arc<Self>,
        ingress: &Arc<dyn Ingress>,
        stream: &StreamCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Forwards datagrams that arrive at `ingress`, of an offload of the same engine, on this connection.
    ///
    /// # Errors
    /// As of [`Self::delegate`].
    fn delegate_datagrams(
        self: Arc<Self>,
        ingress: &Arc<dyn Ingress>,
        datagrams: &DatagramCopy,
    ) -> Result<Box<dyn Delegation>, Declined>;

    /// Takes a stream back. [`Owner::on_returned`] says when nothing more is under way.
    fn recall(self: Arc<Self>, key: StreamKey, delegation: Option<Box<dyn Delegation>>);

    /// Hands over what was sent since the last call, each with the time when it was, none later than `now`.
    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, Sent));

    /// Times that it was short of window or credit.
    fn short_of_room(&self) -> u64;

    fn status(&self) -> ConnectionStatus;
}

/// The connection behind an offload.
pub trait Owner: Send + Sync {
    /// Gives this offload to the connection. The offload knows nothing of it yet.
    fn on_offload(&self, now: Instant, offload: Arc<dyn Offload>);

    /// Asks for the offload, which is needed elsewhere: the connection takes everything back, and calls [`Offload::release`].
    fn on_offload_recalled(&self, now: Instant);

    /// The offload sends nothing more, and all that it sent can be drained. It is to be dropped then.
    fn on_released(&self, now: Instant);

    /// [`Offload::drain`] has something.
    fn on_sent(&self, now: Instant);

    /// These streams are returned: the offload sends no more on them, and all that it sent can be drained.
    fn on_returned(&self, now: Instant, keys: &[StreamKey]);

    /// Packets go there from now on.
    fn on_path(&self, now: Instant, path: &Path);

    /// What the offload may have opened streams for, under these tags, is gone.
    fn on_gone(&self, now: Instant, tags: &[u64]);
}

/// An ingress or openings, as an offload has made them.
pub trait Made: Send + Sync {
    /// Whether the offload has been released: it is of no use any more.
    fn is_over(&self) -> bool;
}

/// A stream of the peer, or a track's datagrams, as the offload may forward it. When it is dropped nothing of it is
/// forwarded any more.
pub trait Ingress: Made + Any {
    /// This end has the stream's bytes up to there. What is forwarded follows the bytes that were forwarded before, or those
    /// that this end has, and is well-formed there.
    fn advance(&self, position: &Position);

    /// Whether other bytes may have been forwarded than this end has, since the peer has sent two versions. Nothing more is forwarded
    /// then, and what was should be ended.
    fn is_contradicted(&self) -> bool;

    /// Whether nobody waits for it but those to whom it is forwarded: then what arrives need not wake the process.
    fn set_exclusive(&self, exclusive: bool);

    /// Tells it from every other one.
    fn serial(&self) -> u64;

    /// One of those that were prepared for it knows what it carries.
    fn on_adopted(&self);
}

/// Openings of a track: each is an [`Ingress`] that is bound to the next stream that begins. When this is dropped no more are
/// bound.
pub trait Openings: Made {
    /// How many more there should be, to so many subscribers each.
    fn missing(&self, subscribers: usize) -> usize;

    /// One more; `None`: there is no room.
    fn make(&self) -> Option<Arc<dyn Ingress>>;

    /// Has it bound to a stream in its turn.
    fn put(&self, opening: Arc<dyn Ingress>);

    /// Those that have not been bound.
    fn waiting(&self) -> Vec<Arc<dyn Ingress>>;

    /// A subgroup has begun, by group and ID: only those behind it are bound.
    fn began(&self, subgroup: (u64, u64));
}

/// What is forwarded from an ingress to one connection, until this is dropped.
pub trait Delegation: Send + Sync {
    /// The peer's limit of the stream has risen.
    fn set_max_offset(&self, max: u64);

    fn is_of(&self, ingress: &Arc<dyn Ingress>) -> bool;

    /// Of a stream that the offload may open: it does not from now on, if it has not yet.
    fn close(&self) -> OpeningSide;

    /// It has.
    fn on_opened(&self);
}

/// The end that opens a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpeningSide {
    Userspace,
    /// With this ID; `None`: it is about to.
    Offload(Option<u64>),
}

/// What of a connection came before the offload looked at it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// One more than the largest packet number.
    pub packets: u64,
    /// Unidirectional streams that were accepted.
    pub streams: u64,
    /// IDs of streams that have begun to arrive. Bytes of these that arrive again are not forwarded.
    pub begun: Vec<u64>,
}

/// What an [`Ingress`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A stream of the peer, by its ID.
    Stream(u64),
    /// Datagrams of the peer under this track alias.
    Datagrams(u64),
}

/// One subscriber's copy of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamCopy {
    /// Comes back in [`Sent::tag`].
    pub key: StreamKey,
    pub id: u64,
    /// Its offset minus that of the ingress.
    pub shift: i64,
    /// Offset of the ingress from which on it is forwarded.
    pub from: u64,
    /// The peer's MAX_STREAM_DATA.
    pub max_offset: u64,
    /// Urgency: smaller is more urgent, as of [`Offload::set_waiting`].
    pub level: u16,
    /// How traces name what it carries.
    pub track: u32,
    pub group: u64,
}

/// One subscriber's copy of a track's streams that begin: those whose first object is at the first location or behind it, to the
/// last group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningTerms {
    /// The subscription, as of [`NewStream::owner`](millrace_quic::plane::downstream::NewStream::owner).
    pub owner: u64,
    /// The track's towards the subscriber.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    pub last_group: u64,
    /// As of [`DatagramCopy`].
    pub level: u16,
    pub track: u32,
}

/// A stream that the offload may open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpeningRequest {
    /// Comes back in [`Sent::tag`].
    pub tag: u64,
    /// The peer's limit of new streams.
    pub max_offset: u64,
    pub terms: OpeningTerms,
}

/// One subscriber's copy of a track's datagrams: those from the first location on, to the last group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramCopy {
    /// Comes back in [`Sent::tag`].
    pub tag: u64,
    /// The track's towards the subscriber.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    pub last_group: u64,
    /// As of [`StreamCopy`]; the publisher's part, the low 8 bits, is for datagrams without one of their own.
    pub level: u16,
    pub track: u32,
}

/// Where packets go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// The peer's connection ID.
    pub id: ConnectionId,
    /// DSCP and ECN.
    pub traffic_class: u8,
}

/// A packet that an offload sent, with one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub tag: u64,
    pub number: u64,
    /// UDP payload, bytes.
    pub size: u16,
    pub carried: Carried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// `credit`: stream bytes that it has used of its budget.
    Stream {
        id: u64,
        offset: u64,
        len: u16,
        fin: bool,
        credit: u64,
    },
    Datagram {
        group: u64,
        object: u64,
    },
}

/// Why something stays with the plane.
#[derive(Clone, Debug, Error)]
#[error("{0}")]
pub struct Declined(pub String);

/// An interface that media is to be forwarded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// The mechanism by which it is attached, or why it is not any more.
    pub attached: Result<String, String>,
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.attached {
            Ok(mechanism) => write!(f, "{} by {mechanism}", self.name),
            Err(reason) => write!(f, "no more to {}: {reason}", self.name),
        }
    }
}

/// Counts by name.
pub type Counts = Vec<(&'static str, u64)>;

/// What an engine did since it was started.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Streams that are delegated at the moment.
    pub streams: u64,
    /// Streams that it may open.
    pub prepared: u64,
    /// Packets whose wake-up was deferred.
    pub deferred: u64,
    /// Of these, packets that there was no room for.
    pub deferred_dropped: u64,
    /// Times that it has looked for something to tell, where nothing else had it look.
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
    /// What became of packets that arrived; `None`: it does not say.
    pub received: Option<Counts>,
    /// What became of frames of streams that may be forwarded.
    pub frames: Option<Counts>,
    /// What became of streams that began without being delegated.
    pub openings: Option<Counts>,
    /// What became of copies.
    pub copies: Option<Counts>,
    /// How runs ended that went on with a packet of more copies than one run makes.
    pub further_runs: Option<Counts>,
}

/// What an offload did since its connection began.
#[derive(Clone, Debug, Default)]
pub struct ConnectionStatus {
    /// Why it sends and opens nothing on the connection.
    pub refused: Option<&'static str>,
    /// Whether there is one.
    pub standing: Option<Standing>,
    /// It has keys, and knows the way to the peer: it may send.
    pub is_ready: bool,
    /// What became of copies that it could have sent on the connection.
    pub copies: Counts,
    /// Packets sent, those included that have not been drained yet.
    pub sent: u64,
    /// Packets of the peer whose wake-up was deferred; those of a publisher do not count here.
    pub deferred: u64,
    /// Of packets that it sealed, and of those that it opened.
    pub keystreams: [KeystreamUse; 2],
}

/// Packets by whether their keystream had been computed ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeystreamUse {
    pub hit: u64,
    /// Another packet's was in its place.
    pub stale: u64,
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
        for (sum, KeystreamUse { hit, stale, miss }) in self.keystreams.iter_mut().zip(past.keystreams) {
            *sum = KeystreamUse { hit: sum.hit + hit, stale: sum.stale + stale, miss: sum.miss + miss };
        }
    }
}
