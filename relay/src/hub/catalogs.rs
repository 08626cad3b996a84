//! Catalogs of namespaces (MSF), which the relay itself subscribes to and reads.

use std::{sync::Arc, time::Duration};

use millrace_moq::{
    Namespace, TrackName, msf,
    tracks::{adapt::Ladder, subgroup::SubgroupStream},
};
use tokio::time::timeout;

use super::{Hub, Requester};
use crate::live::LiveTrack;

/// How long the relay waits for the catalog object after the publisher has accepted the subscription.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest catalog that the relay reads, in bytes.
const LARGEST: u64 = 64 << 10;

impl Hub {
    /// Returns the ladder of renditions that contains the track: from the settings, or else from the catalog of its
    /// namespace.
    pub async fn ladder(&self, track: &TrackName, requester: Requester) -> Option<Ladder> {
        if let Some(ladder) = self.adaptive.ladder(track) {
            return Some(ladder);
        }
        // The catalog track itself has no ladder: the relay would have to read the catalog to find it.
        let is_catalog = track.name()[..] == *msf::CATALOG.as_bytes();
        if is_catalog || !self.adaptive.reads_catalogs() {
            return None;
        }
        let catalog = self.catalog(track.namespace(), requester).await?;
        Ladder::from_catalog(&catalog, track.namespace(), str::from_utf8(track.name()).ok()?)
    }

    async fn catalog(&self, namespace: &Namespace, requester: Requester) -> Option<Arc<msf::MsfCatalog>> {
        let name = TrackName::new(namespace.clone(), msf::CATALOG.as_bytes().to_vec()).ok()?;
        let track = self.established(&name, requester, Duration::ZERO, None).await.ok()?;
        let read = async {
            loop {
                // The notification of a complete object is requested before the cache is read, so an object that
                // completes in between is not missed.
                let progress = track.progress.notified();
                if let Some(catalog) = newest(&track) {
                    return catalog;
                }
                progress.await;
            }
        };
        timeout(PATIENCE, read).await.ok()?
    }
}

/// Reads the catalog from the first object of the newest group, since later objects of a group are delta updates.
/// Returns `None` if that object is missing or incomplete.
fn newest(track: &LiveTrack) -> Option<Option<Arc<msf::MsfCatalog>>> {
    let group = track.data.group(track.data.largest()?.group)?;
    group
        .subgroups
        .iter()
        .find_map(|subgroup| track.catalog.get(subgroup.serial(), || first_object(subgroup)))
}

fn first_object(subgroup: &SubgroupStream) -> Option<Vec<u8>> {
    let (object, _) = subgroup.first_object_from(0).filter(|(object, _)| object.start.id == 0)?;
    let start = object.start.payload;
    let len = object.start.payload_len;
    if len > LARGEST || subgroup.extent().len < start.saturating_add(len) {
        return None;
    }
    let mut json = vec![0; usize::try_from(len).ok()?];
    (subgroup.read(start, &mut json) == json.len()).then_some(json)
}
