//! Connections that live, and the latest that are over: what each got, and why.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::Arc,
};

use millrace_graft_proto::select::online::Outcome;

use super::{Made, name_of};
use crate::{Flow, Side, status};

/// That are known at once: what begins beyond is counted, and not remembered.
const LIVE_MAX: usize = 16_384;
const ENDED_MAX: usize = 1024;

/// One connection.
#[derive(Clone, Debug)]
pub struct Record {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub side: Side,
    pub rule: String,
    /// `learned`, `explored`, `doubted`, `found`, `first`, `fallback`, `rule`.
    pub why: &'static str,
    pub arm: String,
    /// What it was taken to be for. `None`: nothing went by that.
    pub purpose: Option<status::Purpose>,
    /// `None`: nothing was chosen yet.
    pub made: Option<Arc<Made>>,
    pub began_ns: u64,
    pub carried: bool,
    /// By which.
    pub carrier: Option<String>,
    /// In another network namespace.
    pub is_elsewhere: bool,
    /// By the latest look at sockets.
    pub unseen: bool,
    pub ended: Option<(Flow, Option<Outcome>)>,
}

/// `missed`: it was to be carried, and could not be.
pub fn why(made: Option<&Made>, is_tried: bool, missed: bool) -> &'static str {
    match made {
        None => "first",
        Some(_) if missed => "fallback",
        Some(_) if is_tried => "explored",
        Some(made) => name_of(made.why),
    }
}

#[derive(Debug, Default)]
pub struct Records {
    live: BTreeMap<u64, Record>,
    ended: VecDeque<Record>,
    by_why: BTreeMap<&'static str, u64>,
    /// Tier and arm.
    by_arm: BTreeMap<(&'static str, String), u64>,
    judged: [u64; 3],
    forgotten: u64,
    /// As it was at the latest look.
    untold: u64,
}

impl Records {
    pub fn begin(&mut self, id: u64, record: Record) {
        *self.by_why.entry(record.why).or_default() += 1;
        let tier = if record.carried { "carried" } else { "in-place" };
        *self.by_arm.entry((tier, record.arm.clone())).or_default() += 1;
        if self.live.len() >= LIVE_MAX && !self.live.contains_key(&id) {
            self.forgotten += 1;
            return;
        }
        self.live.insert(id, record);
    }

    pub fn end(&mut self, id: u64, flow: &Flow, outcome: Option<Outcome>) {
        let judged = match outcome {
            Some(outcome) => usize::from(outcome.is_bad),
            None => 2,
        };
        self.judged[judged] += 1;
        let Some(record) = self.live.remove(&id) else { return };
        self.ended.push_back(Record { ended: Some((flow.clone(), outcome)), ..record });
        if self.ended.len() > ENDED_MAX {
            self.ended.pop_front();
        }
    }

    pub fn live(&self, id: u64) -> Option<&Record> {
        self.live.get(&id)
    }

    pub fn forget_carried(&mut self) {
        self.live.retain(|_, record| !record.carried);
    }

    /// What ended untold.
    pub fn prune(&mut self, lives: impl Fn(u64) -> bool, untold: u64) {
        let before = self.live.len();
        let is_lost = std::mem::replace(&mut self.untold, untold) < untold;
        self.live.retain(|id, record| {
            if record.is_elsewhere {
                return !is_lost;
            }
            let is_missed = !record.carried && !lives(*id);
            !(std::mem::replace(&mut record.unseen, is_missed) && is_missed)
        });
        self.forgotten += (before - self.live.len()) as u64;
    }

    pub fn has_live(&self) -> bool {
        self.live.values().any(|record| !record.carried)
    }

    /// The latest of these ends, in either order.
    pub fn find(&self, [one, other]: [SocketAddr; 2]) -> Option<&Record> {
        let is_it = |record: &&Record| {
            let ends = (record.local, record.remote);
            ends == (one, other) || ends == (other, one)
        };
        self.live
            .values()
            .filter(is_it)
            .max_by_key(|it| it.began_ns)
            .or_else(|| self.ended.iter().rev().find(is_it))
    }

    pub fn status(&self) -> status::Selection {
        let mut live = BTreeMap::<String, u64>::new();
        for record in self.live.values() {
            let tier = if record.carried { "carried" } else { "in-place" };
            *live.entry(format!("{tier}/{}", record.arm)).or_default() += 1;
        }
        let [good, bad, unjudged] = self.judged;
        let judged = [("good", good), ("bad", bad), ("not-judged", unjudged)];
        status::Selection {
            live,
            connections: self
                .by_arm
                .iter()
                .map(|((tier, arm), count)| (format!("{tier}/{arm}"), *count))
                .collect(),
            reasons: self.by_why.iter().map(|(why, count)| ((*why).to_owned(), *count)).collect(),
            outcomes: judged.map(|(name, count)| (name.to_owned(), count)).into(),
            forgotten: self.forgotten,
            ..status::Selection::default()
        }
    }
}

impl Record {
    pub fn status(
        &self,
        chosen: Option<status::Chosen>,
        gain: Option<f64>,
        plain: &str,
        now_ns: u64,
    ) -> status::Connection {
        let ended = self.ended.as_ref();
        status::Connection {
            local: Some(self.local),
            remote: Some(self.remote),
            side: if self.side == Side::Client { "client" } else { "server" }.to_owned(),
            rule: self.rule.clone(),
            tier: if self.carried { "carried" } else { "in-place" }.to_owned(),
            arm: self.arm.clone(),
            carrier: self.carrier.clone(),
            why: self.why.to_owned(),
            age_s: now_ns.saturating_sub(self.began_ns) as f64 / 1e9,
            ended: ended.map(|(flow, outcome)| status::Ended {
                sent: flow.sent,
                received: flow.received,
                duration_ms: flow.duration.as_secs_f64() * 1e3,
                cost: outcome.map(|it| it.cost),
                is_bad: outcome.map(|it| it.is_bad),
            }),
            gain,
            plain: plain.to_owned(),
            purpose: self.purpose.clone(),
            chosen,
        }
    }
}
