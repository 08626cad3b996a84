//! Who is sent a stream, until when, and who is not for a while. Nothing is kept of an address before it is proved.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::{
    breaker::{self, Breaker, Heard, Sent, Trip},
    message::{Answer, Ask, Refusal, Request, Say},
    token::Mint,
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub receivers: usize,
    /// Of them with one address.
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
    Cut(Trip),
}

/// Of one stream. Times are of one clock that does not go back.
pub struct Receivers {
    stream: String,
    limits: Limits,
    entries: BTreeMap<SocketAddr, Entry>,
}

/// It counts against the limits also while it waits, so that another port is no way around the pause.
struct Entry {
    state: State,
    /// An operator has named it: it needs no lease.
    pinned: bool,
    breaker: Option<Breaker>,
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
        Self { stream: stream.to_owned(), limits, entries: BTreeMap::new() }
    }

    /// An operator's word: beyond all limits, without a lease. `breaker`: whether its reports are looked at.
    pub fn pin(&mut self, who: SocketAddr, breaker: bool) -> Command {
        let breaker = self.limits.breaker.filter(|_| breaker).map(Breaker::new);
        let state = State::Leased { until: FOREVER };
        self.entries.insert(who, Entry { state, pinned: true, breaker });
        Command::Add { who, until: FOREVER }
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

    /// Answers a request. Without a token that proves the address nothing is done, and nothing kept.
    pub fn ask(
        &mut self,
        mint: &Mint,
        request: &Request,
        who: SocketAddr,
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
            Ask::Unsubscribe => (answer(Say::Ended), self.leave(who)),
            Ask::Subscribe { seconds: wanted } => match self.lease(who, wanted, now) {
                Ok((lease, command)) => (answer(Say::Lease { seconds: seconds(lease), token }), command),
                Err((why, wait)) => (refused(why, wait), None),
            },
        }
    }

    /// Who waits after a cut goes on waiting.
    fn leave(&mut self, who: SocketAddr) -> Option<Command> {
        let entry = self.entries.get(&who)?;
        if entry.pinned || matches!(entry.state, State::Paused { .. }) {
            return None;
        }
        self.entries.remove(&who);
        Some(Command::Remove { who, why: Why::Asked })
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
                self.has_room(who.ip()).map_err(|why| (why, self.limits.lease))?;
                let until = now + lease;
                let breaker = self.limits.breaker.map(Breaker::new);
                let entry = Entry { state: State::Leased { until }, pinned: false, breaker };
                self.entries.insert(who, entry);
                Ok((lease, Some(Command::Add { who, until })))
            }
        }
    }

    fn has_room(&self, address: IpAddr) -> Result<(), Refusal> {
        if self.entries.len() >= self.limits.receivers {
            return Err(Refusal::Full);
        }
        let first = SocketAddr::new(address, 0);
        let there = self.entries.range(first..).take_while(|(who, _)| who.ip() == address);
        if there.count() >= self.limits.per_address { Err(Refusal::FullAddress) } else { Ok(()) }
    }

    /// What a receiver reports. `None` for what cannot be read.
    pub fn heard(
        &mut self,
        who: SocketAddr,
        heard: Option<Heard>,
        sent: Sent,
        now: Duration,
    ) -> Option<Command> {
        let breaker = self.entries.get_mut(&who).and_then(|entry| entry.breaker.as_mut())?;
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
                self.entries.remove(&who);
                Some(Command::Remove { who, why: Why::Expired })
            }
            State::Leased { .. } => {
                let trip = entry.breaker.as_mut()?.tick(now, sent(who))?;
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

/// Rounded up.
fn seconds(time: Duration) -> u16 {
    let whole = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    u16::try_from(whole).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests;
