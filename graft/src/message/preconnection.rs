//! What a session is to be, before there is one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::want::Want;
use super::{DEFAULT_SOCKET, Error, Listener, Session};

/// For the other end to agree. The daemon's own patience is shorter: it says what is missing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A peer of the daemon's settings, a service by name, and what its messages need.
#[derive(Clone, Debug)]
pub struct Preconnection {
    socket: PathBuf,
    peer: String,
    service: String,
    want: Want,
    patience: Duration,
}

impl Preconnection {
    pub fn new(peer: impl Into<String>, service: impl Into<String>) -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            peer: peer.into(),
            service: service.into(),
            want: Want::default(),
            patience: PATIENCE,
        }
    }

    /// Of the daemon, if not [`DEFAULT_SOCKET`].
    pub fn socket(self, path: impl AsRef<Path>) -> Self {
        Self { socket: path.as_ref().to_owned(), ..self }
    }

    /// One more: `reliability`, `order`, `partial-reliability`, ...
    pub fn service(mut self, name: impl Into<String>) -> Self {
        self.want.services.insert(name.into());
        self
    }

    /// One way.
    pub fn max_delay_ms(mut self, ms: u32) -> Self {
        self.want.qos.max_delay_ms = Some(ms);
        self
    }

    pub fn min_throughput_mbit(mut self, mbit: f64) -> Self {
        self.want.qos.min_throughput_mbit = Some(mbit);
        self
    }

    pub fn max_loss_percent(mut self, percent: f64) -> Self {
        self.want.qos.max_loss_percent = Some(percent);
        self
    }

    /// Another graft may come where this one does not keep to it.
    pub fn adapt(mut self, may: bool) -> Self {
        self.want.adapt = may;
        self
    }

    /// All of it at once.
    pub fn want(self, want: Want) -> Self {
        Self { want, ..self }
    }

    /// How long [`initiate`](Self::initiate) waits.
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns when both ends have agreed.
    ///
    /// # Errors
    /// There is no daemon, or what is asked for is refused: then in its words.
    pub fn initiate(&self) -> Result<Session, Error> {
        let mut session = self.begin()?;
        session.validate(Some(self.patience))?;
        Ok(session)
    }

    /// Asks, and does not wait: [`Session::validate`] does.
    pub fn begin(&self) -> Result<Session, Error> {
        let mut session = Session::new(&self.socket, &self.peer, &self.service)?;
        session.negotiate(self.want.clone())?;
        Ok(session)
    }

    /// Sessions that the other end opens for this service. What is wanted of them, it says.
    pub fn listen(&self) -> Result<Listener, Error> {
        Listener::new(&self.socket, &self.peer, &self.service, self.patience)
    }
}
