//! Tracks of other publishers that we subscribe to at this one too.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::{context::Context, publish::Publications};
use crate::{hub::Counters, live::LiveTrack};

/// SUBSCRIBEs of this kind that wait for their answer at a time.
pub const AT_ONCE: usize = 8;
/// Tracks that wait for their turn.
const MAX_WAITING: usize = 4096;

/// The tracks that wait, and how many tasks see to them.
#[derive(Default)]
pub struct Backups(Mutex<State>);

#[derive(Default)]
struct State {
    /// By their numbers.
    waiting: VecDeque<(u32, Weak<LiveTrack>)>,
    /// Numbers of the tracks that wait or are being subscribed to.
    known: HashSet<u32>,
    tasks: usize,
}

impl Backups {
    /// Has `tracks` wait for their turn.
    pub fn add(
        self: &Arc<Self>,
        context: &Arc<Context>,
        publications: &Arc<Publications>,
        tracks: &[Arc<LiveTrack>],
    ) {
        let mut state = self.0.lock();
        for track in tracks {
            if state.waiting.len() >= MAX_WAITING {
                Counters::count(&context.hub().counters.backups_passed_over);
            } else if state.known.insert(track.number) {
                state.waiting.push_back((track.number, Arc::downgrade(track)));
            }
        }
        while state.tasks < AT_ONCE.min(state.waiting.len()) {
            let (backups, publications) = (Arc::clone(self), Arc::clone(publications));
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

    /// Subscribes to one after the other.
    async fn run(&self, publications: &Arc<Publications>) {
        while let Some(track) = self.next() {
            let (number, wanted) = (track.number, track.subscription_count() > 0);
            if wanted && publications.subscribe(Arc::clone(&track)).await.is_err() {
                publications.relieve(&track).await;
            }
            self.0.lock().known.remove(&number);
        }
    }

    /// The next track that is still there; without one, the task ends.
    fn next(&self) -> Option<Arc<LiveTrack>> {
        let mut state = self.0.lock();
        while let Some((number, waiting)) = state.waiting.pop_front() {
            if let Some(track) = waiting.upgrade() {
                return Some(track);
            }
            state.known.remove(&number);
        }
        state.tasks -= 1;
        None
    }
}
