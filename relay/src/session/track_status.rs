//! Answers TRACK_STATUS.

use std::{sync::Arc, time::Duration};

use millrace_moq::message::{RequestError, RequestOk, TrackStatus};

use super::context::SessionContext;
use crate::{
    live::LiveTrack,
    wire::{self, RequestStream, SessionError},
};

pub async fn serve(
    context: &SessionContext,
    status: TrackStatus,
    mut stream: RequestStream,
) -> Result<(), SessionError> {
    // A publisher that returns uses TRACK_STATUS to learn the group at which its track stopped.
    let waiting = context.hub().find_track(&status.track).filter(|track| track.is_waiting());
    let known = match waiting {
        Some(track) => Ok(track),
        None => established(context, &status).await,
    };
    let track = match known {
        Ok(track) => track,
        Err(error) => return context.refuse(stream.send, error).await,
    };
    let ok = RequestOk {
        parameters: context.dialect().largest(track.data.largest()),
        properties: track.data.properties_for(&status.parameters),
    };
    wire::send_last(&mut stream.send, ok).await;
    Ok(())
}

async fn established(context: &SessionContext, status: &TrackStatus) -> Result<Arc<LiveTrack>, RequestError> {
    context.hub().established(&status.track, context.requester(), Duration::ZERO, None).await
}
