//! Requests, as long as they are allowed.

use std::{sync::Arc, time::Instant};

use tracing::info;

use super::context::Context;
use crate::{
    access::rights::Rights,
    wire::{Fate, MessageReader, RequestStream, SessionError},
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
        let reader = self.watched(reader, rights, &fate);
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
                if let Some(line) = self.hub().log.line(Instant::now()) {
                    let suppressed = line.suppressed;
                    info!(session = self.id(), reason = %refusal, suppressed, "a request is not allowed any more");
                }
                Ok(())
            }
            result = serve(stream) => result,
        }
    }

    /// Has the authoriser see what updates a request.
    fn watched(self: &Arc<Self>, reader: MessageReader, rights: &Arc<Rights>, fate: &Fate) -> MessageReader {
        let (context, rights, fate) = (Arc::downgrade(self), Arc::clone(rights), fate.clone());
        reader.on_update(move |update| match context.upgrade() {
            Some(context) => {
                let updated = context.authority().update(&rights, update);
                if let Some(refusal) = rights.over() {
                    fate.set(refusal.reset_code());
                }
                updated
            }
            None => Err(SessionError::Lost("the session ended".into())),
        })
    }
}
