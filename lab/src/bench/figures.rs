//! What one run yields, and how the runs of one relay become a row.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::contender::Contender;
use super::owed::Owed;
use super::profile::Profile;
use super::wire::Matched;
use crate::stats::{Percentiles, median};
use crate::transport::Transport;

/// One relay, once. Figures that could not be had are `null`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Objects, over all subscribers.
    pub delivered: u64,
    pub lost: u64,
    /// From the publisher's application to the subscribers'.
    pub latency_us: Option<Percentiles>,
    /// The same of all objects owed. In rows by its own rules: what never came counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owed: Option<Owed>,
    /// From the relay's incoming interface to its outgoing one.
    pub wire_latency_us: Option<Percentiles>,
    pub cpu_ns_per_object: Cpu,
    pub syscalls_per_object: Option<f64>,
    pub packets_per_object: PacketsPerObject,
    /// Only of the kernel engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel>,
    /// Only with the gate: run time of its program per packet that came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_ns_per_packet: Option<f64>,
    /// Peak resident memory of the relay.
    pub rss_bytes: u64,
    /// How the wire latency was matched.
    pub wire: Matched,
    /// Only where it is measured, with the plain forwarder: median application latency while the probe is
    /// attached, minus the same without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe_adds_us: Option<f64>,
}

/// Per delivered object.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    pub machine: f64,
    pub relay: f64,
}

/// Of the links to both ends, whatever they carry, while nothing else was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PacketsPerObject {
    pub from_publisher: f64,
    /// Per object that one subscriber got.
    pub to_subscriber: f64,
}

/// What the kernel engine did, while system calls were counted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Of the packets with media that left, those that the kernel sent, percent.
    pub sent_percent: f64,
    /// Of the packets that the kernel sealed or opened, those whose keystream was there, percent.
    pub ahead_percent: f64,
    /// Run time of the engine's BPF programs per packet that they forwarded, other packets' runs included.
    pub bpf_ns_per_packet: f64,
    /// The same per copy.
    pub bpf_ns_per_copy: f64,
}

/// What the relay's BPF programs did, while system calls were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Programs {
    pub kernel: Option<Kernel>,
    pub gate_ns_per_packet: Option<f64>,
}

/// What was asked for in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Of publisher and subscribers; the plain forwarder's have none.
    pub transport: Transport,
    pub subscribers: usize,
    pub object_bytes: u32,
    pub rate_hz: u32,
}

/// All rounds of one relay under one load.
#[derive(Debug)]
pub struct Row {
    pub contender: Contender,
    pub profile: Profile,
    pub load: Load,
    /// One entry per round.
    pub rounds: Vec<Result<Figures, String>>,
}

impl Row {
    /// The median of each figure over the rounds that worked.
    pub fn median(&self) -> Option<Figures> {
        let rounds = self.measured();
        if rounds.is_empty() {
            return None;
        }
        let middle: Figures = serde_json::from_value(combine(&rounds, &middle)).ok()?;
        Some(Figures { owed: self.owed().map(|[_, middle, _]| middle), ..middle })
    }

    /// Lowest, middle and highest of each figure.
    fn owed(&self) -> Option<[Owed; 3]> {
        Owed::spread(&self.rounds.iter().flatten().filter_map(|figures| figures.owed).collect::<Vec<_>>())
    }

    pub fn error(&self) -> Option<String> {
        error(&self.rounds)
    }

    /// One flat object: what was asked, the medians, their spread (lowest and highest), and each round.
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
        let rounds = self.measured();
        match combine(&rounds, &middle) {
            Value::Object(median) => row.extend(median),
            _ => row.extend(FIGURES.map(|name| (name.to_owned(), Value::Null))),
        }
        row.insert("spread".into(), combine(&rounds, &extremes));
        if let Some([low, middle, high]) = self.owed() {
            row.insert("owed".into(), json!(middle));
            let [low, high] = [json!(low), json!(high)];
            if let Some(Value::Object(spread)) = row.get_mut("spread") {
                spread.insert("owed".into(), json!({ "low": low, "high": high }));
            }
        }
        if let Some(error) = self.error() {
            row.insert("error".into(), json!(error));
        }
        row.insert("rounds".into(), Value::Array(rounds));
        Value::Object(row)
    }

    fn measured(&self) -> Vec<Value> {
        self.rounds.iter().flatten().filter_map(|figures| serde_json::to_value(figures).ok()).collect()
    }
}

/// The figures of a row of which no round worked.
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

/// # Errors
/// No round of any row gave figures.
pub fn ensure_measured<'a, T: 'a>(
    rows: impl IntoIterator<Item = &'a [Result<T, String>]>,
) -> anyhow::Result<()> {
    let is_measured = rows.into_iter().flatten().any(Result::is_ok);
    anyhow::ensure!(is_measured, "nothing could be measured");
    Ok(())
}

/// The first error, and of how many rounds when not all have failed.
pub fn error<T>(rounds: &[Result<T, String>]) -> Option<String> {
    let errors: Vec<&String> = rounds.iter().filter_map(|round| round.as_ref().err()).collect();
    let first = errors.first()?;
    match errors.len() == rounds.len() {
        true => Some((*first).clone()),
        false => Some(format!("{} of {} rounds: {first}", errors.len(), rounds.len())),
    }
}

/// Applies `reduce` to each number over trees of one shape, leaving out what is `null`.
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

    fn figures(delivered: u64, p50: Option<f64>) -> Figures {
        let percentiles = p50.map(|p50| Percentiles { p50, p90: p50, p99: p50, max: 10.0 * p50 });
        Figures {
            delivered,
            lost: 0,
            latency_us: percentiles,
            owed: None,
            wire_latency_us: percentiles,
            cpu_ns_per_object: Cpu { machine: 10.0, relay: 5.0 },
            syscalls_per_object: Some(1.5),
            packets_per_object: PacketsPerObject { from_publisher: 1.0, to_subscriber: 1.1 },
            kernel: None,
            gate_ns_per_packet: None,
            rss_bytes: 4096,
            wire: Matched::default(),
            probe_adds_us: None,
        }
    }

    fn row(rounds: Vec<Result<Figures, String>>) -> Row {
        let transport = Transport::Webtransport;
        let load = Load { transport, subscribers: 8, object_bytes: 1200, rate_hz: 500 };
        Row { contender: Contender::User, profile: Profile::Clean, load, rounds }
    }

    #[test]
    fn medians_and_spread() {
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
    fn a_figure_that_is_not_always_there() {
        let row = row(vec![Ok(figures(10, None)), Ok(figures(10, Some(3.0)))]);
        assert_eq!(row.json()["latency_us"]["p50"], 3.0);
        assert_eq!(row.median(), Some(figures(10, Some(3.0))));
    }

    #[test]
    fn errors_stay_visible() {
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
