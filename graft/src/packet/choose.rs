//! Which graft an application gets for what it asks for, and why it gets none: as values, without I/O.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use super::function::Service;
use super::settings::{Graft, Settings};
use crate::message::want::{ENCRYPTION, Qos, Want};

/// Payload of a datagram and what is around it, for rates in packets.
const PACKET_BITS: f64 = 8.0 * 1200.0;

/// What a graft of the settings can do for who asks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    pub graft: String,
    pub services: BTreeSet<Service>,
    pub functions: usize,
    /// Packets under way, at most.
    pub window: Option<u64>,
    /// Of 1000 packets so many may be given up, and after how long.
    pub gives_up: Option<(u64, Duration)>,
    /// Packets that one parity packet protects.
    pub parity: Option<u64>,
    /// Bit/s.
    pub rate: Option<f64>,
    /// Why it cannot be had now.
    pub trouble: Option<String>,
}

/// What is known of the way to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Path {
    /// The least of late.
    pub round_trip: Option<Duration>,
    /// Part of the packets, from 0 to 1.
    pub loss: Option<f64>,
}

/// Why none is chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("redundant: {0}")]
    Redundant(String),
    #[error("impossible: {0}")]
    Impossible(String),
}

/// Of all grafts of the settings.
pub fn offers(settings: &Settings) -> Vec<Offer> {
    settings.grafts.values().map(|graft| Offer::of(graft, settings)).collect()
}

/// The one that has least beside what is asked for.
pub fn choose<'a>(
    offers: &'a [Offer],
    want: &Want,
    path: &Path,
    is_sealed: bool,
) -> Result<&'a Offer, Refused> {
    let wanted = services(want, is_sealed)?;
    check_redundant(&wanted, &want.qos)?;
    let able: Vec<_> = offers.iter().filter(|offer| offer.has(&wanted)).collect();
    if able.is_empty() {
        return Err(Refused::Impossible(format!(
            "no graft of the settings has {} together; there are: {}",
            names(&wanted),
            list(offers)
        )));
    }
    check_path(&want.qos, path)?;
    let (mut best, mut why): (Option<&Offer>, String) = (None, String::new());
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
    best.ok_or(Refused::Impossible(why))
}

/// How long a datagram takes at least, of what was measured.
fn one_way(path: &Path) -> Option<Duration> {
    path.round_trip.map(|round_trip| round_trip / 2)
}

fn services(want: &Want, is_sealed: bool) -> Result<BTreeSet<Service>, Refused> {
    let mut services = BTreeSet::new();
    for name in &want.services {
        if name == ENCRYPTION {
            return Err(match is_sealed {
                true => Refused::Redundant("sessions with this peer are sealed anyway".to_owned()),
                false => Refused::Impossible(
                    "by the operator's word, sessions with this peer are in clear".to_owned(),
                ),
            });
        }
        let service = Service::by_name(name).ok_or_else(|| {
            let known: Vec<_> = Service::ALL.into_iter().map(Service::name).collect();
            Refused::Impossible(format!("there is no service {name}; there are: {}", known.join(", ")))
        })?;
        services.insert(service);
    }
    Ok(services)
}

fn check_redundant(wanted: &BTreeSet<Service>, qos: &Qos) -> Result<(), Refused> {
    let table =
        [(Service::Order, Service::PartialOrder), (Service::Reliability, Service::PartialReliability)];
    for (whole, part) in table {
        if wanted.contains(&whole) && wanted.contains(&part) {
            return Err(Refused::Redundant(format!("{} has {} in it", whole.name(), part.name())));
        }
    }
    match qos.max_loss_percent {
        Some(_) if wanted.contains(&Service::Reliability) => {
            Err(Refused::Redundant("max_loss: with reliability nothing is lost".to_owned()))
        }
        Some(percent) if percent >= 100.0 => {
            Err(Refused::Redundant("max_loss: no more than 100 % can be lost".to_owned()))
        }
        _ => Ok(()),
    }
}

/// What no graft changes.
fn check_path(qos: &Qos, path: &Path) -> Result<(), Refused> {
    match (qos.max_delay(), one_way(path)) {
        (Some(most), Some(least)) if most < least => Err(Refused::Impossible(format!(
            "max_delay {} ms: half of the round trip that was measured is {} ms",
            ms(most),
            ms(least)
        ))),
        _ => Ok(()),
    }
}

impl Offer {
    fn of(graft: &Graft, settings: &Settings) -> Self {
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

    /// Order is had, too, where messages can wait for those before them: these come, and a window bounds how many wait.
    pub fn can_wait(&self) -> bool {
        self.services.contains(&Service::Reliability) && self.services.contains(&Service::FlowControl)
    }

    fn has(&self, wanted: &BTreeSet<Service>) -> bool {
        wanted
            .iter()
            .all(|service| self.services.contains(service) || (*service == Service::Order && self.can_wait()))
    }

    /// What it has that was not asked for, and how much there is to run. Order by waiting costs less than by sending again what had come.
    fn cost(&self, wanted: &BTreeSet<Service>) -> (usize, bool, usize, &str) {
        let beside = self.services.difference(wanted).count();
        (beside, self.services.contains(&Service::Order), self.functions, &self.graft)
    }

    fn fits(&self, qos: &Qos, path: &Path) -> Result<(), String> {
        if let Some(trouble) = &self.trouble {
            return Err(trouble.clone());
        }
        self.is_soon(qos, path)?;
        self.is_fast(qos, path)?;
        self.is_complete(qos, path)
    }

    /// After how long the latest datagrams come. What is lost has to be asked for, which takes a round trip more.
    pub fn delay(&self, path: &Path) -> Option<Duration> {
        let round_trip = path.round_trip?;
        let again = match self.gives_up {
            Some((_, deadline)) => deadline.min(round_trip),
            None if self.services.contains(&Service::Reliability) => round_trip,
            None => Duration::ZERO,
        };
        let is_lossy = path.loss.is_some_and(|loss| loss > 0.0);
        Some(round_trip / 2 + if is_lossy { again } else { Duration::ZERO })
    }

    fn is_soon(&self, qos: &Qos, path: &Path) -> Result<(), String> {
        match qos.max_delay().zip(self.delay(path)) {
            Some((most, late)) if late > most => Err(format!(
                "what is lost on this path comes after {} ms, and max_delay is {}",
                ms(late),
                ms(most)
            )),
            _ => Ok(()),
        }
    }

    fn is_fast(&self, qos: &Qos, path: &Path) -> Result<(), String> {
        let Some(least) = qos.min_throughput_mbit.map(|mbit| mbit * 1e6) else { return Ok(()) };
        let mbit = |bits: f64| format!("{:.1} Mbit/s, and min_throughput is {:.1}", bits / 1e6, least / 1e6);
        if let Some(rate) = self.rate.filter(|rate| *rate < least) {
            return Err(format!("its rate is {}", mbit(rate)));
        }
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

    fn is_complete(&self, qos: &Qos, path: &Path) -> Result<(), String> {
        let Some(most) = qos.max_loss_percent.map(|percent| percent / 100.0) else { return Ok(()) };
        let (loss, what) = self.loss(path.loss.unwrap_or_default());
        match loss > most {
            true => Err(format!("{what} {:.2} %, and max_loss is {:.2}", loss * 100.0, most * 100.0)),
            false => Ok(()),
        }
    }

    /// How much of what is sent does not come, where losses do not depend on each other.
    fn loss(&self, path: f64) -> (f64, &'static str) {
        if let Some((permille, _)) = self.gives_up {
            return (permille as f64 / 1000.0, "it may give up");
        }
        if self.services.contains(&Service::Reliability) {
            return (0.0, "");
        }
        match self.parity {
            Some(packets) => {
                (path * (1.0 - (1.0 - path).powf(packets as f64)), "with its parity the path loses")
            }
            None => (path, "the path loses"),
        }
    }
}

fn names(services: &BTreeSet<Service>) -> String {
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

    fn offer(graft: &str, services: &[Service]) -> Offer {
        Offer {
            graft: graft.to_owned(),
            services: services.iter().copied().collect(),
            functions: services.len(),
            ..Offer::default()
        }
    }

    fn all() -> Vec<Offer> {
        use Service::*;
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

    fn path(ms: u64, loss: f64) -> Path {
        Path { round_trip: Some(Duration::from_millis(ms)), loss: Some(loss) }
    }

    #[test]
    fn the_least_that_does_is_chosen() {
        let delay = |ms| Qos { max_delay_ms: Some(ms), ..Qos::default() };
        let fast = |mbit| Qos { min_throughput_mbit: Some(mbit), ..Qos::default() };
        let loss = |percent| Qos { max_loss_percent: Some(percent), ..Qos::default() };
        let table: [(&[&str], Qos, Path, &str); 13] = [
            (&[], Qos::default(), path(20, 0.0), "canonical"),
            (&["once"], Qos::default(), path(20, 0.0), "newest"),
            (&["reliability"], Qos::default(), path(20, 0.0), "selective"),
            (&["partial-reliability"], Qos::default(), path(20, 0.0), "partial"),
            (&["partial-reliability"], loss(1.0), path(20, 0.01), "selective"),
            (&["partial-reliability"], delay(100), path(80, 0.01), "partial"),
            (&["partial-order"], delay(10), path(20, 0.0), "newest"),
            // Nothing is lost, so nothing has to be sent again.
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

    /// Where what is lost comes, and not too much at once, messages can wait: that is cheaper than to refuse what is early.
    #[test]
    fn order_is_had_by_waiting() {
        use Service::*;
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
        assert!(matches!(chosen(&[unbounded, lossy]), Err(Refused::Impossible(_))));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
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
            (&["order", "partial-order"], Qos::default(), "redundant: order has partial-order in it"),
            (&["reliability", "partial-reliability"], Qos::default(), "redundant: reliability has partial-"),
            (&["encryption"], Qos::default(), "redundant: sessions with this peer are sealed anyway"),
            (&["reliability"], loss(2.0), "redundant: max_loss: with reliability nothing is lost"),
            (&[], loss(100.0), "redundant: max_loss: no more than 100 %"),
            (&[], delay(9), "impossible: max_delay 9 ms: half of the round trip that was measured is 10 ms"),
            (
                &["reliability"],
                delay(29),
                "impossible: graft selective: what is lost on this path comes after 30 ms, and max_delay is 29",
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
        assert!(matches!(refused, Err(Refused::Impossible(_))));
    }

    /// Nothing was measured yet: what comes of it is seen while the session runs.
    #[test]
    fn nothing_is_refused_for_what_is_not_known() {
        let qos = Qos { max_delay_ms: Some(1), min_throughput_mbit: Some(50.0), max_loss_percent: None };
        let offers = all();
        let chosen = choose(&offers, &want(&["reliability"], qos), &Path::default(), true);
        assert_eq!(chosen.map(|offer| offer.graft.as_str()), Ok("selective"));
    }
}
