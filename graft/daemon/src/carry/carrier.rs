//! One carrier to a peer's broker: a QUIC connection, or a pool of connections.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_graft::{settings::Kind, status};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{broken::Broken, pool::Pool, stream::Stream};

/// Silence that is none, however short the round trip.
const SUSPECT_LEAST: Duration = Duration::from_millis(300);

/// Who is at the other end, as it has proved and said.
pub struct Far {
    pub peer: String,
    /// Of the other broker: another after each of its starts.
    pub run: u64,
    /// Where it comes from.
    pub remote: IpAddr,
    /// This host's address by which it is here, if that is known.
    pub local: Option<IpAddr>,
}

/// By what and where a peer is reached, in the order in which ways are preferred.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// Of the kind in the settings.
    pub place: usize,
    at: At,
    pub kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum At {
    /// The address's number among the peer's.
    Called(usize, SocketAddr),
    /// It has called this host, by the address `to` of it, if that is known.
    Calls { from: IpAddr, to: Option<IpAddr> },
}

impl Way {
    pub fn called(place: usize, kind: Kind, number: usize, at: SocketAddr) -> Self {
        Self { place, at: At::Called(number, at), kind }
    }

    pub fn calls(place: usize, kind: Kind, from: IpAddr, to: Option<IpAddr>) -> Self {
        Self { place, at: At::Calls { from, to }, kind }
    }

    pub fn is_called(&self) -> bool {
        matches!(self.at, At::Called(..))
    }

    pub fn is_first_quic(&self) -> bool {
        self.kind == Kind::Quic && matches!(self.at, At::Called(0, _))
    }

    pub fn is_incoming_quic(&self) -> bool {
        self.kind == Kind::Quic && matches!(self.at, At::Calls { .. })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            At::Called(_, at) => write!(out, "{} to {at}", self.kind),
            At::Calls { from, to: None } => write!(out, "{} from {from}", self.kind),
            At::Calls { from, to: Some(to) } => write!(out, "{} from {from} to {to}", self.kind),
        }
    }
}

pub enum Link {
    Quic(quinn::Connection),
    Pool(Arc<Pool>),
}

pub struct Carrier {
    pub far: Arc<Far>,
    pub way: Way,
    link: Link,
    /// Hosts that are reached by it.
    pub addresses: Vec<IpAddr>,
    is_suspect: AtomicBool,
    /// Since it is as it is.
    since: Mutex<Instant>,
    /// Whether what it carries is to go on with another.
    left: watch::Sender<bool>,
}

impl Carrier {
    pub fn new(far: Arc<Far>, way: Way, link: Link) -> Self {
        let (is_suspect, since, left) =
            (AtomicBool::new(false), Mutex::new(Instant::now()), watch::Sender::new(false));
        Self { far, way, link, addresses: Vec::new(), is_suspect, since, left }
    }

    /// For one connection. It waits for as long as there is no room. May be cancelled.
    pub async fn open(&self) -> Result<Stream, Broken> {
        match &self.link {
            Link::Quic(connection) => {
                let opened = connection.open_bi().await;
                opened.map(|streams| Stream::quic(connection, streams)).map_err(|_| Broken::Lost)
            }
            Link::Pool(pool) => pool.open().await,
        }
    }

    pub fn is_closed(&self) -> bool {
        match &self.link {
            Link::Quic(connection) => connection.close_reason().is_some(),
            Link::Pool(pool) => pool.is_closed(),
        }
    }

    /// With all that it carries.
    pub fn close(&self, why: &str) {
        match &self.link {
            Link::Quic(connection) => connection.close(0_u32.into(), why.as_bytes()),
            Link::Pool(pool) => pool.sever(),
        }
    }

    /// What waits in a pool is not what carries the next one.
    pub fn doubt(&self) {
        if let Link::Pool(pool) = &self.link {
            pool.doubt();
        }
    }

    fn rtt(&self) -> Duration {
        match &self.link {
            Link::Quic(connection) => connection.rtt(),
            Link::Pool(pool) => pool.rtt(),
        }
    }

    /// After which silence means something.
    pub fn patience(&self) -> Duration {
        (self.rtt() * 3).max(SUSPECT_LEAST)
    }

    /// Another one whenever something has come.
    pub fn heard(&self) -> u64 {
        match &self.link {
            Link::Quic(connection) => connection.stats().udp_rx.datagrams,
            Link::Pool(pool) => pool.crowd.heard(),
        }
    }

    pub fn is_suspect(&self) -> bool {
        self.is_suspect.load(Relaxed)
    }

    /// Returns whether it was otherwise.
    pub fn set_suspect(&self, is_suspect: bool) -> bool {
        let changed = self.is_suspect.swap(is_suspect, Relaxed) != is_suspect;
        if changed {
            *self.since.lock() = Instant::now();
        }
        changed
    }

    pub fn set_left(&self, left: bool) {
        self.left.send_if_modified(|before| std::mem::replace(before, left) != left);
    }

    /// Until what it carries is to go on with another.
    pub async fn left(&self) {
        let _ = self.left.subscribe().wait_for(|left| *left).await;
    }

    pub fn status(&self) -> status::Carrier {
        let own = status::Carrier {
            peer: self.far.peer.clone(),
            carrier: self.way.kind.name().to_owned(),
            way: self.way.to_string(),
            age_s: self.since.lock().elapsed().as_secs_f64(),
            addresses: self.addresses.clone(),
            rtt_us: self.rtt().as_micros().try_into().unwrap_or(u64::MAX),
            ..status::Carrier::default()
        };
        match &self.link {
            Link::Quic(connection) => {
                let stats = connection.stats();
                status::Carrier {
                    window_bytes: stats.path.cwnd,
                    mtu: stats.path.current_mtu,
                    sent_packets: stats.path.sent_packets,
                    lost_packets: stats.path.lost_packets,
                    sent_bytes: stats.udp_tx.bytes,
                    received_bytes: stats.udp_rx.bytes,
                    ..own
                }
            }
            Link::Pool(pool) => {
                let idle = pool.idle_count() as u64;
                status::Carrier {
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
