//! Serves a subscription from the rendition that fits the bandwidth of the subscriber's path.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    GroupOrder, TrackName,
    tracks::adapt::{ConnectionSample, Decider, Ladder},
};
use millrace_transport::Connection;
use tokio::{task::JoinSet, time::sleep};
use tracing::debug;

use super::SubscriptionEntry;
use crate::live::LiveTrack;
use millrace_access::{
    grant::{Action, Resource},
    rights::Rights,
};

/// How often the estimated bandwidth of the path is checked.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// The most ladders (sets of renditions of the same content) that are remembered for a session. If the session asks for
/// tracks of more ladders, the relay does not adapt its subscriptions.
const MAX_LADDERS: usize = 16;

/// The tracks that a session asked for: one for each ladder, a set of renditions of the same content.
#[derive(Default)]
pub(super) struct LadderTracks {
    ladders: Vec<(Ladder, TrackName)>,
    /// True once the session has asked for two renditions of one ladder. It chooses renditions itself, so the relay
    /// does not.
    chooses: bool,
}

impl LadderTracks {
    /// Records that the session asks for a track of a ladder. Returns false if the session chooses renditions itself.
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

impl SubscriptionEntry {
    /// Serves the subscription from the best fitting rendition until it ends. Returns at once if the rendition is not
    /// adapted to the path's bandwidth.
    pub(super) async fn adapt(&self, rights: Option<&Arc<Rights>>) {
        let context = self.context();
        let hub = context.hub();
        let requester = context.requester();
        // A relay gets the requested rendition, since it adapts the rendition for each of its subscribers.
        let Some(rights) = rights.filter(|_| !context.is_dialed()) else { return };
        let asked = self.track().name();
        let Some(ladder) = hub.ladder(asked, requester).await else { return };
        let leaves_it = self.family.state.lock().asked.note(&ladder, asked);
        // The rendition of a subscription in descending order is not adapted: a switch applies only to groups with
        // larger IDs than those sent so far.
        if !leaves_it || self.subscription().options().order == GroupOrder::Descending {
            return;
        }
        let Some(rungs) = ladder.up_to(asked) else { return };
        let mut found = Vec::new();
        let mut lent = Vec::new();
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

    /// Returns a rendition's track and the right to it. For the requested track no further right is needed, so the
    /// right is `None`.
    async fn rendition(
        &self,
        name: &TrackName,
        rights: &Rights,
    ) -> Option<(Arc<LiveTrack>, Option<Arc<Rights>>)> {
        if name == self.track().name() {
            return Some((Arc::clone(self.track()), None));
        }
        let right = rights.derive(Action::Subscribe, Resource::track(name)).ok()?;
        let hub = self.context().hub();
        let requester = self.context().requester();
        let track = hub.established(name, requester, Duration::ZERO, None).await.ok()?;
        // The subscriber was told the properties of the requested track, so another rendition must have the same
        // properties.
        let alike = track.data.properties() == self.track().data.properties();
        alike.then_some((track, Some(right)))
    }

    /// Chooses between `tracks` until the subscription ends. The requested track is the last of them. `lent` has the
    /// subscriber's right to each other track. A track is no longer sent when this right ends.
    async fn keep_choosing(
        &self,
        tracks: Vec<Arc<LiveTrack>>,
        bitrates: Vec<u64>,
        lent: Vec<(Arc<LiveTrack>, Arc<Rights>)>,
    ) {
        let subscription = self.subscription();
        let top = tracks.len() - 1;
        if !subscription.adapt(tracks.iter().map(|track| track.reference()).collect(), top) {
            return;
        }
        let tracks = self.renditions.get_or_init(|| tracks);
        for track in &tracks[..top] {
            track.join(subscription);
        }
        debug!(
            session = self.context().id(),
            track = %self.track().name().typed(),
            renditions = tracks.len(),
            "the subscription adapts its rendition to the network path"
        );
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
            // `decider` returns the rendition whose bitrate fits the path's bandwidth, with hysteresis.
            let now = Instant::now();
            let fits = decider.look(&sample(self.context().connection(), now));
            let chooses = self.family.state.lock().asked.chooses;
            if let Some((before, after)) = subscription.choose(if chooses { top } else { fits }, now) {
                // The streams that the kernel had prepared for the previous rendition were withdrawn, so new ones are
                // offered.
                tracks[after].offer_openings(subscription);
                self.context().hub().counters.count_switch(before, after);
            }
        }
    }

    /// Stops sending a rendition because the subscriber's right to it has ended.
    fn give_up(&self, track: &LiveTrack) {
        let now = Instant::now();
        track.unsubscribe(self.subscription(), now);
        self.subscription().give_up(track.number, now);
        self.context().connection().transmit_now();
        debug!(
            session = self.context().id(),
            track = %track.name().typed(),
            "the subscriber's right to a rendition has ended: the subscription goes on with the other renditions"
        );
    }
}

pub(super) fn sample(connection: &Connection, now: Instant) -> ConnectionSample {
    ConnectionSample::from_room(&connection.downstream().room(now), now)
}
