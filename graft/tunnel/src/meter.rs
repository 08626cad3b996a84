//! Counts the bytes and turns (requests that follow an answer) of one tunnelled connection, and reports both to
//! [`Purposes`] when the connection ends.

use std::sync::Arc;

use millrace_graft_proto::select::{
    kind::{Expected, FlowFigures, TrafficClass, number_of},
    profile::TrafficProfile,
};

use super::purposes::Purposes;

/// Counts the bytes and turns of one tunnelled connection.
pub struct TransferMeter {
    purposes: Arc<Purposes>,
    kind: TrafficClass,
    expected: Expected,
    /// Number that identifies the connection's remote host in `purposes`.
    peer: u64,
    flow: FlowFigures,
    /// True if the server has sent bytes since the client last sent some.
    was_answered: bool,
    /// Number of turns: how often the client has sent again after an answer.
    turns: u32,
}

impl TransferMeter {
    pub fn new(purposes: &Arc<Purposes>, kind: TrafficClass, peer: std::net::IpAddr) -> Self {
        Self {
            purposes: purposes.clone(),
            expected: purposes.expected(&kind, peer),
            kind,
            peer: number_of(peer),
            flow: FlowFigures::default(),
            was_answered: false,
            turns: 0,
        }
    }

    /// Returns how the connection is expected to be used, as predicted when it began.
    pub fn expected(&self) -> &Expected {
        &self.expected
    }

    /// Reports whether the streams of other connections should be sent first, since this connection tolerates delay.
    pub fn yields(&self) -> bool {
        self.expected.profile == TrafficProfile::Insensitive
    }

    /// Counts bytes that the application on this host (`is_own`) or its peer has sent.
    pub fn note(&mut self, is_own: bool, bytes: &[u8]) {
        let by_client = is_own == self.kind.is_client;
        let length = bytes.len() as u64;
        if by_client {
            self.flow.asked += length;
            // The client has sent again after the server has answered, which counts as a turn.
            self.turns = self.turns.saturating_add(u32::from(self.was_answered));
        } else {
            self.flow.answered += length;
        }
        self.was_answered = !by_client;
    }

    /// Returns how often the client has sent again after an answer.
    pub fn turns(&self) -> u32 {
        self.turns
    }

    /// Records the counts of an established connection that is over.
    pub fn end(&mut self) {
        let flow = FlowFigures { turns: Some(self.turns), ..self.flow };
        self.purposes.note(self.kind.clone(), self.peer, flow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(is_client: bool) -> TrafficClass {
        TrafficClass { is_client, port: 7100, command: String::new(), cgroup: 0 }
    }

    #[tokio::test]
    async fn transfer_meters_of_both_ends_count_the_same_bytes() {
        for is_client in [true, false] {
            let purposes = Arc::new(Purposes::default());
            for peer in 1..=4 {
                let mut meter = TransferMeter::new(&purposes, kind(is_client), [10, 0, 0, peer].into());
                for _ in 0..5 {
                    meter.note(is_client, &[0; 100]);
                    meter.note(is_client, &[0; 100]);
                    meter.note(!is_client, &[0; 300]);
                }
                meter.end();
            }
            let kinds = purposes.kinds().lock();
            assert_eq!(kinds.iter().collect::<Vec<_>>(), [&kind(is_client)]);
            // The connection above had 5 exchanges, with 2500 bytes in each direction in total.
            let expected = millrace_graft::Settings::default().expected(&kind(is_client), &kinds);
            assert_eq!(
                (expected.profile, expected.size_kib),
                (TrafficProfile::Time, Some(2)),
                "{}",
                expected.words
            );
        }
    }
}
