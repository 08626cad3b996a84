//! A carrier that has fallen silent while it carries is asked whether it is still there, where another could go on.

use std::{sync::Arc, time::Duration};

use millrace_graft_proto::carry::frame::Frame;
use tokio::time::{Instant, sleep};

use super::{carrier::Carrier, carriers::Carriers};

const LOOK: Duration = Duration::from_millis(100);

/// Until it is closed.
pub async fn watch(carriers: Arc<Carriers>, carrier: Arc<Carrier>) {
    let peer = carrier.far.peer.as_str();
    let (mut heard, mut since, mut has_asked) = (carrier.heard(), Instant::now(), false);
    while !carrier.is_closed() {
        sleep(LOOK).await;
        if carrier.heard() != heard || carriers.connections(peer) == 0 || !carriers.has_several(peer) {
            (heard, since, has_asked) = (carrier.heard(), Instant::now(), false);
        } else if since.elapsed() >= carrier.patience() {
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

/// A stream of nothing: that it has come is acknowledged.
async fn ask(carrier: &Carrier) {
    let opened = tokio::time::timeout(LOOK, carrier.open()).await;
    if let Ok(Ok(mut stream)) = opened {
        stream.sender.push(&Frame::End);
        let _ = tokio::time::timeout(LOOK, stream.sender.flush()).await;
        stream.finish();
    }
}
