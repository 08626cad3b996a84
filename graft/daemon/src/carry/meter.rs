//! The meter of one carried connection counts its bytes and turns. It tells them to [`Purposes`] at the end.

use std::sync::Arc;

use millrace_graft_proto::select::{
    kind::{Expected, Flow, Kind, number_of},
    profile::Profile,
};

use super::purposes::Purposes;

pub struct Meter {
    purposes: Arc<Purposes>,
    kind: Kind,
    expected: Expected,
    /// A number that stands for the other host.
    peer: u64,
    flow: Flow,
    /// The server has spoken since the client has.
    was_answered: bool,
    turns: u32,
}

impl Meter {
    pub fn new(purposes: &Arc<Purposes>, kind: Kind, peer: std::net::IpAddr) -> Self {
        Self {
            purposes: purposes.clone(),
            expected: purposes.expected(&kind, peer),
            kind,
            peer: number_of(peer),
            flow: Flow::default(),
            was_answered: false,
            turns: 0,
        }
    }

    /// What it was taken to be for when it began.
    pub fn expected(&self) -> &Expected {
        &self.expected
    }

    /// Whether others go first.
    pub fn yields(&self) -> bool {
        self.expected.profile == Profile::Insensitive
    }

    /// Of the application at this end, or (`!is_own`) of the other one.
    pub fn note(&mut self, is_own: bool, bytes: &[u8]) {
        let by_client = is_own == self.kind.is_client;
        let length = bytes.len() as u64;
        if by_client {
            self.flow.asked += length;
            self.turns = self.turns.saturating_add(u32::from(self.was_answered));
        } else {
            self.flow.answered += length;
        }
        self.was_answered = !by_client;
    }

    /// How often the client has spoken again after it had heard something.
    pub fn turns(&self) -> u32 {
        self.turns
    }

    /// It is over, and was one.
    pub fn end(&mut self) {
        let flow = Flow { turns: Some(self.turns), ..self.flow };
        self.purposes.note(self.kind.clone(), self.peer, flow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(is_client: bool) -> Kind {
        Kind { is_client, port: 7100, command: String::new(), cgroup: 0 }
    }

    #[tokio::test]
    async fn both_ends_count_alike() {
        for is_client in [true, false] {
            let purposes = Arc::new(Purposes::default());
            for peer in 1..=4 {
                let mut meter = Meter::new(&purposes, kind(is_client), [10, 0, 0, peer].into());
                for _ in 0..5 {
                    meter.note(is_client, &[0; 100]);
                    meter.note(is_client, &[0; 100]);
                    meter.note(!is_client, &[0; 300]);
                }
                meter.end();
            }
            let kinds = purposes.kinds();
            let kinds = kinds.lock().unwrap();
            assert_eq!(kinds.iter().collect::<Vec<_>>(), [&kind(is_client)]);
            // 2500 bytes in 5 exchanges each.
            let expected = millrace_graft::Settings::default().expected(&kind(is_client), &kinds);
            assert_eq!((expected.profile, expected.size_kib), (Profile::Time, Some(2)), "{}", expected.words);
        }
    }
}
