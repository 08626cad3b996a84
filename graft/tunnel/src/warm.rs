//! Opens a new carrier's congestion window before it is needed, with filler bytes that the other broker discards.
//!
//! A congestion window grows only with load. A connection on an unused carrier would therefore start as slowly as a new
//! TCP connection, except for the handshake.

use bytes::Bytes;
use millrace_graft_proto::carry::{
    WARM_MAX,
    frame::{CarryFrame, head_of_data},
};
use tokio::time::timeout;
use tracing::debug;

use super::{
    carrier::PeerCarrier,
    carrier_error::CarrierError,
    stream::{CarrierStream, PATIENCE},
};

const PIECE: usize = 16 << 10;
static NOTHING: [u8; PIECE] = [0; PIECE];

/// Sends this number of filler bytes, as fast as the congestion control allows and with lower priority than tunnelled
/// data.
pub async fn open(carrier: &PeerCarrier, bytes: u64) {
    if bytes == 0 {
        return;
    }
    if let Err(error) = try_open(carrier, bytes).await {
        debug!(peer = carrier.peer.name, "cannot send filler bytes that grow a congestion window: {error}");
    }
}

async fn try_open(carrier: &PeerCarrier, bytes: u64) -> Result<(), CarrierError> {
    let mut stream = carrier.open().await?;
    stream.yield_to_others();
    push(&mut stream, bytes).await?;
    stream.finish();
    Ok(())
}

async fn push(stream: &mut CarrierStream, bytes: u64) -> Result<(), CarrierError> {
    let mut left = usize::try_from(bytes.min(WARM_MAX)).unwrap_or_default();
    while left > 0 {
        let piece = left.min(PIECE);
        stream.sender.push_bytes(head_of_data(piece));
        stream.sender.push_bytes(Bytes::from_static(&NOTHING).slice(..piece));
        stream.sender.flush().await?;
        left -= piece;
    }
    Ok(())
}

/// Exchanges filler bytes on a pool connection that this host has made: it sends `bytes` bytes, and then the peer sends
/// as many as its own settings say.
pub async fn exchange(stream: &mut CarrierStream, bytes: u64) -> Result<(), CarrierError> {
    if bytes == 0 {
        return Ok(());
    }
    say(stream, bytes).await?;
    receive_warmup(stream, 0).await
}

/// Exchanges filler bytes on a pool connection that this host has accepted: it receives the peer's, of which `first`
/// have arrived already, and then sends `bytes` bytes.
pub async fn answer(stream: &mut CarrierStream, first: u64, bytes: u64) -> Result<(), CarrierError> {
    receive_warmup(stream, first).await?;
    say(stream, bytes).await
}

async fn say(stream: &mut CarrierStream, bytes: u64) -> Result<(), CarrierError> {
    push(stream, bytes).await?;
    stream.sender.push(&CarryFrame::End);
    stream.sender.flush().await
}

async fn receive_warmup(stream: &mut CarrierStream, first: u64) -> Result<(), CarrierError> {
    let mut got = first;
    while got <= WARM_MAX {
        match timeout(PATIENCE, stream.receiver.next()).await.map_err(|_| CarrierError::TimedOut)?? {
            CarryFrame::Data(bytes) => got += bytes.len() as u64,
            CarryFrame::End => return Ok(()),
            _ => break,
        }
    }
    Err(CarrierError::Closed)
}

/// Receives and discards the peer's filler bytes, of which `first` have arrived already. If more than `WARM_MAX` filler
/// bytes arrive, the stream is reset.
pub async fn discard(mut stream: CarrierStream, first: u64) {
    let mut got = first;
    while got <= WARM_MAX {
        match timeout(PATIENCE, stream.receiver.next()).await {
            Ok(Ok(CarryFrame::Data(bytes))) => got += bytes.len() as u64,
            Ok(Err(CarrierError::Closed)) => return stream.finish(),
            _ => break,
        }
    }
    stream.reset();
}
