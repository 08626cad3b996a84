//! TRACK_STATUS.

use std::time::Duration;

use millrace_proto::moq::message::{RequestOk, TrackStatus};

use super::context::Context;
use crate::wire::{self, RequestStream, SessionError};

pub async fn serve(
    context: &Context,
    status: TrackStatus,
    mut stream: RequestStream,
) -> Result<(), SessionError> {
    let known = context.hub().established(&status.track, context.requester(), Duration::ZERO, None).await;
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
