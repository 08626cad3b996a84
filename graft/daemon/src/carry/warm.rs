//! What opens a new carrier's window before anybody needs it: bytes of no connection, which the other end throws away.
//!
//! A window is as large as what it has carried. A connection on a carrier that has carried nothing would begin as slowly as one of
//! its own, but for the handshake.

use bytes::Bytes;
use millrace_graft_proto::carry::{
    WARM_MAX,
    frame::{Frame, head_of_data},
};
use tokio::time::timeout;
use tracing::debug;

use super::{
    broken::Broken,
    carrier::Carrier,
    stream::{PATIENCE, Stream},
};

const PIECE: usize = 16 << 10;
static NOTHING: [u8; PIECE] = [0; PIECE];

/// Sends so many, as fast as the congestion control says, behind what is carried.
pub async fn open(carrier: &Carrier, bytes: u64) {
    if bytes == 0 {
        return;
    }
    if let Err(error) = try_open(carrier, bytes).await {
        debug!(peer = carrier.far.peer, "its window is not opened: {error}");
    }
}

async fn try_open(carrier: &Carrier, bytes: u64) -> Result<(), Broken> {
    let mut stream = carrier.open().await?;
    stream.yield_to_others();
    push(&mut stream, bytes).await?;
    stream.finish();
    Ok(())
}

async fn push(stream: &mut Stream, bytes: u64) -> Result<(), Broken> {
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

/// Of a pool's connection, by who has made it: as much as each end wants, one after the other.
pub async fn exchange(stream: &mut Stream, bytes: u64) -> Result<(), Broken> {
    if bytes == 0 {
        return Ok(());
    }
    say(stream, bytes).await?;
    hear(stream, 0).await
}

/// The other end's, of which so many have come.
pub async fn answer(stream: &mut Stream, first: u64, bytes: u64) -> Result<(), Broken> {
    hear(stream, first).await?;
    say(stream, bytes).await
}

async fn say(stream: &mut Stream, bytes: u64) -> Result<(), Broken> {
    push(stream, bytes).await?;
    stream.sender.push(&Frame::End);
    stream.sender.flush().await
}

async fn hear(stream: &mut Stream, first: u64) -> Result<(), Broken> {
    let mut got = first;
    while got <= WARM_MAX {
        match timeout(PATIENCE, stream.receiver.next()).await.map_err(|_| Broken::TimedOut)?? {
            Frame::Data(bytes) => got += bytes.len() as u64,
            Frame::End => return Ok(()),
            _ => break,
        }
    }
    Err(Broken::Closed)
}

/// Takes what the other end sends, of which `first` has come. More than there may be is no opening of a window.
pub async fn discard(mut stream: Stream, first: u64) {
    let mut got = first;
    while got <= WARM_MAX {
        match timeout(PATIENCE, stream.receiver.next()).await {
            Ok(Ok(Frame::Data(bytes))) => got += bytes.len() as u64,
            Ok(Err(Broken::Closed)) => return stream.finish(),
            _ => break,
        }
    }
    stream.reset();
}
