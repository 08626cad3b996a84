//! Subscribes at an additional publisher to tracks that have a publisher already.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::{context::SessionContext, publish::Publications};
use crate::{hub::OperatorCounters, live::LiveTrack};

/// The most SUBSCRIBE requests to additional publishers that may wait for an answer at the same time.
pub const AT_ONCE: usize = 8;
/// The most tracks that may wait for a SUBSCRIBE to an additional publisher.
const MAX_WAITING: usize = 4096;

/// The tracks that wait for a SUBSCRIBE at this peer, and the number of tasks that send these SUBSCRIBEs.
#[derive(Default)]
pub struct Backups(Mutex<BackupState>);

#[derive(Default)]
struct BackupState {
    /// The tracks that wait for a SUBSCRIBE to be sent, and their track numbers.
    waiting: VecDeque<(u32, Weak<LiveTrack>)>,
    /// The numbers of tracks that wait or are being subscribed to.
    known: HashSet<u32>,
    tasks: usize,
}

impl Backups {
    /// Queues tracks for a subscription at this session's peer, and starts tasks if fewer than [`AT_ONCE`] run.
    pub fn add(
        self: &Arc<Self>,
        context: &Arc<SessionContext>,
        publications: &Arc<Publications>,
        tracks: &[Arc<LiveTrack>],
    ) {
        let mut state = self.0.lock();
        for track in tracks {
            // A track that does not fit into the queue keeps only its present publisher.
            if state.waiting.len() >= MAX_WAITING {
                OperatorCounters::count(&context.hub().counters.backups_passed_over);
            } else if state.known.insert(track.number) {
                state.waiting.push_back((track.number, Arc::downgrade(track)));
            }
        }
        // Few tasks work on the queue, so that many tracks do not open as many request streams at once.
        while state.tasks < AT_ONCE.min(state.waiting.len()) {
            let backups = Arc::clone(self);
            let publications = Arc::clone(publications);
            let begun = context.spawn(async move {
                backups.run(&publications).await;
                Ok(())
            });
            if !begun {
                return; // the session is over
            }
            state.tasks += 1;
        }
    }

    /// Subscribes to waiting tracks, one after the other, until none is left.
    async fn run(&self, publications: &Arc<Publications>) {
        while let Some(track) = self.next() {
            let number = track.number;
            let wanted = track.subscription_count() > 0;
            if wanted && publications.subscribe(Arc::clone(&track)).await.is_err() {
                publications.relieve(&track).await;
            }
            self.0.lock().known.remove(&number);
        }
    }

    /// Returns the next waiting track that still exists. If there is none, the calling task ends.
    fn next(&self) -> Option<Arc<LiveTrack>> {
        let mut state = self.0.lock();
        while let Some((number, waiting)) = state.waiting.pop_front() {
            if let Some(track) = waiting.upgrade() {
                return Some(track);
            }
            state.known.remove(&number);
        }
        // The task count is decremented under the lock under which the queue was found empty, so that `add` starts a
        // task for a track that is queued next.
        state.tasks -= 1;
        None
    }
}
