//! A TCP connection between brokers after its handshake: both directions, used by one task, each for itself.

use std::{
    io,
    net::Shutdown,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rustls::ExtractedSecrets;
use tokio::{net::TcpStream, time::timeout};

use super::{
    broken::Broken,
    record::{Bad, Batch, Content, Opener, Sealer},
};

/// Of what is sealed or read at once.
const SEAL_MOST: usize = 128 << 10;
const READ_LEAST: usize = 2 << 10;
const READ_MOST: usize = 128 << 10;
/// For the other end to take what was sent last.
const FAREWELL: Duration = Duration::from_secs(15);

/// Connections that belong together, and end together.
#[derive(Default)]
pub struct Crowd {
    sockets: Mutex<Vec<Weak<Socket>>>,
    count: AtomicUsize,
    /// Times that something has come.
    heard: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Crowd {
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    pub fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    pub fn sent_bytes(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    pub fn received_bytes(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Ends all of them, whatever they are doing.
    pub fn sever(&self) {
        for socket in self.sockets.lock().drain(..).filter_map(|it| it.upgrade()) {
            let _ = socket2::SockRef::from(&socket.stream).shutdown(Shutdown::Both);
        }
    }

    fn enter(&self, socket: &Arc<Socket>) {
        let mut sockets = self.sockets.lock();
        // Those that are gone leave when there is no room.
        if sockets.len() == sockets.capacity() {
            sockets.retain(|it| it.strong_count() > 0);
        }
        sockets.push(Arc::downgrade(socket));
    }
}

pub struct Socket {
    stream: TcpStream,
    crowd: Arc<Crowd>,
    /// Times that something has come.
    heard: AtomicU64,
}

impl Socket {
    pub fn new(stream: TcpStream, crowd: &Arc<Crowd>) -> Arc<Self> {
        let socket = Arc::new(Self { stream, crowd: crowd.clone(), heard: AtomicU64::new(0) });
        crowd.count.fetch_add(1, Relaxed);
        crowd.enter(&socket);
        socket
    }

    pub fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    /// Something has come, or it is over.
    pub async fn stirs(&self) {
        let _ = self.stream.readable().await;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.crowd.count.fetch_sub(1, Relaxed);
    }
}

/// Both halves.
pub fn halves(socket: &Arc<Socket>, secrets: &ExtractedSecrets) -> Option<(Box<Writing>, Box<Reading>)> {
    let (sealer, opener) = (Sealer::new(&secrets.tx)?, Opener::new(&secrets.rx)?);
    let writing = Writing { socket: socket.clone(), sealer, sealed: Vec::new(), at: 0 };
    let reading = Reading {
        socket: socket.clone(),
        opener,
        read: BytesMut::new(),
        ready: Vec::new(),
        piece: READ_LEAST,
    };
    Some((Box::new(writing), Box::new(reading)))
}

pub struct Writing {
    socket: Arc<Socket>,
    sealer: Sealer,
    /// Records, of which those before `at` have gone.
    sealed: Vec<u8>,
    at: usize,
}

impl Writing {
    pub fn is_empty(&self) -> bool {
        self.sealed.is_empty()
    }

    /// Some of it. May be cancelled.
    pub async fn send(&mut self, batch: &mut Batch) -> Result<(), Broken> {
        if self.sealed.is_empty() {
            while !batch.0.is_empty() && self.sealed.len() < SEAL_MOST {
                self.sealer.seal(batch, &mut self.sealed)?;
            }
        }
        self.write().await
    }

    async fn write(&mut self) -> Result<(), Broken> {
        while self.at < self.sealed.len() {
            self.socket.stream.writable().await?;
            match self.socket.stream.try_write(&self.sealed[self.at..]) {
                Ok(length) => {
                    self.at += length;
                    self.socket.crowd.sent.fetch_add(length as u64, Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.sealed.clear();
        self.at = 0;
        Ok(())
    }

    /// What it holds is not needed for a while.
    pub fn shrink(&mut self) {
        if self.sealed.is_empty() {
            self.sealed = Vec::new();
        }
    }

    async fn say_reset(&mut self) -> Result<(), Broken> {
        self.sealer.reset(&mut self.sealed)?;
        self.write().await?;
        Ok(socket2::SockRef::from(&self.socket.stream).shutdown(Shutdown::Write)?)
    }
}

pub struct Reading {
    socket: Arc<Socket>,
    opener: Opener,
    read: BytesMut,
    /// Opened, the next one last.
    ready: Vec<Bytes>,
    piece: usize,
}

impl Reading {
    pub fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// What has come already.
    pub fn next(&mut self) -> Option<Bytes> {
        self.ready.pop()
    }

    /// Nothing has come that was not taken, and the other end has not ended it.
    pub fn is_quiet(&self) -> bool {
        let nothing = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.read.is_empty()
            && self.ready.is_empty()
            && self.socket.stream.try_read(&mut [0]).is_err_and(|error| nothing(&error))
    }

    /// Some more, all before was taken; it may be less than a record. May be cancelled.
    pub async fn receive(&mut self) -> Result<(), Broken> {
        while self.ready.is_empty() {
            self.socket.stream.readable().await?;
            self.read.reserve(self.piece);
            match self.socket.stream.try_read_buf(&mut self.read) {
                Ok(0) => return Err(Broken::Lost),
                Ok(length) => return self.open(length),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn open(&mut self, length: usize) -> Result<(), Broken> {
        self.socket.crowd.heard.fetch_add(1, Relaxed);
        self.socket.heard.fetch_add(1, Relaxed);
        self.socket.crowd.received.fetch_add(length as u64, Relaxed);
        while let Some(content) = self.opener.open(&mut self.read)? {
            match content {
                Content::Data(bytes) => self.ready.push(bytes),
                Content::Reset => return Err(Broken::Reset),
                Content::Over => return Err(Broken::Lost),
            }
        }
        self.ready.reverse();
        self.piece = match length >= self.piece {
            true => (2 * self.piece).min(READ_MOST),
            // All of it was read. What comes next may not come soon: no room is kept for it.
            false => {
                if self.read.is_empty() {
                    self.read = BytesMut::new();
                }
                (self.piece / 2).max(READ_LEAST)
            }
        };
        Ok(())
    }
}

/// Tells the other end that the application has reset the connection, and waits until it has heard it: what has come and was not
/// read would have the kernel reset the connection first.
pub async fn farewell(mut writing: Box<Writing>, mut reading: Box<Reading>) {
    let all = async {
        writing.say_reset().await?;
        loop {
            reading.receive().await?;
            while reading.next().is_some() {}
        }
    };
    let _: Result<Result<(), Broken>, _> = timeout(FAREWELL, all).await;
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Lost
    }
}

impl From<Bad> for Broken {
    fn from(_: Bad) -> Self {
        Self::Lost
    }
}
