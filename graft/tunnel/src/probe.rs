//! Tests a carrier on which nothing arrives although tunnelled connections use it, if another carrier could replace it.

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
    let mut has_asked = false;
    while !carrier.is_closed() {
        sleep(LOOK).await;
        // A silent carrier without connections, or without another carrier to replace it, is left alone.
        if carrier.last_arrival() != heard || carriers.connections(peer) == 0 || !carriers.has_several(peer) {
            (heard, since, has_asked) = (carrier.last_arrival(), Instant::now(), false);
        } else if since.elapsed() >= carrier.patience() {
            // After one period in which nothing arrived, the peer is asked to answer an empty stream. If nothing
            // arrives in the next period either, the carrier is suspected to be dead.
            match has_asked {
                true => carriers.suspect(&carrier),
                false => {
                    ask(&carrier).await;
                    (since, has_asked) = (Instant::now(), true);
                }
            }
        }
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
