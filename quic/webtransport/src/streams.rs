//! Opening and taking streams.

use bytes::{Bytes, BytesMut};
use millrace_quic::webtransport::Binding;
use quinn::{Connection, ConnectionError, SendDatagramError, WriteError};

use crate::{Foreign, NotOurs, RecvStream, SendStream};

/// The streams and datagrams of an application on a connection.
#[derive(Clone, Copy)]
pub struct Streams<'a> {
    pub connection: &'a Connection,
    pub binding: Binding,
    /// Where it is counted what the peer sends besides.
    pub foreign: &'a Foreign,
}

impl Streams<'_> {
    /// Opens a unidirectional stream.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn open_uni(self) -> Result<SendStream, WriteError> {
        let mut stream = self.connection.open_uni().await?;
        stream.write_all(&self.binding.uni()).await?;
        Ok(SendStream::new(stream, self.binding))
    }

    /// Opens a bidirectional stream.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn open_bi(self) -> Result<(SendStream, RecvStream), WriteError> {
        let (mut send, recv) = self.connection.open_bi().await?;
        send.write_all(&self.binding.bidi()).await?;
        Ok((SendStream::new(send, self.binding), RecvStream::new(recv, self.binding)))
    }

    /// The peer's next unidirectional stream, of which [`Self::enter_uni`] says whose it is.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn accept_uni(self) -> Result<RecvStream, ConnectionError> {
        Ok(RecvStream::new(self.connection.accept_uni().await?, self.binding))
    }

    /// The peer's next bidirectional stream, of which [`Self::enter_bi`] says whose it is.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn accept_bi(self) -> Result<(SendStream, RecvStream), ConnectionError> {
        let (send, recv) = self.connection.accept_bi().await?;
        Ok((SendStream::new(send, self.binding), RecvStream::new(recv, self.binding)))
    }

    /// Reads what a unidirectional stream begins with, up to the application's first byte. `None`: it is not the
    /// application's, and is dealt with.
    ///
    /// # Errors
    /// It is of another session, one too many of HTTP/3's, or lost.
    pub async fn enter_uni(self, mut stream: RecvStream) -> Result<Option<RecvStream>, NotOurs> {
        match stream.enter(Binding::begins_uni).await {
            Ok(()) => Ok(Some(stream)),
            // HTTP/3's control stream, those of its header compression, or one whose type means nothing.
            Err(NotOurs::Http(_)) if self.foreign.stream() => Err(NotOurs::TooMany),
            Err(NotOurs::Http(_)) => {
                stream.discard().await;
                Ok(None)
            }
            Err(NotOurs::Over) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The same of a bidirectional stream. Requests of HTTP/3 are refused.
    ///
    /// # Errors
    /// As [`Self::enter_uni`].
    pub async fn enter_bi(
        self,
        (mut send, mut recv): (SendStream, RecvStream),
    ) -> Result<Option<(SendStream, RecvStream)>, NotOurs> {
        match recv.enter(Binding::begins_bidi).await {
            Ok(()) => Ok(Some((send, recv))),
            Err(NotOurs::Http(_)) if self.foreign.request() => Err(NotOurs::TooMany),
            Err(NotOurs::Http(_)) => {
                send.reject();
                Ok(None)
            }
            Err(NotOurs::Over) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The application's next datagram. Others' are dropped.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn read_datagram(self) -> Result<Bytes, ConnectionError> {
        loop {
            let datagram = self.connection.read_datagram().await?;
            if let Some(from) = self.binding.strip(&datagram) {
                return Ok(datagram.slice(from..));
            }
            self.foreign.datagram();
        }
    }

    /// Sends a datagram.
    ///
    /// # Errors
    /// It is too large, or the connection is lost.
    pub fn send_datagram(self, datagram: Bytes) -> Result<(), SendDatagramError> {
        let preamble = self.binding.datagram();
        if preamble.is_empty() {
            return self.connection.send_datagram(datagram);
        }
        let mut bytes = BytesMut::with_capacity(preamble.len() + datagram.len());
        bytes.extend_from_slice(&preamble);
        bytes.extend_from_slice(&datagram);
        self.connection.send_datagram(bytes.freeze())
    }
}
