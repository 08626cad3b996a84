//! Who is sent a stream, until when, and who is not for a while. Nothing is kept of an address before it is proved.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use millrace_base::networks::{Network, levels};

use super::{
    breaker::{self, Breaker, Heard, Sent, Trip},
    message::{Answer, Ask, Refusal, Request, Say},
    token::Mint,
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub receivers: usize,
    /// Receivers of one client: an IPv4 address or an IPv6 /64. Wider networks have multiples of it ([`levels`]).
    pub per_address: usize,
    /// The longest lease.
    pub lease: Duration,
    /// How long who was cut off has to wait.
    pub pause: Duration,
    /// Of those who asked; `None`: their reports are not looked at.
    pub breaker: Option<breaker::Settings>,
}

/// What is to be done; applied in order it makes the kernel's state that of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    Add { who: SocketAddr, until: Duration },
    Renew { who: SocketAddr, until: Duration },
    Remove { who: SocketAddr, why: Why },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It asked for it.
    Asked,
    Expired,
    /// The operator names it no more.
    Unnamed,
    Cut(Trip),
}

/// Of one stream. Times are of one clock that does not go back.
pub struct Receivers {
    stream: String,
    limits: Limits,
    entries: BTreeMap<SocketAddr, Entry>,
    /// Who has left a moment ago: coming again is no way around the breaker. No more than there may be receivers.
    left: BTreeMap<SocketAddr, Left>,
}

struct Left {
    breaker: Breaker,
    sent: Sent,
    since: Duration,
}

/// It counts against the limits also while it waits, so that another port is no way around the pause.
struct Entry {
    state: State,
    /// An operator has named it: it needs no lease.
    pinned: bool,
    breaker: Option<Breaker>,
    /// Before it left and came again, as the breaker knows it.
    sent: Sent,
}

enum State {
    Leased { until: Duration },
    Paused { until: Duration },
}

/// The lease of those that an operator has named.
pub const FOREVER: Duration = Duration::MAX;
/// Of a lease.
const LEAST: Duration = Duration::from_secs(1);

impl Receivers {
    pub fn new(stream: &str, limits: Limits) -> Self {
        Self { stream: stream.to_owned(), limits, entries: BTreeMap::new(), left: BTreeMap::new() }
    }

    /// An operator's word: beyond all limits, without a lease. `breaker`: whether its reports are looked at.
    pub fn pin(&mut self, who: SocketAddr, breaker: bool) -> Command {
        let breaker = self.limits.breaker.filter(|_| breaker).map(Breaker::new);
        let state = State::Leased { until: FOREVER };
        self.entries.insert(who, Entry { state, pinned: true, breaker, sent: Sent::default() });
        Command::Add { who, until: FOREVER }
    }

    /// An operator names it no more: it may ask from now on.
    pub fn unpin(&mut self, who: SocketAddr) -> Option<Command> {
        let entry = self.entries.get(&who).filter(|entry| entry.pinned)?;
        let is_leased = matches!(entry.state, State::Leased { .. });
        self.entries.remove(&who);
        is_leased.then_some(Command::Remove { who, why: Why::Unnamed })
    }

    /// For what is decided from now on. Nobody who is there is sent away by them.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Those who are sent the stream now.
    pub fn leased(&self) -> impl Iterator<Item = (SocketAddr, bool)> {
        let leased = self.entries.iter().filter(|(_, entry)| matches!(entry.state, State::Leased { .. }));
        leased.map(|(who, entry)| (*who, entry.pinned))
    }

    /// Those who were cut off, and for how much longer they wait.
    pub fn paused(&self, now: Duration) -> impl Iterator<Item = (SocketAddr, Duration)> {
        self.entries.iter().filter_map(move |(who, entry)| match entry.state {
            State::Paused { until } => Some((*who, until.saturating_sub(now))),
            State::Leased { .. } => None,
        })
    }

    pub fn is_leased(&self, who: SocketAddr) -> bool {
        self.entries.get(&who).is_some_and(|entry| matches!(entry.state, State::Leased { .. }))
    }

    /// Answers a request. Without a token that proves the address nothing is done, and nothing kept. `sent`: what it was sent so far.
    pub fn ask(
        &mut self,
        mint: &Mint,
        request: &Request,
        who: SocketAddr,
        sent: Sent,
        now: Duration,
    ) -> (Answer, Option<Command>) {
        let answer = |what| Answer { what, transaction: request.transaction };
        let refused = |why, wait: Duration| answer(Say::Refused { why, seconds: seconds(wait) });
        if request.stream != self.stream {
            return (refused(Refusal::Unknown, Duration::ZERO), None);
        }
        let token = mint.token(&self.stream, who, now.as_secs());
        if !mint.is_good(request.token, &self.stream, who, now.as_secs()) {
            return (answer(Say::Prove(token)), None);
        }
        match request.what {
            Ask::Unsubscribe => (answer(Say::Ended), self.leave(who, sent, now)),
            Ask::Subscribe { seconds: wanted } => match self.lease(who, wanted, now) {
                Ok((lease, command)) => (answer(Say::Lease { seconds: seconds(lease), token }), command),
                Err((why, wait)) => (refused(why, wait), None),
            },
        }
    }

    /// The kernel has no room for it: it has no lease either.
    pub fn take_back(&mut self, who: SocketAddr, answer: Answer) -> Answer {
        self.entries.remove(&who);
        let seconds = seconds(self.limits.lease);
        Answer { what: Say::Refused { why: Refusal::Full, seconds }, ..answer }
    }

    /// Who waits after a cut goes on waiting.
    fn leave(&mut self, who: SocketAddr, sent: Sent, now: Duration) -> Option<Command> {
        let entry = self.entries.get(&who)?;
        if entry.pinned || matches!(entry.state, State::Paused { .. }) {
            return None;
        }
        self.part(who, sent, now);
        Some(Command::Remove { who, why: Why::Asked })
    }

    /// Its breaker is remembered, while there is room for that.
    fn part(&mut self, who: SocketAddr, sent: Sent, now: Duration) {
        let Some(entry) = self.entries.remove(&who) else { return };
        if let Some(breaker) = entry.breaker.filter(|_| self.left.len() < self.limits.receivers) {
            self.left.insert(who, Left { breaker, sent: entry.sent + sent, since: now });
        }
    }

    /// As it was when it left, or a new one.
    fn breaker(&mut self, who: SocketAddr, now: Duration) -> (Option<Breaker>, Sent) {
        let left = self.left.remove(&who).filter(|left| now < left.since + left.breaker.memory());
        match left {
            Some(Left { mut breaker, sent, since }) => {
                breaker.skip(now.saturating_sub(since));
                (Some(breaker), sent)
            }
            None => (self.limits.breaker.map(Breaker::new), Sent::default()),
        }
    }

    fn lease(
        &mut self,
        who: SocketAddr,
        wanted: u16,
        now: Duration,
    ) -> Result<(Duration, Option<Command>), (Refusal, Duration)> {
        let lease = Duration::from_secs(wanted.into()).clamp(LEAST, self.limits.lease.max(LEAST));
        match self.entries.get_mut(&who).map(|entry| (&mut entry.state, entry.pinned)) {
            Some((State::Paused { until }, _)) => Err((Refusal::Cut, until.saturating_sub(now))),
            Some((_, true)) => Ok((lease, None)),
            Some((State::Leased { until }, false)) => {
                *until = now + lease;
                Ok((lease, Some(Command::Renew { who, until: *until })))
            }
            None => {
                self.has_room(who).map_err(|why| (why, self.limits.lease))?;
                let until = now + lease;
                let (breaker, sent) = self.breaker(who, now);
                let entry = Entry { state: State::Leased { until }, pinned: false, breaker, sent };
                self.entries.insert(who, entry);
                Ok((lease, Some(Command::Add { who, until })))
            }
        }
    }

    fn has_room(&self, who: SocketAddr) -> Result<(), Refusal> {
        if self.entries.len() >= self.limits.receivers {
            return Err(Refusal::Full);
        }
        let is_free = levels(who.ip()).all(|(network, times)| {
            let most = self.limits.per_address.saturating_mul(times);
            let there = of_network(&self.entries, who, network);
            let left = of_network(&self.left, who, network).filter(|left| **left != who);
            there.chain(left).take(most).count() < most
        });
        if is_free { Ok(()) } else { Err(Refusal::FullAddress) }
    }

    /// What a receiver reports. `None` for what cannot be read.
    pub fn heard(
        &mut self,
        who: SocketAddr,
        heard: Option<Heard>,
        sent: Sent,
        now: Duration,
    ) -> Option<Command> {
        let entry = self.entries.get_mut(&who)?;
        let (breaker, sent) = (entry.breaker.as_mut()?, entry.sent + sent);
        let trip = match heard {
            Some(heard) => breaker.heard(now, heard, sent),
            None => {
                breaker.heard_something(now, sent);
                None
            }
        };
        trip.map(|trip| self.cut(who, trip, now))
    }

    /// Ends what has to end by now. To be called a few times a second. `sent`: to whom how much.
    pub fn tick(&mut self, now: Duration, sent: impl Fn(SocketAddr) -> Sent) -> Vec<Command> {
        self.left.retain(|_, left| now < left.since + left.breaker.memory());
        let all: Vec<_> = self.entries.keys().copied().collect();
        all.into_iter().filter_map(|who| self.tick_one(who, now, &sent)).collect()
    }

    fn tick_one(
        &mut self,
        who: SocketAddr,
        now: Duration,
        sent: &impl Fn(SocketAddr) -> Sent,
    ) -> Option<Command> {
        let entry = self.entries.get_mut(&who)?;
        match entry.state {
            State::Leased { until } if until <= now => {
                self.part(who, sent(who), now);
                Some(Command::Remove { who, why: Why::Expired })
            }
            State::Leased { .. } => {
                let sent = entry.sent + sent(who);
                let trip = entry.breaker.as_mut()?.tick(now, sent)?;
                Some(self.cut(who, trip, now))
            }
            State::Paused { until } if until > now => None,
            State::Paused { .. } if entry.pinned => Some(self.pin(who, true)),
            State::Paused { .. } => {
                self.entries.remove(&who);
                None
            }
        }
    }

    fn cut(&mut self, who: SocketAddr, trip: Trip, now: Duration) -> Command {
        if let Some(entry) = self.entries.get_mut(&who) {
            entry.state = State::Paused { until: now + self.limits.pause };
            entry.breaker = None;
        }
        Command::Remove { who, why: Why::Cut(trip) }
    }
}

/// Receivers in a network of one of them.
fn of_network<T>(
    all: &BTreeMap<SocketAddr, T>,
    one: SocketAddr,
    network: Network,
) -> impl Iterator<Item = &SocketAddr> {
    let first = match (one, network.address) {
        (SocketAddr::V6(_), IpAddr::V4(first)) => first.to_ipv6_mapped().into(),
        (_, first) => first,
    };
    let from = SocketAddr::new(first, 0);
    all.range(from..).map(|(who, _)| who).take_while(move |who| network.contains(who.ip()))
}

/// Rounded up.
fn seconds(time: Duration) -> u16 {
    let whole = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    u16::try_from(whole).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests;
