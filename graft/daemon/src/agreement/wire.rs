//! Messages on a TLS connection, each with a time limit, and what it means when one does not come.

use std::{io, time::Duration};

use millrace_graft::agreements::State;
use millrace_graft_proto::message::{MESSAGE_MAX, Malformed, Message};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::timeout,
};

/// For an answer, and for a message to go out.
pub const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the connection was closed")]
    Closed,
    #[error("{0}")]
    Io(io::Error),
    #[error("nothing came within {0:?}")]
    TimedOut(Duration),
    #[error("{0}")]
    Malformed(#[from] Malformed),
    #[error("{said} where {wanted} was due")]
    Unexpected { said: &'static str, wanted: &'static str },
    #[error("{0}")]
    Untrusted(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return of_tls(tls);
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                Self::Closed
            }
            _ => Self::Io(error),
        }
    }
}

fn of_tls(error: &rustls::Error) -> Broken {
    match error {
        rustls::Error::InvalidCertificate(_) => {
            Broken::Untrusted(format!("the peer's key is not the one that the settings name: {error}"))
        }
        rustls::Error::AlertReceived(alert) => {
            Broken::Untrusted(format!("the peer does not take this host's key: {alert:?}"))
        }
        rustls::Error::NoCertificatesPresented => Broken::Untrusted("it shows no certificate".to_owned()),
        other => Broken::Untrusted(format!("TLS: {other}")),
    }
}

impl From<Broken> for State {
    fn from(broken: Broken) -> Self {
        let detail = broken.to_string();
        match broken {
            Broken::Closed | Broken::Io(_) => Self::Ended(detail),
            Broken::TimedOut(_) => Self::TimedOut(detail),
            Broken::Malformed(_) | Broken::Unexpected { .. } => Self::Malformed(detail),
            Broken::Untrusted(_) => Self::Untrusted(detail),
        }
    }
}

pub struct Wire<S>(pub S);

impl<S: AsyncRead + AsyncWrite + Unpin> Wire<S> {
    pub async fn send(&mut self, message: &Message) -> Result<(), Broken> {
        let body = message.encode()?;
        let length = u32::try_from(body.len()).map_err(|_| Malformed::TooLong(body.len()))?;
        let bytes = [&length.to_be_bytes()[..], &body].concat();
        self.send_bytes(&bytes).await
    }

    pub async fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let write = async {
            self.0.write_all(bytes).await?;
            self.0.flush().await
        };
        Ok(timeout(PATIENCE, write).await.map_err(|_| Broken::TimedOut(PATIENCE))??)
    }

    /// The next message. What is cancelled leaves half of one behind: the connection is to be closed then.
    pub async fn receive(&mut self, patience: Duration) -> Result<Message, Broken> {
        let read = async {
            let length = self.0.read_u32().await? as usize;
            if length > MESSAGE_MAX {
                return Err(Malformed::TooLong(length).into());
            }
            Ok(Message::decode(&self.read(length).await?)?)
        };
        timeout(patience, read).await.map_err(|_| Broken::TimedOut(patience))?
    }

    pub async fn receive_bytes(&mut self, length: usize) -> Result<Vec<u8>, Broken> {
        timeout(PATIENCE, self.read(length)).await.map_err(|_| Broken::TimedOut(PATIENCE))?
    }

    /// Room is made as it comes, not as it is announced.
    async fn read(&mut self, length: usize) -> Result<Vec<u8>, Broken> {
        let mut bytes = Vec::new();
        (&mut self.0).take(length as u64).read_to_end(&mut bytes).await?;
        if bytes.len() == length { Ok(bytes) } else { Err(Broken::Closed) }
    }

    /// Until the other ends it. It has nothing to say meanwhile.
    pub async fn closed(&mut self) -> Broken {
        match self.0.read_u8().await {
            Ok(_) => Broken::Unexpected { said: "something", wanted: "nothing" },
            Err(error) => error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_cross() {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (mut near, mut far) = (Wire(near), Wire(far));
        near.send(&Message::Confirm).await.unwrap();
        assert_eq!(far.receive(PATIENCE).await.unwrap(), Message::Confirm);
        drop(near);
        assert!(matches!(far.closed().await, Broken::Closed));
    }

    #[tokio::test]
    async fn who_says_nothing_or_too_much_is_let_go() {
        const SHORT: Duration = Duration::from_millis(50);
        let (mut near, far) = tokio::io::duplex(1 << 16);
        let mut far = Wire(far);
        assert!(matches!(far.receive(SHORT).await, Err(Broken::TimedOut(_))));
        near.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
        assert!(matches!(far.receive(PATIENCE).await, Err(Broken::Malformed(Malformed::TooLong(_)))));
        // Half of a message, and nothing more.
        near.write_all(&[0, 0, 0, 9, b'{']).await.unwrap();
        assert!(matches!(far.receive(SHORT).await, Err(Broken::TimedOut(_))));
        drop(near);
        assert!(matches!(far.receive(PATIENCE).await, Err(Broken::Closed)));
    }
}
