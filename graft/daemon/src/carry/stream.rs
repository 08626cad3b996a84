//! What carries one connection, as frames: a stream of a QUIC carrier, or a connection of a pool, for as long as it has it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_graft_proto::carry::frame::{Decoder, Frame};
use quinn::{Connection, ReadError, RecvStream, SendStream, VarInt, WriteError};
use tokio::time::timeout;

use super::{
    broken::Broken,
    record::Batch,
    socket::{self, Reading, Socket, Writing},
};

/// For an answer of who is asked, however short the round trip.
const ASKED_LEAST: Duration = Duration::from_secs(1);
/// For the first frame of a stream, and for its answer.
pub const PATIENCE: Duration = Duration::from_secs(15);

const READ_MOST: usize = 64 << 10;
/// What a connection may have given to a carrier by QUIC, however slow that is, and the other end has not confirmed.
pub const LEAD_LEAST: u64 = 256 << 10;
/// Beyond that, so many of its windows: one is under way, one is being confirmed, and there is always more to send.
const LEAD_WINDOWS: u64 = 4;
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
    /// Of a pool whose other end may be asked whether it is there: how long it may take to answer.
    pub asked: Option<Duration>,
}

pub struct Sender {
    link: SendLink,
    batch: Batch,
    /// The other end takes no more. Whether it is done or has reset the connection is told by what it has sent.
    is_stopped: bool,
}

enum SendLink {
    /// With what it is of.
    Quic(SendStream, Connection),
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
    pub fn quic(connection: &Connection, (sender, receiver): (SendStream, RecvStream)) -> Self {
        Self::with(SendLink::Quic(sender, connection.clone()), ReceiveLink::Quic(receiver), None)
    }

    /// Of a pool.
    pub fn tls(
        (writing, reading): (Box<Writing>, Box<Reading>),
        home: Home,
        asked: Option<Duration>,
    ) -> Self {
        let it = Self::with(SendLink::Tls(writing), ReceiveLink::Tls(reading), Some(home));
        Self { asked, ..it }
    }

    fn with(send: SendLink, receive: ReceiveLink, home: Option<Home>) -> Self {
        Self {
            sender: Sender { link: send, batch: Batch::default(), is_stopped: false },
            receiver: Receiver { link: receive, decoder: Decoder::default() },
            home,
            asked: None,
        }
    }

    /// What is sent on others goes first.
    pub fn yield_to_others(&self) {
        if let SendLink::Quic(stream, _) = &self.sender.link {
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
            (SendLink::Quic(send, _), ReceiveLink::Quic(receive)) => end(send, receive, RESET),
            (SendLink::Tls(writing), ReceiveLink::Tls(reading)) => {
                tokio::spawn(socket::farewell(writing, reading));
            }
            _ => {}
        }
    }

    /// The connection goes on with another: this one is as if it were lost. A pool's is closed.
    pub fn leave(&mut self) {
        if let (SendLink::Quic(send, _), ReceiveLink::Quic(receive)) = self.take() {
            end(send, receive, LEFT);
        }
    }

    /// All was said at both ends, and heard.
    pub fn release(&mut self) {
        match self.take() {
            (SendLink::Quic(mut send, _), _) => drop(send.finish()),
            (SendLink::Tls(mut writing), ReceiveLink::Tls(reading)) => {
                let Some(home) = self.home.take() else { return };
                // What has come already is of the next connection.
                if writing.is_empty() && self.sender.batch.0.is_empty() && self.receiver.decoder.is_between()
                {
                    writing.shrink();
                    home(Self::tls((writing, reading), home.clone(), self.asked));
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

    /// Times that something has come by it, of a pool.
    pub fn heard(&self) -> u64 {
        self.socket().map_or(0, |socket| socket.heard())
    }

    /// A frame that is alone, and its answer: of a pool something comes soon, or the connection is none any more.
    pub async fn ask(&mut self, frame: &Frame) -> Result<Frame, Broken> {
        let patience = self.asked.map_or(PATIENCE, |asked| PATIENCE.min(2 * asked));
        self.sender.push(frame);
        self.sender.flush().await?;
        self.first_within(patience).await
    }

    pub async fn first(&mut self) -> Result<Frame, Broken> {
        self.first_within(PATIENCE).await
    }

    /// With no longer silence before it.
    async fn first_within(&mut self, patience: Duration) -> Result<Frame, Broken> {
        let first = async {
            loop {
                match timeout(patience, self.receiver.next()).await.map_err(|_| Broken::TimedOut)? {
                    // Of what it carried before, or from who is busy with what it was asked.
                    Ok(Frame::Ask | Frame::Answer) if self.asked.is_some() => {}
                    first => return first,
                }
            }
        };
        timeout(PATIENCE, first).await.map_err(|_| Broken::TimedOut)?
    }
}

/// For an answer, where one takes so long at best.
pub fn patience(rtt: Duration) -> Duration {
    (3 * rtt).max(ASKED_LEAST)
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

    /// What may be ahead of what the other end has confirmed. Confirmations of the other direction come behind it: a carrier by QUIC takes more than it can send soon,
    /// and they would come as late as all of that. Sockets take no more than they need.
    pub fn lead(&self) -> u64 {
        match &self.link {
            SendLink::Quic(_, connection) => LEAD_LEAST.max(LEAD_WINDOWS * connection.stats().path.cwnd),
            _ => u64::MAX,
        }
    }

    /// Some of it. May be cancelled.
    pub async fn send(&mut self) -> Result<(), Broken> {
        let stream = match &mut self.link {
            SendLink::Quic(stream, _) => stream,
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
