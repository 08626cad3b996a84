//! The peer as a publisher that the hub asks.

use std::sync::Arc;

use millrace_moq::{GroupOrder, Location, TrackName, code, message::RequestError};
use tokio::sync::mpsc;

use super::{
    backups::Backups, context::Context, publish::Publications, rights::request_error,
    upstream_fetch::UpstreamFetches,
};
use crate::{
    access::Refusal,
    hub::{self, Answer, Fetching},
    live::LiveTrack,
};

pub struct Publisher {
    pub context: Arc<Context>,
    pub publications: Arc<Publications>,
    pub fetches: Arc<UpstreamFetches>,
    pub backups: Arc<Backups>,
}

impl hub::Publisher for Publisher {
    fn id(&self) -> u64 {
        self.context.id()
    }

    fn is_upstream(&self) -> bool {
        self.context.is_upstream()
    }

    fn subscribe(&self, track: Arc<LiveTrack>, answers: mpsc::Sender<Answer>) {
        let (publications, unheard) = (Arc::clone(&self.publications), answers.clone());
        let begun = self.context.spawn(async move {
            let _ = answers.send(publications.subscribe(track).await).await; // nobody waits any more
            Ok(())
        });
        if !begun {
            let gone = RequestError::new(code::Request::INTERNAL_ERROR, "the publisher is gone");
            let _ = unheard.try_send(Err(gone)); // nobody waits
        }
    }

    fn back_up(&self, tracks: Vec<Arc<LiveTrack>>) {
        self.backups.add(&self.context, &self.publications, &tracks);
    }

    fn fetch(&self, track: TrackName, range: (Location, Location), order: GroupOrder) -> Fetching<'_> {
        Box::pin(async move {
            let live = self.context.hub().find_track(&track);
            let rights = self.context.authority().may_serve(&track)?;
            if live.is_some_and(|live| !live.is_open_to(&rights.identity())) {
                return Err(request_error(Refusal::Taken));
            }
            self.fetches.fetch(track, range, order).await
        })
    }
}
