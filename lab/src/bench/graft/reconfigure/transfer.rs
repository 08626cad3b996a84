//! Sends messages from one host to another as fast as the session accepts them, and records the arrival of each.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::libc::ENOBUFS;
use nix::sys::socket::{setsockopt, sockopt};

use super::super::packets::forget_words;
use super::super::repair::datagrams::{message, read};
use super::host::PORT;
use crate::lab::LabNode;

/// Time for which a sender waits if the session's send window has no space for a message.
const NO_ROOM: Duration = Duration::from_micros(200);

/// A message that arrived: its number, the time of sending, and its delay.
#[derive(Clone, Copy, Debug)]
pub struct MessageArrival {
    pub number: u64,
    pub sent_s: f64,
    pub delay_ms: f64,
}

#[derive(Default)]
pub struct ReceivedTransfer {
    pub arrivals: Vec<MessageArrival>,
    /// Number of messages that were altered or duplicated.
    pub wrong: u64,
}

/// State of one transfer, which its sender, its receiver and the thread that reads the daemon's status share.
pub struct SharedTransfer {
    from: UdpSocket,
    to: UdpSocket,
    pub base: Instant,
    bytes: usize,
    messages: u64,
    /// Number of the next message to be sent.
    pub next: AtomicU64,
    pub is_over: AtomicBool,
}

impl SharedTransfer {
    pub fn new(near: &LabNode, far: &LabNode, bytes: usize, messages: u64) -> anyhow::Result<Self> {
        let socket = |node: &LabNode, peer: &LabNode| -> anyhow::Result<UdpSocket> {
            let socket = node.enter(|| UdpSocket::bind((node.addr_v4(), PORT)))??;
            socket.connect((peer.addr_v4(), PORT))?;
            Ok(socket)
        };
        let from = socket(near, far)?;
        let to = socket(far, near)?;
        setsockopt(&from, sockopt::Ipv4RecvErr, &true)?;
        setsockopt(&to, sockopt::RcvBufForce, &(64 << 20))?;
        forget_words(&to)?;
        to.set_read_timeout(Some(Duration::from_millis(50)))?;
        let next = AtomicU64::new(0);
        let is_over = AtomicBool::new(false);
        Ok(Self { from, to, base: Instant::now(), bytes, messages, next, is_over })
    }

    /// Sends all messages, unless the transfer is ended earlier.
    pub fn send(&self) -> anyhow::Result<()> {
        for number in 0..self.messages {
            while !self.send_once(number)? {
                if self.is_over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                std::thread::sleep(NO_ROOM);
            }
            self.next.store(number + 1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn send_once(&self, number: u64) -> anyhow::Result<bool> {
        match self.from.send(&message(number, self.base.elapsed(), self.bytes)) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(ENOBUFS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Receives messages until all have arrived, or `limit` has passed, or the transfer is over. It also stops if
    /// nothing arrived for `silence` after the last message was sent.
    pub fn receive(&self, silence: Duration, limit: Duration) -> ReceivedTransfer {
        let mut received = ReceivedTransfer::default();
        let mut seen = vec![false; usize::try_from(self.messages).unwrap_or(usize::MAX)];
        let mut buffer = [0; 2048];
        let mut latest = Instant::now();
        let is_over = || self.base.elapsed() >= limit || self.is_over.load(Ordering::Relaxed);
        while (received.arrivals.len() as u64) < self.messages && !is_over() {
            let Ok(got) = self.to.recv(&mut buffer) else {
                let all_sent = self.next.load(Ordering::Relaxed) == self.messages;
                if all_sent && latest.elapsed() > silence {
                    break;
                }
                continue;
            };
            latest = Instant::now();
            match self.take(&buffer[..got], &mut seen) {
                Some(arrival) => received.arrivals.push(arrival),
                None => received.wrong += 1,
            }
        }
        self.is_over.store(true, Ordering::Relaxed);
        received
    }

    fn take(&self, got: &[u8], seen: &mut [bool]) -> Option<MessageArrival> {
        let now_s = self.base.elapsed().as_secs_f64();
        let (number, delay_ms) = read(got, self.base, self.bytes)?;
        let seen = seen.get_mut(usize::try_from(number).ok()?)?;
        let is_new = !std::mem::replace(seen, true);
        is_new.then_some(MessageArrival { number, sent_s: now_s - delay_ms / 1e3, delay_ms })
    }
}

impl MessageArrival {
    pub fn came_s(&self) -> f64 {
        self.sent_s + self.delay_ms / 1e3
    }
}
