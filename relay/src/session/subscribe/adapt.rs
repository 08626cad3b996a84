//! A subscription that is served from whichever rendition its path has room for.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    GroupOrder, TrackName,
    tracks::adapt::{Decider, Ladder, Sample},
};
use millrace_transport::Connection;
use tokio::{task::JoinSet, time::sleep};
use tracing::debug;

use super::Entry;
use crate::{
    access::{
        grant::{Action, Resource},
        rights::Rights,
    },
    live::LiveTrack,
};

/// How often it looks at what the path carries.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// Ladders of which a session's part is remembered. A session that asks for more is left alone.
const MAX_LADDERS: usize = 16;

/// What a session asked for of each ladder.
#[derive(Default)]
pub(super) struct Asked {
    ladders: Vec<(Ladder, TrackName)>,
    /// It has asked for more than one rendition of the same, and chooses itself from then on.
    chooses: bool,
}

impl Asked {
    /// The session asks for a track of a ladder. Returns whether it leaves the choice to the relay.
    fn note(&mut self, ladder: &Ladder, track: &TrackName) -> bool {
        let same = |(known, _): &&(Ladder, TrackName)| known.position(track).is_some();
        match self.ladders.iter().find(same) {
            Some((_, asked)) => self.chooses |= asked != track,
            None if self.ladders.len() >= MAX_LADDERS => self.chooses = true,
            None => self.ladders.push((ladder.clone(), track.clone())),
        }
        !self.chooses
    }
}

impl Entry {
    /// Serves the subscription from the rendition that fits, for as long as it lasts. Returns if it is none that is adapted.
    pub(super) async fn adapt(&self, rights: Option<&Arc<Rights>>) {
        let context = self.context();
        let (hub, requester) = (context.hub(), context.requester());
        let Some(rights) = rights.filter(|_| !context.is_upstream()) else { return };
        let asked = self.track().name();
        let Some(ladder) = hub.ladder(asked, requester).await else { return };
        let leaves_it = self.family.state.lock().asked.note(&ladder, asked);
        if !leaves_it || self.subscription().options().order == GroupOrder::Descending {
            return;
        }
        let Some(rungs) = ladder.up_to(asked) else { return };
        let (mut found, mut lent) = (Vec::new(), Vec::new());
        for rung in rungs.rungs() {
            if let Some((track, right)) = self.rendition(&rung.track, rights).await {
                lent.extend(right.map(|right| (Arc::clone(&track), right)));
                found.push((track, rung.bitrate));
            }
        }
        let (tracks, bitrates): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        if tracks.len() > 1 {
            self.keep_choosing(tracks, bitrates, lent).await;
        }
    }

    /// A track that may stand for the one that was asked for, and the right to it; or that one itself, to which the request has
    /// the right.
    async fn rendition(
        &self,
        name: &TrackName,
        rights: &Rights,
    ) -> Option<(Arc<LiveTrack>, Option<Arc<Rights>>)> {
        if name == self.track().name() {
            return Some((Arc::clone(self.track()), None));
        }
        let right = rights.derive(Action::Subscribe, Resource::track(name)).ok()?;
        let (hub, requester) = (self.context().hub(), self.context().requester());
        let track = hub.established(name, requester, Duration::ZERO, None).await.ok()?;
        // The subscriber was told those of its own.
        let alike = track.data.properties() == self.track().data.properties();
        alike.then_some((track, Some(right)))
    }

    /// Looks at the path again and again. The track that was asked for is the last of `tracks`. `lent`: the others, each as long
    /// as there is a right to it.
    async fn keep_choosing(
        &self,
        tracks: Vec<Arc<LiveTrack>>,
        bitrates: Vec<u64>,
        lent: Vec<(Arc<LiveTrack>, Arc<Rights>)>,
    ) {
        let (subscription, top) = (self.subscription(), tracks.len() - 1);
        if !subscription.adapt(tracks.iter().map(|track| track.reference()).collect(), top) {
            return;
        }
        let tracks = self.renditions.get_or_init(|| tracks);
        for track in &tracks[..top] {
            track.join(subscription);
        }
        debug!(session = self.context().id(), track = %self.track().name().typed(), renditions = tracks.len(), "adapted");
        let mut ends = JoinSet::new();
        for (track, right) in lent {
            ends.spawn(async move {
                right.ended().await;
                track
            });
        }
        let mut decider = Decider::new(bitrates, top);
        loop {
            tokio::select! {
                () = sleep(LOOK) => {}
                Some(Ok(track)) = ends.join_next() => self.give_up(&track),
            }
            let now = Instant::now();
            let fits = decider.look(&sample(self.context().connection(), now));
            let chooses = self.family.state.lock().asked.chooses;
            if let Some((before, after)) = subscription.choose(if chooses { top } else { fits }, now) {
                // What was prepared for the one before has been taken back.
                tracks[after].offer_openings(subscription);
                self.context().hub().counters.count_switch(before, after);
            }
        }
    }

    /// Sends nothing more of a rendition to the subscriber, whose right to it is over.
    fn give_up(&self, track: &LiveTrack) {
        let now = Instant::now();
        track.unsubscribe(self.subscription(), now);
        self.subscription().give_up(track.number, now);
        self.context().connection().transmit_now();
        debug!(
            session = self.context().id(),
            track = %track.name().typed(),
            "the right to a rendition is over: the subscription goes on with others"
        );
    }
}

pub(super) fn sample(connection: &Connection, now: Instant) -> Sample {
    Sample::of(&connection.downstream().room(now), now)
}
