//! Catalogs of namespaces, as the relay itself reads them.

use std::{sync::Arc, time::Duration};

use millrace_moq::{
    Namespace, TrackName, msf,
    tracks::{adapt::Ladder, subgroup::Subgroup},
};
use tokio::time::timeout;

use super::{Hub, Requester};
use crate::live::LiveTrack;

/// How long a catalog may take to come once its publisher has agreed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The largest catalog that is read, bytes.
const LARGEST: u64 = 64 << 10;

impl Hub {
    /// The ladder that a track is part of, by the settings or the catalog of its namespace.
    pub async fn ladder(&self, track: &TrackName, requester: Requester) -> Option<Ladder> {
        if let Some(ladder) = self.adaptive.ladder(track) {
            return Some(ladder);
        }
        let is_catalog = track.name()[..] == *msf::CATALOG.as_bytes();
        if is_catalog || !self.adaptive.reads_catalogs() {
            return None;
        }
        let catalog = self.catalog(track.namespace(), requester).await?;
        Ladder::of_catalog(&catalog, track.namespace(), str::from_utf8(track.name()).ok()?)
    }

    async fn catalog(&self, namespace: &Namespace, requester: Requester) -> Option<Arc<msf::Catalog>> {
        let name = TrackName::new(namespace.clone(), msf::CATALOG.as_bytes().to_vec()).ok()?;
        let track = self.established(&name, requester, Duration::ZERO, None).await.ok()?;
        let read = async {
            loop {
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

/// What the first object of the newest group says, which is no delta update. `None`: it is not there, or not whole.
fn newest(track: &LiveTrack) -> Option<Option<Arc<msf::Catalog>>> {
    let group = track.data.group(track.data.largest()?.group)?;
    group
        .subgroups
        .iter()
        .find_map(|subgroup| track.catalog.get(subgroup.serial(), || first_object(subgroup)))
}

fn first_object(subgroup: &Subgroup) -> Option<Vec<u8>> {
    let (object, _) = subgroup.first_object_from(0).filter(|(object, _)| object.start.id == 0)?;
    let (start, len) = (object.start.payload, object.start.payload_len);
    if len > LARGEST || subgroup.extent().len < start.saturating_add(len) {
        return None;
    }
    let mut json = vec![0; usize::try_from(len).ok()?];
    (subgroup.read(start, &mut json) == json.len()).then_some(json)
}
