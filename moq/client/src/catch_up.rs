//! Fetches what a track's subscriber has missed while it moved from one session to another.

use std::time::Duration;

use millrace_moq::message::FetchKind;
use millrace_moq::{Filter, GroupOrder, Location, TrackName, code};
use tokio::time::{sleep, timeout};

use crate::object::{ObjectStream, ReceivedObject};
use crate::receive::ObjectReceiver;
use crate::session::Error;

/// The most FETCHes for one gap. While a track changes its source, a relay may not know older objects for a moment.
const ATTEMPTS: u32 = 8;
/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(250);
/// The longest wait for an answer, and for each object.
const PATIENCE: Duration = Duration::from_secs(5);

/// The objects between the end of an earlier session and the start of a new subscription. They are fetched from the new
/// session's peer.
pub(crate) struct CatchUp<'a> {
    receiver: &'a ObjectReceiver,
    track: TrackName,
    /// The track's largest location at the start of the subscription.
    last: Location,
    objects: Option<ObjectStream>,
    attempts: u32,
    is_whole: bool,
}

impl<'a> CatchUp<'a> {
    /// Prepares to fetch the objects of `track` from `next` to `last`, its largest location at the start of a
    /// subscription. Returns `None` if nothing is missing.
    pub fn new(
        receiver: &'a ObjectReceiver,
        track: TrackName,
        next: Option<Location>,
        last: Option<Location>,
    ) -> Option<Self> {
        let last = last.filter(|last| next.is_some_and(|next| next <= *last))?;
        Some(Self { receiver, track, last, objects: None, attempts: 0, is_whole: false })
    }

    /// Returns the next object, or `None` if there are no more, or the peer cannot give them. `next` is the location
    /// from which on objects are missing now: a FETCH that breaks off is repeated from there.
    pub async fn next(&mut self, next: Option<Location>) -> Result<Option<ReceivedObject>, Error> {
        loop {
            let is_last = self.attempts == ATTEMPTS;
            if let Some(objects) = &mut self.objects {
                match timeout(PATIENCE, objects.next()).await {
                    // What the peer does not know now it may know a moment later.
                    Ok(Ok(_)) if objects.is_partial() && !is_last => {}
                    Ok(Ok(Some(object))) => return Ok(Some(object)),
                    Ok(Ok(None)) => {
                        self.is_whole = !objects.is_partial();
                        return Ok(None);
                    }
                    Ok(Err(Error::Cancelled)) => {}
                    Ok(Err(error)) => return Err(error),
                    Err(_) => return Ok(None),
                }
                self.objects = None;
            }
            let Some(first) = next.filter(|next| *next <= self.last) else {
                self.is_whole = true;
                return Ok(None);
            };
            if is_last {
                return Ok(None);
            }
            if self.attempts > 0 {
                sleep(PAUSE).await;
            }
            self.attempts += 1;
            let range = Filter::range(first, self.last);
            let kind = FetchKind::Standalone { track: self.track.clone(), range };
            match timeout(PATIENCE, self.receiver.fetch(kind, GroupOrder::Ascending)).await {
                Ok(Ok(objects)) => self.objects = Some(objects),
                Ok(Err(Error::Refused(refused))) if may_change(refused.code) => {
                    tracing::debug!(reason = refused.reason, "cannot fetch missed objects yet");
                }
                Ok(Err(Error::Refused(refused))) => {
                    tracing::info!(reason = refused.reason, "the peer does not give missed objects");
                    return Ok(None);
                }
                Ok(Err(Error::Cancelled)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => return Ok(None),
            }
        }
    }

    /// Returns the location at which the subscription goes on. If not all objects came, that is the next group, since a
    /// decoder cannot go on in the middle of a group.
    pub fn end(&self) -> Location {
        match self.is_whole {
            true => Filter::NextObject.start(Some(self.last)),
            false => Filter::NEXT_GROUP.start(Some(self.last)),
        }
    }
}

/// Reports whether a FETCH that was refused with this code may succeed a moment later. A relay may call a range invalid
/// whose objects are still on their way to it.
fn may_change(refusal: code::Request) -> bool {
    let temporary = [
        code::Request::DOES_NOT_EXIST,
        code::Request::TIMEOUT,
        code::Request::INTERNAL_ERROR,
        code::Request::INVALID_RANGE,
    ];
    temporary.contains(&refusal)
}
