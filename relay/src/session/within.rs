//! Ends requests when the access right that they were admitted with ends.

use std::{
    sync::{Arc, Weak},
    time::Instant,
};

use millrace_moq::{Message, message::RequestUpdate};
use tracing::info;

use super::{
    bounds::{WorkBound, cost},
    context::SessionContext,
};
use crate::{
    hub::OperatorCounters,
    wire::{DroppedStreamFate, MessageGuard, RequestStream, SessionError},
};
use millrace_access::rights::Rights;

impl SessionContext {
    /// Serves a request while its access rights (`rights`) last. If they end first, the request's stream is reset.
    pub async fn within<F>(
        self: &Arc<Self>,
        rights: &Arc<Rights>,
        stream: RequestStream,
        serve: impl FnOnce(RequestStream) -> F,
    ) -> Result<(), SessionError>
    where
        F: Future<Output = Result<(), SessionError>>,
    {
        let fate = DroppedStreamFate::default();
        let RequestStream { send, reader } = stream;
        let guard =
            RequestGuard { context: Arc::downgrade(self), rights: Arc::clone(rights), fate: fate.clone() };
        let reader = reader.guarded(guard);
        let stream = RequestStream { send: send.with(fate.clone()), reader };
        let ended = async {
            let refusal = rights.ended().await;
            // The reset code is set before `serve` is dropped, because dropping it resets the stream with that code.
            fate.set(refusal.reset_code());
            refusal
        };
        tokio::select! {
            // The end of the access rights takes precedence if the request ends at the same moment.
            biased;
            refusal = ended => {
                info!(session = self.id(), reason = %refusal, "a request of the session is no longer allowed and ends");
                Ok(())
            }
            result = serve(stream) => result,
        }
    }
}

/// Checks a request's updates against its rights, and delays messages that exceed the request budget.
struct RequestGuard {
    context: Weak<SessionContext>,
    rights: Arc<Rights>,
    fate: DroppedStreamFate,
}

impl MessageGuard for RequestGuard {
    fn answer_deadline(&self, message: &Message) -> Option<Instant> {
        if WorkBound::from_message(message) != WorkBound::Pace {
            return None;
        }
        let context = self.context.upgrade()?;
        let now = Instant::now();
        let due = context.authority().reserve(cost(message));
        if due <= now {
            return None;
        }
        OperatorCounters::count(&context.hub().counters.message_waits);
        Some(due)
    }

    fn update(&self, update: &RequestUpdate) -> Result<(), SessionError> {
        let Some(context) = self.context.upgrade() else {
            return Err(SessionError::Lost("the session ended".into()));
        };
        let updated = context.authority().update(&self.rights, update);
        if let Some(refusal) = self.rights.expiry_refusal() {
            self.fate.set(refusal.reset_code());
        }
        updated
    }
}
