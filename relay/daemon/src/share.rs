//! Measures the share of the media that the kernel sent in the last ten seconds, for each session and each interface.
//! Finds out why userspace sent the other media, and what an operator can do about it.
//!
//! [`ShareMeter::take`] gets the relay's status every [`PERIOD`]. Shares are computed from the difference to two
//! periods ago.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    net::IpAddr,
    time::Duration,
};

use millrace_transport::interfaces::InterfaceRoutes;
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::status::{EngineStatus, MediaShare, MediaShares, RelaySessionStatus};

/// Time between two calls of [`ShareMeter::take`].
pub const PERIOD: Duration = Duration::from_secs(5);
/// Number of earlier samples of the relay's counters that are kept. The difference to the oldest one covers ten
/// seconds.
const MOMENTS: usize = 2;
/// Longest time that a share covers, seconds.
const LONGEST: f64 = (PERIOD.as_secs() * MOMENTS as u64) as f64;
/// Number of media bytes in ten seconds below which the kernel's share of them is not reported.
const LEAST: u64 = 50_000;
/// The kernel's share of the media below which the log reports that userspace sends most of it.
const OFF: f64 = 0.5;
/// The kernel's share of the media from which the log reports that the kernel sends it again. The gap to [`OFF`]
/// prevents repeated log lines.
const ON: f64 = 0.8;
/// Assumed number of packets in one super-packet, which GRO has merged.
const MERGED: u64 = 16;

/// The reason that the status shows for media that userspace sends by design, so that the kernel counts no reason.
const BY_DESIGN: &str = "userspace's own";
/// The reason in the status if no media packet has arrived on the interfaces of engine `kernel`.
const UNSEEN: &str = "not seen";

type Counts = BTreeMap<String, u64>;

/// Results that the kernel program counts for received packets, and that do not explain why userspace sent media.
/// Results that only follow from another counted result are listed here, too.
const HARMLESS: &[&str] = &[
    "forwarded",
    "continued",
    "segmented",
    "no_slot",
    "from_subscriber",
    "declined",
    "not_udp",
    "other_port",
    "unknown_id",
    "long_header",
    "malformed",
    "replayed",
    "not_authentic",
];
/// Results that the kernel program counts for frames, new streams and copies, and that do not explain why userspace
/// sent media.
const HARMLESS_BEHIND: &[&str] = &["good", "bound", "preamble", "sent", "before", "gone", "unopened"];

/// Returns what an operator can do about a reason for which userspace sends media, or an empty text if there is no
/// remedy. `interface` is the one on which the media arrives.
pub fn remedy(reason: &str, interface: &str) -> String {
    match reason {
        "super_packet" => format!(
            "ethtool -K {interface} gro off rx-gro-list off rx-udp-gro-forwarding off; where publishers are on this host, at their end of the \
             veth or tap: ethtool -K DEVICE tx-udp-segmentation off"
        ),
        "bad_size" | "too_long" | "too_large" => format!("ip link set dev {interface} mtu 1500"),
        "odd_headers" => format!(
            "ip link show {interface}: packets with IP options or stacked VLAN tags are left to userspace"
        ),
        "over_budget" => "set kernel-runs or kernel-copies-per-run higher, and restart the relay".to_owned(),
        "missed" | "full" | "client_share" => "set kernel-streams higher, and restart the relay".to_owned(),
        "no_track" => "set kernel-tracks higher, and restart the relay".to_owned(),
        "other" => "have publishers write the header of a stream in one piece".to_owned(),
        "ring_full" => {
            "give the relay more processor time: systemctl set-property millrace-relay CPUWeight=1000"
                .to_owned()
        }
        "no_route" => "ip route get ADDRESS, of the subscriber: a route is missing".to_owned(),
        "no_neighbour" => format!("ip neigh show dev {interface}: the gateway does not answer"),
        "lost" => format!("tc -s qdisc show dev {interface}: the interface's queue is full"),
        "not_arriving" => {
            "nft list ruleset: rules of this host may stop what the kernel sends; else set engine to user"
                .to_owned()
        }
        "stream_limit" | "stream_credit" | "data_credit" => {
            "have the subscriber allow more streams, or more bytes".to_owned()
        }
        "window" | "behind" => {
            "offer renditions of a lower bitrate (adaptive): the subscriber's path is slower than the track"
                .to_owned()
        }
        "waiting" | "taken for a publisher" => "set kernel-sessions higher, and restart the relay".to_owned(),
        UNSEEN => {
            "ip route get ADDRESS, of the publisher: name that interface in the setting interface".to_owned()
        }
        _ => String::new(),
    }
}

/// Returns the name of the counter that grew most since `before`, and its increase. Skips the counters in `harmless`.
fn worst<'a>(now: &'a Counts, before: Option<&Counts>, harmless: &[&str]) -> Option<(u64, &'a str)> {
    let grown = |(name, count): (&'a String, &u64)| {
        // A super-packet stands for several packets that GRO merged, while the other counters count single packets.
        let weight = if name == "super_packet" { MERGED } else { 1 };
        let old = before.and_then(|before| before.get(name)).copied().unwrap_or(0);
        (count.saturating_sub(old) * weight, name.as_str())
    };
    let harmful = now.iter().filter(|(name, _)| !harmless.contains(&name.as_str())).map(grown);
    harmful.filter(|(count, _)| *count > 0).max_by_key(|(count, _)| *count)
}

/// A sample of the relay's media counters.
#[derive(Default)]
struct ShareMoment {
    /// Values of each session: bytes sent by the kernel, and bytes sent by userspace. Also counts of packet copies that
    /// were not sent, by reason, as far as there were any.
    sessions: HashMap<u64, (u64, u64, Counts)>,
    /// Counts of publishers' packets, frames and new streams by result: forwarded, or the reason why not.
    upstream: [Counts; 3],
}

impl ShareMoment {
    fn from_engine(engine: &EngineStatus, sessions: &[RelaySessionStatus]) -> Self {
        // With thousands of sessions, counts that are 0 or explain nothing would take megabytes.
        let counts = |session: &RelaySessionStatus| {
            let copies = session.kernel_copies.iter().flatten();
            let telling =
                copies.filter(|(name, count)| **count > 0 && !HARMLESS_BEHIND.contains(&name.as_str()));
            telling.map(|(name, count)| (name.clone(), *count)).collect()
        };
        let upstream = [&engine.received, &engine.frames, &engine.openings];
        Self {
            sessions: sessions
                .iter()
                .map(|one| (one.id, (one.kernel.bytes, one.data_plane.bytes, counts(one))))
                .collect(),
            upstream: upstream.map(|counts| counts.clone().unwrap_or_default()),
        }
    }

    /// Returns the main reason that kept publishers' media from the kernel since `before`, and whether any media
    /// reached the kernel program.
    fn upstream_since(&self, before: &Self) -> (Option<(u64, &str)>, bool) {
        let all =
            self.upstream.iter().zip(&before.upstream).zip([HARMLESS, HARMLESS_BEHIND, HARMLESS_BEHIND]);
        let all = all.filter_map(|((now, before), harmless)| worst(now, Some(before), harmless));
        let [received, ..] = &self.upstream;
        let [past, ..] = &before.upstream;
        let came =
            ["forwarded", "continued", "declined"].iter().any(|name| received.get(*name) > past.get(*name));
        (all.max_by_key(|(count, _)| *count), came)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ShareSubject {
    Interface(String),
    Session(u64),
}

/// Measures which part of the media the kernel sends, and stores the last results.
#[derive(Default)]
pub struct ShareMeter(Mutex<ReportedShares>);

#[derive(Default)]
struct ReportedShares {
    moments: VecDeque<ShareMoment>,
    shares: MediaShares,
    /// Interfaces and sessions for which the log has reported that userspace sends most of the media.
    off: HashSet<ShareSubject>,
}

impl ShareMeter {
    pub fn shares(&self) -> MediaShares {
        self.0.lock().shares.clone()
    }

    /// Computes the shares from the relay's present counts. Logs for which interfaces and sessions userspace now sends
    /// most of the media, and for which the kernel sends it again.
    pub fn take(&self, engine: &EngineStatus, sessions: &[RelaySessionStatus], routes: &mut InterfaceRoutes) {
        let name_of = |ip: IpAddr| match &engine.interfaces[..] {
            // If only one interface has the BPF program, the share is reported for this interface: with a bridge or a
            // bond, the route to the peer names another interface.
            [one] => Some(one.name.clone()),
            _ => routes.interface_to(ip),
        };
        let mut told = self.0.lock();
        // Old samples are dropped while no interface is attached, so that they are not compared with later counters.
        if engine.interfaces.is_empty() {
            *told = ReportedShares::default();
            return;
        }
        told.measure(engine, sessions, name_of);
        told.log();
    }
}

impl ReportedShares {
    fn measure(
        &mut self,
        engine: &EngineStatus,
        sessions: &[RelaySessionStatus],
        mut name_of: impl FnMut(IpAddr) -> Option<String>,
    ) {
        let now = ShareMoment::from_engine(engine, sessions);
        let empty = ShareMoment::default();
        // The oldest sample is the reference, so that a share covers up to ten seconds and not only the last period.
        let before = self.moments.front().unwrap_or(&empty);
        // The reasons for which publishers' packets were not forwarded are not counted by session, so they may apply to
        // any subscriber's session.
        let (upstream, came) = now.upstream_since(before);
        let mut names = sessions
            .iter()
            .map(|one| name_of(one.remote.ip().to_canonical()))
            .collect::<Vec<_>>()
            .into_iter();
        // Remedies name the interface on which media arrives. It is taken from the first session that publishes.
        let publishes = |one: &RelaySessionStatus| one.publisher || one.upstream;
        let arrives = sessions.iter().zip(names.as_slice()).find(|(one, _)| publishes(one));
        let arrives = arrives.and_then(|(_, name)| name.clone()).unwrap_or_else(|| "INTERFACE".to_owned());
        let mut shares = MediaShares::default();
        let mut reasons = HashMap::<String, BTreeMap<String, u64>>::new();
        for one in sessions {
            let name = names.next().flatten();
            let old = before.sessions.get(&one.id);
            // An older session without an earlier sample was idle until now, so its sum says nothing about this period.
            if old.is_none() && !self.moments.is_empty() && one.age_s > LONGEST {
                continue;
            }
            let kernel = one.kernel.bytes.saturating_sub(old.map_or(0, |old| old.0));
            let user = one.data_plane.bytes.saturating_sub(old.map_or(0, |old| old.1));
            if kernel + user == 0 {
                continue;
            }
            let mut share = MediaShare { bytes: kernel + user, by_kernel: kernel, ..MediaShare::default() };
            if user > 0 {
                let copies = one.kernel_copies.as_ref();
                let own = copies.and_then(|copies| worst(copies, old.map(|old| &old.2), HARMLESS_BEHIND));
                let worst = own.into_iter().chain(upstream).max_by_key(|(count, _)| *count);
                let counted = worst.map_or(if came { BY_DESIGN } else { UNSEEN }, |(_, reason)| reason);
                // If the kernel engine has no record of the session, the status shows that as the reason, whatever
                // other reasons the kernel has counted.
                let waits = one.kernel_record.as_deref().filter(|record| *record != "held");
                share.reason = waits.unwrap_or(counted).to_owned();
                share.remedy = remedy(&share.reason, &arrives);
            }
            if let Some(name) = name {
                *reasons.entry(name.clone()).or_default().entry(share.reason.clone()).or_default() += user;
                let sum = shares.interfaces.entry(name).or_default();
                sum.bytes += share.bytes;
                sum.by_kernel += kernel;
            }
            shares.sessions.insert(one.id, share);
        }
        for (name, reasons) in reasons {
            let reason = reasons
                .into_iter()
                .max_by_key(|(_, bytes)| *bytes)
                .map(|(reason, _)| reason)
                .unwrap_or_default();
            if let Some(share) = shares.interfaces.get_mut(&name) {
                share.remedy = remedy(&reason, &arrives);
                share.reason = reason;
            }
        }
        self.shares = shares;
        self.moments.push_back(now);
        if self.moments.len() > MOMENTS {
            self.moments.pop_front();
        }
    }

    /// Logs for which interfaces most of the media is now sent by userspace, or by the kernel again. Sessions are
    /// logged only while no whole interface depends on userspace.
    fn log(&mut self) {
        let Self { shares: MediaShares { interfaces, sessions }, off, .. } = self;
        // Entries without recent media are removed, so that the set does not grow with sessions that have ended.
        off.retain(|subject| match subject {
            ShareSubject::Interface(name) => interfaces.contains_key(name),
            ShareSubject::Session(id) => sessions.contains_key(id),
        });
        for (interface, share) in interfaces {
            let percent = share.percent();
            let MediaShare { reason, remedy, .. } = &*share;
            match turn(off, ShareSubject::Interface(interface.clone()), share) {
                Some(true) => {
                    warn!(
                        interface,
                        percent, reason, remedy, "userspace sends most of the media on this interface"
                    );
                }
                Some(false) => {
                    info!(interface, percent, "the kernel again sends most media on this interface")
                }
                None => {}
            }
        }
        if off.iter().any(|subject| matches!(subject, ShareSubject::Interface(_))) {
            return;
        }
        for (session, share) in sessions {
            let percent = share.percent();
            let MediaShare { reason, remedy, .. } = &*share;
            match turn(off, ShareSubject::Session(*session), share) {
                Some(true) => {
                    info!(
                        session,
                        percent, reason, remedy, "userspace sends most of the media to this session"
                    );
                }
                Some(false) => info!(session, percent, "the kernel again sends most media to this session"),
                None => {}
            }
        }
    }
}

/// Records whether userspace sends most of the media of an interface or session. Returns `Some(true)` if it now does,
/// `Some(false)` if it no longer does, and `None` without a change.
fn turn(off: &mut HashSet<ShareSubject>, subject: ShareSubject, share: &MediaShare) -> Option<bool> {
    // With few bytes the share depends on chance, so it changes nothing that was logged.
    if share.bytes < LEAST {
        return None;
    }
    if share.ratio() < OFF {
        return off.insert(subject).then_some(true);
    }
    (share.ratio() >= ON && off.remove(&subject)).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        status::{InterfaceStatus, SentStatus},
        text::tests::session as any_session,
    };

    fn counts(counts: &[(&str, u64)]) -> Option<Counts> {
        Some(counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect())
    }

    fn engine(received: &[(&str, u64)]) -> EngineStatus {
        let interfaces = vec![InterfaceStatus { name: "eth0".into(), ..InterfaceStatus::default() }];
        EngineStatus { interfaces, received: counts(received), ..EngineStatus::default() }
    }

    fn session(id: u64, kernel: u64, user: u64, copies: &[(&str, u64)]) -> RelaySessionStatus {
        let sent = |bytes| SentStatus { packets: 1, bytes };
        RelaySessionStatus {
            id,
            publisher: id == 1,
            kernel: sent(kernel),
            data_plane: sent(user),
            kernel_copies: counts(copies),
            ..any_session()
        }
    }

    /// Returns the media shares of the session with ID 2, a subscriber, and of the interface `eth0`.
    fn told(meter: &ShareMeter) -> (Option<MediaShare>, Option<MediaShare>) {
        let MediaShares { interfaces, sessions } = meter.shares();
        (sessions.get(&2).cloned(), interfaces.get("eth0").cloned())
    }

    #[test]
    fn kernel_share_of_sent_bytes_covers_the_last_ten_seconds() {
        let meter = ShareMeter::default();
        for (kernel, user) in [(1_000_000, 0), (1_000_000, 500_000), (1_500_000, 1_000_000)] {
            let sessions = [session(2, kernel, user, &[])];
            meter.take(&engine(&[("forwarded", 1)]), &sessions, &mut InterfaceRoutes::default());
        }
        let (share, of_interface) = told(&meter);
        let share = share.unwrap();
        assert_eq!((share.bytes, share.by_kernel, share.percent()), (1_500_000, 500_000, 33));
        assert_eq!(of_interface, Some(share));
        meter.take(&EngineStatus::default(), &[session(2, 9, 9, &[])], &mut InterfaceRoutes::default());
        assert_eq!(told(&meter), (None, None));
    }

    #[test]
    fn bytes_that_a_session_sent_before_it_was_idle_do_not_count() {
        let meter = ShareMeter::default();
        let take = |sessions: &[RelaySessionStatus]| {
            meter.take(&engine(&[("forwarded", 1)]), sessions, &mut InterfaceRoutes::default());
            told(&meter).0.map(|share| share.bytes)
        };
        let after_an_hour = |kernel| RelaySessionStatus { age_s: 3600.0, ..session(2, kernel, 0, &[]) };
        // A relay leaves out idle sessions.
        assert_eq!(
            [take(&[]), take(&[after_an_hour(9_000_000)]), take(&[after_an_hour(9_100_000)])],
            [None; 3]
        );
        assert_eq!(take(&[after_an_hour(9_300_000)]), Some(300_000));
        let new = RelaySessionStatus { age_s: 4.0, ..session(2, 70_000, 0, &[]) };
        let meter = ShareMeter::default();
        meter.take(&engine(&[]), &[], &mut InterfaceRoutes::default());
        meter.take(&engine(&[]), &[new], &mut InterfaceRoutes::default());
        assert_eq!(told(&meter).0.map(|share| share.bytes), Some(70_000));
    }

    #[test]
    fn main_reason_for_userspace_forwarding_is_the_most_frequent_with_remedy() {
        for (received, copies, record, reason, part) in [
            (
                &[("super_packet", 20), ("forwarded", 2), ("not_udp", 1000)][..],
                &[("window", 30)][..],
                "held",
                "super_packet",
                "ethtool -K eth0",
            ),
            (
                &[("super_packet", 1), ("forwarded", 900)],
                &[("sent", 900), ("before", 90), ("window", 30)],
                "held",
                "window",
                "adaptive",
            ),
            (&[("segmented", 90), ("forwarded", 900)], &[("window", 30)], "held", "window", "adaptive"),
            (&[("forwarded", 9)], &[("sent", 900)], "held", BY_DESIGN, ""),
            (&[("from_subscriber", 9)], &[], "held", UNSEEN, "setting interface"),
            (&[("super_packet", 20)], &[], "waiting", "waiting", "kernel-sessions"),
        ] {
            let meter = ShareMeter::default();
            let subscriber =
                RelaySessionStatus { kernel_record: Some(record.into()), ..session(2, 0, 100_000, copies) };
            let sessions = [session(1, 0, 0, &[]), subscriber];
            meter.take(&engine(received), &sessions, &mut InterfaceRoutes::default());
            let (share, of_interface) = told(&meter);
            let share = share.unwrap();
            assert_eq!(share.reason, reason);
            assert!(share.remedy.contains(part) && share.remedy.is_empty() == part.is_empty(), "{share:?}");
            assert_eq!(of_interface, Some(share));
        }
    }

    #[test]
    fn fall_of_kernel_sent_bytes_below_half_is_logged_once_until_recovery() {
        let mut off = HashSet::new();
        let mut told = |by_kernel| {
            let share = MediaShare { bytes: 100_000, by_kernel, ..MediaShare::default() };
            turn(&mut off, ShareSubject::Session(1), &share)
        };
        let shares = [90_000, 40_000, 10_000, 60_000, 40_000, 80_000, 90_000];
        assert_eq!(shares.map(&mut told), [None, Some(true), None, None, None, Some(false), None]);
        let little = MediaShare { bytes: LEAST - 1, ..MediaShare::default() };
        assert_eq!(turn(&mut off, ShareSubject::Session(1), &little), None);
    }
}
