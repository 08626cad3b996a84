//! A TCP connection between brokers after its handshake. One task uses both directions, and each direction works
//! independently of the other.

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
    carrier_error::CarrierError,
    record::{Opener, RecordBatch, RecordContent, RecordError, Sealer},
};

/// Largest number of bytes that are encrypted together (`SEAL_MOST`), and smallest and largest size of one read, in
/// bytes.
const SEAL_MOST: usize = 128 << 10;
const READ_LEAST: usize = 2 << 10;
const READ_MOST: usize = 128 << 10;
/// Time limit for telling the other end that the application has reset the connection.
const FAREWELL: Duration = Duration::from_secs(15);

/// A group of connections between brokers that are closed together.
#[derive(Default)]
pub struct SocketGroup {
    sockets: Mutex<Vec<Weak<CarrierSocket>>>,
    count: AtomicUsize,
    /// Number of reads on all connections of the group that returned bytes.
    heard: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl SocketGroup {
    /// Returns the number of connections in the group.
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    pub fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    /// Returns the number of bytes that were sent on all connections of the group.
    pub fn sent_bytes(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Returns the number of bytes that were received on all connections of the group.
    pub fn received_bytes(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Shuts down all connections of the group, including busy ones.
    pub fn sever(&self) {
        for socket in self.sockets.lock().drain(..).filter_map(|it| it.upgrade()) {
            let _ = socket2::SockRef::from(&socket.stream).shutdown(Shutdown::Both);
        }
    }

    fn enter(&self, socket: &Arc<CarrierSocket>) {
        let mut sockets = self.sockets.lock();
        // Entries of sockets that no longer exist are removed when the list would have to grow.
        if sockets.len() == sockets.capacity() {
            sockets.retain(|it| it.strong_count() > 0);
        }
        sockets.push(Arc::downgrade(socket));
    }
}

/// The socket of one pool connection between two brokers. It counts towards its group until it is dropped.
pub struct CarrierSocket {
    stream: TcpStream,
    crowd: Arc<SocketGroup>,
    /// Number of reads on this connection that returned bytes.
    heard: AtomicU64,
}

impl CarrierSocket {
    pub fn new(stream: TcpStream, crowd: &Arc<SocketGroup>) -> Arc<Self> {
        let socket = Arc::new(Self { stream, crowd: crowd.clone(), heard: AtomicU64::new(0) });
        crowd.count.fetch_add(1, Relaxed);
        crowd.enter(&socket);
        socket
    }

    pub fn heard(&self) -> u64 {
        self.heard.load(Relaxed)
    }

    /// Waits until bytes have arrived, or the connection was closed.
    pub async fn stirs(&self) {
        let _ = self.stream.readable().await;
    }
}

impl Drop for CarrierSocket {
    fn drop(&mut self) {
        self.crowd.count.fetch_sub(1, Relaxed);
    }
}

/// Returns the sending and the receiving half of a connection, or `None` if the cipher is not supported.
pub fn halves(
    socket: &Arc<CarrierSocket>,
    secrets: &ExtractedSecrets,
) -> Option<(Box<Writing>, Box<SocketReader>)> {
    let sealer = Sealer::new(&secrets.tx)?;
    let opener = Opener::new(&secrets.rx)?;
    let writing = Writing { socket: socket.clone(), sealer, sealed: Vec::new(), at: 0 };
    let reading = SocketReader {
        socket: socket.clone(),
        opener,
        read: BytesMut::new(),
        ready: Vec::new(),
        piece: READ_LEAST,
    };
    Some((Box::new(writing), Box::new(reading)))
}

/// The sending half of a pool connection: encrypts bytes as TLS records, and sends them.
pub struct Writing {
    socket: Arc<CarrierSocket>,
    sealer: Sealer,
    /// Encrypted TLS records that wait to be sent. The bytes before `at` were sent already.
    sealed: Vec<u8>,
    at: usize,
}

impl Writing {
    pub fn is_empty(&self) -> bool {
        self.sealed.is_empty()
    }

    /// Sends the encrypted TLS records. If all of them were sent, first encrypts more data of the batch. The call may
    /// be cancelled.
    pub async fn send(&mut self, batch: &mut RecordBatch) -> Result<(), CarrierError> {
        // All encrypted bytes are sent before more are encrypted, so the buffer stays small.
        if self.sealed.is_empty() {
            while !batch.0.is_empty() && self.sealed.len() < SEAL_MOST {
                self.sealer.seal(batch, &mut self.sealed)?;
            }
        }
        self.write().await
    }

    async fn write(&mut self) -> Result<(), CarrierError> {
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

    /// Frees the send buffer of a connection that is idle.
    pub fn shrink(&mut self) {
        if self.sealed.is_empty() {
            self.sealed = Vec::new();
        }
    }

    async fn say_reset(&mut self) -> Result<(), CarrierError> {
        self.sealer.reset(&mut self.sealed)?;
        self.write().await?;
        Ok(socket2::SockRef::from(&self.socket.stream).shutdown(Shutdown::Write)?)
    }
}

/// The receiving half of a pool connection: receives TLS records, and decrypts them.
pub struct SocketReader {
    socket: Arc<CarrierSocket>,
    opener: Opener,
    read: BytesMut,
    /// Decrypted contents of records in reverse order: the content that is returned next is the last element.
    ready: Vec<Bytes>,
    piece: usize,
}

impl SocketReader {
    pub fn socket(&self) -> &Arc<CarrierSocket> {
        &self.socket
    }

    /// Returns the next decrypted content of a record that was received earlier.
    pub fn next(&mut self) -> Option<Bytes> {
        self.ready.pop()
    }

    /// Reports whether the idle connection can be used: it is open, and has no unread bytes.
    pub fn is_quiet(&self) -> bool {
        // An idle connection has nothing to read: a byte or an end shows that it cannot be used.
        let nothing = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.read.is_empty()
            && self.ready.is_empty()
            && self.socket.stream.try_read(&mut [0]).is_err_and(|error| nothing(&error))
    }

    /// Receives more bytes, after the caller has taken all decrypted contents. The received bytes may be less than one
    /// TLS record. The call may be cancelled.
    pub async fn receive(&mut self) -> Result<(), CarrierError> {
        while self.ready.is_empty() {
            self.socket.stream.readable().await?;
            self.read.reserve(self.piece);
            match self.socket.stream.try_read_buf(&mut self.read) {
                Ok(0) => return Err(CarrierError::Lost),
                Ok(length) => return self.open(length),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn open(&mut self, length: usize) -> Result<(), CarrierError> {
        self.socket.crowd.heard.fetch_add(1, Relaxed);
        self.socket.heard.fetch_add(1, Relaxed);
        self.socket.crowd.received.fetch_add(length as u64, Relaxed);
        while let Some(content) = self.opener.open(&mut self.read)? {
            match content {
                RecordContent::Data(bytes) => self.ready.push(bytes),
                RecordContent::Reset => return Err(CarrierError::Reset),
                RecordContent::Over => return Err(CarrierError::Lost),
            }
        }
        // The list is reversed, because `next` removes contents from its end.
        self.ready.reverse();
        // A read that fills its buffer doubles the size of the next one, and a smaller read halves it.
        self.piece = match length >= self.piece {
            true => (2 * self.piece).min(READ_MOST),
            // The read took everything that had arrived. The next bytes may come much later, so no buffer is kept for
            // them.
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

/// Tells the other end that the application has reset the connection, and reads until the other end closes the
/// connection. If the socket were closed with unread bytes, the kernel would reset the connection before the alert
/// arrives.
pub async fn farewell(mut writing: Box<Writing>, mut reading: Box<SocketReader>) {
    let all = async {
        writing.say_reset().await?;
        loop {
            reading.receive().await?;
            while reading.next().is_some() {}
        }
    };
    let _: Result<Result<(), CarrierError>, _> = timeout(FAREWELL, all).await;
}

impl From<io::Error> for CarrierError {
    fn from(_: io::Error) -> Self {
        Self::Lost
    }
}

impl From<RecordError> for CarrierError {
    fn from(_: RecordError) -> Self {
        Self::Lost
    }
}
