//! Requests, as long as they are allowed.

use std::{
    sync::{Arc, Weak},
    time::Instant,
};

use millrace_moq::{Message, message::RequestUpdate};
use tracing::info;

use super::{
    bounds::{Bound, cost},
    context::Context,
};
use crate::{
    access::rights::Rights,
    hub::Counters,
    wire::{Fate, Guard, RequestStream, SessionError},
};

impl Context {
    /// Serves a request as long as `rights` last; its stream is reset when they end before it is over.
    pub async fn within<F>(
        self: &Arc<Self>,
        rights: &Arc<Rights>,
        stream: RequestStream,
        serve: impl FnOnce(RequestStream) -> F,
    ) -> Result<(), SessionError>
    where
        F: Future<Output = Result<(), SessionError>>,
    {
        let fate = Fate::default();
        let RequestStream { send, reader } = stream;
        let guard =
            RequestGuard { context: Arc::downgrade(self), rights: Arc::clone(rights), fate: fate.clone() };
        let reader = reader.guarded(guard);
        let stream = RequestStream { send: send.with(fate.clone()), reader };
        let ended = async {
            let refusal = rights.ended().await;
            // Before the other future is dropped.
            fate.set(refusal.reset_code());
            refusal
        };
        tokio::select! {
            biased;
            refusal = ended => {
                info!(session = self.id(), reason = %refusal, "a request is not allowed any more");
                Ok(())
            }
            result = serve(stream) => result,
        }
    }
}

/// Has the authoriser see what updates a request, and messages wait that count as requests.
struct RequestGuard {
    context: Weak<Context>,
    rights: Arc<Rights>,
    fate: Fate,
}

impl Guard for RequestGuard {
    fn due(&self, message: &Message) -> Option<Instant> {
        if Bound::of(message) != Bound::Pace {
            return None;
        }
        let context = self.context.upgrade()?;
        let now = Instant::now();
        let due = context.authority().reserve(cost(message));
        if due <= now {
            return None;
        }
        Counters::count(&context.hub().counters.message_waits);
        Some(due)
    }

    fn update(&self, update: &RequestUpdate) -> Result<(), SessionError> {
        let Some(context) = self.context.upgrade() else {
            return Err(SessionError::Lost("the session ended".into()));
        };
        let updated = context.authority().update(&self.rights, update);
        if let Some(refusal) = self.rights.over() {
            self.fate.set(refusal.reset_code());
        }
        updated
    }
}
