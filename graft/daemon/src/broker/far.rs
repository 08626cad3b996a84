//! The daemon at the other end: what both say to each other by the first session of a pool, and what they learn of the path by it.

use std::{
    collections::VecDeque,
    io,
    net::UdpSocket,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    time::{Duration, Instant},
};

use millrace_graft::{message::Why, packet::choose::Path};
use millrace_graft_kernel::joint::Ends;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::seat;

const PING_EVERY: Duration = Duration::from_millis(250);
/// Of the newest pings so many count for losses, and fewer say nothing.
const PINGS: usize = 100;
const PINGS_MIN: usize = 20;
/// An answer that is later than this is none.
const PONG_WITHIN: Duration = Duration::from_secs(1);
/// Of the newest round trips: the least of these is the path's, their median is what there is now.
const LATE: usize = 8;
/// Bytes of a word.
const WORD_MAX: usize = 1024;

/// A word that wants an answer is said again until it comes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case", deny_unknown_fields)]
pub enum Say {
    Ping {
        n: u32,
    },
    Pong {
        n: u32,
    },
    /// `life`: of the session between two applications, at random. Answered by `Accept` or `Refuse`.
    Open {
        life: u64,
        port: u16,
        service: String,
        /// The library puts messages in order.
        in_order: bool,
    },
    Accept {
        life: u64,
    },
    Refuse {
        life: u64,
        why: Why,
        reason: String,
    },
    /// Both ends use the graft, and this one takes datagrams. Answered by `Ready`.
    Go {
        life: u64,
    },
    Ready {
        life: u64,
    },
    /// The application here sends no more; it has sent so many messages. Answered by `Finished`.
    Finish {
        life: u64,
        messages: u32,
    },
    Finished {
        life: u64,
    },
    /// The application here has gone, or never came. Answered by `Closed`.
    Close {
        life: u64,
        messages: Option<u32>,
        reason: String,
    },
    Closed {
        life: u64,
    },
    /// The session is known here. `delivered`: so many of the application's datagrams have come, for who asks for that.
    Report {
        life: u64,
        delivered: Option<u64>,
        asks: bool,
    },
}

/// One of the peers.
pub struct Far {
    /// Sessions with it that applications here have got.
    pub opened: u64,
    socket: Arc<UdpSocket>,
    path: Arc<Mutex<Pings>>,
    ended: Arc<AtomicBool>,
}

impl Far {
    /// What it says is given to `words`, with the number of the peer.
    pub fn new(peer: usize, ends: &Ends, words: Sender<(usize, Say)>) -> io::Result<Self> {
        let socket = Arc::new(seat::control(ends)?);
        let path = Arc::new(Mutex::new(Pings::default()));
        let ended = Arc::new(AtomicBool::new(false));
        let far = Self { opened: 0, socket: socket.clone(), path: path.clone(), ended: ended.clone() };
        std::thread::Builder::new().name("peer".into()).spawn(move || {
            let hear = |say| words.send((peer, say)).is_ok();
            while !ended.load(Ordering::Relaxed) && converse(&socket, &path, hear) {}
        })?;
        Ok(far)
    }

    /// What is lost is said again by who waits for an answer.
    pub fn say(&self, say: &Say) {
        send(&self.socket, say);
    }

    pub fn path(&self) -> Path {
        self.path.lock().path(Instant::now())
    }

    /// As it is now, with the queues that there are.
    pub fn round_trip_now(&self) -> Option<Duration> {
        self.path.lock().median()
    }

    /// For how long nothing was heard; since the start, if nothing ever was.
    pub fn silence(&self) -> Duration {
        self.path.lock().heard.elapsed()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Until the next ping is due: `false` when nobody listens any more.
fn converse(socket: &UdpSocket, path: &Mutex<Pings>, mut hear: impl FnMut(Say) -> bool) -> bool {
    let due = path.lock().ping(Instant::now(), |n| send(socket, &Say::Ping { n }));
    let left = due.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let _ = socket.set_read_timeout(Some(left));
    let mut buffer = [0; WORD_MAX];
    let Ok(got) = socket.recv(&mut buffer) else { return true };
    let Ok(say) = serde_json::from_slice(buffer.get(..got).unwrap_or_default()) else { return true };
    path.lock().heard = Instant::now();
    match say {
        Say::Ping { n } => {
            send(socket, &Say::Pong { n });
            true
        }
        Say::Pong { n } => {
            path.lock().pong(Instant::now(), n);
            true
        }
        say => hear(say),
    }
}

/// Whether it has left.
fn send(socket: &UdpSocket, say: &Say) -> bool {
    serde_json::to_vec(say).is_ok_and(|text| text.len() <= WORD_MAX && socket.send(&text).is_ok())
}

/// What pings have found out.
struct Pings {
    next: u32,
    due: Instant,
    heard: Instant,
    /// Number, when it left, and how long until its answer.
    newest: VecDeque<(u32, Instant, Option<Duration>)>,
}

impl Default for Pings {
    fn default() -> Self {
        let now = Instant::now();
        Self { next: 0, due: now, heard: now, newest: VecDeque::new() }
    }
}

impl Pings {
    /// Sends one if it is time; returns when the next one is. What could not leave says nothing about the path.
    fn ping(&mut self, now: Instant, send: impl FnOnce(u32) -> bool) -> Instant {
        if now < self.due {
            return self.due;
        }
        self.due = now + PING_EVERY;
        if send(self.next) {
            self.newest.push_back((self.next, now, None));
            if self.newest.len() > PINGS {
                self.newest.pop_front();
            }
        }
        self.next = self.next.wrapping_add(1);
        self.due
    }

    fn pong(&mut self, now: Instant, n: u32) {
        let found = self.newest.iter_mut().rev().find(|(sent, ..)| *sent == n);
        if let Some((_, at, round_trip @ None)) = found {
            *round_trip = Some(now.saturating_duration_since(*at)).filter(|it| *it <= PONG_WITHIN);
        }
    }

    fn late(&self) -> Vec<Duration> {
        self.newest.iter().rev().filter_map(|(_, _, round_trip)| *round_trip).take(LATE).collect()
    }

    fn median(&self) -> Option<Duration> {
        let mut late = self.late();
        late.sort_unstable();
        late.get(late.len() / 2).copied()
    }

    fn path(&self, now: Instant) -> Path {
        let over: Vec<_> = self
            .newest
            .iter()
            .filter(|(_, at, _)| now.saturating_duration_since(*at) > PONG_WITHIN)
            .collect();
        let lost = over.iter().filter(|(_, _, round_trip)| round_trip.is_none()).count();
        // Of there and back each is as likely: the part that is lost one way.
        let one_way = |lost: f64| 1.0 - (1.0 - lost).sqrt();
        let loss = (over.len() >= PINGS_MIN).then(|| one_way(lost as f64 / over.len() as f64));
        Path { round_trip: self.late().into_iter().min(), loss }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_tell_the_round_trip_and_what_is_lost() {
        let (mut pings, start) = (Pings::default(), Instant::now() + Duration::from_secs(1));
        let at = |n: u32| start + n * PING_EVERY;
        for n in 0..200 {
            assert_eq!(pings.ping(at(n), |sent| sent == n), at(n + 1));
            assert_eq!(pings.ping(at(n), |_| panic!("not yet")), at(n + 1));
            // Every fourth one is lost, and one is late.
            if n % 4 > 0 {
                let round_trip = Duration::from_millis(if n == 199 { 50 } else { 20 });
                pings.pong(at(n) + round_trip, n);
                pings.pong(at(n) + 2 * round_trip, n);
            }
        }
        pings.pong(at(200), 7);
        let path = pings.path(at(210));
        assert_eq!(path.round_trip, Some(Duration::from_millis(20)));
        assert_eq!(pings.median(), Some(Duration::from_millis(20)));
        assert!((path.loss.expect("enough") - (1.0 - 0.75_f64.sqrt())).abs() < 1e-9, "{path:?}");
        assert_eq!(pings.newest.len(), PINGS);
    }

    #[test]
    fn what_could_not_leave_is_not_lost() {
        let (mut pings, start) = (Pings::default(), Instant::now() + Duration::from_secs(1));
        for n in 0..100 {
            pings.ping(start + n * PING_EVERY, |_| false);
        }
        assert_eq!(pings.path(start + 200 * PING_EVERY), Path::default());
    }

    #[test]
    fn words_are_short_and_what_is_none_is_none() {
        let (service, reason) = ("s".repeat(64), "r".repeat(300));
        let longest = [
            Say::Open { life: u64::MAX, port: u16::MAX, service, in_order: true },
            Say::Close { life: u64::MAX, messages: Some(u32::MAX), reason },
        ];
        for say in longest {
            let text = serde_json::to_vec(&say).expect("JSON");
            assert!(text.len() <= WORD_MAX);
            assert_eq!(serde_json::from_slice::<Say>(&text).expect("a word"), say);
        }
        for text in
            ["", "{}", "[]", r#"{"say":"go"}"#, r#"{"say":"go","life":-1}"#, r#"{"say":"go","life":1,"x":1}"#]
        {
            assert!(serde_json::from_str::<Say>(text).is_err(), "{text}");
        }
    }
}
