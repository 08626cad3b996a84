//! One carrier to a peer's tunnel broker: a QUIC connection, or a pool of connections.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_graft::{settings::CarrierKind, status};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{carrier_error::CarrierError, pool::ConnectionPool, stream::CarrierStream};

/// Minimum silence before a carrier is suspected to be dead, however short its round trip is.
const SUSPECT_LEAST: Duration = Duration::from_millis(300);

/// The tunnel broker at the other end: its authenticated name, and what its greeting says.
pub struct CarrierPeer {
    pub name: String,
    /// Random number that the other broker chose when it started, by which a restart is noticed.
    pub run: u64,
    /// Address that the other broker's packets come from.
    pub remote: IpAddr,
    /// This host's address on the carrier, if it is known.
    pub local: Option<IpAddr>,
}

/// A route to a peer: a kind of carrier and an address. Routes are sorted in the order of preference.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CarrierRoute {
    /// Position of this kind of carrier in the settings' list of carriers.
    pub place: usize,
    at: CarrierAddress,
    pub kind: CarrierKind,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CarrierAddress {
    /// This host connects to the peer at this address. The number is the address's position among the peer's addresses.
    Called(usize, SocketAddr),
    /// The peer connects to this host from `from`. `to` is the address of this host that it connected to, if known.
    Calls { from: IpAddr, to: Option<IpAddr> },
}

impl CarrierRoute {
    /// Creates the route of a carrier that this host makes to `at`, the peer's address with this number.
    pub fn called(place: usize, kind: CarrierKind, number: usize, at: SocketAddr) -> Self {
        Self { place, at: CarrierAddress::Called(number, at), kind }
    }

    /// Creates the route of a carrier that the peer makes from `from` to the address `to` of this host.
    pub fn calls(place: usize, kind: CarrierKind, from: IpAddr, to: Option<IpAddr>) -> Self {
        Self { place, at: CarrierAddress::Calls { from, to }, kind }
    }

    /// Reports whether this host makes the carrier.
    pub fn is_called(&self) -> bool {
        matches!(self.at, CarrierAddress::Called(..))
    }

    pub fn is_first_quic(&self) -> bool {
        self.kind == CarrierKind::Quic && matches!(self.at, CarrierAddress::Called(0, _))
    }

    pub fn is_incoming_quic(&self) -> bool {
        self.kind == CarrierKind::Quic && matches!(self.at, CarrierAddress::Calls { .. })
    }
}

impl fmt::Display for CarrierRoute {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            CarrierAddress::Called(_, at) => write!(out, "{} to {at}", self.kind),
            CarrierAddress::Calls { from, to: None } => write!(out, "{} from {from}", self.kind),
            CarrierAddress::Calls { from, to: Some(to) } => write!(out, "{} from {from} to {to}", self.kind),
        }
    }
}

/// The connections of a carrier: one QUIC connection, or a pool of TCP, MPTCP or SCTP connections.
pub enum CarrierLink {
    Quic(quinn::Connection),
    Pool(Arc<ConnectionPool>),
}

/// A carrier to one peer's tunnel broker, and its state.
///
/// A carrier is *ready*, *suspected* or *closed*. `Carriers::suspect` moves a ready carrier to suspected when an answer
/// on it is overdue. Any answer ([`Self::answers`]) makes it ready again. While it is suspected and the peer has a
/// carrier that is not, it is also *left*: [`Self::wait_until_left`] returns, and the tunnelled connections move to the
/// other carrier. It is closed when its link ends or [`Self::close`] is called, and stays so. The task that made the
/// carrier adds it to `Carriers` once, and removes it after its end. Only `Carriers` calls [`Self::set_suspect`] and
/// [`Self::set_left`], with its lock held. The peer, the route and the link never change.
pub struct PeerCarrier {
    pub peer: Arc<CarrierPeer>,
    pub way: CarrierRoute,
    link: CarrierLink,
    /// Addresses of the hosts that are reached by this carrier.
    pub addresses: Vec<IpAddr>,
    /// True while an answer is overdue and [`Self::answers`] has not changed since that answer was requested.
    is_suspect: AtomicBool,
    /// Time of the last change of this carrier's state.
    since: Mutex<Instant>,
    /// True if the tunnelled connections on this carrier should move to another carrier of the same peer.
    left: watch::Sender<bool>,
}

impl PeerCarrier {
    pub fn new(peer: Arc<CarrierPeer>, way: CarrierRoute, link: CarrierLink) -> Self {
        let is_suspect = AtomicBool::new(false);
        let since = Mutex::new(Instant::now());
        let left = watch::Sender::new(false);
        Self { peer, way, link, addresses: Vec::new(), is_suspect, since, left }
    }

    /// Opens a stream for one tunnelled connection. Waits while the peer permits no more streams. The call may be
    /// cancelled.
    pub async fn open(&self) -> Result<CarrierStream, CarrierError> {
        match &self.link {
            CarrierLink::Quic(connection) => {
                let opened = connection.open_bi().await;
                opened
                    .map(|streams| CarrierStream::quic(connection, streams.0, streams.1))
                    .map_err(|_| CarrierError::Lost)
            }
            CarrierLink::Pool(pool) => pool.open().await,
        }
    }

    /// Reports whether the carrier is closed, by either end or by a failure.
    pub fn is_closed(&self) -> bool {
        match &self.link {
            CarrierLink::Quic(connection) => connection.close_reason().is_some(),
            CarrierLink::Pool(pool) => pool.is_closed(),
        }
    }

    /// Closes the carrier and all streams on it.
    pub fn close(&self, why: &str) {
        match &self.link {
            CarrierLink::Quic(connection) => connection.close(0_u32.into(), why.as_bytes()),
            CarrierLink::Pool(pool) => pool.sever(),
        }
    }

    /// If the carrier is a pool, closes its idle connections, which may be dead, so that no new stream uses one.
    pub fn doubt(&self) {
        if let CarrierLink::Pool(pool) = &self.link {
            pool.doubt();
        }
    }

    fn rtt(&self) -> Duration {
        match &self.link {
            CarrierLink::Quic(connection) => connection.rtt(),
            CarrierLink::Pool(pool) => pool.rtt(),
        }
    }

    /// Returns the silence after which this carrier is suspected to be dead.
    pub fn patience(&self) -> Duration {
        (self.rtt() * 3).max(SUSPECT_LEAST)
    }

    /// Returns a counter that grows with every arrival of data on the carrier.
    pub fn last_arrival(&self) -> u64 {
        match &self.link {
            CarrierLink::Quic(connection) => connection.stats().udp_rx.datagrams,
            CarrierLink::Pool(pool) => pool.crowd.heard(),
        }
    }

    /// Returns a value that changes with every arrival which shows that the peer has received something. Over QUIC it is
    /// the estimated round-trip time, which every acknowledgement of a packet changes. A peer's packets are no such
    /// sign, since they arrive even if packets pass in one direction only. Neither are ACK frames, which a peer repeats.
    pub fn answers(&self) -> u64 {
        match &self.link {
            CarrierLink::Quic(connection) => connection.rtt().as_nanos().try_into().unwrap_or(u64::MAX),
            CarrierLink::Pool(pool) => pool.crowd.heard(),
        }
    }

    pub fn is_suspect(&self) -> bool {
        self.is_suspect.load(Relaxed)
    }

    /// Sets whether the carrier is suspected to be dead. Returns whether that has changed.
    pub fn set_suspect(&self, is_suspect: bool) -> bool {
        let changed = self.is_suspect.swap(is_suspect, Relaxed) != is_suspect;
        if changed {
            *self.since.lock() = Instant::now();
        }
        changed
    }

    /// Sets whether tunnelled connections should move away from this carrier.
    pub fn set_left(&self, left: bool) {
        self.left.send_if_modified(|before| std::mem::replace(before, left) != left);
    }

    /// Waits until the tunnelled connections on this carrier should move to another carrier of the same peer.
    pub async fn wait_until_left(&self) {
        let _ = self.left.subscribe().wait_for(|left| *left).await;
    }

    pub fn status(&self) -> status::CarrierStatus {
        let own = status::CarrierStatus {
            peer: self.peer.name.clone(),
            carrier: self.way.kind.name().to_owned(),
            way: self.way.to_string(),
            age_s: self.since.lock().elapsed().as_secs_f64(),
            addresses: self.addresses.clone(),
            rtt_us: self.rtt().as_micros().try_into().unwrap_or(u64::MAX),
            ..status::CarrierStatus::default()
        };
        match &self.link {
            CarrierLink::Quic(connection) => {
                let stats = connection.stats();
                status::CarrierStatus {
                    window_bytes: stats.path.cwnd,
                    mtu: stats.path.current_mtu,
                    sent_packets: stats.path.sent_packets,
                    lost_packets: stats.path.lost_packets,
                    sent_bytes: stats.udp_tx.bytes,
                    received_bytes: stats.udp_rx.bytes,
                    ..own
                }
            }
            CarrierLink::Pool(pool) => {
                let idle = pool.idle_count() as u64;
                status::CarrierStatus {
                    pool_idle: idle,
                    pool_busy: (pool.count() as u64).saturating_sub(idle),
                    sent_bytes: pool.crowd.sent_bytes(),
                    received_bytes: pool.crowd.received_bytes(),
                    ..own
                }
            }
        }
    }
}
