//! Peers of the relay program: a publisher that sends packets, and subscribers that receive copies.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use fastrand::Rng;
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{DownstreamRecord, Forwarded, PacketPath, RelayProgram, UpstreamRecord};

use super::net::{self, NamespaceNetwork, inside};
use super::quic::DirectionKeys;

pub const PORT: u16 = 4443;

/// Adds the publisher's connection to the program, with its first keys.
pub fn upstream(relay: &RelayProgram, publisher: &DirectionKeys) -> UpstreamRecord {
    let upstream = relay.upstream(0).expect("an upstream");
    upstream.add_id(&publisher.id).expect("an ID");
    upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
    upstream
}

/// Makes the publisher's socket and the main socket of the relay's userspace.
pub fn sockets(network: &NamespaceNetwork, from: IpAddr, to: IpAddr) -> (UdpSocket, UdpSocket) {
    let to = net::socket(&network.relay, SocketAddr::new(to, PORT));
    let from = net::socket(&network.publisher, SocketAddr::new(from, 0));
    from.connect(to.local_addr().expect("address")).expect("connect");
    (from, to)
}

pub fn attach(network: &NamespaceNetwork, relay: &RelayProgram, interface: &str) {
    let ifindex = net::ifindex(&network.relay, interface);
    inside(&network.relay, || relay.attach(ifindex).expect("the relay attaches"));
}

/// Checks that userspace gets the unchanged packet. Returns the copies that the program has reported as sent. It
/// reports them before it passes the packet on.
pub fn receive_original(to: &UdpSocket, packet: &[u8], relay: &RelayProgram) -> Vec<Forwarded> {
    let mut buffer = [0; 2048];
    let len = to.recv(&mut buffer).expect("the original");
    assert_eq!(buffer[..len], *packet, "the original");
    let mut forwarded = Vec::new();
    relay.drain(|packet| forwarded.push(packet));
    forwarded
}

/// The place of a subscriber in the network: its namespace and address, and the address `local` that its copies are
/// sent from.
#[derive(Clone, Copy)]
pub struct SubscriberPlace<'a> {
    pub namespace: &'a str,
    pub local: IpAddr,
    pub remote: IpAddr,
}

pub struct KernelSubscriber {
    pub keys: DirectionKeys,
    pub downstream: DownstreamRecord,
    pub socket: UdpSocket,
}

/// Adds a subscriber's connection to the program. Neither a congestion window nor flow control limits the copies.
pub fn downstream(
    relay: &RelayProgram,
    local: SocketAddr,
    remote: SocketAddr,
    keys: &DirectionKeys,
    flow_label: u32,
) -> DownstreamRecord {
    let path = PacketPath { local, remote, id: keys.id.clone(), traffic_class: 2, flow_label };
    let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
    downstream.set_keys(0, &keys.kernel_keys(0)).expect("keys");
    downstream.set_max_bytes(u64::MAX / 2);
    downstream.set_max_data(u64::MAX / 2);
    downstream
}

impl KernelSubscriber {
    /// Makes a subscriber at `place`, whose connection IDs have `id_len` bytes.
    pub fn new(
        network: &NamespaceNetwork,
        relay: &RelayProgram,
        place: SubscriberPlace<'_>,
        suite: KeySuite,
        id_len: usize,
        rng: &mut Rng,
    ) -> Self {
        let SubscriberPlace { namespace, local, remote } = place;
        let socket = net::socket(namespace, SocketAddr::new(remote, 0));
        let remote = socket.local_addr().expect("address");
        // The relay's host learns the link address of the next hop from this packet.
        let greeter = net::socket(&network.relay, SocketAddr::new(local, 0));
        greeter.send_to(&[0], remote).expect("send");
        assert_eq!(socket.recv(&mut [0; 1]).expect("receive"), 1);
        let keys = DirectionKeys::new(suite, id_len, rng);
        let flow_label = rng.u32(..1 << 20);
        let downstream = downstream(relay, SocketAddr::new(local, PORT), remote, &keys, flow_label);
        Self { keys, downstream, socket }
    }
}
