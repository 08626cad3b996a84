//! Datagrams of the peer: objects into the cache and on to the subscribers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use millrace_moq::{
    Datagram,
    tracks::track::{DatagramObject, Duplicate},
};

use super::{
    context::Context,
    publish::{Publications, Published},
};
use crate::{hub::Counters, outbox::Outbox, wire::SessionError};

/// How long a datagram may wait for the control message that says what its track alias means.
const ALIAS_TIMEOUT: Duration = Duration::from_millis(500);

/// Where the datagrams of one session go.
pub struct Datagrams {
    pub context: Arc<Context>,
    pub publications: Arc<Publications>,
}

impl Datagrams {
    /// Takes datagrams until the session is over.
    pub async fn accept(self: &Arc<Self>) -> Result<(), SessionError> {
        let mut outbox = Outbox::default();
        loop {
            let bytes = self.context.connection().streams().read_datagram().await?;
            let Some(datagram) = Datagram::decode(bytes)? else { continue };
            let object = DatagramObject { datagram: owned(datagram), received_at: Instant::now() };
            match self.publications.get(object.datagram.alias) {
                Some(published) => self.take(&published, object, &mut outbox),
                None => self.hold(object),
            }
        }
    }

    /// The control message that explains the datagram may be right behind.
    fn hold(self: &Arc<Self>, object: DatagramObject) {
        let unknown = |datagrams: &Self| Counters::count(&datagrams.context.hub().counters.unknown_alias);
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

    fn take(&self, published: &Published, object: DatagramObject, outbox: &mut Outbox) {
        let Published { track, upstream } = published;
        upstream.saw_datagram();
        if !self.publications.takes(published, object.datagram.group) {
            return;
        }
        let counters = &self.context.hub().counters;
        counters.count_objects(1, object.datagram.payload.len() as u64);
        let places = || self.context.quotas().offloaded_track();
        let make = || self.context.connection().offload(|offload| offload.ingress_datagrams(upstream.alias));
        let ingress = upstream.datagram_ingress(&places, make);
        let account = self.context.account();
        if let Err(duplicate) = track.datagram(object, ingress.as_ref(), account, outbox) {
            match duplicate {
                Duplicate::Malformed(malformed) => self.context.malformed(track, malformed),
                duplicate => counters.count_duplicate(duplicate),
            }
        }
    }
}

/// A copy that does not keep the whole received packet in memory.
fn owned(datagram: Datagram) -> Datagram {
    Datagram {
        properties: Bytes::copy_from_slice(&datagram.properties),
        payload: Bytes::copy_from_slice(&datagram.payload),
        ..datagram
    }
}
