//! Whom the relay program's packets come from, and whom its copies go to.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use fastrand::Rng;
use millrace_quic::keys::Suite;
use millrace_relay_kernel::program::{DownstreamRecord, Forwarded, Path, Relay, UpstreamRecord};

use super::net::{self, Network, inside};
use super::quic::Direction;

pub const PORT: u16 = 4443;

/// The connection of a publisher, with its first keys.
pub fn upstream(relay: &Relay, publisher: &Direction) -> UpstreamRecord {
    let upstream = relay.upstream(0).expect("an upstream");
    upstream.add_id(&publisher.id).expect("an ID");
    upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
    upstream
}

/// Where the publisher's packets come from, and where userspace reads them.
pub fn sockets(network: &Network, (from, to): (IpAddr, IpAddr)) -> (UdpSocket, UdpSocket) {
    let to = net::socket(&network.relay, SocketAddr::new(to, PORT));
    let from = net::socket(&network.publisher, SocketAddr::new(from, 0));
    from.connect(to.local_addr().expect("address")).expect("connect");
    (from, to)
}

pub fn attach(network: &Network, relay: &Relay, interface: &str) {
    let ifindex = net::ifindex(&network.relay, interface);
    inside(&network.relay, || relay.attach(ifindex).expect("the relay attaches"));
}

/// Userspace must get the packet as it was. Returns what was registered by then.
pub fn receive_original(to: &UdpSocket, packet: &[u8], relay: &Relay) -> Vec<Forwarded> {
    let mut buffer = [0; 2048];
    let len = to.recv(&mut buffer).expect("the original");
    assert_eq!(buffer[..len], *packet, "the original");
    let mut forwarded = Vec::new();
    relay.drain(|packet| forwarded.push(packet));
    forwarded
}

pub struct Subscriber {
    pub keys: Direction,
    pub downstream: DownstreamRecord,
    pub socket: UdpSocket,
}

/// Neither window nor credit hold anything back.
pub fn downstream(
    relay: &Relay,
    (local, remote): (SocketAddr, SocketAddr),
    keys: &Direction,
    flow_label: u32,
) -> DownstreamRecord {
    let path = Path { local, remote, id: keys.id.clone(), traffic_class: 2, flow_label };
    let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
    downstream.set_keys(0, &keys.kernel_keys(0)).expect("keys");
    downstream.set_max_bytes(u64::MAX / 2);
    downstream.set_max_data(u64::MAX / 2);
    downstream
}

impl Subscriber {
    /// At `remote` in `namespace`, with packets that leave from `local`.
    pub fn new(
        network: &Network,
        relay: &Relay,
        (namespace, local, remote): (&str, IpAddr, IpAddr),
        (suite, id_len): (Suite, usize),
        rng: &mut Rng,
    ) -> Self {
        let socket = net::socket(namespace, SocketAddr::new(remote, 0));
        let remote = socket.local_addr().expect("address");
        // Makes the relay's host know the next hop's link address.
        let greeter = net::socket(&network.relay, SocketAddr::new(local, 0));
        greeter.send_to(&[0], remote).expect("send");
        assert_eq!(socket.recv(&mut [0; 1]).expect("receive"), 1);
        let keys = Direction::new(suite, id_len, rng);
        let flow_label = rng.u32(..1 << 20);
        let downstream = downstream(relay, (SocketAddr::new(local, PORT), remote), &keys, flow_label);
        Self { keys, downstream, socket }
    }
}
