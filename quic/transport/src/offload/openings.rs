//! Openings: outgoing streams that the kernel offload may open as copies of a publisher's future streams. Each is first
//! prepared, then opened by the offload. The data plane adopts it when this process has the source of the stream's
//! data.

use std::collections::{BTreeMap, HashMap};

use millrace_quic::plane::downstream::{Downstream, Label, StreamKey};

use super::Delegation;

/// The bit that is set in the tag of every opening (a stream that the kernel offload may open), and in no stream's key.
pub(super) const TAG: u64 = 1 << 63;

/// A stream on which the kernel offload may send.
pub(super) struct DelegatedStream {
    pub id: u64,
    pub delegation: Box<dyn Delegation>,
}

/// An opening: a stream that the kernel offload may open, as one subscriber's copy of an incoming stream.
pub(super) struct OpeningEntry {
    /// The number of the subscription that owns the stream.
    pub owner: u64,
    /// Serial number (`OffloadIngress::serial`) of the incoming stream.
    pub ingress: u64,
    pub label: Label,
    /// The subscriber priority at which the kernel offload sends the stream.
    pub priority: u8,
    /// The permission to open the stream; `None` once the kernel offload has opened it.
    pub delegation: Option<Box<dyn Delegation>>,
    pub key: Option<StreamKey>,
    /// True if the data plane has the stream's source, or if the subscription does not want the stream.
    pub adopted: bool,
    /// True if the kernel offload has stopped sending on the stream, and has reported all packets that it sent on the
    /// stream.
    pub returned: bool,
}

/// The openings of a connection: streams that the kernel offload may open, or has opened.
///
/// An opening is *prepared* while it has a delegation (the permission for the offload to open the stream) and no key,
/// and *opened* once it has a key. It is removed when it is both *adopted* and *returned*, in either order, or when it
/// is withdrawn before its stream was opened. [`Self::key`] marks an entry as opened: at the first packet that the
/// offload reports, or when the offload is about to open the stream. [`Self::take`] marks it as adopted, and
/// [`Self::on_returned`] as returned. While no method runs, `waiting` has exactly the entries that are not adopted.
/// `by_key` then has exactly those that are opened and not returned.
#[derive(Default)]
pub(super) struct OpeningBook {
    pub by_tag: HashMap<u64, OpeningEntry>,
    /// The tags of openings whose source the data plane does not have yet, by owner (subscription) and serial number of
    /// the incoming stream.
    pub waiting: BTreeMap<(u64, u64), u64>,
    by_key: HashMap<StreamKey, u64>,
    /// Number of openings (streams that the kernel offload may open) created so far. The next opening's tag is made
    /// from it.
    pub made: u64,
}

impl OpeningBook {
    pub fn is_empty(&self) -> bool {
        self.by_tag.is_empty()
    }

    /// Returns the key of the stream that the kernel offload has opened under `tag`, and creates the stream's state if
    /// needed. `id` is the stream's ID, if it is known.
    pub fn key(
        &mut self,
        tag: u64,
        id: Option<u64>,
        downstream: &mut Downstream,
        delegations: &mut HashMap<StreamKey, DelegatedStream>,
    ) -> Option<StreamKey> {
        let opening = self.by_tag.get_mut(&tag)?;
        let key = match opening.key {
            Some(key) => key,
            None => {
                let key = downstream.opened(opening.owner, opening.label, id);
                opening.key = Some(key);
                self.by_key.insert(key, tag);
                if let Some(delegation) = opening.delegation.take() {
                    delegation.on_opened();
                    delegations.insert(key, DelegatedStream { id: id.unwrap_or(u64::MAX), delegation });
                }
                key
            }
        };
        if let Some(id) = id
            && downstream.on_opened(key, id)
            && let Some(delegated) = delegations.get_mut(&key)
        {
            delegated.id = id;
        }
        Some(key)
    }

    /// Notes that the kernel offload has returned the stream: it sends and reports nothing more of it.
    pub fn on_returned(&mut self, key: StreamKey) {
        let Some(tag) = self.by_key.remove(&key) else { return };
        if let Some(opening) = self.by_tag.get_mut(&tag) {
            opening.returned = true;
            self.forget(tag);
        }
    }

    /// Removes an opening that was adopted by the data plane and returned by the kernel offload.
    pub fn forget(&mut self, tag: u64) {
        if self.by_tag.get(&tag).is_some_and(|opening| opening.adopted && opening.returned) {
            self.by_tag.remove(&tag);
        }
    }

    /// Marks an opening as adopted, so that it no longer waits for its stream's source.
    pub fn take(&mut self, tag: u64) {
        if let Some(opening) = self.by_tag.get_mut(&tag) {
            opening.adopted = true;
            self.waiting.remove(&(opening.owner, opening.ingress));
        }
    }

    /// Returns the tags of prepared streams that the kernel offload has not opened according to its reports so far.
    pub fn prepared(&self) -> Vec<u64> {
        let prepared = self.by_tag.iter().filter(|(_, opening)| opening.delegation.is_some());
        prepared.map(|(tag, _)| *tag).collect()
    }

    /// Returns the tags of the streams, prepared or opened by the kernel offload for this owner (a subscription), that
    /// are not adopted yet.
    pub fn owner_streams(&self, owner: u64) -> Vec<u64> {
        self.waiting.range((owner, 0)..=(owner, u64::MAX)).map(|(_, tag)| *tag).collect()
    }
}
