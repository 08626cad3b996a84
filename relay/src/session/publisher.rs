//! Implements the hub's interface to publishers (`HubPublisher`) for the peer of a session.

use std::sync::Arc;

use millrace_moq::{GroupOrder, Location, TrackName, code, message::RequestError};
use tokio::sync::mpsc;

use super::{
    backups::Backups, context::SessionContext, publish::Publications, rights::request_error,
    upstream_fetch::UpstreamFetches,
};
use crate::{
    hub::{self, Fetching, SubscribeAnswer},
    live::LiveTrack,
};
use millrace_access::AccessRefusal;

pub struct SessionPublisher {
    pub context: Arc<SessionContext>,
    pub publications: Arc<Publications>,
    pub fetches: Arc<UpstreamFetches>,
    pub backups: Arc<Backups>,
}

impl hub::HubPublisher for SessionPublisher {
    fn id(&self) -> u64 {
        self.context.id()
    }

    fn is_upstream(&self) -> bool {
        self.context.is_upstream()
    }

    fn subscribe(&self, track: Arc<LiveTrack>, answers: mpsc::Sender<SubscribeAnswer>) {
        let publications = Arc::clone(&self.publications);
        let unheard = answers.clone();
        let begun = self.context.spawn(async move {
            // The send fails only if no caller waits for the answer.
            let _ = answers.send(publications.subscribe(track).await).await;
            Ok(())
        });
        if !begun {
            let gone = RequestError::new(code::Request::INTERNAL_ERROR, "the publisher is gone");
            let _ = unheard.try_send(Err(gone)); // The send fails only if no caller waits for the answer.
        }
    }

    fn back_up(&self, tracks: Vec<Arc<LiveTrack>>) {
        self.backups.add(&self.context, &self.publications, &tracks);
    }

    fn fetch(&self, track: TrackName, range: (Location, Location), order: GroupOrder) -> Fetching<'_> {
        Box::pin(async move {
            let live = self.context.hub().find_track(&track);
            let rights = self.context.authority().may_serve(&track)?;
            if live.is_some_and(|live| !live.is_open_to(&self.context.owner(&rights))) {
                return Err(request_error(AccessRefusal::Taken));
            }
            self.fetches.fetch(track, range.0, range.1, order).await
        })
    }
}
