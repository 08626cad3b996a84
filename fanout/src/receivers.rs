//! Leases of a stream's receivers, and the time for which a receiver that was cut off has to wait. No state is kept for
//! an address that is not proved.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use millrace_base::networks::{NetworkPrefix, levels};

use super::{
    breaker::{self, Breaker, ReceiverReport, ReceiverSent, Trip},
    message::{ReceiverAction, ReceiverRequest, RelayAnswer, RequestOutcome, RequestRefusal},
    token::Mint,
};

/// Limits of a stream's receivers.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverLimits {
    /// Largest number of receivers of the stream, including those that the operator has named.
    pub receivers: usize,
    /// Largest number of receivers of one client: an IPv4 address or an IPv6 /64. Wider networks have multiples of it
    /// ([`levels`]).
    pub per_address: usize,
    /// Longest lease that a receiver gets.
    pub lease: Duration,
    /// Time for which a receiver that was cut off has to wait.
    pub pause: Duration,
    /// Settings of the circuit breaker for receivers that asked for the stream. `None`: reports cut no receiver off.
    pub breaker: Option<breaker::Settings>,
}

/// A change of the receivers to which the kernel sends a stream. Executed in order, such commands give the kernel the
/// same receivers as the table in userspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Sends the stream to one more receiver.
    Add {
        /// The receiver's address and port.
        who: SocketAddr,
        /// Time at which the receiver's lease ends.
        until: Duration,
    },
    /// Changes the time at which a receiver's lease ends.
    Renew {
        /// The receiver's address and port.
        who: SocketAddr,
        /// New time at which the receiver's lease ends.
        until: Duration,
    },
    /// Stops sending the stream to a receiver.
    Remove {
        /// The receiver's address and port.
        who: SocketAddr,
        /// The reason for the removal, for counters and logs.
        why: RemovalReason,
    },
}

/// Reason why a receiver is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// The receiver asked to be removed.
    Asked,
    /// The lease has ended.
    Expired,
    /// The operator has removed the receiver from the settings.
    Unnamed,
    /// The circuit breaker has cut the receiver off.
    Cut(Trip),
}

/// The receivers of one stream. Times are of one clock that does not go back.
///
/// A receiver has a lease ([`Self::ask`], or [`Self::pin`] for one that the operator has named), or waits after it was
/// cut off. It leaves when it asks to, when its lease ends, or when the circuit breaker trips ([`Self::on_report`],
/// [`Self::tick`]). Its breaker is remembered for a while, so that leaving and returning does not reset it.
///
/// An address is absent, leased or paused. Every method that changes this returns the [`Command`] that makes the
/// kernel's state equal to the table. The caller carries out commands in the order in which it got them.
///
/// ```
/// use std::time::Duration;
/// use millrace_fanout::{
///     breaker::ReceiverSent,
///     message::{ReceiverAction, ReceiverRequest, RequestOutcome},
///     receivers::{Command, ReceiverLimits, StreamReceivers},
///     token::{Mint, ReceiverToken},
/// };
///
/// let limits = ReceiverLimits {
///     receivers: 100,
///     per_address: 4,
///     lease: Duration::from_secs(60),
///     pause: Duration::from_secs(30),
///     breaker: None,
/// };
/// let (mut receivers, mint) = (StreamReceivers::new("live", limits), Mint::new([7; 32]));
/// let (who, now, sent) = ("192.0.2.7:5000".parse()?, Duration::from_secs(1), ReceiverSent::default());
/// let what = ReceiverAction::Subscribe { seconds: 30 };
/// let mut request = ReceiverRequest { what, token: ReceiverToken::default(), transaction: 1, stream: "live".to_owned() };
///
/// // The first answer goes to the address that was claimed, with a token. The second request proves that it arrived.
/// let (answer, command) = receivers.ask(&mint, &request, who, sent, now);
/// assert_eq!(command, None);
/// let RequestOutcome::Prove(token) = answer.what else { unreachable!("no token yet") };
/// request.token = token;
/// let (_, command) = receivers.ask(&mint, &request, who, sent, now);
/// assert_eq!(command, Some(Command::Add { who, until: Duration::from_secs(31) }));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
pub struct StreamReceivers {
    stream: String,
    limits: ReceiverLimits,
    entries: BTreeMap<SocketAddr, ReceiverEntry>,
    /// Receivers that left recently. A receiver that returns gets its circuit breaker's earlier state back. At most as
    /// many departed receivers are remembered as the stream may have receivers.
    left: BTreeMap<SocketAddr, DepartedReceiver>,
}

struct DepartedReceiver {
    breaker: Breaker,
    sent: ReceiverSent,
    since: Duration,
}

/// One receiver. A paused receiver also counts against the limits, so that it cannot evade the pause with another port.
struct ReceiverEntry {
    state: LeaseState,
    /// Whether an operator has named the receiver, so that it needs no lease.
    pinned: bool,
    breaker: Option<Breaker>,
    /// Traffic that was sent to the receiver before it left and returned, since its breaker counts that traffic too.
    sent: ReceiverSent,
}

enum LeaseState {
    Leased { until: Duration },
    Paused { until: Duration },
}

/// The time at which the lease of a receiver that the operator has named ends: never.
pub const FOREVER: Duration = Duration::MAX;
/// The shortest lease that a receiver gets.
const LEAST: Duration = Duration::from_secs(1);

impl StreamReceivers {
    /// Creates a table without receivers for the stream of this name.
    pub fn new(stream: &str, limits: ReceiverLimits) -> Self {
        Self { stream: stream.to_owned(), limits, entries: BTreeMap::new(), left: BTreeMap::new() }
    }

    /// Adds a receiver that an operator has named. It needs no lease and is exempt from all limits. `breaker` tells
    /// whether the circuit breaker applies to it.
    pub fn pin(&mut self, who: SocketAddr, breaker: bool) -> Command {
        let breaker = self.limits.breaker.filter(|_| breaker).map(Breaker::new);
        let state = LeaseState::Leased { until: FOREVER };
        self.entries
            .insert(who, ReceiverEntry { state, pinned: true, breaker, sent: ReceiverSent::default() });
        Command::Add { who, until: FOREVER }
    }

    /// Removes a receiver that the operator no longer names. It may ask for a lease from now on.
    pub fn unpin(&mut self, who: SocketAddr) -> Option<Command> {
        let entry = self.entries.get(&who).filter(|entry| entry.pinned)?;
        let is_leased = matches!(entry.state, LeaseState::Leased { .. });
        self.entries.remove(&who);
        is_leased.then_some(Command::Remove { who, why: RemovalReason::Unnamed })
    }

    /// Changes the limits. Present receivers stay, even beyond the new limits.
    pub fn set_limits(&mut self, limits: ReceiverLimits) {
        self.limits = limits;
    }

    /// Returns the receivers that are sent the stream now. The flag is true for receivers that an operator has named.
    pub fn leased(&self) -> impl Iterator<Item = (SocketAddr, bool)> {
        let leased =
            self.entries.iter().filter(|(_, entry)| matches!(entry.state, LeaseState::Leased { .. }));
        leased.map(|(who, entry)| (*who, entry.pinned))
    }

    /// Returns the receivers that were cut off, and how much longer each of them is paused.
    pub fn paused(&self, now: Duration) -> impl Iterator<Item = (SocketAddr, Duration)> {
        self.entries.iter().filter_map(move |(who, entry)| match entry.state {
            LeaseState::Paused { until } => Some((*who, until.saturating_sub(now))),
            LeaseState::Leased { .. } => None,
        })
    }

    /// Reports whether the receiver has a lease.
    pub fn is_leased(&self, who: SocketAddr) -> bool {
        self.entries.get(&who).is_some_and(|entry| matches!(entry.state, LeaseState::Leased { .. }))
    }

    /// Answers a request. Without a token that proves the address, nothing is changed. `sent` is the traffic to this
    /// receiver so far.
    pub fn ask(
        &mut self,
        mint: &Mint,
        request: &ReceiverRequest,
        who: SocketAddr,
        sent: ReceiverSent,
        now: Duration,
    ) -> (RelayAnswer, Option<Command>) {
        let answer = |what| RelayAnswer { what, transaction: request.transaction };
        let refused = |why, wait: Duration| answer(RequestOutcome::Refused { why, seconds: seconds(wait) });
        if request.stream != self.stream {
            return (refused(RequestRefusal::Unknown, Duration::ZERO), None);
        }
        let token = mint.token(&self.stream, who, now.as_secs());
        if !mint.is_good(request.token, &self.stream, who, now.as_secs()) {
            return (answer(RequestOutcome::Prove(token)), None);
        }
        match request.what {
            ReceiverAction::Unsubscribe => (answer(RequestOutcome::Ended), self.leave(who, sent, now)),
            ReceiverAction::Subscribe { seconds: wanted } => match self.lease(who, wanted, now) {
                Ok((lease, command)) => {
                    (answer(RequestOutcome::Lease { seconds: seconds(lease), token }), command)
                }
                Err((why, wait)) => (refused(why, wait), None),
            },
        }
    }

    /// Revokes a lease, because the kernel's table has no free entry for the receiver.
    pub fn take_back(&mut self, who: SocketAddr, answer: RelayAnswer) -> RelayAnswer {
        self.entries.remove(&who);
        let seconds = seconds(self.limits.lease);
        RelayAnswer { what: RequestOutcome::Refused { why: RequestRefusal::Full, seconds }, ..answer }
    }

    /// Removes a receiver that asked for it. A receiver that was cut off stays paused.
    fn leave(&mut self, who: SocketAddr, sent: ReceiverSent, now: Duration) -> Option<Command> {
        let entry = self.entries.get(&who)?;
        if entry.pinned || matches!(entry.state, LeaseState::Paused { .. }) {
            return None;
        }
        self.part(who, sent, now);
        Some(Command::Remove { who, why: RemovalReason::Asked })
    }

    /// Keeps the circuit breaker of a receiver that leaves, unless too many are kept already.
    fn part(&mut self, who: SocketAddr, sent: ReceiverSent, now: Duration) {
        let Some(entry) = self.entries.remove(&who) else { return };
        if let Some(breaker) = entry.breaker.filter(|_| self.left.len() < self.limits.receivers) {
            self.left.insert(who, DepartedReceiver { breaker, sent: entry.sent + sent, since: now });
        }
    }

    /// Returns the circuit breaker of a receiver as it was when the receiver left, or a new one.
    fn breaker(&mut self, who: SocketAddr, now: Duration) -> (Option<Breaker>, ReceiverSent) {
        let left = self.left.remove(&who).filter(|left| now < left.since + left.breaker.memory());
        match left {
            Some(DepartedReceiver { mut breaker, sent, since }) => {
                breaker.skip(now.saturating_sub(since));
                (Some(breaker), sent)
            }
            None => (self.limits.breaker.map(Breaker::new), ReceiverSent::default()),
        }
    }

    fn lease(
        &mut self,
        who: SocketAddr,
        wanted: u16,
        now: Duration,
    ) -> Result<(Duration, Option<Command>), (RequestRefusal, Duration)> {
        let lease = Duration::from_secs(wanted.into()).clamp(LEAST, self.limits.lease.max(LEAST));
        match self.entries.get_mut(&who).map(|entry| (&mut entry.state, entry.pinned)) {
            Some((LeaseState::Paused { until }, _)) => Err((RequestRefusal::Cut, until.saturating_sub(now))),
            Some((_, true)) => Ok((lease, None)),
            Some((LeaseState::Leased { until }, false)) => {
                *until = now + lease;
                Ok((lease, Some(Command::Renew { who, until: *until })))
            }
            None => {
                self.has_room(who).map_err(|why| (why, self.limits.lease))?;
                let until = now + lease;
                let (breaker, sent) = self.breaker(who, now);
                let entry =
                    ReceiverEntry { state: LeaseState::Leased { until }, pinned: false, breaker, sent };
                self.entries.insert(who, entry);
                Ok((lease, Some(Command::Add { who, until })))
            }
        }
    }

    fn has_room(&self, who: SocketAddr) -> Result<(), RequestRefusal> {
        if self.entries.len() >= self.limits.receivers {
            return Err(RequestRefusal::Full);
        }
        let is_free = levels(who.ip()).all(|(network, times)| {
            let most = self.limits.per_address.saturating_mul(times);
            let there = count_network(&self.entries, who, network);
            let left = count_network(&self.left, who, network).filter(|left| **left != who);
            there.chain(left).take(most).count() < most
        });
        if is_free { Ok(()) } else { Err(RequestRefusal::FullAddress) }
    }

    /// Handles a receiver's report, which is `None` if it cannot be read.
    pub fn on_report(
        &mut self,
        who: SocketAddr,
        heard: Option<ReceiverReport>,
        sent: ReceiverSent,
        now: Duration,
    ) -> Option<Command> {
        let entry = self.entries.get_mut(&who)?;
        let breaker = entry.breaker.as_mut()?;
        let sent = entry.sent + sent;
        let trip = match heard {
            Some(heard) => breaker.on_report(now, heard, sent),
            None => {
                breaker.heard_something(now, sent);
                None
            }
        };
        trip.map(|trip| self.cut(who, trip, now))
    }

    /// Ends leases that are over, and cuts off receivers whose breaker trips. Call it a few times a second. `sent`
    /// returns the traffic to a receiver so far.
    pub fn tick(&mut self, now: Duration, sent: impl Fn(SocketAddr) -> ReceiverSent) -> Vec<Command> {
        self.left.retain(|_, left| now < left.since + left.breaker.memory());
        let all: Vec<_> = self.entries.keys().copied().collect();
        all.into_iter().filter_map(|who| self.tick_one(who, now, &sent)).collect()
    }

    fn tick_one(
        &mut self,
        who: SocketAddr,
        now: Duration,
        sent: &impl Fn(SocketAddr) -> ReceiverSent,
    ) -> Option<Command> {
        let entry = self.entries.get_mut(&who)?;
        match entry.state {
            LeaseState::Leased { until } if until <= now => {
                self.part(who, sent(who), now);
                Some(Command::Remove { who, why: RemovalReason::Expired })
            }
            LeaseState::Leased { .. } => {
                let sent = entry.sent + sent(who);
                let trip = entry.breaker.as_mut()?.tick(now, sent)?;
                Some(self.cut(who, trip, now))
            }
            LeaseState::Paused { until } if until > now => None,
            LeaseState::Paused { .. } if entry.pinned => Some(self.pin(who, true)),
            LeaseState::Paused { .. } => {
                self.entries.remove(&who);
                None
            }
        }
    }

    fn cut(&mut self, who: SocketAddr, trip: Trip, now: Duration) -> Command {
        if let Some(entry) = self.entries.get_mut(&who) {
            entry.state = LeaseState::Paused { until: now + self.limits.pause };
            entry.breaker = None;
        }
        Command::Remove { who, why: RemovalReason::Cut(trip) }
    }
}

/// Returns the receivers of `all` whose addresses are in `network`. `one` is a receiver in this network, and tells
/// whether `all` has IPv4 addresses as IPv4-mapped ones.
fn count_network<T>(
    all: &BTreeMap<SocketAddr, T>,
    one: SocketAddr,
    network: NetworkPrefix,
) -> impl Iterator<Item = &SocketAddr> {
    // IPv4-mapped receivers are sorted as IPv6 addresses, so their network has to be one as well.
    let first = match (one, network.address) {
        (SocketAddr::V6(_), IpAddr::V4(first)) => first.to_ipv6_mapped().into(),
        (_, first) => first,
    };
    let from = SocketAddr::new(first, 0);
    all.range(from..).map(|(who, _)| who).take_while(move |who| network.contains(who.ip()))
}

/// Returns a time in seconds, rounded up.
fn seconds(time: Duration) -> u16 {
    let whole = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    u16::try_from(whole).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests;
