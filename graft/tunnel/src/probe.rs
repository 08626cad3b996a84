//! Finds out whether a carrier works: one on which nothing arrives although tunnelled connections use it, if another
//! carrier could replace it, and one whose peer does not answer a question.

use std::{sync::Arc, time::Duration};

use millrace_graft_proto::carry::frame::CarryFrame;
use tokio::time::{Instant, sleep};

use super::{carrier::PeerCarrier, carriers::Carriers};

/// Interval of checks whether a carrier is silent.
const LOOK: Duration = Duration::from_millis(100);

/// Watches a carrier for silence until it is closed.
pub async fn watch(carriers: Arc<Carriers>, carrier: Arc<PeerCarrier>) {
    let peer = carrier.peer.name.as_str();
    let mut heard = carrier.last_arrival();
    let mut since = Instant::now();
    // The carrier's `answers` when the peer was asked.
    let mut asked = None;
    while !carrier.is_closed() {
        sleep(LOOK).await;
        let is_heard = match asked {
            Some(answers) => carrier.answers() != answers,
            None => carrier.last_arrival() != heard,
        };
        // A silent carrier without connections, or without another carrier to replace it, is left alone.
        if is_heard || carriers.connections(peer) == 0 || !carriers.has_several(peer) {
            (heard, since, asked) = (carrier.last_arrival(), Instant::now(), None);
        } else if since.elapsed() >= carrier.patience() {
            // After one period in which nothing arrived, the peer is asked to answer an empty stream. If it
            // acknowledges nothing in the next period either, the carrier is suspected to be dead.
            match asked {
                Some(_) => carriers.suspect(&carrier),
                None => {
                    asked = Some(carrier.answers());
                    ask(&carrier).await;
                    since = Instant::now();
                }
            }
        }
    }
}

/// The deadline for the first answer of the peer's tunnel broker to a question.
pub struct AnswerDeadline {
    pub at: Instant,
    patience: Duration,
    /// The carrier's `answers` when the peer was asked.
    answers: u64,
}

impl AnswerDeadline {
    /// The question must not have been sent yet.
    pub fn new(carrier: &PeerCarrier) -> Self {
        let patience = carrier.patience();
        Self { at: Instant::now() + patience, patience, answers: carrier.answers() }
    }

    /// Returns whether the peer has shown no sign of life until the deadline. If it has, the deadline is put off, and
    /// the peer is asked for another sign: what has arrived may acknowledge packets that were sent before the question.
    pub fn is_missed(&mut self, carrier: &Arc<PeerCarrier>) -> bool {
        let is_missed = carrier.answers() == self.answers;
        if !is_missed {
            let carrier = Arc::clone(carrier);
            self.answers = carrier.answers();
            tokio::spawn(async move { ask(&carrier).await });
        }
        self.patience *= 2;
        self.at = Instant::now() + self.patience;
        is_missed
    }
}

/// Opens and ends an empty stream, which the peer answers by ending its direction.
async fn ask(carrier: &PeerCarrier) {
    let opened = tokio::time::timeout(LOOK, carrier.open()).await;
    if let Ok(Ok(mut stream)) = opened {
        stream.sender.push(&CarryFrame::End);
        let _ = tokio::time::timeout(LOOK, stream.sender.flush()).await;
        stream.finish();
    }
}
