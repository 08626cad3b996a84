//! Messages between the worker processes `tunnel` and `grafts`: reports of tunnelled connections, from
//! which the model learns that chooses between the tunnel and congestion controls.
//!
//! `tunnel` reports, and `grafts` answers each report. `grafts` trusts no report: its lists and texts are bounded.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use anyhow::ensure;
use millrace_graft::CarriedFlow;
use millrace_graft_proto::select::kind::ClassLesson;
use serde::{Deserialize, Serialize};

/// Interval of reports while there is something to report.
pub const REPORT: Duration = Duration::from_millis(100);
/// Most connections in a report. A longer queue is reported in several reports.
pub const REPORTED_MAX: usize = 1000;
/// Most hosts with a tunnel broker in a report.
const CARRIERS_MAX: usize = 4096;
/// Longest report in bytes.
pub const BYTES_MAX: u64 = 4 << 20;
/// Longest text in a report, in bytes.
const TEXT_MAX: usize = 512;

/// A report of the worker process `tunnel`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunnelReport {
    /// True in the first report over a connection.
    pub is_first: bool,
    /// Hosts with a tunnel broker, and whether a carrier to each is ready ("warm").
    pub carriers: BTreeMap<IpAddr, bool>,
    /// Tunnelled connections that have begun or ended since the previous report, in order.
    pub flows: Vec<CarriedFlow>,
    /// Connections that have ended, from which the use of new ones is predicted.
    pub lessons: Vec<ClassLesson>,
}

/// The answer of the worker process `grafts`.
#[derive(Debug, Serialize, Deserialize)]
pub struct TunnelAnswer {
    /// Connections without a tunnel that have ended since the previous report, or all that are remembered.
    pub lessons: Vec<ClassLesson>,
}

impl TunnelReport {
    /// Checks the lengths of lists and texts.
    ///
    /// # Errors
    /// One of them is too long.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.carriers.len() <= CARRIERS_MAX
                && self.flows.len() <= REPORTED_MAX
                && self.lessons.len() <= REPORTED_MAX,
            "a list is too long"
        );
        let flows = self.flows.iter().flat_map(|flow| match flow {
            CarriedFlow::Began(began) => {
                [began.carrier.as_deref(), began.command.as_deref(), Some(began.expected.words.as_str())]
            }
            CarriedFlow::Ended { flow, .. } => [flow.command.as_deref(), Some(flow.candidate.as_str()), None],
        });
        let lessons = self.lessons.iter().map(|lesson| Some(lesson.kind.command.as_str()));
        let mut texts = flows.chain(lessons).flatten();
        ensure!(texts.all(|text| text.len() <= TEXT_MAX), "a text is too long");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft_proto::select::kind::{FlowFigures, Saw, TrafficClass};

    use super::*;

    #[test]
    fn report_with_too_long_lists_or_texts_is_refused() {
        let lesson = |bytes: usize| ClassLesson {
            kind: TrafficClass { is_client: true, port: 80, command: "a".repeat(bytes), cgroup: 0 },
            seen: Saw::Flow(1, FlowFigures::default()),
        };
        let report =
            |lessons| TunnelReport { is_first: true, carriers: BTreeMap::new(), flows: Vec::new(), lessons };
        assert!(report(vec![lesson(TEXT_MAX); REPORTED_MAX]).check().is_ok());
        assert!(report(vec![lesson(TEXT_MAX + 1)]).check().is_err());
        assert!(report(vec![lesson(1); REPORTED_MAX + 1]).check().is_err());
        let text = serde_json::to_string(&report(vec![lesson(1)])).unwrap();
        assert!(serde_json::from_str::<TunnelReport>(&text).is_ok());
        assert!(serde_json::from_str::<TunnelReport>(&text.replacen('{', "{\"more\":1,", 1)).is_err());
    }
}
