//! The outcome of a fault, which is one row of the result table.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Serialize;

use super::end::{DirectionEnd, EndReport};
use crate::bench::table::columns;

#[derive(Debug, Default, Serialize)]
pub struct FaultOutcome {
    pub fault: String,
    pub carrier: String,
    /// Number of times that the fault was produced.
    pub runs: u64,
    pub connections: u64,
    /// Number of bytes that arrived, in both directions.
    pub bytes: u64,
    /// Connections that delivered all bytes in both directions: the hashes of sent and received bytes agree.
    pub whole: u64,
    /// Connections that were reset on both sides. All bytes before the reset were correct.
    pub reset: u64,
    /// Connections that delivered all bytes, but that the client's daemon made outside of the tunnel, from a port of
    /// its own.
    pub by_broker: u64,
    /// Longest time without data on either side of a connection that delivered all bytes, ms.
    pub longest_pause_ms: f64,
    /// Counters in the status of each daemon, by host.
    pub counted: BTreeMap<String, BTreeMap<String, u64>>,
    /// Observations as text, such as the time until a fault was noticed.
    pub seen: Vec<String>,
    /// Errors. The list is empty if the fault had only the expected effects.
    pub wrong: Vec<String>,
}

impl FaultOutcome {
    pub fn new(fault: &str, carrier: &str) -> Self {
        Self { fault: fault.to_owned(), carrier: carrier.to_owned(), runs: 1, ..Self::default() }
    }

    pub fn label(&self) -> String {
        format!("{}, {}", self.fault, self.carrier)
    }

    pub fn check(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.wrong.push(otherwise());
        }
    }

    /// Adds one connection to the outcome, from the reports of client and server.
    pub fn note(&mut self, id: u64, near: &EndReport, far: Option<&EndReport>) {
        self.connections += 1;
        self.bytes += near.received + far.map_or(0, |far| far.received);
        match (near.came, far.map(|far| far.came)) {
            (DirectionEnd::Whole, Some(DirectionEnd::Whole)) => {
                self.note_whole(id, near, far);
            }
            // The server has no report of a connection whose first message never arrived.
            (DirectionEnd::Reset | DirectionEnd::Refused, Some(DirectionEnd::Reset) | None) => {
                self.reset += 1
            }
            (near, far) => {
                let far = far.map_or_else(|| "nothing".to_owned(), |far| format!("{far:?}"));
                self.wrong.push(format!("connection {id}: {near:?} at the client, {far} at the server"));
            }
        }
    }

    fn note_whole(&mut self, id: u64, near: &EndReport, far: Option<&EndReport>) {
        let Some(far) = far else { return };
        let is_same =
            |from: &EndReport, to: &EndReport| from.sent == to.received && from.sent_hash == to.received_hash;
        self.longest_pause_ms = self.longest_pause_ms.max(near.pause_ms).max(far.pause_ms);
        match is_same(near, far) && is_same(far, near) {
            true => self.whole += 1,
            false => self.wrong.push(format!("connection {id}: the two sides have different hashes")),
        }
        // Both sides must see each other's true IP address, as without daemons. A connection that the client's daemon
        // makes outside of the tunnel has a port of that daemon.
        let address = |at: Option<SocketAddr>| at.map(|at| at.ip());
        if address(near.own) != address(far.peer) || near.peer != far.own {
            self.wrong.push(format!("connection {id}: the other side sees {:?} as {:?}", near.own, far.peer));
        }
        self.by_broker += u64::from(near.own != far.peer);
    }

    fn counted(&self) -> String {
        let of = |(host, counts): (&String, &BTreeMap<String, u64>)| {
            let counts: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
            format!("{host}: {}", counts.join(", "))
        };
        self.counted.iter().map(of).collect::<Vec<_>>().join("; ")
    }
}

pub fn render(rows: &[FaultOutcome]) -> String {
    let head = [
        "fault",
        "carrier",
        "runs",
        "connections",
        "MB",
        "whole",
        "reset",
        "longest pause ms",
        "as it should be",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        lines.push(vec![
            row.fault.clone(),
            row.carrier.clone(),
            row.runs.to_string(),
            row.connections.to_string(),
            format!("{:.1}", row.bytes as f64 / 1e6),
            row.whole.to_string(),
            row.reset.to_string(),
            format!("{:.0}", row.longest_pause_ms),
            if row.wrong.is_empty() { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    let mut text = columns(&lines);
    for row in rows {
        text += &format!("{}: {}\n", row.label(), row.counted());
        if row.by_broker > 0 {
            text += &format!("    in place by the client's broker: {}\n", row.by_broker);
        }
        for line in &row.seen {
            text += &format!("    {line}\n");
        }
        for line in &row.wrong {
            text += &format!("    WRONG: {line}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(came: DirectionEnd, sent: &str, received: &str) -> EndReport {
        EndReport {
            came,
            sent: sent.len() as u64,
            received: received.len() as u64,
            sent_hash: sent.into(),
            received_hash: received.into(),
            pause_ms: 1.0,
            peer: None,
            own: None,
        }
    }

    #[test]
    fn connection_whose_ends_report_differently_is_an_error() {
        use DirectionEnd::{Differs, Refused, Reset, Short, Silent, Whole};
        let table = [
            (report(Whole, "a", "b"), Some(report(Whole, "b", "a")), (1, 0, 0)),
            (report(Whole, "a", "b"), Some(report(Whole, "b", "c")), (0, 0, 1)),
            (report(Reset, "a", ""), Some(report(Reset, "", "a")), (0, 1, 0)),
            (report(Refused, "", ""), None, (0, 1, 0)),
            (report(Reset, "a", ""), Some(report(Silent, "", "a")), (0, 0, 1)),
            (report(Short, "a", ""), Some(report(Reset, "", "a")), (0, 0, 1)),
            (report(Whole, "a", ""), None, (0, 0, 1)),
            (report(Differs, "a", ""), Some(report(Reset, "", "a")), (0, 0, 1)),
        ];
        for (near, far, (whole, reset, wrong)) in table {
            let mut outcome = FaultOutcome::new("test", "none");
            outcome.note(7, &near, far.as_ref());
            assert_eq!(
                (outcome.whole, outcome.reset, outcome.wrong.len()),
                (whole, reset, wrong),
                "{near:?} {far:?}"
            );
        }
    }
}
