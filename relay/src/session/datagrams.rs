//! Datagrams of a peer: stores their objects in the cache and sends them to subscribers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use millrace_moq::{
    ObjectDatagram,
    tracks::track::{CachedDatagram, Duplicate},
};

use super::{
    context::SessionContext,
    publish::{Publications, PublishedTrack},
};
use crate::{hub::OperatorCounters, wire::SessionError};
use millrace_transport::Outbox;

/// How long a datagram may wait for the control message that defines its track alias.
const ALIAS_TIMEOUT: Duration = Duration::from_millis(500);

/// Receives the datagrams of one session.
pub struct SessionDatagrams {
    pub context: Arc<SessionContext>,
    pub publications: Arc<Publications>,
}

impl SessionDatagrams {
    /// Processes the peer's datagrams until the session is over.
    pub async fn accept(self: &Arc<Self>) -> Result<(), SessionError> {
        let mut outbox = Outbox::default();
        loop {
            // A padding datagram contains no object.
            let bytes = self.context.connection().streams().read_datagram().await?;
            let Some(datagram) = ObjectDatagram::decode(bytes)? else { continue };
            let object = CachedDatagram { datagram: owned(datagram), received_at: Instant::now() };
            match self.publications.get(object.datagram.alias) {
                Some(published) => self.take(&published, object, &mut outbox),
                None => self.hold(object),
            }
        }
    }

    /// Holds a datagram until the control message that defines its track alias has arrived, for at most
    /// [`ALIAS_TIMEOUT`].
    fn hold(self: &Arc<Self>, object: CachedDatagram) {
        let unknown =
            |datagrams: &Self| OperatorCounters::count(&datagrams.context.hub().counters.unknown_alias);
        let Some(place) = self.context.quotas().waiting_datagram() else { return unknown(self) };
        let datagrams = Arc::clone(self);
        self.context.spawn(async move {
            let _place = place;
            match datagrams.publications.wait(object.datagram.alias, ALIAS_TIMEOUT).await {
                Some(published) => datagrams.take(&published, object, &mut Outbox::default()),
                None => unknown(&datagrams),
            }
            Ok(())
        });
    }

    fn take(&self, published: &PublishedTrack, object: CachedDatagram, outbox: &mut Outbox) {
        let PublishedTrack { track, upstream } = published;
        upstream.saw_datagram();
        if !self.publications.takes(published, object.datagram.group) {
            return;
        }
        let counters = &self.context.hub().counters;
        counters.count_objects(1, object.datagram.payload.len() as u64);
        let places = || self.context.quotas().offloaded_track();
        let make = || self.context.connection().offload(|offload| offload.ingress_datagrams(upstream.alias));
        let account = self.context.account();
        if let Err(duplicate) = track.datagram(upstream, object, &places, make, account, outbox) {
            match duplicate {
                Duplicate::Malformed(malformed) => self.context.malformed(track, malformed),
                duplicate => counters.count_duplicate(duplicate),
            }
        }
    }
}

/// Returns a copy of the datagram, so that the buffer of the whole received packet can be freed.
fn owned(datagram: ObjectDatagram) -> ObjectDatagram {
    ObjectDatagram {
        properties: Bytes::copy_from_slice(&datagram.properties),
        payload: Bytes::copy_from_slice(&datagram.payload),
        ..datagram
    }
}
