//! Records of live connections and of the latest ended ones: the congestion control or carrier that each used, and the
//! reason for it.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::Arc,
};

use millrace_graft_proto::select::online::ConnectionOutcome;

use super::{SelectionResult, name_of};
use crate::{SelectedFlow, SideSetting, status};

/// Limit of live connections that are recorded. Further connections are only counted.
const LIVE_MAX: usize = 16_384;
const ENDED_MAX: usize = 1024;

/// One connection of this host, with the candidate (congestion control or carrier) that it uses.
#[derive(Clone, Debug)]
pub struct ConnectionRecord {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub side: SideSetting,
    pub rule: String,
    /// Reason why the connection uses its candidate (congestion control or carrier), as `reason` in the status: for
    /// example `learned` if the model chose it, or `rule`.
    pub why: &'static str,
    pub candidate: String,
    /// Purpose (traffic profile and size) that was predicted for the connection, or `None` if its congestion control or
    /// carrier was chosen without one.
    pub purpose: Option<status::PurposeStatus>,
    /// The model's choice for the connection's path, or `None` if no choice was made yet.
    pub made: Option<Arc<SelectionResult>>,
    pub began_ns: u64,
    pub carried: bool,
    /// Carrier that the connection uses, or `None` if it is not tunnelled.
    pub carrier: Option<String>,
    /// True if the connection's socket is in another network namespace.
    pub is_elsewhere: bool,
    /// True if the latest list of sockets did not contain the connection.
    pub unseen: bool,
    /// The connection's measurements and cost, once it has ended.
    pub ended: Option<(SelectedFlow, Option<ConnectionOutcome>)>,
}

/// Returns the reason for a connection's congestion control or carrier. `missed` is true if the connection should have
/// been tunnelled, but could not be.
pub fn choice_reason(made: Option<&SelectionResult>, is_tried: bool, missed: bool) -> &'static str {
    match made {
        None => "first",
        Some(_) if missed => "fallback",
        Some(_) if is_tried => "explored",
        Some(made) => name_of(made.why),
    }
}

#[derive(Debug, Default)]
pub struct ConnectionRecords {
    live: BTreeMap<u64, ConnectionRecord>,
    ended: VecDeque<ConnectionRecord>,
    by_why: BTreeMap<&'static str, u64>,
    /// Number of connections by tier (tunnelled or not) and candidate (congestion control or carrier).
    by_candidate: BTreeMap<(&'static str, String), u64>,
    /// Numbers of ended connections by their cost: at most the usual cost for the model's choice, higher, and not
    /// known.
    judged: [u64; 3],
    /// Number of connections whose records were dropped before their end was known.
    forgotten: u64,
    /// Number of kernel reports about connections that were lost until the latest call of the function that removes old
    /// connections.
    lost: u64,
}

impl ConnectionRecords {
    pub fn begin(&mut self, id: u64, record: ConnectionRecord) {
        *self.by_why.entry(record.why).or_default() += 1;
        let tier = if record.carried { "carried" } else { "in-place" };
        *self.by_candidate.entry((tier, record.candidate.clone())).or_default() += 1;
        if self.live.len() >= LIVE_MAX && !self.live.contains_key(&id) {
            self.forgotten += 1;
            return;
        }
        self.live.insert(id, record);
    }

    pub fn end(&mut self, id: u64, flow: &SelectedFlow, outcome: Option<ConnectionOutcome>) {
        let judged = match outcome {
            Some(outcome) => usize::from(outcome.is_bad),
            None => 2,
        };
        self.judged[judged] += 1;
        let Some(record) = self.live.remove(&id) else { return };
        self.ended.push_back(ConnectionRecord { ended: Some((flow.clone(), outcome)), ..record });
        if self.ended.len() > ENDED_MAX {
            self.ended.pop_front();
        }
    }

    pub fn live(&self, id: u64) -> Option<&ConnectionRecord> {
        self.live.get(&id)
    }

    pub fn forget_carried(&mut self) {
        self.live.retain(|_, record| !record.carried);
    }

    /// Removes connections whose end was not reported.
    pub fn prune(&mut self, is_live: impl Fn(u64) -> bool, lost: u64) {
        let before = self.live.len();
        let is_lost = std::mem::replace(&mut self.lost, lost) < lost;
        self.live.retain(|id, record| {
            // Sockets of another network namespace are in no list of sockets, so their absence proves nothing.
            if record.is_elsewhere {
                return !is_lost;
            }
            let is_missed = !record.carried && !is_live(*id);
            !(std::mem::replace(&mut record.unseen, is_missed) && is_missed)
        });
        self.forgotten += (before - self.live.len()) as u64;
    }

    pub fn has_live(&self) -> bool {
        self.live.values().any(|record| !record.carried)
    }

    /// Returns the latest connection between these addresses, which may be in either order.
    pub fn find(&self, [one, other]: [SocketAddr; 2]) -> Option<&ConnectionRecord> {
        let is_it = |record: &&ConnectionRecord| {
            let ends = (record.local, record.remote);
            ends == (one, other) || ends == (other, one)
        };
        self.live
            .values()
            .filter(is_it)
            .max_by_key(|it| it.began_ns)
            .or_else(|| self.ended.iter().rev().find(is_it))
    }

    pub fn status(&self) -> status::SelectionStatus {
        let mut live = BTreeMap::<String, u64>::new();
        for record in self.live.values() {
            let tier = if record.carried { "carried" } else { "in-place" };
            *live.entry(format!("{tier}/{}", record.candidate)).or_default() += 1;
        }
        let [good, bad, unjudged] = self.judged;
        let judged = [("good", good), ("bad", bad), ("not-judged", unjudged)];
        status::SelectionStatus {
            live,
            connections: self
                .by_candidate
                .iter()
                .map(|((tier, candidate), count)| (format!("{tier}/{candidate}"), *count))
                .collect(),
            reasons: self.by_why.iter().map(|(why, count)| ((*why).to_owned(), *count)).collect(),
            outcomes: judged.map(|(name, count)| (name.to_owned(), count)).into(),
            forgotten: self.forgotten,
            ..status::SelectionStatus::default()
        }
    }
}

impl ConnectionRecord {
    pub fn status(
        &self,
        chosen: Option<status::ChosenStatus>,
        gain: Option<f64>,
        plain: &str,
        now_ns: u64,
    ) -> status::GraftConnectionStatus {
        let ended = self.ended.as_ref();
        status::GraftConnectionStatus {
            local: Some(self.local),
            remote: Some(self.remote),
            side: if self.side == SideSetting::Client { "client" } else { "server" }.to_owned(),
            rule: self.rule.clone(),
            tier: if self.carried { "carried" } else { "in-place" }.to_owned(),
            candidate: self.candidate.clone(),
            carrier: self.carrier.clone(),
            why: self.why.to_owned(),
            age_s: now_ns.saturating_sub(self.began_ns) as f64 / 1e9,
            ended: ended.map(|(flow, outcome)| status::EndedStatus {
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
