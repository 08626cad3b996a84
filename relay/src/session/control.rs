//! The control streams of a session: SETUP and GOAWAY.

use std::{sync::Arc, time::Duration};

use millrace_logging::short;
use millrace_moq::{Message, code, message::SetupOptions, param::Assignment};
use tokio::{sync::oneshot, time::timeout};
use tracing::info;

use super::{context::SessionContext, rights::session_over};
use crate::wire::{self, Answers, IncomingMessage, MessageReader, SessionError};
use millrace_access::{rights::Rights, unproven};

/// The longest time from the start of a session until both SETUP messages were sent and received.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long after the end of its control stream a peer may take to close the connection. If the connection is open for
/// longer, the end of the stream is a protocol violation.
const CLOSE_GRACE: Duration = Duration::from_millis(250);

/// Runs both control streams until the session is over. Ours begins with `setup`; the peer's comes from `stream`.
/// `place` counts the session against the limit of sessions that have not proved an access right.
pub async fn run(
    context: &SessionContext,
    setup: &SetupOptions,
    place: Option<unproven::UnprovenPlace>,
    stream: oneshot::Receiver<MessageReader>,
) -> Result<(), SessionError> {
    let begin = Box::pin(begin(context, setup.clone(), stream));
    let late = |_| SessionError::Violation {
        code: code::Session::CONTROL_MESSAGE_TIMEOUT,
        reason: "no SETUP in time".into(),
    };
    let (mut send, mut reader, rights) = tokio::select! {
        begun = timeout(SETUP_TIMEOUT, begin) => begun.map_err(late)??,
        refusal = unproven::displaced(place.as_ref()) => {
            context.authority().count(refusal);
            return Err(session_over(refusal));
        }
    };
    let proven = || context.uses().prove();
    // Ends the session if the peer does not prove an access right in time, for example by a token.
    let without_right = context.authority().without_right(context.connection(), place, proven);
    let mut without_right = std::pin::pin!(without_right);
    loop {
        tokio::select! {
            incoming = reader.next() => Box::pin(on_message(context, incoming?)).await?,
            refusal = rights.ended() => return Err(session_over(refusal)),
            refused = &mut without_right => return Err(refused),
            goaway = context.until_drain() => wire::send(&mut send, goaway).await?,
        }
    }
}

/// Sends our SETUP, and reads the peer's. Returns both control streams and the peer's rights.
async fn begin(
    context: &SessionContext,
    setup: SetupOptions,
    stream: oneshot::Receiver<MessageReader>,
) -> Result<(Answers, MessageReader, Arc<Rights>), SessionError> {
    let switching_algorithms =
        context.hub().switching_sets.then_some(Assignment::ALGORITHM).into_iter().collect();
    let hop_id = context.hub().hop_on(context.id()).filter(|_| context.is_in_cluster());
    let setup = SetupOptions {
        implementation: Some(concat!("millrace/", env!("CARGO_PKG_VERSION")).to_owned()),
        max_auth_token_cache_size: Some(context.authority().token_cache()),
        switching_algorithms,
        hop_id,
        relay_cost: hop_id.and(context.hub().relay_cost),
        ..setup
    };
    // The peer's flow control has to admit the control stream and its first bytes, so this may take a while.
    let mut send = context.answers(context.connection().streams().open_uni().await?);
    wire::send(&mut send, setup).await?;
    context.connection().start();
    let (reader, rights) = read_setup(context, stream).await?;
    Ok((send, reader, rights))
}

async fn read_setup(
    context: &SessionContext,
    stream: oneshot::Receiver<MessageReader>,
) -> Result<(MessageReader, Arc<Rights>), SessionError> {
    let mut reader = stream.await.map_err(|_| SessionError::Lost("closed".into()))?;
    let IncomingMessage::Message(Message::Setup(mut setup)) = reader.next().await? else {
        return Err(SessionError::violation("the control stream does not begin with SETUP"));
    };
    let says_where = setup.path.is_some() || setup.authority.is_some();
    let refused =
        |reason: &str| SessionError::Violation { code: code::Session::INVALID_PATH, reason: reason.into() };
    match context.tunnel() {
        _ if says_where && context.is_dialed() => {
            return Err(refused("a server sent a path or an authority"));
        }
        Some(_) if says_where => {
            return Err(refused("a path or an authority in the SETUP of a WebTransport session"));
        }
        // The CONNECT request of a WebTransport session contains path and authority.
        Some(tunnel) if !context.is_dialed() => {
            (setup.path, setup.authority) =
                (Some(tunnel.asked.path.clone()), Some(tunnel.asked.authority.clone()));
        }
        _ => {}
    }
    let rights = context.authority().admit(context.connection(), context.is_dialed(), &setup)?;
    info!(
        session = context.id(),
        identity = short(&rights.identity().to_string()),
        remote = %context.connection().quic.remote_address(),
        implementation = short(setup.implementation.as_deref().unwrap_or("unknown")),
        draft = context.draft().number(),
        "MoQ session established"
    );
    if setup.hop_id.is_some_and(|hop| hop.is_named()) && setup.hop_id == context.hub().hop_on(context.id()) {
        let reason =
            "the peer has the hop ID of this relay: it is this relay, or cluster-hop is the same on two";
        return Err(SessionError::Refused { code: code::Session::UNAUTHORIZED, reason: reason.into() });
    }
    context.set_ready(&setup);
    Ok((reader, rights))
}

async fn on_message(context: &SessionContext, incoming: IncomingMessage) -> Result<(), SessionError> {
    match incoming {
        IncomingMessage::Finished | IncomingMessage::Reset if is_closing(context).await => {
            Err(SessionError::Lost("closed by the peer".into()))
        }
        IncomingMessage::GoAway(goaway) => {
            context.set_peer_goes_away(goaway.uri);
            info!(session = context.id(), "the session's peer sent GOAWAY: the peer will leave");
            Ok(())
        }
        IncomingMessage::Message(message) => Err(SessionError::misplaced(&message, "on the control stream")),
        IncomingMessage::Finished | IncomingMessage::Reset => {
            Err(SessionError::violation("the control stream was closed"))
        }
    }
}

/// Reports whether the connection closes within [`CLOSE_GRACE`]. When a peer closes the connection, its streams may end
/// a moment earlier.
async fn is_closing(context: &SessionContext) -> bool {
    timeout(CLOSE_GRACE, context.connection().quic.closed()).await.is_ok()
}
