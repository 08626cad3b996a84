//! The control stream: SETUP, GOAWAY.

use std::{sync::Arc, time::Duration};

use millrace_logging::short;
use millrace_moq::{Message, code, message::Setup, param::Assignment};
use tokio::{sync::mpsc, time::timeout};
use tracing::info;

use super::{context::Context, rights::session_over};
use crate::{
    access::{rights::Rights, unproven},
    wire::{self, Incoming, MessageReader, SessionError},
};

/// How long a peer may take to take our SETUP, and for its own.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may outlive its control stream.
const CLOSE_GRACE: Duration = Duration::from_millis(250);

/// Both control streams, until the session is over; ours begins with `setup`, the peer's comes from `streams`. `place`: the
/// session's among those that have no right.
pub async fn run(
    context: &Context,
    setup: Setup,
    place: Option<unproven::Place>,
    mut streams: mpsc::Receiver<MessageReader>,
) -> Result<(), SessionError> {
    let implementation = Some(concat!("millrace/", env!("CARGO_PKG_VERSION")).to_owned());
    let max_auth_token_cache_size = Some(context.authority().token_cache());
    let switching_algorithms =
        context.hub().switching_sets.then_some(Assignment::ALGORITHM).into_iter().collect();
    let setup = Setup { implementation, max_auth_token_cache_size, switching_algorithms, ..setup };
    let begin = async {
        // A peer has to allow it a stream and some bytes.
        let mut send = context.answers(context.connection().streams().open_uni().await?);
        wire::send(&mut send, setup).await?;
        context.connection().start();
        let (reader, rights) = read_setup(context, &mut streams).await?;
        Ok::<_, SessionError>((send, reader, rights))
    };
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
    let without_right = context.authority().without_right(context.connection(), place, proven);
    let mut without_right = std::pin::pin!(without_right);
    loop {
        tokio::select! {
            incoming = reader.next() => match incoming? {
                Incoming::Finished | Incoming::Reset if is_closing(context).await => {
                    return Err(SessionError::Lost("closed by the peer".into()));
                }
                incoming => on_message(context, incoming)?,
            },
            second = streams.recv() => if second.is_some() {
                return Err(SessionError::violation("a second control stream"));
            },
            refusal = rights.ended() => return Err(session_over(refusal)),
            refused = &mut without_right => return Err(refused),
            goaway = context.until_drain() => wire::send(&mut send, goaway).await?,
        }
    }
}

async fn read_setup(
    context: &Context,
    streams: &mut mpsc::Receiver<MessageReader>,
) -> Result<(MessageReader, Arc<Rights>), SessionError> {
    let mut reader = streams.recv().await.ok_or_else(|| SessionError::Lost("closed".into()))?;
    let Incoming::Message(Message::Setup(mut setup)) = reader.next().await? else {
        return Err(SessionError::violation("the control stream does not begin with SETUP"));
    };
    let says_where = setup.path.is_some() || setup.authority.is_some();
    let refused =
        |reason: &str| SessionError::Violation { code: code::Session::INVALID_PATH, reason: reason.into() };
    match context.tunnel() {
        _ if says_where && context.is_upstream() => {
            return Err(refused("a server sent a path or an authority"));
        }
        Some(_) if says_where => {
            return Err(refused("a path or an authority in the SETUP of a WebTransport session"));
        }
        // Its request has said both.
        Some(tunnel) if !context.is_upstream() => {
            (setup.path, setup.authority) =
                (Some(tunnel.asked.path.clone()), Some(tunnel.asked.authority.clone()));
        }
        _ => {}
    }
    let rights = context.authority().admit(context.connection(), context.is_upstream(), &setup)?;
    info!(
        session = context.id(),
        identity = short(&rights.identity().to_string()),
        remote = %context.connection().quic.remote_address(),
        implementation = short(setup.implementation.as_deref().unwrap_or("unknown")),
        draft = context.draft().number(),
        "session established"
    );
    context.set_ready(&setup);
    Ok((reader, rights))
}

fn on_message(context: &Context, incoming: Incoming) -> Result<(), SessionError> {
    match incoming {
        Incoming::GoAway(goaway) => {
            context.set_peer_goes_away(goaway.uri);
            info!(session = context.id(), "the peer goes away");
            Ok(())
        }
        Incoming::Message(message) => {
            Err(SessionError::violation(format!("{} on the control stream", message.name())))
        }
        Incoming::Finished | Incoming::Reset => Err(SessionError::violation("the control stream was closed")),
    }
}

/// Peers that close the connection may close its streams a moment earlier.
async fn is_closing(context: &Context) -> bool {
    timeout(CLOSE_GRACE, context.connection().quic.closed()).await.is_ok()
}
