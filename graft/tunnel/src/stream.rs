//! The stream of one tunnelled connection, which transports frames: a stream of a QUIC carrier, or a connection of a
//! pool while the tunnelled connection uses it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_graft_proto::carry::frame::{CarryFrame, Decoder};
use quinn::{Connection, ReadError, RecvStream, SendStream, VarInt, WriteError};
use tokio::time::timeout;

use super::{
    carrier_error::CarrierError,
    record::RecordBatch,
    socket::{self, CarrierSocket, SocketReader, Writing},
};

/// Shortest time limit for an answer to the frame `Ask`, however short the round trip is.
const ASKED_LEAST: Duration = Duration::from_secs(1);
/// Time limit for receiving the first frame of a stream, and for receiving the peer's answer to it.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Largest read from a QUIC stream, in bytes.
const READ_MOST: usize = 64 << 10;
/// Number of sent bytes that may always wait for the peer's acknowledgement (frame `Confirm`) on a QUIC carrier, for
/// each tunnelled connection and however slow the carrier is.
pub const LEAD_LEAST: u64 = 256 << 10;
/// Limit of a tunnelled connection's sent bytes that the peer has not acknowledged (frame `Confirm`), in congestion
/// windows of the QUIC carrier. One window is in flight, one is being acknowledged, and the rest keeps the sender busy.
const LEAD_WINDOWS: u64 = 4;
/// QUIC error code of a stream whose application has reset the connection.
const RESET: VarInt = VarInt::from_u32(1);
/// QUIC error code of a stream whose connection continues on another stream.
const LEFT: VarInt = VarInt::from_u32(2);

impl From<ReadError> for CarrierError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(code) if code != LEFT => Self::Reset,
            _ => Self::Lost,
        }
    }
}

/// Function that returns a connection to its pool when it is idle again.
pub type Home = Arc<dyn Fn(CarrierStream) + Send + Sync>;

/// Both directions of a stream. One task uses both directions, and each direction works independently of the other.
pub struct CarrierStream {
    pub sender: CarrierSender,
    pub receiver: CarrierReceiver,
    home: Option<Home>,
    /// Time limit for an answer to the frame `Ask`. `None` for a QUIC stream, and for a pool's connection whose other
    /// end does not know that frame.
    pub asked: Option<Duration>,
}

/// The sending half of a carrier's stream: queues frames, and sends them in order.
pub struct CarrierSender {
    link: SendLink,
    batch: RecordBatch,
    /// True if the other end has stopped reading. Frames from the other end tell whether it has finished or has reset
    /// the connection.
    is_stopped: bool,
}

enum SendLink {
    /// A QUIC stream and its connection.
    Quic(SendStream, Connection),
    Tls(Box<Writing>),
    Gone,
}

/// The receiving half of a carrier's stream: decodes the frames that arrive.
pub struct CarrierReceiver {
    link: ReceiveLink,
    decoder: Decoder,
}

enum ReceiveLink {
    Quic(RecvStream),
    Tls(Box<SocketReader>),
    Gone,
}

impl CarrierStream {
    /// Creates a stream that uses a stream of a QUIC carrier.
    pub fn quic(connection: &Connection, sender: SendStream, receiver: RecvStream) -> Self {
        Self::with(SendLink::Quic(sender, connection.clone()), ReceiveLink::Quic(receiver), None)
    }

    /// Creates a stream that uses a pool's connection.
    pub fn tls(
        writing: Box<Writing>,
        reading: Box<SocketReader>,
        home: Home,
        asked: Option<Duration>,
    ) -> Self {
        let it = Self::with(SendLink::Tls(writing), ReceiveLink::Tls(reading), Some(home));
        Self { asked, ..it }
    }

    fn with(send: SendLink, receive: ReceiveLink, home: Option<Home>) -> Self {
        Self {
            sender: CarrierSender { link: send, batch: RecordBatch::default(), is_stopped: false },
            receiver: CarrierReceiver { link: receive, decoder: Decoder::default() },
            home,
            asked: None,
        }
    }

    /// Gives the stream a lower priority than the streams of other connections.
    pub fn yield_to_others(&self) {
        if let SendLink::Quic(stream, _) = &self.sender.link {
            let _ = stream.set_priority(-1);
        }
    }

    fn take(&mut self) -> (SendLink, ReceiveLink) {
        let send = std::mem::replace(&mut self.sender.link, SendLink::Gone);
        (send, std::mem::replace(&mut self.receiver.link, ReceiveLink::Gone))
    }

    /// Resets the stream, because the application has reset the connection, or because the stream carries no
    /// connection.
    pub fn reset(&mut self) {
        match self.take() {
            (SendLink::Quic(send, _), ReceiveLink::Quic(receive)) => end(send, receive, RESET),
            (SendLink::Tls(writing), ReceiveLink::Tls(reading)) => {
                tokio::spawn(socket::farewell(writing, reading));
            }
            _ => {}
        }
    }

    /// Abandons the stream, because the tunnelled connection continues on another stream. A pool's connection is
    /// closed.
    pub fn leave(&mut self) {
        if let (SendLink::Quic(send, _), ReceiveLink::Quic(receive)) = self.take() {
            end(send, receive, LEFT);
        }
    }

    /// Ends the stream after both ends have sent and received everything.
    pub fn release(&mut self) {
        match self.take() {
            (SendLink::Quic(mut send, _), _) => drop(send.finish()),
            (SendLink::Tls(mut writing), ReceiveLink::Tls(reading)) => {
                let Some(home) = self.home.take() else { return };
                // A connection returns to its pool only between two frames. Bytes that have already arrived belong to
                // the next tunnelled connection.
                if writing.is_empty() && self.sender.batch.0.is_empty() && self.receiver.decoder.is_between()
                {
                    writing.shrink();
                    home(Self::tls(writing, reading, home.clone(), self.asked));
                }
            }
            _ => {}
        }
    }

    /// Ends the stream after everything was sent. Bytes that are still in flight arrive nevertheless.
    pub fn finish(mut self) {
        self.release();
    }

    /// Reports whether the stream uses a pool's connection that is open and has no unread bytes.
    pub fn is_quiet(&self) -> bool {
        matches!(&self.receiver.link, ReceiveLink::Tls(reading) if reading.is_quiet())
    }

    /// Returns the socket of a pool's connection.
    pub fn socket(&self) -> Option<&Arc<CarrierSocket>> {
        match &self.receiver.link {
            ReceiveLink::Tls(reading) => Some(reading.socket()),
            _ => None,
        }
    }

    /// Returns how often data has arrived on a pool's connection (its arrival counter).
    pub fn heard(&self) -> u64 {
        self.socket().map_or(0, |socket| socket.heard())
    }

    /// Sends a single frame and waits for its answer. If nothing arrives on a pool's connection within the time limit,
    /// the connection counts as lost.
    pub async fn ask(&mut self, frame: &CarryFrame) -> Result<CarryFrame, CarrierError> {
        // The time limit for an answer is shorter on a pool's connection.
        let patience = self.asked.map_or(PATIENCE, |asked| PATIENCE.min(2 * asked));
        self.sender.push(frame);
        self.sender.flush().await?;
        self.first_within(patience).await
    }

    /// Waits for the first frame of the stream, for at most [`PATIENCE`].
    pub async fn first(&mut self) -> Result<CarryFrame, CarrierError> {
        self.first_within(PATIENCE).await
    }

    /// Waits for the first frame of the stream. Gives up if nothing arrives for longer than `patience`.
    async fn first_within(&mut self, patience: Duration) -> Result<CarryFrame, CarrierError> {
        let first = async {
            loop {
                match timeout(patience, self.receiver.next()).await.map_err(|_| CarrierError::TimedOut)? {
                    // `Ask` and `Answer` belong to the previous tunnelled connection on this pool connection, or show
                    // that the peer is still handling the request.
                    Ok(CarryFrame::Ask | CarryFrame::Answer) if self.asked.is_some() => {}
                    first => return first,
                }
            }
        };
        timeout(PATIENCE, first).await.map_err(|_| CarrierError::TimedOut)?
    }
}

/// Returns the time limit for an answer on a path with this round trip.
pub fn patience(rtt: Duration) -> Duration {
    (3 * rtt).max(ASKED_LEAST)
}

fn end(mut send: SendStream, mut receive: RecvStream, code: VarInt) {
    let _ = send.reset(code);
    let _ = receive.stop(code);
}

impl CarrierSender {
    /// Reports whether no frames are queued.
    pub fn is_empty(&self) -> bool {
        let sealed = matches!(&self.link, SendLink::Tls(writing) if !writing.is_empty());
        self.batch.0.is_empty() && !sealed
    }

    /// Queues a frame. [`Self::send`] and [`Self::flush`] send it.
    pub fn push(&mut self, frame: &CarryFrame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.push_bytes(bytes.into());
    }

    /// Queues an encoded frame, or a part of one. It is dropped if the other end has stopped reading.
    pub fn push_bytes(&mut self, bytes: Bytes) {
        if !self.is_stopped {
            self.batch.0.push(bytes);
        }
    }

    /// Returns the limit of sent bytes that the peer has not acknowledged. A QUIC carrier buffers more than it can send
    /// soon, and frames that acknowledge received bytes would wait behind these bytes. TCP sockets need no limit here.
    pub fn lead(&self) -> u64 {
        match &self.link {
            SendLink::Quic(_, connection) => LEAD_LEAST.max(LEAD_WINDOWS * connection.stats().path.cwnd),
            _ => u64::MAX,
        }
    }

    /// Sends a part of the queued bytes. The call may be cancelled.
    pub async fn send(&mut self) -> Result<(), CarrierError> {
        let stream = match &mut self.link {
            SendLink::Quic(stream, _) => stream,
            SendLink::Tls(writing) => return writing.send(&mut self.batch).await,
            SendLink::Gone => return Err(CarrierError::Lost),
        };
        match stream.write_chunks(&mut self.batch.0).await {
            Ok(written) => drop(self.batch.0.drain(..written.chunks)),
            Err(WriteError::Stopped(code)) if code == LEFT => return Err(CarrierError::Lost),
            // Frames from the other end tell why it has stopped reading.
            Err(WriteError::Stopped(_)) => {
                self.is_stopped = true;
                self.batch.0.clear();
            }
            Err(_) => return Err(CarrierError::Lost),
        }
        Ok(())
    }

    /// Sends all queued frames.
    pub async fn flush(&mut self) -> Result<(), CarrierError> {
        while !self.is_empty() {
            self.send().await?;
        }
        Ok(())
    }
}

impl CarrierReceiver {
    /// Returns the next frame that has already arrived.
    pub fn frame(&mut self) -> Result<Option<CarryFrame>, CarrierError> {
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

    /// Receives more bytes, after the caller has taken all frames. The call may be cancelled.
    pub async fn receive(&mut self) -> Result<(), CarrierError> {
        match &mut self.link {
            ReceiveLink::Quic(stream) => {
                let chunk = stream.read_chunk(READ_MOST, true).await?.ok_or(CarrierError::Closed)?;
                self.decoder.push(chunk.bytes);
                Ok(())
            }
            ReceiveLink::Tls(reading) => reading.receive().await,
            ReceiveLink::Gone => Err(CarrierError::Lost),
        }
    }

    /// Waits for the next frame.
    pub async fn next(&mut self) -> Result<CarryFrame, CarrierError> {
        loop {
            if let Some(frame) = self.frame()? {
                return Ok(frame);
            }
            self.receive().await?;
        }
    }
}
