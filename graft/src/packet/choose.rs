//! Chooses the graft (list of packet functions) for an application's request, or explains why no graft is suitable. The
//! code does no I/O.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use millrace_messages::want::{ENCRYPTION, Qos, Want};

use super::function::FunctionService;
use super::settings::{GraftSetting, Settings};

/// Assumed size of a packet with its headers, in bits, for converting a window in packets to a rate.
const PACKET_BITS: f64 = 8.0 * 1200.0;

/// A graft (list of packet functions) from the settings, with the capabilities that are compared with applications'
/// requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    /// Name of the graft.
    pub graft: String,
    /// Services that the graft provides.
    pub services: BTreeSet<FunctionService>,
    /// Number of functions of the graft. Of several suitable grafts the one with fewer functions is chosen.
    pub functions: usize,
    /// Largest number of packets in flight, or `None` without a window.
    pub window: Option<u64>,
    /// Number of packets out of 1000 that the graft may abandon instead of retransmitting, and the time after which it
    /// abandons them.
    pub gives_up: Option<(u64, Duration)>,
    /// Number of packets that one parity packet protects.
    pub parity: Option<u64>,
    /// Rate in bit/s to which the graft's functions limit a session's packets.
    pub rate: Option<f64>,
    /// Reason why the graft cannot be used now.
    pub trouble: Option<String>,
}

/// Measurements of the path to a peer, which `None` marks as unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeerPathFigures {
    /// Smallest recent round-trip time.
    pub round_trip: Option<Duration>,
    /// Share of packets that are lost in one direction, from 0 to 1.
    pub loss: Option<f64>,
}

/// The reason why no graft (list of packet functions) was chosen for an application's request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceRefusal {
    /// The request names a service that every session has anyway.
    #[error("redundant: {0}")]
    Redundant(String),
    /// No graft provides what the application has requested.
    #[error("impossible: {0}")]
    Impossible(String),
}

/// Returns the capabilities of each graft (list of packet functions) from the settings.
pub fn offers(settings: &Settings) -> Vec<Offer> {
    settings.grafts.values().map(|graft| Offer::from_graft(graft, settings)).collect()
}

/// Returns the suitable graft (list of packet functions) that provides the fewest services beyond the requested ones.
pub fn choose<'a>(
    offers: &'a [Offer],
    want: &Want,
    path: &PeerPathFigures,
    is_sealed: bool,
) -> Result<&'a Offer, ChoiceRefusal> {
    let wanted = services(want, is_sealed)?;
    check_redundant(&wanted, &want.qos)?;
    let able: Vec<_> = offers.iter().filter(|offer| offer.has(&wanted)).collect();
    if able.is_empty() {
        return Err(ChoiceRefusal::Impossible(format!(
            "no graft of the settings has {} together; there are: {}",
            names(&wanted),
            list(offers)
        )));
    }
    check_path(&want.qos, path)?;
    let mut best: Option<&Offer> = None;
    let mut why: String = String::new();
    for offer in able {
        match offer.fits(&want.qos, path) {
            Ok(()) if best.is_none_or(|best| offer.cost(&wanted) < best.cost(&wanted)) => best = Some(offer),
            Ok(()) => {}
            Err(reason) => {
                let separator = if why.is_empty() { "" } else { "; " };
                let _ = write!(why, "{separator}graft {}: {reason}", offer.graft);
            }
        }
    }
    best.ok_or(ChoiceRefusal::Impossible(why))
}

/// Returns the shortest possible delay of a datagram: half of the measured round trip.
fn one_way(path: &PeerPathFigures) -> Option<Duration> {
    path.round_trip.map(|round_trip| round_trip / 2)
}

fn services(want: &Want, is_sealed: bool) -> Result<BTreeSet<FunctionService>, ChoiceRefusal> {
    let mut services = BTreeSet::new();
    for name in &want.services {
        // Encryption is a property of the peer's settings, and no function of a graft.
        if name == ENCRYPTION {
            return Err(match is_sealed {
                true => ChoiceRefusal::Redundant("sessions with this peer are sealed anyway".to_owned()),
                false => ChoiceRefusal::Impossible(
                    "sessions with this peer are in clear, as the settings say".to_owned(),
                ),
            });
        }
        let service = FunctionService::find_by_name(name).ok_or_else(|| {
            let known: Vec<_> = FunctionService::ALL.into_iter().map(FunctionService::name).collect();
            ChoiceRefusal::Impossible(format!("there is no service {name}; there are: {}", known.join(", ")))
        })?;
        services.insert(service);
    }
    Ok(services)
}

fn check_redundant(wanted: &BTreeSet<FunctionService>, qos: &Qos) -> Result<(), ChoiceRefusal> {
    let table = [
        (FunctionService::Order, FunctionService::PartialOrder),
        (FunctionService::Reliability, FunctionService::PartialReliability),
    ];
    for (whole, part) in table {
        if wanted.contains(&whole) && wanted.contains(&part) {
            return Err(ChoiceRefusal::Redundant(format!("{} includes {}", whole.name(), part.name())));
        }
    }
    match qos.max_loss_percent {
        Some(_) if wanted.contains(&FunctionService::Reliability) => Err(ChoiceRefusal::Redundant(
            "max_loss has no effect, since nothing is lost with reliability".to_owned(),
        )),
        Some(percent) if percent >= 100.0 => {
            Err(ChoiceRefusal::Redundant("max_loss: no more than 100 % can be lost".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Checks the requirements that depend only on the path and not on the graft.
fn check_path(qos: &Qos, path: &PeerPathFigures) -> Result<(), ChoiceRefusal> {
    match (qos.max_delay(), one_way(path)) {
        // Without a measured round-trip time no requirement is known to be impossible.
        (Some(most), Some(least)) if most < least => Err(ChoiceRefusal::Impossible(format!(
            "max_delay {} ms: half of the round trip that was measured is {} ms",
            ms(most),
            ms(least)
        ))),
        _ => Ok(()),
    }
}

impl Offer {
    fn from_graft(graft: &GraftSetting, settings: &Settings) -> Self {
        let value = |function, parameter| settings.parameter(graft, function, parameter);
        let gives_up = value("partial", "give_up_permille").zip(value("partial", "deadline_ms"));
        Self {
            graft: graft.name.clone(),
            services: graft.services.clone(),
            functions: graft.functions.len(),
            window: value("window", "packets"),
            gives_up: gives_up.map(|(permille, deadline)| (permille, Duration::from_millis(deadline))),
            parity: value("fec", "packets"),
            rate: value("pace", "rate_kbit").filter(|rate| *rate > 0).map(|rate| rate as f64 * 1e3),
            trouble: None,
        }
    }

    /// Reports whether the receiving library can put messages in order by waiting for earlier ones. The graft must
    /// deliver every message, and a window must bound how many messages wait.
    pub fn can_wait(&self) -> bool {
        self.services.contains(&FunctionService::Reliability)
            && self.services.contains(&FunctionService::FlowControl)
    }

    fn has(&self, wanted: &BTreeSet<FunctionService>) -> bool {
        wanted.iter().all(|service| {
            self.services.contains(service) || (*service == FunctionService::Order && self.can_wait())
        })
    }

    /// Returns the cost of a graft, by which suitable grafts are compared: the number of services that were not
    /// requested, and the number of functions. Ordering in the library costs less than the service `order`, which drops
    /// early packets so that the sender has to repeat them.
    fn cost(&self, wanted: &BTreeSet<FunctionService>) -> (usize, bool, usize, &str) {
        let beside = self.services.difference(wanted).count();
        // The name is compared last, so that the choice among otherwise equal grafts is always the same.
        (beside, self.services.contains(&FunctionService::Order), self.functions, &self.graft)
    }

    fn fits(&self, qos: &Qos, path: &PeerPathFigures) -> Result<(), String> {
        if let Some(trouble) = &self.trouble {
            return Err(trouble.clone());
        }
        self.is_soon(qos, path)?;
        self.is_fast(qos, path)?;
        self.is_complete(qos, path)
    }

    /// Returns the delay of the datagrams that take longest. If the path loses packets, a retransmission takes another
    /// round trip.
    pub fn delay(&self, path: &PeerPathFigures) -> Option<Duration> {
        let round_trip = path.round_trip?;
        let again = match self.gives_up {
            Some((_, deadline)) => deadline.min(round_trip),
            None if self.services.contains(&FunctionService::Reliability) => round_trip,
            None => Duration::ZERO,
        };
        // Without losses on the path nothing is retransmitted, so no datagram needs the additional round trip.
        let is_lossy = path.loss.is_some_and(|loss| loss > 0.0);
        Some(round_trip / 2 + if is_lossy { again } else { Duration::ZERO })
    }

    fn is_soon(&self, qos: &Qos, path: &PeerPathFigures) -> Result<(), String> {
        match qos.max_delay().zip(self.delay(path)) {
            Some((most, late)) if late > most => Err(format!(
                "lost datagrams arrive after {} ms on this path, and max_delay is {}",
                ms(late),
                ms(most)
            )),
            _ => Ok(()),
        }
    }

    fn is_fast(&self, qos: &Qos, path: &PeerPathFigures) -> Result<(), String> {
        let Some(least) = qos.min_throughput_mbit.map(|mbit| mbit * 1e6) else { return Ok(()) };
        let mbit = |bits: f64| format!("{:.1} Mbit/s, and min_throughput is {:.1}", bits / 1e6, least / 1e6);
        if let Some(rate) = self.rate.filter(|rate| *rate < least) {
            return Err(format!("its rate is {}", mbit(rate)));
        }
        // At most one window of packets is sent in each round trip.
        if let (Some(window), Some(round_trip)) = (self.window, path.round_trip) {
            let most = window as f64 * PACKET_BITS / round_trip.as_secs_f64().max(1e-6);
            if most < least {
                return Err(format!(
                    "{window} packets in a round trip of {} ms are {}",
                    ms(round_trip),
                    mbit(most)
                ));
            }
        }
        Ok(())
    }

    fn is_complete(&self, qos: &Qos, path: &PeerPathFigures) -> Result<(), String> {
        let Some(most) = qos.max_loss_percent.map(|percent| percent / 100.0) else { return Ok(()) };
        let (loss, what) = self.loss(path.loss.unwrap_or_default());
        match loss > most {
            true => Err(format!("{what} {:.2} %, and max_loss is {:.2}", loss * 100.0, most * 100.0)),
            false => Ok(()),
        }
    }

    /// Returns the share of packets that are lost after the graft's functions have recovered packets, if the path loses
    /// packets independently. Also returns a text for the refusal of the request.
    fn loss(&self, path: f64) -> (f64, &'static str) {
        // The graft retransmits lost packets, and abandons at most `permille` of all packets, whatever the path loses.
        if let Some((permille, _)) = self.gives_up {
            return (permille as f64 / 1000.0, "it may give up");
        }
        if self.services.contains(&FunctionService::Reliability) {
            return (0.0, "");
        }
        match self.parity {
            Some(packets) => {
                // A lost packet cannot be recovered if another packet of its parity group is lost, too.
                (path * (1.0 - (1.0 - path).powf(packets as f64)), "with its parity the path loses")
            }
            None => (path, "the path loses"),
        }
    }
}

fn names(services: &BTreeSet<FunctionService>) -> String {
    services.iter().map(|service| service.name()).collect::<Vec<_>>().join(", ")
}

fn list(offers: &[Offer]) -> String {
    let each = offers.iter().map(|offer| match offer.services.is_empty() {
        true => format!("{} (framing only)", offer.graft),
        false => format!("{} ({})", offer.graft, names(&offer.services)),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(graft: &str, services: &[FunctionService]) -> Offer {
        Offer {
            graft: graft.to_owned(),
            services: services.iter().copied().collect(),
            functions: services.len(),
            ..Offer::default()
        }
    }

    fn all() -> Vec<Offer> {
        use FunctionService::*;
        vec![
            offer("canonical", &[]),
            offer("newest", &[Once, PartialOrder]),
            Offer { parity: Some(8), ..offer("parity", &[Once, Recovery]) },
            Offer {
                window: Some(128),
                ..offer("selective", &[Once, Reliability, PartialReliability, FlowControl])
            },
            Offer {
                window: Some(128),
                gives_up: Some((20, Duration::from_millis(50))),
                ..offer("partial", &[Once, PartialReliability, FlowControl])
            },
            Offer { rate: Some(4e6), ..offer("paced", &[Once, Pacing]) },
        ]
    }

    fn want(services: &[&str], qos: Qos) -> Want {
        Want { services: services.iter().map(|name| (*name).to_owned()).collect(), qos, adapt: false }
    }

    fn path(ms: u64, loss: f64) -> PeerPathFigures {
        PeerPathFigures { round_trip: Some(Duration::from_millis(ms)), loss: Some(loss) }
    }

    #[test]
    fn graft_with_the_fewest_sufficient_functions_is_chosen() {
        let delay = |ms| Qos { max_delay_ms: Some(ms), ..Qos::default() };
        let fast = |mbit| Qos { min_throughput_mbit: Some(mbit), ..Qos::default() };
        let loss = |percent| Qos { max_loss_percent: Some(percent), ..Qos::default() };
        let table: [(&[&str], Qos, PeerPathFigures, &str); 13] = [
            (&[], Qos::default(), path(20, 0.0), "canonical"),
            (&["once"], Qos::default(), path(20, 0.0), "newest"),
            (&["reliability"], Qos::default(), path(20, 0.0), "selective"),
            (&["partial-reliability"], Qos::default(), path(20, 0.0), "partial"),
            (&["partial-reliability"], loss(1.0), path(20, 0.01), "selective"),
            (&["partial-reliability"], delay(100), path(80, 0.01), "partial"),
            (&["partial-order"], delay(10), path(20, 0.0), "newest"),
            // The path loses nothing, so nothing has to be retransmitted.
            (&["reliability"], delay(30), path(40, 0.0), "selective"),
            (&[], loss(3.0), path(20, 0.02), "canonical"),
            (&[], loss(1.0), path(20, 0.02), "parity"),
            (&[], loss(0.01), path(20, 0.02), "selective"),
            (&["pacing"], fast(3.0), path(20, 0.0), "paced"),
            (&["reliability"], fast(60.0), path(20, 0.0), "selective"),
        ];
        for (services, qos, path, wanted) in table {
            let offers = all();
            let chosen = choose(&offers, &want(services, qos), &path, true).map(|offer| offer.graft.clone());
            assert_eq!(chosen, Ok(wanted.to_owned()), "{services:?} {qos:?}");
        }
    }

    /// If every lost packet is retransmitted and a flow-control window bounds how many packets are in flight, the
    /// library can put messages in order. That is cheaper than dropping packets that arrive early.
    #[test]
    fn reliable_graft_without_ordering_is_chosen_for_ordered_messages() {
        use FunctionService::*;
        let chosen = |offers: &[Offer]| {
            choose(offers, &want(&["order"], Qos::default()), &path(20, 0.0), true)
                .map(|offer| offer.graft.clone())
        };
        let back = offer("back", &[Once, Order, Reliability, FlowControl]);
        let selective = offer("selective", &[Once, Reliability, FlowControl]);
        assert_eq!(chosen(&[back.clone(), selective.clone()]), Ok("selective".to_owned()));
        assert_eq!(chosen(&[back]), Ok("back".to_owned()));
        let unbounded = offer("unbounded", &[Once, Reliability]);
        let lossy = offer("lossy", &[Once, PartialReliability, FlowControl]);
        assert!(matches!(chosen(&[unbounded, lossy]), Err(ChoiceRefusal::Impossible(_))));
    }

    #[test]
    fn impossible_session_request_is_refused_with_the_reason() {
        let delay = |ms| Qos { max_delay_ms: Some(ms), ..Qos::default() };
        let fast = |mbit| Qos { min_throughput_mbit: Some(mbit), ..Qos::default() };
        let loss = |percent| Qos { max_loss_percent: Some(percent), ..Qos::default() };
        let table: [(&[&str], Qos, &str); 12] = [
            (
                &["order", "recovery"],
                Qos::default(),
                "impossible: no graft of the settings has order, recovery together; there are: canonical (framing only), newest (once, partial-order)",
            ),
            (&["teleport"], Qos::default(), "impossible: there is no service teleport; there are: once, "),
            (&["order", "partial-order"], Qos::default(), "redundant: order includes partial-order"),
            (
                &["reliability", "partial-reliability"],
                Qos::default(),
                "redundant: reliability includes partial-",
            ),
            (&["encryption"], Qos::default(), "redundant: sessions with this peer are sealed anyway"),
            (
                &["reliability"],
                loss(2.0),
                "redundant: max_loss has no effect, since nothing is lost with reliability",
            ),
            (&[], loss(100.0), "redundant: max_loss: no more than 100 %"),
            (&[], delay(9), "impossible: max_delay 9 ms: half of the round trip that was measured is 10 ms"),
            (
                &["reliability"],
                delay(29),
                "impossible: graft selective: lost datagrams arrive after 30 ms on this path, and max_delay is 29",
            ),
            (
                &["partial-order"],
                loss(1.0),
                "impossible: graft newest: the path loses 2.00 %, and max_loss is 1.00",
            ),
            (
                &["pacing"],
                fast(5.0),
                "impossible: graft paced: its rate is 4.0 Mbit/s, and min_throughput is 5.0",
            ),
            (
                &["reliability"],
                fast(100.0),
                "impossible: graft selective: 128 packets in a round trip of 20 ms are 61.4 Mbit/s",
            ),
        ];
        for (services, qos, wanted) in table {
            let refused = choose(&all(), &want(services, qos), &path(20, 0.02), true).expect_err(wanted);
            assert!(refused.to_string().starts_with(wanted), "{refused}");
        }
        let offers = all();
        let refused = choose(&offers, &want(&["encryption"], Qos::default()), &path(20, 0.0), false);
        assert!(matches!(refused, Err(ChoiceRefusal::Impossible(_))));
    }

    /// A session on an unmeasured path is allowed. Its requirements are checked while it is open.
    #[test]
    fn session_request_on_an_unmeasured_path_is_not_refused() {
        let qos = Qos { max_delay_ms: Some(1), min_throughput_mbit: Some(50.0), max_loss_percent: None };
        let offers = all();
        let chosen = choose(&offers, &want(&["reliability"], qos), &PeerPathFigures::default(), true);
        assert_eq!(chosen.map(|offer| offer.graft.as_str()), Ok("selective"));
    }
}
