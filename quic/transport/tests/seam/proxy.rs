//! A UDP proxy between client and server that loses, duplicates and delays datagrams, and records them.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{net::UdpSocket, task::JoinSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    Client,
    Server,
}

/// Probabilities of loss, duplication and reordering of a datagram, each in thousandths.
#[derive(Default)]
pub struct ProxyImpairment {
    pub loss: AtomicU32,
    pub duplication: AtomicU32,
    pub reordering: AtomicU32,
    /// Size above which datagrams are dropped, bytes; 0 drops none.
    pub max_size: AtomicUsize,
}

pub struct Proxy {
    pub addr: SocketAddr,
    pub impairment: ProxyImpairment,
    seen: Mutex<Vec<(Towards, Vec<u8>)>>,
    server: SocketAddr,
    rng: Mutex<fastrand::Rng>,
    /// The socket towards the server for each client address. Forged packets are sent from one of these sockets.
    ways: Mutex<HashMap<SocketAddr, Arc<UdpSocket>>>,
}

impl Proxy {
    pub async fn start(server: SocketAddr, seed: u64) -> Arc<Self> {
        let front = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
        let proxy = Arc::new(Self {
            addr: front.local_addr().unwrap(),
            impairment: ProxyImpairment::default(),
            seen: Mutex::default(),
            server,
            rng: Mutex::new(fastrand::Rng::with_seed(seed)),
            ways: Mutex::default(),
        });
        tokio::spawn(Arc::clone(&proxy).run(front));
        proxy
    }

    pub fn impair(&self, loss: u32, duplication: u32, reordering: u32) {
        self.impairment.loss.store(loss, Ordering::Relaxed);
        self.impairment.duplication.store(duplication, Ordering::Relaxed);
        self.impairment.reordering.store(reordering, Ordering::Relaxed);
    }

    /// Returns the datagrams that arrived at the proxy so far, including those that it lost.
    pub fn seen(&self, towards: Towards) -> Vec<Vec<u8>> {
        let seen = self.seen.lock();
        seen.iter().filter(|(way, _)| *way == towards).map(|(_, datagram)| datagram.clone()).collect()
    }

    /// Sends a datagram to the server from a client's socket, as if the client had sent it.
    pub async fn forge(&self, datagram: &[u8]) {
        let way = self.ways.lock().values().next().cloned().expect("a client has connected");
        way.send(datagram).await.unwrap();
    }

    /// Drops all mappings, as a NAT does. Datagrams of the server are lost until the client sends again, which gets
    /// another port.
    pub fn forget(&self) {
        self.ways.lock().clear();
    }

    async fn run(self: Arc<Self>, front: Arc<UdpSocket>) {
        let mut tasks = JoinSet::new();
        let mut buffer = vec![0; 65536];
        loop {
            let (len, client) = front.recv_from(&mut buffer).await.unwrap();
            let known = self.ways.lock().get(&client).cloned();
            let way = match known {
                Some(way) => way,
                None => {
                    let way = Arc::new(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap());
                    way.connect(self.server).await.unwrap();
                    // `try_send` fails until the runtime has seen the socket writable, so a first datagram would be
                    // lost.
                    way.writable().await.unwrap();
                    self.ways.lock().insert(client, Arc::clone(&way));
                    tasks.spawn(Arc::clone(&self).back(Arc::clone(&way), Arc::clone(&front), client));
                    way
                }
            };
            for delay in self.fate(Towards::Server, &buffer[..len]) {
                deliver(delay, buffer[..len].to_vec(), Arc::clone(&way), self.server);
            }
        }
    }

    async fn back(self: Arc<Self>, way: Arc<UdpSocket>, front: Arc<UdpSocket>, client: SocketAddr) {
        let mut buffer = vec![0; 65536];
        // A client that has moved causes ICMP errors, which must not end the loop.
        loop {
            let Ok(len) = way.recv(&mut buffer).await else { continue };
            if !self.ways.lock().get(&client).is_some_and(|known| Arc::ptr_eq(known, &way)) {
                continue;
            }
            for delay in self.fate(Towards::Client, &buffer[..len]) {
                deliver(delay, buffer[..len].to_vec(), Arc::clone(&front), client);
            }
        }
    }

    /// Records a datagram, and returns the delay of each copy that the proxy forwards; none if it loses the datagram.
    fn fate(&self, towards: Towards, datagram: &[u8]) -> Vec<Duration> {
        self.seen.lock().push((towards, datagram.to_vec()));
        let mut rng = self.rng.lock();
        let mut happens = |thousandths: &AtomicU32| rng.u32(..1000) < thousandths.load(Ordering::Relaxed);
        let max_size = self.impairment.max_size.load(Ordering::Relaxed);
        if happens(&self.impairment.loss) || max_size > 0 && datagram.len() > max_size {
            return Vec::new();
        }
        let copies = if happens(&self.impairment.duplication) { 2 } else { 1 };
        (0..copies)
            .map(
                |_| {
                    if happens(&self.impairment.reordering) {
                        Duration::from_millis(4)
                    } else {
                        Duration::ZERO
                    }
                },
            )
            .collect()
    }
}

fn deliver(delay: Duration, datagram: Vec<u8>, socket: Arc<UdpSocket>, to: SocketAddr) {
    let send = move |socket: Arc<UdpSocket>| {
        // A connected socket sends only to its peer, and a call with a destination address may fail. A datagram that
        // does not fit into the send buffer is lost.
        let _ = match socket.peer_addr() {
            Ok(_) => socket.try_send(&datagram),
            Err(_) => socket.try_send_to(&datagram, to),
        };
    };
    if delay.is_zero() {
        return send(socket);
    }
    tokio::spawn(async move {
        tokio::time::sleep(delay).await; // exact: the pause is the delay of this datagram
        send(socket);
    });
}
