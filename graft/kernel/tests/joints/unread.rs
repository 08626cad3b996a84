//! Receivers that do not read: what an acknowledgement has promised room for, their sockets have.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millrace_graft_kernel::joint::{Joints, Reason, Word};
use millrace_kernel::xdp::Mode;
use millrace_testkit::{wait_for, wait_until};
use nix::sys::socket::{setsockopt, sockopt};

use crate::net::{ifindex, inside, root};
use crate::sealed::{Cipher, pair_of};
use crate::traffic::{AtEnd, Fate, GO_BACK, SELECTIVE, Site, get_to_know};
use crate::{count, counted, joints_of, other_side};

const LONG: Duration = millrace_testkit::BOUND;
/// More than any of the sockets has room for.
const SENT: u32 = 2500;
/// Words of the sender's that change nothing, until it is believed to stand still.
const STILL: u32 = 40;

/// Bytes of each datagram, by its number.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    Least,
    Most(usize),
    /// Small ones first: what a large one takes is not known yet.
    Growing(usize),
    Mixed(usize),
}

impl Sizes {
    fn of(self, number: u32) -> usize {
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
        bytes.resize(self.of(number), number as u8);
        bytes
    }
}

struct Case {
    family: u8,
    cipher: Option<Cipher>,
    functions: &'static [&'static str],
    /// As applications ask for it, or what sockets have anyway.
    buffer: Option<usize>,
    sizes: Sizes,
    window: u64,
    is_lossy: bool,
}

/// In every combination that is there: all of it comes, once, and its socket has dropped nothing.
#[test]
fn who_reads_nothing_and_then_everything_has_all_of_it() {
    if !root("who_reads_nothing_and_then_everything_has_all_of_it") {
        return;
    }
    // What fits an interface of 1500 bytes, with frames, seals and headers.
    let longest = |family, cipher: Option<Cipher>| {
        1500 - if family == 4 { 28 } else { 48 } - if cipher.is_some() { 40 } else { 16 }
    };
    let (chacha, aes) = (Some(Cipher::ChaCha20Poly1305), Some(Cipher::Aes128Gcm));
    let (small, large) = (Some(16 << 10), Some(1 << 20));
    type Make = fn(usize) -> Sizes;
    type Row = (u8, Option<Cipher>, &'static [&'static str], Option<usize>, Make, u64, bool);
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
        Case { family, cipher, functions, buffer, sizes, window, is_lossy }.run();
    }
}

impl Case {
    fn run(&self) {
        let site = Site::new("unread", self.family);
        let (near, far) = site.sockets();
        match self.family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        // What the kernel gives who does not ask: it doubles what it is told.
        setsockopt(&far, sockopt::RcvBufForce, &self.buffer.unwrap_or(212_992 / 2)).expect("a buffer");
        let [mut sender, mut receiver] = self.joints(&site);
        let there = other_side(&site.ends);
        let stop = AtomicBool::new(false);
        let lossy = |count: u64| match count % 23 {
            3 | 4 => Fate::Lose,
            9 => Fate::Hold,
            _ => Fate::Pass,
        };
        let wire = site.wire();
        let is_lossy = self.is_lossy;
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, |count| if is_lossy { lossy(count) } else { Fate::Pass }));
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
                thread::sleep(Duration::from_millis(5)); // exact: as often as the daemon says it
            }
            stop.store(true, Ordering::Relaxed);
            sending.join().expect("sent");
            receiving.join().expect("messages")
        });
        crate::traffic::assert_all_once(&got, SENT);
        let left = wait_until("an empty socket", || queued(&site, &far), |(bytes, _)| *bytes == 0);
        assert_eq!(left, (0, 0));
        assert_eq!(count(&mut sender, &site.ends, Reason::Sent), u64::from(SENT));
        assert_eq!(count(&mut receiver, &there, Reason::Delivered), u64::from(SENT));
        // With a window for which there is room, the promise alone keeps it: nothing is turned away.
        if self.buffer == Some(1 << 20) {
            assert_eq!(count(&mut receiver, &there, Reason::SocketFull), 0);
        }
    }

    fn joints(&self, site: &Site) -> [Joints; 2] {
        let parameters = [
            ("window", "packets", self.window),
            ("repair", "retry_us", 20_000),
            ("repair", "tries", 0),
            ("gobackn", "retry_us", 20_000),
        ];
        let Some(cipher) = self.cipher else { return site.joints_of(self.functions, &parameters) };
        let make = || joints_of(self.functions, &parameters);
        let (sender, receiver) = pair_of(site.ends, cipher, self.functions, make);
        let mut both = [sender, receiver];
        for (namespace, joints) in
            [&site.network.publisher, &site.network.subscriber].into_iter().zip(&mut both)
        {
            let eth = ifindex(namespace, "eth");
            inside(namespace, || joints.attach(eth, Mode::Auto).expect("attached"));
        }
        both
    }

    fn send(&self, near: &UdpSocket) {
        for number in 0..SENT {
            let until = Instant::now() + LONG;
            while let Err(error) = near.send(&self.sizes.message(number)) {
                assert_eq!(error.raw_os_error(), Some(nix::libc::ENOBUFS), "{error}");
                assert!(Instant::now() < until, "there is no room for message {number}");
                thread::sleep(Duration::from_micros(200)); // exact: paces the sender
            }
        }
    }

    fn receive(&self, far: &UdpSocket) -> Vec<u32> {
        let (mut buffer, mut got, mut until) = ([0; 2048], Vec::new(), Instant::now() + LONG);
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

fn say_last(site: &Site, sender: &Joints) {
    let next = sender.progress(&site.ends).expect("progress").next;
    inside(&site.network.publisher, || sender.say(&site.ends, Word::Last(next)).expect("said"));
}

/// Until the sender is told of nothing new any more; how much has come then, as it believes.
fn stand_still(site: &Site, sender: &Joints) -> u32 {
    let (mut before, mut still) = ((0, 0), 0);
    wait_for("its end", || {
        let known = sender.progress(&site.ends).expect("progress");
        let now = (known.next, known.acked);
        still = if now == before && known.acked > 0 { still + 1 } else { 0 };
        before = now;
        say_last(site, sender);
        if still < STILL { Err(now) } else { Ok(known.acked) }
    })
}

/// Bytes that wait in the socket, and datagrams that it has dropped, as the kernel counts them.
fn queued(site: &Site, far: &UdpSocket) -> (u64, u64) {
    let port = format!(":{:04X}", far.local_addr().expect("an address").port());
    let table = inside(&site.network.subscriber, || {
        ["udp", "udp6"]
            // exact: its callers wait, or ask for what never grows.
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
