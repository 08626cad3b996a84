//! Fills of a subscription: earlier objects that the subscriber asks for, each fill on a stream of its own (draft-22,
//! "Fill Semantics").

use std::sync::Arc;

use millrace_moq::{Filter, Location, Parameters, code, message::RequestError};
use tokio::task::JoinSet;

use super::SubscribedTrack;
use crate::session::responses::{ResponseRange, Responses};
use millrace_access::rights::Rights;

/// The most fills (streams with earlier objects) of one subscription that may be under way at a time.
const AT_ONCE: usize = 4;

/// The fills of one subscription. Dropping it resets their streams.
pub(super) struct Fills {
    responses: Arc<Responses>,
    rights: Arc<Rights>,
    under_way: JoinSet<()>,
    opened: u64,
}

impl Fills {
    pub fn new(responses: Arc<Responses>, rights: &Arc<Rights>) -> Self {
        Self { responses, rights: Arc::clone(rights), under_way: JoinSet::new(), opened: 0 }
    }

    /// Starts the fill that a request asks for, if it asks for one and there are objects to send. `largest` is the
    /// track's largest location when the request was served; later objects belong to the subscription itself.
    ///
    /// # Errors
    /// Returns an error if too many fills are under way.
    pub fn begin(
        &mut self,
        request_id: u64,
        parameters: &Parameters,
        of: &SubscribedTrack,
        largest: Option<Location>,
    ) -> Result<(), RequestError> {
        let options = of.subscription.options();
        let (Some(fill), Some(largest), true) = (&parameters.fill, largest, options.forward) else {
            return Ok(());
        };
        // Removes the tasks of fills that have ended from the set of tasks.
        while self.under_way.try_join_next().is_some() {}
        if self.under_way.len() >= AT_ONCE {
            return Err(RequestError::new(code::Request::EXCESSIVE_LOAD, "too many fills at a time"));
        }
        let filter = fill.filter.or(options.filter).unwrap_or(Filter::All);
        let first = filter.start(Some(largest));
        let last = filter.end().unwrap_or(largest).min(largest);
        if first > last {
            return Ok(());
        }
        let responses = Arc::clone(&self.responses);
        let rights = Arc::clone(&self.rights);
        let range = ResponseRange {
            track: Arc::clone(&of.track),
            first,
            last,
            told: last == largest,
            order: fill.group_order.unwrap_or(options.order),
            fill: responses.patience(fill),
        };
        let subscriber = fill.subscriber_priority.unwrap_or(options.priority);
        self.opened += 1;
        self.under_way.spawn(async move { responses.fill(request_id, range, subscriber, &rights).await });
        Ok(())
    }

    /// Returns how many streams were opened for fills. PUBLISH_DONE has to include them in its stream count.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Waits until no fill is under way.
    pub async fn delivered(&mut self) {
        while self.under_way.join_next().await.is_some() {}
    }

    pub fn are_delivered(&self) -> bool {
        self.under_way.is_empty()
    }
}
