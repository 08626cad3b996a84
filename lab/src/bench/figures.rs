//! Measured values of one run of a relay, and the result row that combines several runs.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::contender::Contender;
use super::owed::OwedFigures;
use super::profile::LinkProfile;
use super::wire::Matched;
use crate::stats::{Percentiles, median};
use crate::transport::LabTransport;

/// Measured values of one run of a relay. A value that could not be measured is `null` in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RelayFigures {
    /// Number of objects that arrived, summed over all subscribers.
    pub delivered: u64,
    pub lost: u64,
    /// Time from the publisher's application to a subscriber's, us.
    pub latency_us: Option<Percentiles>,
    /// Latency and delivery of all objects that subscribers should have received, including those that never arrived.
    /// `OwedFigures::spread` combines this field over the rounds, since a latency may be infinite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owed: Option<OwedFigures>,
    /// Time from the relay's incoming interface to its outgoing one, us.
    pub wire_latency_us: Option<Percentiles>,
    pub cpu_ns_per_object: CpuPerObject,
    pub syscalls_per_object: Option<f64>,
    pub packets_per_object: PacketsPerObject,
    /// Counts of what the relay's BPF programs forwarded, and their run time; only for relays that forward in the
    /// kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelWork>,
    /// Run time of the packet gate's XDP program per packet that arrived, ns; only for relays behind a gate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_ns_per_packet: Option<f64>,
    /// Peak resident memory of the relay, bytes.
    pub rss_bytes: u64,
    /// Numbers of packets to the relay that were matched, or not, with the copies that the relay sent, to measure the
    /// wire latency.
    pub wire: Matched,
    /// Median application latency with the probe attached, minus the median without it, us. It is measured with the
    /// plain UDP forwarder only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_adds_us: Option<f64>,
}

/// CPU time per delivered object, ns: of the whole machine, and of the relay's process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CpuPerObject {
    pub machine: f64,
    pub relay: f64,
}

/// Packets of any kind on the links to publisher and subscribers, per object. They are counted in a separate period.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PacketsPerObject {
    pub from_publisher: f64,
    /// Packets to one subscriber per object that it received.
    pub to_subscriber: f64,
}

/// Counts of what the relay's BPF programs forwarded, and their run time. They are measured in the part of a run in
/// which system calls are counted, too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KernelWork {
    /// Share of the outgoing media packets that the kernel sent instead of the process, percent.
    pub sent_percent: f64,
    /// Share of the packets sealed or opened in the kernel whose keystream had been computed ahead, percent.
    pub ahead_percent: f64,
    /// Run time of the relay's BPF programs per packet that they forwarded, ns. It includes their runs on other
    /// packets.
    pub bpf_ns_per_packet: f64,
    /// Run time of the relay's BPF programs per copy that they sent, ns.
    pub bpf_ns_per_copy: f64,
}

/// Counts of what the BPF programs of relay and packet gate did, measured in the part of a run in which system calls
/// are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProgramWork {
    pub kernel: Option<KernelWork>,
    pub gate_ns_per_packet: Option<f64>,
}

/// The load under which a result row was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowLoad {
    /// Transport of publisher and subscribers. The plain forwarder's clients ignore it.
    pub transport: LabTransport,
    pub subscribers: usize,
    pub object_bytes: u32,
    pub rate_hz: u32,
}

/// The results of one relay under one load, over all rounds.
#[derive(Debug)]
pub struct RelayRow {
    pub contender: Contender,
    pub profile: LinkProfile,
    pub load: RowLoad,
    /// Measured values of each round, or the error that ended the round.
    pub rounds: Vec<Result<RelayFigures, String>>,
}

impl RelayRow {
    /// Returns the median of each measured value over the successful rounds.
    pub fn median(&self) -> Option<RelayFigures> {
        let rounds = measured(&self.rounds);
        if rounds.is_empty() {
            return None;
        }
        let middle: RelayFigures = serde_json::from_value(combine(&rounds, &middle)).ok()?;
        Some(RelayFigures { owed: self.owed().map(|[_, middle, _]| middle), ..middle })
    }

    /// Returns the lowest, the median and the highest values of latency and delivery, for the objects that subscribers
    /// should have received.
    fn owed(&self) -> Option<[OwedFigures; 3]> {
        OwedFigures::spread(
            &self.rounds.iter().flatten().filter_map(|figures| figures.owed).collect::<Vec<_>>(),
        )
    }

    pub fn error(&self) -> Option<String> {
        error(&self.rounds)
    }

    /// Returns a flat JSON object: the load, the medians, their spread (lowest and highest), and each round.
    pub fn json(&self) -> Value {
        let mut row = Map::new();
        row.insert("relay".into(), json!(self.contender.relay()));
        row.insert("engine".into(), json!(self.contender.engine()));
        row.insert("gate".into(), json!(self.contender.gate()));
        row.insert("congestion_control".into(), json!(self.contender.congestion_control()));
        row.insert("max_delay".into(), json!(self.contender.max_delay()));
        row.insert("transport".into(), json!(self.contender.over(self.load.transport)));
        row.insert("impair".into(), json!(self.profile.name()));
        row.insert("subscribers".into(), json!(self.load.subscribers));
        row.insert("object_bytes".into(), json!(self.load.object_bytes));
        row.insert("rate_hz".into(), json!(self.load.rate_hz));
        let rounds = measured(&self.rounds);
        add_medians(&mut row, &rounds, &FIGURES);
        if let Some([low, middle, high]) = self.owed() {
            row.insert("owed".into(), json!(middle));
            let [low, high] = [json!(low), json!(high)];
            if let Some(Value::Object(spread)) = row.get_mut("spread") {
                spread.insert("owed".into(), json!({ "low": low, "high": high }));
            }
        }
        add_rounds(&mut row, rounds, self.error());
        Value::Object(row)
    }
}

/// Names of the JSON fields that are `null` in a result row without a successful round.
const FIGURES: [&str; 8] = [
    "delivered",
    "lost",
    "latency_us",
    "wire_latency_us",
    "cpu_ns_per_object",
    "syscalls_per_object",
    "packets_per_object",
    "rss_bytes",
];

/// Fails unless at least one round was successful.
///
/// # Errors
///
/// Fails if every round of every row ended with an error.
pub fn ensure_measured<'a, T: 'a>(
    rows: impl IntoIterator<Item = &'a [Result<T, String>]>,
) -> anyhow::Result<()> {
    let is_measured = rows.into_iter().flatten().any(Result::is_ok);
    anyhow::ensure!(is_measured, "nothing could be measured");
    Ok(())
}

/// Returns the successful rounds as JSON.
pub fn measured<F: Serialize>(rounds: &[Result<F, String>]) -> Vec<Value> {
    rounds.iter().flatten().filter_map(|figures| serde_json::to_value(figures).ok()).collect()
}

/// Adds to a result row the median of each figure over these rounds, and their spread (lowest and highest). Without a
/// round, the figures `names` are `null`.
pub fn add_medians(row: &mut Map<String, Value>, rounds: &[Value], names: &[&str]) {
    match combine(rounds, &middle) {
        Value::Object(median) => row.extend(median),
        _ => row.extend(names.iter().map(|name| ((*name).to_owned(), Value::Null))),
    }
    row.insert("spread".into(), combine(rounds, &extremes));
}

/// Adds to a result row the error of its rounds, if there is one, and each round.
pub fn add_rounds(row: &mut Map<String, Value>, rounds: Vec<Value>, error: Option<String>) {
    row.extend(error.map(|error| ("error".to_owned(), json!(error))));
    row.insert("rounds".into(), Value::Array(rounds));
}

/// Returns the first round's error. If only some rounds failed, the text says how many.
pub fn error<T>(rounds: &[Result<T, String>]) -> Option<String> {
    let errors: Vec<&String> = rounds.iter().filter_map(|round| round.as_ref().err()).collect();
    let first = errors.first()?;
    match errors.len() == rounds.len() {
        true => Some((*first).clone()),
        false => Some(format!("{} of {} rounds: {first}", errors.len(), rounds.len())),
    }
}

/// Combines JSON trees of equal shape into one: each number becomes the result of `reduce` for that number's values in
/// all trees. Values that are `null` are left out.
pub fn combine(trees: &[Value], reduce: &impl Fn(&[f64], bool) -> Value) -> Value {
    let trees: Vec<&Value> = trees.iter().filter(|tree| !tree.is_null()).collect();
    match trees.first() {
        None => Value::Null,
        Some(Value::Object(first)) => {
            let field = |name: &String| {
                let fields: Vec<Value> = trees.iter().filter_map(|tree| tree.get(name).cloned()).collect();
                (name.clone(), combine(&fields, reduce))
            };
            Value::Object(first.keys().map(field).collect())
        }
        Some(Value::Array(first)) => {
            let item = |index: usize| {
                let items: Vec<Value> = trees.iter().filter_map(|tree| tree.get(index).cloned()).collect();
                combine(&items, reduce)
            };
            Value::Array((0..first.len()).map(item).collect())
        }
        Some(_) => {
            let numbers: Vec<f64> = trees.iter().filter_map(|tree| tree.as_f64()).collect();
            reduce(&numbers, trees.iter().all(|tree| tree.is_u64()))
        }
    }
}

pub fn middle(numbers: &[f64], whole: bool) -> Value {
    match median(numbers) {
        Some(middle) if whole => json!(middle.round() as u64),
        middle => json!(middle),
    }
}

pub fn extremes(numbers: &[f64], _whole: bool) -> Value {
    let low = numbers.iter().copied().min_by(f64::total_cmp);
    let high = numbers.iter().copied().max_by(f64::total_cmp);
    json!([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(delivered: u64, p50: Option<f64>) -> RelayFigures {
        let percentiles = p50.map(|p50| Percentiles { p50, p90: p50, p99: p50, max: 10.0 * p50 });
        RelayFigures {
            delivered,
            lost: 0,
            latency_us: percentiles,
            owed: None,
            wire_latency_us: percentiles,
            cpu_ns_per_object: CpuPerObject { machine: 10.0, relay: 5.0 },
            syscalls_per_object: Some(1.5),
            packets_per_object: PacketsPerObject { from_publisher: 1.0, to_subscriber: 1.1 },
            kernel: None,
            gate_ns_per_packet: None,
            rss_bytes: 4096,
            wire: Matched::default(),
            probe_adds_us: None,
        }
    }

    fn row(rounds: Vec<Result<RelayFigures, String>>) -> RelayRow {
        let transport = LabTransport::Webtransport;
        let load = RowLoad { transport, subscribers: 8, object_bytes: 1200, rate_hz: 500 };
        RelayRow { contender: Contender::User, profile: LinkProfile::Clean, load, rounds }
    }

    #[test]
    fn result_row_has_median_minimum_and_maximum_of_rounds() {
        let row =
            row(vec![Ok(figures(10, Some(3.0))), Ok(figures(30, Some(1.0))), Ok(figures(11, Some(2.0)))]);
        assert_eq!(row.median(), Some(figures(11, Some(2.0))));
        let json = row.json();
        assert_eq!(json["relay"], "millrace");
        assert_eq!((&json["engine"], &json["gate"]), (&json!("user"), &json!(false)));
        assert_eq!(json["transport"], "webtransport");
        assert_eq!(json["delivered"], 11);
        assert_eq!(json["latency_us"]["max"], 20.0);
        assert_eq!(json["spread"]["delivered"], json!([10.0, 30.0]));
        assert_eq!(json["spread"]["latency_us"]["p50"], json!([1.0, 3.0]));
        assert_eq!(json["rounds"].as_array().map(Vec::len), Some(3));
        assert_eq!(json.get("error"), None);
    }

    #[test]
    fn median_leaves_out_rounds_in_which_the_figure_is_missing() {
        let row = row(vec![Ok(figures(10, None)), Ok(figures(10, Some(3.0)))]);
        assert_eq!(row.json()["latency_us"]["p50"], 3.0);
        assert_eq!(row.median(), Some(figures(10, Some(3.0))));
    }

    #[test]
    fn errors_of_rounds_stay_in_the_result_row() {
        let none = row(vec![Err("missing".into()), Err("missing".into())]);
        assert_eq!(none.median(), None);
        assert_eq!(none.json()["error"], "missing");
        assert_eq!(none.json()["subscribers"], 8);
        assert!(FIGURES.iter().all(|name| none.json().get(name) == Some(&Value::Null)));
        let some = row(vec![Ok(figures(10, None)), Err("died".into())]);
        assert_eq!(some.json()["error"], "1 of 2 rounds: died");
        assert_eq!(some.json()["delivered"], 10);
    }
}
