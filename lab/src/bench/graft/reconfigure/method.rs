//! One run of `reconfigure`: two daemons, a transfer, a path that changes, and a thread that reads the session's state.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{anyhow, ensure};

use serde_json::Value;

use super::ReconfigureArgs;
use super::host::{FULL, GIVE_UP, HostSession, PARTIAL, ReconfigureHost};
use super::transfer::{MessageArrival, ReceivedTransfer, SharedTransfer};
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::{Directions, Settings, Topology};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ReconfigureMethod {
    /// The application asks the daemon to change the graft when the round-trip time has changed
    Aware,
    /// A rule in the daemon's settings changes the graft
    InPlace,
    /// The graft is never changed
    None,
}

/// Interval at which the daemon's status is read.
const POLL: Duration = Duration::from_millis(20);
/// Time that a transfer may take, in addition to the time for which the round-trip time stays long.
const LIMIT: Duration = Duration::from_secs(600);

/// State of the session when the daemon's status was read.
#[derive(Clone, Debug)]
pub struct StateSample {
    pub at_s: f64,
    pub session: HostSession,
    /// Number of the next message to be sent.
    pub next: u64,
}

pub struct MethodOutcome {
    pub method: ReconfigureMethod,
    pub messages: u64,
    pub arrivals: Vec<MessageArrival>,
    wrong: u64,
    pub looks: Vec<StateSample>,
    /// Times at which the path's round-trip time became long, and short again, seconds.
    pub turned_s: [f64; 2],
    /// The daemons' counters of the session's packets, by the reason why they were passed or dropped, at the sender and
    /// at the receiver.
    pub packets: [Value; 2],
}

impl ReconfigureMethod {
    pub fn name(self) -> &'static str {
        match self {
            Self::Aware => "aware",
            Self::InPlace => "in-place",
            Self::None => "none",
        }
    }
}

impl ReconfigureArgs {
    pub fn site(&self) -> anyhow::Result<BenchSite> {
        let mut topology = Topology::standard(1, 1);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &delay(self.rtt_ms))?;
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &format!("loss={}%", self.loss))?;
        BenchSite::new(&topology)
    }

    pub fn measure(&self, site: &BenchSite, method: ReconfigureMethod) -> anyhow::Result<MethodOutcome> {
        let near = site.relay()?;
        let far = site.subscribers()?;
        let sender =
            ReconfigureHost::start(site, "sender", [near, far], self, method == ReconfigureMethod::InPlace)?;
        let receiver = ReconfigureHost::start(site, "receiver", [far, near], self, false)?;
        sender.wait_for_keys()?;
        receiver.wait_for_keys()?;
        let transfer = SharedTransfer::new(near, far, self.bytes, self.messages())?;
        let silence = Duration::from_millis(1000 + 10 * u64::from(self.far_rtt_ms));
        std::thread::scope(|scope| {
            let transfer = &transfer;
            let sending = scope.spawn(move || transfer.send());
            let receiving = scope.spawn(move || transfer.receive(silence, LIMIT));
            let turning = scope.spawn(move || self.turn_path(site, transfer));
            let looks = self.watch(&sender, method, transfer);
            // After an error, stop the other threads, which are joined below.
            transfer.is_over.fetch_or(looks.is_err(), Ordering::Relaxed);
            let panicked = |_| anyhow!("a thread of the transfer panicked");
            let ReceivedTransfer { arrivals, wrong } = receiving.join().map_err(panicked)?;
            sending.join().map_err(panicked)??;
            let turned_s = turning.join().map_err(panicked)??;
            let packets = [sender.packets()?, receiver.packets()?];
            Ok(MethodOutcome {
                method,
                messages: self.messages(),
                arrivals,
                wrong,
                looks: looks?,
                turned_s,
                packets,
            })
        })
    }

    /// Makes the path's round-trip time long after `after_s`, and short again after `far_s` or when the transfer is
    /// over. Returns both times.
    fn turn_path(&self, site: &BenchSite, transfer: &SharedTransfer) -> anyhow::Result<[f64; 2]> {
        let link = site.link(SUBSCRIBERS_LINK)?;
        let mut turned_s = [0.0; 2];
        let steps = [(self.after_s, self.far_rtt_ms), (self.after_s + self.far_s, self.rtt_ms)];
        for ((at_s, rtt_ms), turned_s) in steps.into_iter().zip(&mut turned_s) {
            while transfer.base.elapsed().as_secs_f64() < at_s && !transfer.is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            link.change(Directions::Both, &Settings::parse(&delay(rtt_ms))?)?;
            *turned_s = transfer.base.elapsed().as_secs_f64();
        }
        Ok(turned_s)
    }

    /// Samples the session's state until the transfer is over. For the method `aware`, it also requests the graft
    /// changes.
    fn watch(
        &self,
        sender: &ReconfigureHost,
        method: ReconfigureMethod,
        transfer: &SharedTransfer,
    ) -> anyhow::Result<Vec<StateSample>> {
        let mut looks = Vec::new();
        while !transfer.is_over.load(Ordering::Relaxed) {
            let next = transfer.next.load(Ordering::Relaxed);
            let at_s = transfer.base.elapsed().as_secs_f64();
            let session = sender.session()?;
            let wanted =
                self.wanted(&session).filter(|_| method == ReconfigureMethod::Aware && !session.changing);
            looks.push(StateSample { at_s, session, next });
            if let Some(graft) = wanted {
                sender.swap(graft)?;
            }
            std::thread::sleep(POLL);
        }
        Ok(looks)
    }

    /// Returns the graft that suits the session's round-trip time, or `None` if the session uses that graft already.
    fn wanted(&self, session: &HostSession) -> Option<&'static str> {
        let rtt_ms = session.rtt_ms?;
        match session.graft == FULL {
            true => (rtt_ms >= self.at_rtt_ms.into()).then_some(PARTIAL),
            false => (rtt_ms < self.until_rtt_ms().into()).then_some(FULL),
        }
    }
}

fn delay(rtt_ms: u32) -> String {
    format!("delay={}us", u64::from(rtt_ms) * 500)
}

impl StateSample {
    /// Reports whether the session, when this sample was taken, used the graft with full reliability, with no change of
    /// the graft under way.
    fn is_full(&self) -> bool {
        self.session.graft == FULL && !self.session.changing
    }
}

impl MethodOutcome {
    /// Returns the numbers of the messages that did not arrive.
    pub fn lost(&self) -> Vec<u64> {
        let mut seen = vec![false; usize::try_from(self.messages).unwrap_or(usize::MAX)];
        for arrival in &self.arrivals {
            seen[usize::try_from(arrival.number).unwrap_or(usize::MAX)] = true;
        }
        (0..self.messages).zip(seen).filter(|(_, seen)| !seen).map(|(number, _)| number).collect()
    }

    /// Returns the ranges of messages that may have been sent with partial reliability. Each range reaches from the
    /// last sample before the change of the graft to the first sample after it.
    fn partial(&self) -> Vec<(u64, u64)> {
        let mut ranges = Vec::new();
        let mut since = None;
        for pair in self.looks.windows(2) {
            match (pair[0].is_full(), pair[1].is_full()) {
                (true, false) => since = Some(pair[0].next),
                (false, true) => ranges.extend(since.take().map(|from| (from, pair[1].next))),
                _ => {}
            }
        }
        ranges.extend(since.map(|from| (from, self.messages)));
        ranges
    }

    /// Returns the seconds from a change of the path's round-trip time, at `turned_s`, until the session used this
    /// graft.
    pub fn changed_after_s(&self, turned_s: f64, graft: &str) -> Option<f64> {
        let later = self.looks.iter().filter(|look| look.at_s >= turned_s);
        let found = later.into_iter().find(|look| look.session.graft == graft && !look.session.changing)?;
        Some(found.at_s - turned_s)
    }

    /// Checks the numbers of lost messages: none that was sent with full reliability (Go-Back-N), and with partial
    /// reliability no more than its limit allows.
    pub fn check(&self, args: &ReconfigureArgs) -> anyhow::Result<()> {
        let name = self.method.name();
        ensure!(self.wrong == 0, "{name}: {} messages were altered or duplicated", self.wrong);
        let lost = self.lost();
        let ranges = self.partial();
        let is_owed = |number: &&u64| !ranges.iter().any(|(from, to)| (from..to).contains(number));
        let owed = lost.iter().filter(is_owed).count();
        ensure!(owed == 0, "{name}: Go-Back-N lost {owed} of {} messages, and may lose none", self.messages);
        let partial: u64 = ranges.iter().map(|(from, to)| to - from).sum();
        ensure!(
            lost.len() as u64 * 1000 <= partial * GIVE_UP,
            "{name}: {} of {partial} messages were lost, more than the allowed {GIVE_UP} in 1000",
            lost.len()
        );
        if self.method != ReconfigureMethod::None {
            let there = self.changed_after_s(self.turned_s[0], PARTIAL);
            ensure!(
                there.is_some(),
                "{name}: the graft did not change at {} ms: use a longer --far-s",
                args.far_rtt_ms
            );
            let back = self.changed_after_s(self.turned_s[1], FULL);
            ensure!(back.is_some(), "{name}: the graft did not change back: use more --megabytes");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(at_s: f64, graft: &str, changing: bool, next: u64) -> StateSample {
        StateSample {
            at_s,
            session: HostSession { graft: graft.into(), changing, ..HostSession::default() },
            next,
        }
    }

    fn outcome(looks: Vec<StateSample>, lost: &[u64]) -> MethodOutcome {
        let came = (0..1000).filter(|number| !lost.contains(number));
        let arrivals = came.map(|number| MessageArrival { number, sent_s: 0.0, delay_ms: 1.0 }).collect();
        MethodOutcome {
            method: ReconfigureMethod::None,
            messages: 1000,
            arrivals,
            wrong: 0,
            looks,
            turned_s: [0.0; 2],
            packets: [Value::Null, Value::Null],
        }
    }

    /// In this test, messages 200 to 699 may have been sent with partial reliability, and all others with full
    /// reliability.
    #[test]
    fn loss_of_messages_sent_with_full_reliability_is_an_error() {
        use clap::Parser as _;
        #[derive(clap::Parser)]
        struct ParsedArgs {
            #[command(flatten)]
            args: ReconfigureArgs,
        }
        let args = ParsedArgs::parse_from(["bench"]).args;
        let looks = || {
            vec![
                look(0.0, FULL, false, 0),
                look(1.0, FULL, false, 200),
                look(2.0, FULL, true, 300),
                look(3.0, PARTIAL, false, 500),
                look(4.0, PARTIAL, true, 600),
                look(5.0, FULL, false, 700),
                look(6.0, FULL, false, 900),
            ]
        };
        let table: [(&[u64], bool); 6] = [
            (&[], true),
            (&[199], false),
            (&[200, 699], true),
            (&[700], false),
            (&[300, 310, 320, 330, 340, 350, 360, 370, 380, 390], true),
            (&[300, 310, 320, 330, 340, 350, 360, 370, 380, 390, 400], false),
        ];
        for (lost, want) in table {
            let outcome = outcome(looks(), lost);
            assert_eq!(outcome.lost(), lost);
            assert_eq!(outcome.check(&args).is_ok(), want, "{lost:?}");
        }
        assert_eq!(outcome(looks(), &[]).changed_after_s(1.5, PARTIAL), Some(1.5));
        assert!(outcome(vec![look(0.0, FULL, false, 0)], &[5]).check(&args).is_err());
    }
}
