//! What carries one connection, as frames: a stream of a QUIC carrier, or a connection of a pool, for as long as it has it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_proto::graft::carry::frame::{Decoder, Frame};
use quinn::{ReadError, RecvStream, SendStream, VarInt, WriteError};
use tokio::time::timeout;

use super::{
    broken::Broken,
    record::Batch,
    socket::{self, Reading, Socket, Writing},
};

/// For the first frame of a stream, and for its answer.
pub const PATIENCE: Duration = Duration::from_secs(15);

const READ_MOST: usize = 64 << 10;
/// The other application has reset the connection.
const RESET: VarInt = VarInt::from_u32(1);
/// It goes on with another.
const LEFT: VarInt = VarInt::from_u32(2);

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(code) if code != LEFT => Self::Reset,
            _ => Self::Lost,
        }
    }
}

/// What becomes of a pool's connection when it is free again.
pub type Home = Arc<dyn Fn(Stream) + Send + Sync>;

/// Both directions are used by one task, each for itself.
pub struct Stream {
    pub sender: Sender,
    pub receiver: Receiver,
    home: Option<Home>,
}

pub struct Sender {
    link: SendLink,
    batch: Batch,
    /// The other end takes no more. Whether it is done or has reset the connection is told by what it has sent.
    is_stopped: bool,
}

enum SendLink {
    Quic(SendStream),
    Tls(Box<Writing>),
    Gone,
}

pub struct Receiver {
    link: ReceiveLink,
    decoder: Decoder,
}

enum ReceiveLink {
    Quic(RecvStream),
    Tls(Box<Reading>),
    Gone,
}

impl Stream {
    pub fn quic((sender, receiver): (SendStream, RecvStream)) -> Self {
        Self::with(SendLink::Quic(sender), ReceiveLink::Quic(receiver), None)
    }

    /// Of a pool.
    pub fn tls((writing, reading): (Box<Writing>, Box<Reading>), home: Home) -> Self {
        Self::with(SendLink::Tls(writing), ReceiveLink::Tls(reading), Some(home))
    }

    fn with(send: SendLink, receive: ReceiveLink, home: Option<Home>) -> Self {
        Self {
            sender: Sender { link: send, batch: Batch::default(), is_stopped: false },
            receiver: Receiver { link: receive, decoder: Decoder::default() },
            home,
        }
    }

    /// What is sent on others goes first.
    pub fn yield_to_others(&self) {
        if let SendLink::Quic(stream) = &self.sender.link {
            let _ = stream.set_priority(-1);
        }
    }

    fn take(&mut self) -> (SendLink, ReceiveLink) {
        let send = std::mem::replace(&mut self.sender.link, SendLink::Gone);
        (send, std::mem::replace(&mut self.receiver.link, ReceiveLink::Gone))
    }

    /// The application has reset the connection, or there is none.
    pub fn reset(&mut self) {
        match self.take() {
            (SendLink::Quic(send), ReceiveLink::Quic(receive)) => end(send, receive, RESET),
            (SendLink::Tls(writing), ReceiveLink::Tls(reading)) => {
                tokio::spawn(socket::farewell(writing, reading));
            }
            _ => {}
        }
    }

    /// The connection goes on with another: this one is as if it were lost.
    pub fn leave(&mut self) {
        if let (SendLink::Quic(send), ReceiveLink::Quic(receive)) = self.take() {
            end(send, receive, LEFT);
        }
    }

    /// All was said at both ends, and heard.
    pub fn release(&mut self) {
        match self.take() {
            (SendLink::Quic(mut send), _) => drop(send.finish()),
            (SendLink::Tls(mut writing), ReceiveLink::Tls(reading)) => {
                let Some(home) = self.home.take() else { return };
                if writing.is_empty() && self.sender.batch.0.is_empty() && reading.is_between() {
                    writing.shrink();
                    home(Self::tls((writing, reading), home.clone()));
                }
            }
            _ => {}
        }
    }

    /// All was said. What is yet to arrive does.
    pub fn finish(mut self) {
        self.release();
    }

    /// Of a pool: whether it may be used.
    pub fn is_quiet(&self) -> bool {
        matches!(&self.receiver.link, ReceiveLink::Tls(reading) if reading.is_quiet())
    }

    /// Of a pool.
    pub fn socket(&self) -> Option<&Arc<Socket>> {
        match &self.receiver.link {
            ReceiveLink::Tls(reading) => Some(reading.socket()),
            _ => None,
        }
    }

    /// A frame that is alone, and its answer.
    pub async fn ask(&mut self, frame: &Frame) -> Result<Frame, Broken> {
        self.sender.push(frame);
        self.sender.flush().await?;
        self.first().await
    }

    pub async fn first(&mut self) -> Result<Frame, Broken> {
        timeout(PATIENCE, self.receiver.next()).await.map_err(|_| Broken::TimedOut)?
    }
}

fn end(mut send: SendStream, mut receive: RecvStream, code: VarInt) {
    let _ = send.reset(code);
    let _ = receive.stop(code);
}

impl Sender {
    pub fn is_empty(&self) -> bool {
        let sealed = matches!(&self.link, SendLink::Tls(writing) if !writing.is_empty());
        self.batch.0.is_empty() && !sealed
    }

    pub fn push(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.push_bytes(bytes.into());
    }

    pub fn push_bytes(&mut self, bytes: Bytes) {
        if !self.is_stopped {
            self.batch.0.push(bytes);
        }
    }

    /// Some of it. May be cancelled.
    pub async fn send(&mut self) -> Result<(), Broken> {
        let stream = match &mut self.link {
            SendLink::Quic(stream) => stream,
            SendLink::Tls(writing) => return writing.send(&mut self.batch).await,
            SendLink::Gone => return Err(Broken::Lost),
        };
        match stream.write_chunks(&mut self.batch.0).await {
            Ok(written) => drop(self.batch.0.drain(..written.chunks)),
            Err(WriteError::Stopped(code)) if code == LEFT => return Err(Broken::Lost),
            Err(WriteError::Stopped(_)) => {
                self.is_stopped = true;
                self.batch.0.clear();
            }
            Err(_) => return Err(Broken::Lost),
        }
        Ok(())
    }

    pub async fn flush(&mut self) -> Result<(), Broken> {
        while !self.is_empty() {
            self.send().await?;
        }
        Ok(())
    }
}

impl Receiver {
    /// What has come already.
    pub fn frame(&mut self) -> Result<Option<Frame>, Broken> {
        loop {
            if let Some(frame) = self.decoder.frame()? {
                return Ok(Some(frame));
            }
            match &mut self.link {
                ReceiveLink::Tls(reading) => match reading.next() {
                    Some(bytes) => self.decoder.push(bytes),
                    None => return Ok(None),
                },
                _ => return Ok(None),
            }
        }
    }

    /// Some more of it, all before was taken. May be cancelled.
    pub async fn receive(&mut self) -> Result<(), Broken> {
        match &mut self.link {
            ReceiveLink::Quic(stream) => {
                let chunk = stream.read_chunk(READ_MOST, true).await?.ok_or(Broken::Closed)?;
                self.decoder.push(chunk.bytes);
                Ok(())
            }
            ReceiveLink::Tls(reading) => reading.receive().await,
            ReceiveLink::Gone => Err(Broken::Lost),
        }
    }

    pub async fn next(&mut self) -> Result<Frame, Broken> {
        loop {
            if let Some(frame) = self.frame()? {
                return Ok(frame);
            }
            self.receive().await?;
        }
    }
}
