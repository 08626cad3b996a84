//! Tests receivers whose application does not read: their sockets always have the buffer space that acknowledgements
//! announced.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millrace_graft_kernel::packet::{PacketHooks, PacketReason, TalkMessage};
use millrace_kernel::xdp::XdpMode;
use millrace_testkit::{wait_for, wait_until};
use nix::sys::socket::{setsockopt, sockopt};

use crate::net::{ifindex, inside, root};
use crate::sealed::{SealedCipher, pair_of};
use crate::traffic::{AtEnd, DatagramFate, GO_BACK, PacketHook, SELECTIVE, get_to_know};
use crate::{count, counted, hooks_of, other_side};

const LONG: Duration = millrace_testkit::BOUND;
/// Number of datagrams, more than any of the sockets can hold.
const SENT: u32 = 2500;
/// The sender counts as stopped after this many GRAFT_LAST messages without progress.
const STILL: u32 = 40;

/// The order in which datagrams of different sizes are sent.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    Least,
    Most(usize),
    /// Small datagrams come first, so the receiver does not know yet how much buffer space a large one takes.
    Growing(usize),
    Mixed(usize),
}

impl Sizes {
    fn datagram_size(self, number: u32) -> usize {
        match self {
            Self::Least => 4,
            Self::Most(bytes) => bytes,
            Self::Growing(bytes) => {
                if number < 100 {
                    4
                } else {
                    bytes
                }
            }
            Self::Mixed(bytes) => 4 + (number as usize * 7919) % (bytes - 3),
        }
    }

    fn message(self, number: u32) -> Vec<u8> {
        let mut bytes = number.to_be_bytes().to_vec();
        bytes.resize(self.datagram_size(number), number as u8);
        bytes
    }
}

struct UnreadCase {
    family: u8,
    cipher: Option<SealedCipher>,
    functions: &'static [&'static str],
    /// Receive buffer that the application requests, in bytes; `None`: the kernel's default.
    buffer: Option<usize>,
    sizes: Sizes,
    window: u64,
    is_lossy: bool,
}

/// Tests all combinations of datagram sizes and receive buffers: every datagram arrives once, and the socket drops
/// none.
#[test]
fn paused_reader_gets_every_datagram_once_at_any_receive_buffer_size() {
    if !root("paused_reader_gets_every_datagram_once_at_any_receive_buffer_size") {
        return;
    }
    // Longest UDP payload for an MTU of 1500 bytes, after the bytes that the session adds, the AEAD and the headers are
    // subtracted.
    let longest = |family, cipher: Option<SealedCipher>| {
        1500 - if family == 4 { 28 } else { 48 } - if cipher.is_some() { 40 } else { 16 }
    };
    let chacha = Some(SealedCipher::ChaCha20Poly1305);
    let aes = Some(SealedCipher::Aes128Gcm);
    let small = Some(16 << 10);
    let large = Some(1 << 20);
    type Make = fn(usize) -> Sizes;
    type Row = (u8, Option<SealedCipher>, &'static [&'static str], Option<usize>, Make, u64, bool);
    let least: Make = |_| Sizes::Least;
    let table: [Row; 12] = [
        (4, None, SELECTIVE, None, least, 256, false),
        (4, None, SELECTIVE, None, Sizes::Most, 256, true),
        (6, None, SELECTIVE, None, Sizes::Growing, 256, true),
        (6, chacha, SELECTIVE, None, Sizes::Mixed, 128, true),
        (4, chacha, SELECTIVE, large, Sizes::Most, 256, false),
        (6, chacha, SELECTIVE, large, Sizes::Mixed, 256, true),
        (4, aes, SELECTIVE, large, Sizes::Growing, 128, true),
        (6, None, SELECTIVE, large, least, 256, true),
        (4, None, SELECTIVE, small, Sizes::Mixed, 64, true),
        (4, chacha, SELECTIVE, small, Sizes::Most, 16, false),
        (4, None, GO_BACK, None, Sizes::Mixed, 128, true),
        (6, chacha, GO_BACK, large, Sizes::Most, 128, false),
    ];
    for (family, cipher, functions, buffer, sizes, window, is_lossy) in table {
        let sizes = sizes(longest(family, cipher));
        let what = format!("IPv{family} {cipher:?} {functions:?} {buffer:?} {sizes:?} {window} {is_lossy}");
        println!("--- {what}");
        UnreadCase { family, cipher, functions, buffer, sizes, window, is_lossy }.run();
    }
}

impl UnreadCase {
    fn run(&self) {
        let site = PacketHook::new("unread", self.family);
        let (near, far) = site.sockets();
        match self.family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        // The kernel doubles a requested size, so half of its default receive buffer is requested.
        setsockopt(&far, sockopt::RcvBufForce, &self.buffer.unwrap_or(212_992 / 2)).expect("a buffer");
        let [mut sender, mut receiver] = self.hooks(&site);
        let there = other_side(&site.ends);
        let stop = AtomicBool::new(false);
        let lossy = |count: u64| match count % 23 {
            3 | 4 => DatagramFate::Lose,
            9 => DatagramFate::Hold,
            _ => DatagramFate::Pass,
        };
        let wire = site.wire();
        let is_lossy = self.is_lossy;
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, |count| if is_lossy { lossy(count) } else { DatagramFate::Pass }));
            get_to_know(&site, &sender, &mut receiver);
            let sending = scope.spawn(|| self.send(&near));
            let promised = stand_still(&site, &sender);
            let (_, dropped) = queued(&site, &far);
            println!("{promised} have come; {:?}", counted(&mut receiver, &there));
            assert!(promised > 0 && promised < SENT, "{promised} have come at one that does not read");
            assert_eq!(dropped, 0, "datagrams were dropped by the socket");
            let receiving = scope.spawn(|| self.receive(&far));
            while !receiving.is_finished() || !sending.is_finished() {
                say_last(&site, &sender);
                // exact: the interval between GRAFT_LAST messages, which reveal that the latest packets were lost
                thread::sleep(Duration::from_millis(5));
            }
            stop.store(true, Ordering::Relaxed);
            let sent = sending.join();
            let got = receiving.join();
            if sent.is_err() {
                let progress = sender.progress(&site.ends).expect("progress");
                let counts = [counted(&mut sender, &site.ends), counted(&mut receiver, &there)];
                panic!(
                    "not all was sent: {progress:?}; counted: {counts:?}; in the socket: {:?}",
                    queued(&site, &far)
                );
            }
            got.expect("messages")
        });
        crate::traffic::assert_all_once(&got, SENT);
        let left = wait_until("an empty socket", || queued(&site, &far), |(bytes, _)| *bytes == 0);
        assert_eq!(left, (0, 0));
        assert_eq!(count(&mut sender, &site.ends, PacketReason::Sent), u64::from(SENT));
        assert_eq!(count(&mut receiver, &there, PacketReason::Delivered), u64::from(SENT));
        // If the receive buffer has space for all packets that the send window allows in flight, the receiver never
        // refuses a packet, since it never announces more space than it has.
        if self.buffer == Some(1 << 20) {
            assert_eq!(count(&mut receiver, &there, PacketReason::SocketFull), 0);
        }
    }

    fn hooks(&self, site: &PacketHook) -> [PacketHooks; 2] {
        let parameters = [
            ("window", "packets", self.window),
            ("repair", "retry_us", 20_000),
            ("repair", "tries", 0),
            ("gobackn", "retry_us", 20_000),
        ];
        let Some(cipher) = self.cipher else { return site.hooks_of(self.functions, &parameters) };
        let make = || hooks_of(self.functions, &parameters);
        let (sender, receiver) = pair_of(site.ends, cipher, self.functions, make);
        let mut both = [sender, receiver];
        for (namespace, hooks) in
            [&site.network.publisher, &site.network.subscriber].into_iter().zip(&mut both)
        {
            let eth = ifindex(namespace, "eth");
            inside(namespace, || hooks.attach(eth, XdpMode::Auto).expect("attached"));
        }
        both
    }

    fn send(&self, near: &UdpSocket) {
        for number in 0..SENT {
            let until = Instant::now() + LONG;
            while let Err(error) = near.send(&self.sizes.message(number)) {
                assert_eq!(error.raw_os_error(), Some(nix::libc::ENOBUFS), "{error}");
                assert!(Instant::now() < until, "there is no room for message {number}");
                // exact: the pause between two attempts to send into a full send window
                thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn receive(&self, far: &UdpSocket) -> Vec<u32> {
        let mut buffer = [0; 2048];
        let mut got = Vec::new();
        let mut until = Instant::now() + LONG;
        while got.len() < SENT as usize && Instant::now() < until {
            let Ok(bytes) = far.recv(&mut buffer) else { continue };
            let number = u32::from_be_bytes(*buffer.first_chunk().expect("a number"));
            assert!(buffer[..bytes] == self.sizes.message(number), "message {number} is not as it was sent");
            got.push(number);
            until = Instant::now() + LONG;
        }
        got
    }
}

fn say_last(site: &PacketHook, sender: &PacketHooks) {
    let next = sender.progress(&site.ends).expect("progress").next;
    inside(&site.network.publisher, || sender.say(&site.ends, TalkMessage::Last(next)).expect("said"));
}

/// Waits until the sender makes no more progress. Returns how many packets the sender knows to be received.
fn stand_still(site: &PacketHook, sender: &PacketHooks) -> u32 {
    let mut before = (0, 0);
    let mut still = 0;
    wait_for("its end", || {
        let known = sender.progress(&site.ends).expect("progress");
        let now = (known.next, known.acked);
        still = if now == before && known.acked > 0 { still + 1 } else { 0 };
        before = now;
        say_last(site, sender);
        if still < STILL { Err(now) } else { Ok(known.acked) }
    })
}

/// Returns how many bytes wait in the socket, and how many datagrams the kernel has dropped at the socket.
fn queued(site: &PacketHook, far: &UdpSocket) -> (u64, u64) {
    let port = format!(":{:04X}", far.local_addr().expect("an address").port());
    let table = inside(&site.network.subscriber, || {
        ["udp", "udp6"]
            // exact: callers reread the socket's queue length and drop count, or check that no datagram was dropped
            .map(|name| std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).expect("sockets"))
    });
    let line = table
        .iter()
        .flat_map(|table| table.lines())
        .find(|line| line.split_whitespace().nth(1).is_some_and(|local| local.ends_with(&port)));
    let fields: Vec<_> = line.expect("the socket").split_whitespace().collect();
    let (_, bytes) = fields[4].split_once(':').expect("queues");
    let dropped = fields.last().expect("drops");
    (u64::from_str_radix(bytes, 16).expect("bytes"), dropped.parse().expect("a number"))
}
