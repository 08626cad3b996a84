//! A stream of a carrier, as frames.

use std::time::Duration;

use bytes::Bytes;
use millrace_proto::graft::carry::frame::{Decoder, Frame, Malformed};
use quinn::{ReadError, RecvStream, SendStream, VarInt, WriteError};
use tokio::time::timeout;

/// For the first frame of a stream, and for its answer.
pub const PATIENCE: Duration = Duration::from_secs(15);

const READ_MOST: usize = 64 << 10;
/// The other application has reset the connection.
const RESET: VarInt = VarInt::from_u32(1);

#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the carrier is gone")]
    Lost,
    #[error("the other end has reset it")]
    Reset,
    #[error("the other end has closed it")]
    Closed,
    #[error("nothing came")]
    TimedOut,
    #[error("{0}")]
    Malformed(#[from] Malformed),
}

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(_) => Self::Reset,
            _ => Self::Lost,
        }
    }
}

/// Both directions are used by one task, each for itself.
pub struct Stream {
    pub sender: Sender,
    pub receiver: Receiver,
}

pub struct Sender {
    stream: SendStream,
    /// What is to go, the first perhaps in part.
    batch: Vec<Bytes>,
    /// The other end takes no more. Whether it is done or has reset the connection is told by what it has sent.
    is_stopped: bool,
}

pub struct Receiver {
    stream: RecvStream,
    decoder: Decoder,
}

impl Stream {
    pub fn new((sender, receiver): (SendStream, RecvStream)) -> Self {
        Self {
            sender: Sender { stream: sender, batch: Vec::new(), is_stopped: false },
            receiver: Receiver { stream: receiver, decoder: Decoder::default() },
        }
    }

    /// What is sent on others goes first.
    pub fn yield_to_others(&self) {
        let _ = self.sender.stream.set_priority(-1);
    }

    /// The application has reset the connection, or there is none.
    pub fn reset(&mut self) {
        let _ = self.sender.stream.reset(RESET);
        let _ = self.receiver.stream.stop(RESET);
    }

    /// All was said. What is yet to arrive does.
    pub fn finish(mut self) {
        let _ = self.sender.stream.finish();
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

impl Sender {
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    pub fn push(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.push_bytes(bytes.into());
    }

    pub fn push_bytes(&mut self, bytes: Bytes) {
        if !self.is_stopped {
            self.batch.push(bytes);
        }
    }

    /// Some of it. May be cancelled.
    pub async fn send(&mut self) -> Result<(), Broken> {
        match self.stream.write_chunks(&mut self.batch).await {
            Ok(written) => drop(self.batch.drain(..written.chunks)),
            Err(WriteError::Stopped(_)) => {
                self.is_stopped = true;
                self.batch.clear();
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
        Ok(self.decoder.frame()?)
    }

    /// Some more of it, all before was taken. May be cancelled.
    pub async fn receive(&mut self) -> Result<(), Broken> {
        let chunk = self.stream.read_chunk(READ_MOST, true).await?.ok_or(Broken::Closed)?;
        self.decoder.push(chunk.bytes);
        Ok(())
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
