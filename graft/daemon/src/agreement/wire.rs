//! Sends and receives messages of agreements on a TLS connection, each with a time limit, and maps errors and missing
//! messages to states of the agreement.

use std::{io, time::Duration};

use millrace_graft::agreements::NegotiationState;
use millrace_graft_proto::message::{AgreementMessage, MESSAGE_MAX, MalformedMessage};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};

/// Time limit for receiving an answer, and for sending one message.
pub const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("the connection was closed")]
    Closed,
    #[error("{0}")]
    Io(io::Error),
    #[error("no message came within {0:?}")]
    TimedOut(Duration),
    #[error("{0}")]
    Malformed(#[from] MalformedMessage),
    #[error("the peer sent {said} instead of {wanted}")]
    Unexpected { said: &'static str, wanted: &'static str },
    #[error("{0}")]
    Untrusted(String),
}

impl From<io::Error> for WireError {
    fn from(error: io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return from_tls_error(tls);
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }
}

fn from_tls_error(error: &rustls::Error) -> WireError {
    match error {
        rustls::Error::InvalidCertificate(_) => {
            WireError::Untrusted(format!("the peer's key is not the one that the settings name: {error}"))
        }
        rustls::Error::AlertReceived(alert) => {
            WireError::Untrusted(format!("the peer refuses this host's key: {alert:?}"))
        }
        rustls::Error::NoCertificatesPresented => {
            WireError::Untrusted("the peer shows no certificate".to_owned())
        }
        other => WireError::Untrusted(format!("TLS: {other}")),
    }
}

impl From<WireError> for NegotiationState {
    fn from(broken: WireError) -> Self {
        let detail = broken.to_string();
        match broken {
            WireError::Closed | WireError::Io(_) => Self::Ended(detail),
            WireError::TimedOut(_) => Self::TimedOut(detail),
            WireError::Malformed(_) | WireError::Unexpected { .. } => Self::Malformed(detail),
            WireError::Untrusted(_) => Self::Untrusted(detail),
        }
    }
}

pub struct AgreementWire<S>(pub S);

impl<S: AsyncRead + AsyncWrite + Unpin> AgreementWire<S> {
    pub async fn send(&mut self, message: &AgreementMessage) -> Result<(), WireError> {
        let body = message.encode()?;
        let length = u32::try_from(body.len()).map_err(|_| MalformedMessage::TooLong(body.len()))?;
        let bytes = [&length.to_be_bytes()[..], &body].concat();
        self.send_bytes(&bytes).await
    }

    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        let write = async {
            self.0.write_all(bytes).await?;
            self.0.flush().await
        };
        Ok(timeout(PATIENCE, write).await.map_err(|_| WireError::TimedOut(PATIENCE))??)
    }

    /// Receives the next message. If the call is cancelled, half of a message may be left unread, so the connection
    /// must then be closed.
    pub async fn receive(&mut self, patience: Duration) -> Result<AgreementMessage, WireError> {
        let read = async {
            let length = self.0.read_u32().await? as usize;
            // The length is checked before the message is read.
            if length > MESSAGE_MAX {
                return Err(MalformedMessage::TooLong(length).into());
            }
            Ok(AgreementMessage::decode(&self.read(length).await?)?)
        };
        timeout(patience, read).await.map_err(|_| WireError::TimedOut(patience))?
    }

    pub async fn receive_bytes(&mut self, length: usize) -> Result<Vec<u8>, WireError> {
        timeout(PATIENCE, self.read(length)).await.map_err(|_| WireError::TimedOut(PATIENCE))?
    }

    /// Reads `length` bytes. The buffer grows with the bytes that arrive, not with the announced length.
    async fn read(&mut self, length: usize) -> Result<Vec<u8>, WireError> {
        let mut bytes = Vec::new();
        (&mut self.0).take(length as u64).read_to_end(&mut bytes).await?;
        if bytes.len() == length { Ok(bytes) } else { Err(WireError::Closed) }
    }

    /// Waits until the peer closes the connection. A byte that arrives before that is an error, since the peer may not
    /// send now.
    pub async fn closed(&mut self) -> WireError {
        match self.0.read_u8().await {
            Ok(_) => WireError::Unexpected { said: "something", wanted: "nothing" },
            Err(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn agreement_message_arrives_at_the_other_end() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let mut near = AgreementWire(near);
        let mut far = AgreementWire(far);
        near.send(&AgreementMessage::Confirm).await.unwrap();
        assert_eq!(far.receive(PATIENCE).await.unwrap(), AgreementMessage::Confirm);
        drop(near);
        assert!(matches!(far.closed().await, WireError::Closed));
    }

    #[tokio::test]
    async fn silent_or_flooding_peer_is_disconnected() {
        const SHORT: Duration = Duration::from_millis(50);
        let (mut near, far) = tokio::io::duplex(1 << 16);
        let mut far = AgreementWire(far);
        assert!(matches!(far.receive(SHORT).await, Err(WireError::TimedOut(_))));
        near.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
        assert!(matches!(
            far.receive(PATIENCE).await,
            Err(WireError::Malformed(MalformedMessage::TooLong(_)))
        ));
        // The test's peer sends half of a message, and then nothing, so reading the message has to time out.
        near.write_all(&[0, 0, 0, 9, b'{']).await.unwrap();
        assert!(matches!(far.receive(SHORT).await, Err(WireError::TimedOut(_))));
        drop(near);
        assert!(matches!(far.receive(PATIENCE).await, Err(WireError::Closed)));
    }
}
