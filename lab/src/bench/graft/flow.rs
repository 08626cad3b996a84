//! TCP transfers between two nodes of a lab.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use nix::sys::socket::{setsockopt, sockopt};

use crate::lab::LabNode;

/// Result of one transfer.
#[derive(Debug, Clone, Copy)]
pub struct TransferResult {
    /// Time from the SYN to the last byte at the receiver.
    pub time: Duration,
    pub bytes: u64,
    /// Whether all bytes arrived before the time limit.
    pub is_whole: bool,
}

/// An open connection for a transfer, and its start time.
pub struct BegunTransfer {
    pub sender: TcpStream,
    pub receiver: TcpStream,
    pub start: Instant,
}

impl BegunTransfer {
    /// Opens a connection whose sender uses this congestion control from its first data byte on.
    pub fn open(from: &LabNode, to: &LabNode, control: &str) -> anyhow::Result<Self> {
        let listener = to.enter(|| TcpListener::bind((to.addr_v4(), 0)))??;
        let at = SocketAddr::new(to.addr_v4().into(), listener.local_addr()?.port());
        let start = Instant::now();
        let sender =
            from.enter(|| TcpStream::connect(at))?.with_context(|| format!("cannot connect to {at}"))?;
        setsockopt(&sender, sockopt::TcpCongestion, &control.into())
            .map_err(|error| anyhow!("TCP with {control}: {error}"))?;
        let (receiver, _) = listener.accept()?;
        Ok(Self { sender, receiver, start })
    }

    /// Sends this many bytes, and waits for them until `limit` after the start.
    pub fn transfer(self, bytes: u64, limit: Duration) -> anyhow::Result<TransferResult> {
        let Self { mut sender, mut receiver, start } = self;
        sender.set_write_timeout(Some(limit))?;
        let writing = std::thread::spawn(move || {
            let block = [0; 1 << 16];
            let mut left = bytes;
            while left > 0 {
                let now = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
                // A write error means that the receiver has closed the connection at the limit. The receiver's count of
                // bytes is the result.
                if sender.write_all(&block[..now]).is_err() {
                    return;
                }
                left -= now as u64;
            }
        });
        let got = receive(&mut receiver, bytes, start + limit)?;
        let time = start.elapsed();
        // Closing a socket with unread data sends a reset, which ends the sender's writes.
        drop(receiver);
        writing.join().map_err(|_| anyhow!("a sender panicked"))?;
        Ok(TransferResult { time: time.min(limit), bytes: got, is_whole: got == bytes })
    }
}

fn receive(from: &mut TcpStream, bytes: u64, until: Instant) -> anyhow::Result<u64> {
    let mut buffer = vec![0; 1 << 18];
    let mut got = 0;
    while got < bytes {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(got);
        }
        from.set_read_timeout(Some(left))?;
        match from.read(&mut buffer) {
            Ok(0) => return Ok(got),
            Ok(read) => got += read as u64,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(got);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(got)
}
