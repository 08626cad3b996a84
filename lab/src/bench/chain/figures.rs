//! Measured values of one run of a chain of relays, and the result row that combines several runs.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::contender::Contender;
use super::super::figures::{KernelWork, RowLoad, add_medians, add_rounds, combine, error, measured, middle};
use super::super::wire::Matched;
use super::links::ChainBy;
use crate::stats::{Percentiles, Spread};

/// Measured values of one run. A value that could not be measured is `null` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChainFigures {
    /// Number of objects that arrived, summed over all subscribers.
    pub delivered: u64,
    pub lost: u64,
    /// Time from the publisher's application to a subscriber's, us.
    pub latency_us: Option<Percentiles>,
    /// Time from the first relay's incoming interface to the last relay's outgoing one, with the links between, us.
    pub wire_latency_us: Option<Percentiles>,
    pub wire: Matched,
    /// CPU time of the whole machine per delivered object, ns.
    pub machine_ns_per_object: f64,
    /// Values of each relay, the publisher's first.
    pub hops: Vec<HopFigures>,
}

/// Measured values of one relay of a chain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HopFigures {
    /// Time from this relay's incoming interface to its outgoing one, us.
    pub wire_latency_us: Option<Percentiles>,
    pub wire: Matched,
    /// CPU time of the relay's process per delivered object, ns.
    pub cpu_ns_per_object: f64,
    /// Peak resident memory of the relay's process, bytes.
    pub rss_bytes: u64,
    /// Counts of what the relay's BPF programs forwarded, and their run time; only for relays that forward in the
    /// kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelWork>,
}

/// The results of one relay in chains of one length, over all rounds.
#[derive(Debug)]
pub struct ChainRow {
    pub contender: Contender,
    pub by: ChainBy,
    /// Number of relays in a row.
    pub length: usize,
    pub load: RowLoad,
    /// Measured values of each round, or the error that ended the round.
    pub rounds: Vec<Result<ChainFigures, String>>,
}

/// Names of the JSON fields that are `null` in a result row without a successful round.
const FIGURES: [&str; 7] =
    ["delivered", "lost", "latency_us", "wire_latency_us", "wire", "machine_ns_per_object", "hops"];

impl ChainRow {
    /// Returns the row's name: the relay, how many there are in a row, and how many subscribers.
    pub fn label(&self) -> String {
        let subscribers = match self.load.subscribers {
            1 => String::new(),
            subscribers => format!(", {subscribers} subscribers"),
        };
        format!("chain of {} x {}{subscribers}", self.length, self.contender.label())
    }

    /// Returns the median of each measured value over the successful rounds.
    pub fn median(&self) -> Option<ChainFigures> {
        serde_json::from_value(combine(&measured(&self.rounds), &middle)).ok()
    }

    pub fn error(&self) -> Option<String> {
        error(&self.rounds)
    }

    /// Returns how much each relay behind the first adds to the median wire latency, us: the difference to a single
    /// relay in the same round, divided by the number of further relays. Returns `None` if `rows` has no single relay.
    pub fn added_per_hop(&self, rows: &[Self]) -> Option<Spread> {
        let further = self.length.checked_sub(1).filter(|further| *further > 0)?;
        let is_single =
            |row: &&Self| row.length == 1 && (row.contender, row.load) == (self.contender, self.load);
        let single = rows.iter().find(is_single)?;
        let p50 = |round: &Result<ChainFigures, String>| Some(round.as_ref().ok()?.wire_latency_us?.p50);
        let both = self.rounds.iter().zip(&single.rounds);
        let added = both.filter_map(|(chain, single)| Some((p50(chain)? - p50(single)?) / further as f64));
        Spread::from_values(&added.collect::<Vec<_>>())
    }

    /// Returns a flat JSON object: the load, the medians, their spread (lowest and highest), and each round.
    pub fn json(&self, rows: &[Self]) -> Value {
        let mut row = Map::new();
        row.insert("relay".into(), json!(self.contender.relay()));
        row.insert("engine".into(), json!(self.contender.engine()));
        row.insert("gate".into(), json!(self.contender.gate()));
        row.insert("congestion_control".into(), json!(self.contender.congestion_control()));
        row.insert("max_delay".into(), json!(self.contender.max_delay()));
        row.insert("chain".into(), json!(self.length));
        row.insert("chain_by".into(), json!(self.by.name()));
        row.insert("subscribers".into(), json!(self.load.subscribers));
        row.insert("object_bytes".into(), json!(self.load.object_bytes));
        row.insert("rate_hz".into(), json!(self.load.rate_hz));
        let rounds = measured(&self.rounds);
        add_medians(&mut row, &rounds, &FIGURES);
        row.insert("added_per_hop_us".into(), json!(self.added_per_hop(rows)));
        add_rounds(&mut row, rounds, self.error());
        Value::Object(row)
    }
}
