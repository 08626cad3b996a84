//! Opens and accepts streams of a WebTransport session.

use bytes::{Bytes, BytesMut};
use millrace_quic::webtransport::Binding;
use quinn::{Connection, ConnectionError, SendDatagramError, WriteError};

use crate::{Foreign, NotOurs, RecvStream, SendStream};

/// The streams and datagrams of an application on a connection.
#[derive(Clone, Copy)]
pub struct SessionStreams<'a> {
    /// The QUIC connection.
    pub connection: &'a Connection,
    /// Whether the application's streams are plain QUIC streams or belong to a WebTransport session.
    pub binding: Binding,
    /// Counters for streams and datagrams that the peer sends outside the session.
    pub foreign: &'a Foreign,
}

impl SessionStreams<'_> {
    /// Opens a unidirectional stream.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub async fn open_uni(self) -> Result<SendStream, WriteError> {
        let mut stream = self.connection.open_uni().await?;
        stream.write_all(&self.binding.uni()).await?;
        Ok(SendStream::new(stream, self.binding))
    }

    /// Opens a bidirectional stream.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub async fn open_bi(self) -> Result<(SendStream, RecvStream), WriteError> {
        let (mut send, recv) = self.connection.open_bi().await?;
        send.write_all(&self.binding.bidi()).await?;
        Ok((SendStream::new(send, self.binding), RecvStream::new(recv, self.binding)))
    }

    /// Accepts the peer's next unidirectional stream. [`Self::enter_uni`] tells whether it is for the application.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub async fn accept_uni(self) -> Result<RecvStream, ConnectionError> {
        Ok(RecvStream::new(self.connection.accept_uni().await?, self.binding))
    }

    /// Accepts the peer's next bidirectional stream. [`Self::enter_bi`] tells whether it is for the application.
    ///
    /// # Errors
    /// Fails if the connection is lost.
    pub async fn accept_bi(self) -> Result<(SendStream, RecvStream), ConnectionError> {
        let (send, recv) = self.connection.accept_bi().await?;
        Ok((SendStream::new(send, self.binding), RecvStream::new(recv, self.binding)))
    }

    /// Reads the WebTransport header of a unidirectional stream. Returns `None` if the stream is not for the
    /// application. Such a stream is discarded.
    ///
    /// # Errors
    /// Fails if the stream belongs to another session, exceeds the limit of HTTP/3 streams, or is lost.
    pub async fn enter_uni(self, mut stream: RecvStream) -> Result<Option<RecvStream>, NotOurs> {
        match stream.enter(Binding::begins_uni).await {
            Ok(()) => Ok(Some(stream)),
            // The stream is HTTP/3's control stream, a stream of its header compression, or one of a reserved type.
            Err(NotOurs::Http(_)) if self.foreign.stream() => Err(NotOurs::TooMany),
            Err(NotOurs::Http(_)) => {
                stream.discard().await;
                Ok(None)
            }
            Err(NotOurs::Over) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the WebTransport header of a bidirectional stream. Requests of HTTP/3 are refused.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Self::enter_uni`].
    pub async fn enter_bi(
        self,
        mut send: SendStream,
        mut recv: RecvStream,
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

    /// Receives the application's next datagram. Datagrams of other sessions are dropped.
    ///
    /// # Errors
    /// Fails if the connection is lost.
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
    /// Fails if the datagram is too large, or if the connection is lost.
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
