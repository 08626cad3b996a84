//! What came before a subscription, each time that it is asked for on a stream of its own (draft-22, "Fill Semantics").

use std::sync::Arc;

use millrace_moq::{Filter, Location, Parameters, code, message::RequestError};
use tokio::task::JoinSet;

use super::Subscribed;
use crate::{
    access::rights::Rights,
    session::responses::{Range, Responses},
};

/// Fills of a subscription that are under way at a time.
const AT_ONCE: usize = 4;

/// The fills of one subscription. When dropped, their streams are reset.
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

    /// Begins the fill that `parameters` of a request ask for, if they do and there is something to fill. `largest` is the track's
    /// largest object when the request was served: what comes behind it is the subscription's.
    ///
    /// # Errors
    /// There are too many.
    pub fn begin(
        &mut self,
        request_id: u64,
        parameters: &Parameters,
        of: &Subscribed,
        largest: Option<Location>,
    ) -> Result<(), RequestError> {
        let options = of.subscription.options();
        let (Some(fill), Some(largest), true) = (&parameters.fill, largest, options.forward) else {
            return Ok(());
        };
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
        let (responses, rights) = (Arc::clone(&self.responses), Arc::clone(&self.rights));
        let range = Range {
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

    /// Streams that were opened so far, for PUBLISH_DONE.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// Until none is under way.
    pub async fn delivered(&mut self) {
        while self.under_way.join_next().await.is_some() {}
    }

    pub fn are_delivered(&self) -> bool {
        self.under_way.is_empty()
    }
}
