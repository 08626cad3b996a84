//! Makes network namespaces for a publisher, a relay and a subscriber, and sends and captures raw frames.

#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{self, AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType};

/// Reports whether the test runs as root. If not, prints that `test` is skipped.
pub fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

/// Pins this thread, and the threads that it starts, to the current CPU. A veth queues received packets per CPU, so
/// packets that a thread sends from two CPUs may be reordered.
pub fn stay_on_this_cpu() {
    let mut set = nix::sched::CpuSet::new();
    set.set(nix::sched::sched_getcpu().expect("a CPU")).expect("a CPU");
    // The process ID 0 stands for the calling thread, not for its process.
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).expect("it may run there");
}

/// Three network namespaces. The publisher's and the subscriber's namespace each have a veth link to the relay's
/// namespace.
pub struct NamespaceNetwork {
    /// Name of the publisher's namespace.
    pub publisher: String,
    /// Name of the relay's namespace.
    pub relay: String,
    /// Name of the subscriber's namespace.
    pub subscriber: String,
}

impl NamespaceNetwork {
    /// Creates the namespaces and links. `name` makes their names unique.
    pub fn new(name: &str) -> Self {
        let id = std::process::id();
        let namespace = |role: &str| {
            // The process ID keeps apart test processes that run at the same time. `ip` mounts the namespace as a file,
            // so it exists without any process in it until `Drop` deletes it.
            let namespace = format!("mr-{id}-{name}-{role}");
            ip(&format!("netns add {namespace}"));
            namespace
        };
        let network = Self { publisher: namespace("p"), relay: namespace("r"), subscriber: namespace("s") };
        let relay = &network.relay;
        for (peer, port, net) in [(&network.publisher, "west", 1), (&network.subscriber, "east", 2)] {
            // Each veth peer is created in its own namespace, so that both peers may have the name `eth`.
            ip(&format!("-n {relay} link add {port} type veth peer name eth netns {peer}"));
            for (namespace, interface, host) in [(relay, port, 1), (peer, "eth", 2)] {
                ip(&format!("-n {namespace} addr add 10.98.{net}.{host}/24 dev {interface}"));
                // Without `nodad`, the kernel would first look for a duplicate of the address, and `bind` would fail
                // meanwhile.
                ip(&format!("-n {namespace} addr add fd98:{net}::{host}/64 dev {interface} nodad"));
                ip(&format!("-n {namespace} link set {interface} up"));
            }
        }
        network
    }
}

impl Drop for NamespaceNetwork {
    fn drop(&mut self) {
        for namespace in [&self.publisher, &self.relay, &self.subscriber] {
            // `ip netns del` removes only the namespace's name. The namespace and its interfaces exist until the last
            // socket or thread in it is gone.
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

/// Returns the address of host 1 (the relay) or host 2 (the publisher or subscriber) in network 1 (`west`) or 2
/// (`east`) of [`NamespaceNetwork`].
pub fn address(family: u8, net: u8, host: u8) -> IpAddr {
    match family {
        4 => IpAddr::from([10, 98, net, host]),
        _ => format!("fd98:{net}::{host}").parse().expect("an address"),
    }
}

/// Runs `ip` with these arguments, separated by spaces.
pub fn ip(arguments: &str) {
    run("ip", arguments);
}

/// Runs a program with these arguments, separated by spaces. Panics if it fails.
pub fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split(' ')).output().expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments}: {said}");
}

/// Sets whether the kernel leaves the checksums of sent packets to the interface (checksum offload).
pub fn set_checksum_offload(namespace: &str, interface: &str, on: bool) {
    let state = if on { "on" } else { "off" };
    run("ip", &format!("netns exec {namespace} ethtool -K {interface} tx {state}"));
}

/// Runs `work` on a new thread inside a namespace.
pub fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        // `setns` moves only the calling thread into the namespace. So a new thread calls it and then ends, and the
        // caller stays in its own namespace.
        let done = scope.spawn(|| {
            let file = std::fs::File::open(format!("/run/netns/{namespace}")).expect("a namespace");
            setns(file, CloneFlags::CLONE_NEWNET).expect("setns");
            work()
        });
        done.join().expect("work in a namespace")
    })
}

/// Opens a UDP socket inside a namespace. The socket stays in that namespace whichever thread uses it.
pub fn socket(namespace: &str, address: SocketAddr) -> UdpSocket {
    let socket = inside(namespace, || UdpSocket::bind(address).expect("bind"));
    // With a read timeout, a test that waits for a lost packet fails, instead of waiting forever.
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
    socket
}

/// Returns the index of an interface in a namespace.
pub fn ifindex(namespace: &str, interface: &str) -> i32 {
    inside(namespace, || nix::net::if_::if_nametoindex(interface).expect("the interface") as i32)
}

fn packet_socket(namespace: &str) -> OwnedFd {
    let family = AddressFamily::Packet;
    let kind = SockType::Raw;
    // A packet socket receives from all interfaces of its namespace as soon as it is open. With ETH_P_ALL it also sees
    // the frames that are sent.
    let open = || socket::socket(family, kind, SockFlag::SOCK_NONBLOCK, SockProtocol::EthAll);
    inside(namespace, open).expect("a packet socket")
}

fn link(namespace: &str, interface: &str) -> LinkAddr {
    let addresses = || {
        let mut addresses = nix::ifaddrs::getifaddrs().expect("interfaces");
        // `getifaddrs` lists an interface once for each of its addresses. Only the entry of the family AF_PACKET has
        // the link address and the index.
        addresses.find_map(|a| {
            if a.interface_name == interface { a.address?.as_link_addr().copied() } else { None }
        })
    };
    inside(namespace, addresses).expect("the interface")
}

/// Returns the link address of an interface in a namespace.
pub fn link_address(namespace: &str, interface: &str) -> [u8; 6] {
    link(namespace, interface).addr().expect("a link address")
}

/// A raw socket that sends frames on one interface.
pub struct RawSender {
    socket: OwnedFd,
    interface: LinkAddr,
}

impl RawSender {
    /// Opens a raw socket on an interface.
    pub fn new(namespace: &str, interface: &str) -> Self {
        Self { socket: packet_socket(namespace), interface: link(namespace, interface) }
    }

    /// Sends a frame.
    pub fn send(&self, frame: &[u8]) {
        let fd = self.socket.as_raw_fd();
        let sent = loop {
            // The frame begins with its link header, so `sendto` uses only the interface index of this address.
            match socket::sendto(fd, frame, &self.interface, MsgFlags::empty()) {
                // The interface's queue is full, because earlier frames are not sent yet.
                Err(nix::Error::EAGAIN | nix::Error::ENOBUFS) => std::thread::yield_now(),
                sent => break sent.expect("sent"),
            }
        };
        assert_eq!(sent, frame.len());
    }
}

/// Returns a frame with a UDP datagram over IPv4 to link address `to`, with or without a VLAN tag. Its UDP checksum is
/// 0, which means that there is none.
pub fn frame(to: [u8; 6], vlan: Option<u16>, from: SocketAddr, at: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (from.ip(), at.ip()) else { panic!("IPv4 only") };
    let mut frame = [to, [2; 6]].concat();
    if let Some(id) = vlan {
        frame.extend([0x8100, id].map(u16::to_be_bytes).as_flattened());
    }
    let udp_len = payload.len() as u16 + 8;
    let words = [0x0800, 0x4500, udp_len + 20, 1, 0x4000, 0x4011, 0];
    frame.extend(words.map(u16::to_be_bytes).as_flattened());
    frame.extend([source.octets(), destination.octets()].as_flattened());
    let ip = frame.len() - 20;
    let checksum = (!sum(&frame[ip..])).to_be_bytes();
    frame[ip + 10..ip + 12].copy_from_slice(&checksum);
    frame.extend([from.port(), at.port(), udp_len, 0].map(u16::to_be_bytes).as_flattened());
    frame.extend(payload);
    frame
}

/// Distributes the packets that arrive on an interface over these CPUs, by the hash of their flow (RPS).
pub fn steer(namespace: &str, interface: &str, cpus: u8) {
    let file = format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus");
    let script = format!("echo {cpus:x} > {file}");
    // The function `inside` would not do, because `/sys` shows the interfaces of the namespace in which it was mounted.
    // `ip netns exec` mounts `/sys` anew.
    let command = ["netns", "exec", namespace, "sh", "-c", &script];
    assert!(std::process::Command::new("ip").args(command).status().expect("ip").success());
}

/// A capture of all frames that are received or sent in a namespace, or on one of its interfaces.
pub struct PacketCapture(OwnedFd);

impl AsFd for PacketCapture {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PacketCapture {
    /// Captures on all interfaces of a namespace.
    pub fn new(namespace: &str) -> Self {
        let socket = packet_socket(namespace);
        // Frames that do not fit into the receive buffer are dropped. Root may exceed the system's limit
        // `net.core.rmem_max`.
        socket::setsockopt(&socket, socket::sockopt::RcvBufForce, &(64 << 20)).expect("room for packets");
        Self(socket)
    }

    /// Captures on one interface of a namespace.
    pub fn on(namespace: &str, interface: &str) -> Self {
        let capture = Self::new(namespace);
        // Frames of other interfaces that arrived before this call stay in the socket's queue.
        socket::bind(capture.0.as_raw_fd(), &link(namespace, interface)).expect("bound to the interface");
        capture
    }

    /// Restricts the capture: only the first byte is captured of frames that have a flow hash in the skb's metadata.
    pub fn cut_hashed(&self) {
        // The filter loads SKF_AD_RXHASH, the flow hash in the skb's metadata. The hash is 0 if the skb has none.
        self.filter(0xffff_f000 + 32, 0, [0xffff, 1]);
    }

    /// Restricts the capture to outgoing packets. Without this restriction, each packet on the loopback interface would
    /// be captured twice.
    pub fn only_outgoing(&self) {
        // The filter loads SKF_AD_PKTTYPE and compares it with PACKET_OUTGOING.
        self.filter(0xffff_f000 + 4, 4, [0xffff, 0]);
    }

    /// Restricts the capture to incoming packets.
    pub fn only_incoming(&self) {
        self.filter(0xffff_f000 + 4, 4, [0, 0xffff]);
    }

    /// Sets a socket filter. It captures `same` bytes of packets whose 32-bit value at the offset `word` equals
    /// `wanted`, and `other` bytes of all other packets.
    #[allow(unsafe_code)]
    fn filter(&self, word: u32, wanted: u32, [same, other]: [u32; 2]) {
        let filter = |code, jf, k| nix::libc::sock_filter { code, jt: 0, jf, k };
        // The filter's instructions load the word, compare it, and return one of two lengths. The kernel keeps that
        // many bytes of the frame; with 0 it drops the frame.
        let mut code =
            [filter(0x20, 0, word), filter(0x15, 1, wanted), filter(0x06, 0, same), filter(0x06, 0, other)];
        let program = nix::libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
        // SAFETY: the kernel copies the program, whose length is that of `code`.
        let attached = unsafe {
            nix::libc::setsockopt(
                self.0.as_raw_fd(),
                nix::libc::SOL_SOCKET,
                nix::libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                size_of_val(&program) as u32,
            )
        };
        assert_eq!(attached, 0, "a filter");
    }

    /// Returns the frames that were captured since the last call.
    pub fn frames(&self) -> Vec<Vec<u8>> {
        let mut buffer = [0; 4096];
        let mut frames = Vec::new();
        // The socket is non-blocking, so an empty queue ends the loop with EAGAIN.
        while let Ok(len) = socket::recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            frames.push(buffer[..len].to_vec());
        }
        frames
    }

    /// Returns the number of UDP frames that have arrived. Panics if one has a wrong checksum.
    pub fn check(&self) -> usize {
        self.frames().iter().filter(|frame| check_frame(frame)).count()
    }
}

/// Reports whether the frame is UDP. Panics if a checksum or a length is wrong.
pub fn check_frame(frame: &[u8]) -> bool {
    let ip = &frame[14..];
    let (pseudo, udp) = match u16::from_be_bytes([frame[12], frame[13]]) {
        0x0800 => {
            if ip[9] != 17 {
                return false;
            }
            assert_eq!(sum(&ip[..20]), 0xffff, "IPv4 header checksum");
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len(), "IPv4 length");
            (&ip[12..20], &ip[20..])
        }
        0x86dd => {
            if ip[6] != 17 {
                return false;
            }
            assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])) + 40, ip.len(), "IPv6 length");
            (&ip[8..40], &ip[40..])
        }
        _ => return false,
    };
    assert_eq!(usize::from(u16::from_be_bytes([udp[4], udp[5]])), udp.len(), "UDP length");
    assert_ne!(udp[6..8], [0, 0], "no UDP checksum");
    let length = (udp.len() as u16).to_be_bytes();
    let all = [pseudo, &[0, 17], &length, udp].concat();
    assert_eq!(sum(&all), 0xffff, "UDP checksum of a datagram of {} bytes", udp.len());
    true
}

fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum = words.fold(0u64, |sum, word| sum + u64::from(word));
    // The words of a packet add up to less than 2^32. So the first fold leaves at most 17 bits, and the second one 16.
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
