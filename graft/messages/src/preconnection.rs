//! The settings of a session before it is opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::want::Want;
use crate::{DEFAULT_SOCKET, Error, Listener, Session};

/// Time limit for both hosts' agreement. The daemon's own time limit is shorter, so its error message arrives before
/// this limit.
const PATIENCE: Duration = Duration::from_secs(60);

/// The settings of a session: a peer from the daemon's settings, the name of a service, and the services and quality
/// that messages need.
///
/// ```no_run
/// use std::time::Duration;
/// use millrace_messages::Preconnection;
///
/// let settings = Preconnection::new("station", "telemetry")
///     .service("partial-reliability")
///     .max_delay_ms(100)
///     .max_loss_percent(1.0)
///     .adapt(true)
///     .patience(Duration::from_secs(10));
/// let mut session = settings.initiate()?;
/// println!("graft {} is used", session.agreed()?.graft);
/// # Ok::<(), millrace_messages::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Preconnection {
    socket: PathBuf,
    peer: String,
    service: String,
    want: Want,
    patience: Duration,
}

impl Preconnection {
    /// Creates the settings of a session without requested services. `peer` is a name from the daemon's settings, and
    /// `service` is a name that both applications use.
    pub fn new(peer: impl Into<String>, service: impl Into<String>) -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            peer: peer.into(),
            service: service.into(),
            want: Want::default(),
            patience: PATIENCE,
        }
    }

    /// Sets the path of the daemon's socket, instead of [`DEFAULT_SOCKET`].
    pub fn socket(self, path: impl AsRef<Path>) -> Self {
        Self { socket: path.as_ref().to_owned(), ..self }
    }

    /// Adds a transport service that the session needs: `reliability`, `order`, `partial-reliability`, ...
    pub fn service(mut self, name: impl Into<String>) -> Self {
        self.want.services.insert(name.into());
        self
    }

    /// Sets the longest acceptable delay in one direction, in milliseconds.
    pub fn max_delay_ms(mut self, ms: u32) -> Self {
        self.want.qos.max_delay_ms = Some(ms);
        self
    }

    /// Sets the lowest acceptable throughput, in Mbit/s.
    pub fn min_throughput_mbit(mut self, mbit: f64) -> Self {
        self.want.qos.min_throughput_mbit = Some(mbit);
        self
    }

    /// Sets the largest acceptable share of lost messages, in per cent.
    pub fn max_loss_percent(mut self, percent: f64) -> Self {
        self.want.qos.max_loss_percent = Some(percent);
        self
    }

    /// Allows the daemon to change to another graft (list of packet functions) if the present one does not provide the
    /// requested quality.
    pub fn adapt(mut self, may: bool) -> Self {
        self.want.adapt = may;
        self
    }

    /// Sets all requested services and the quality together.
    pub fn want(self, want: Want) -> Self {
        Self { want, ..self }
    }

    /// Sets how long [`initiate`](Self::initiate) waits for the other host's agreement.
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Opens the session, and returns it when both hosts have agreed on it.
    ///
    /// # Errors
    /// No daemon answers, or the request is refused. The error has the daemon's reason.
    pub fn initiate(&self) -> Result<Session, Error> {
        let mut session = self.begin()?;
        session.validate(Some(self.patience))?;
        Ok(session)
    }

    /// Requests the session from the daemon without waiting. [`Session::validate`] then waits until both hosts have
    /// agreed.
    pub fn begin(&self) -> Result<Session, Error> {
        let mut session = Session::new(&self.socket, &self.peer, &self.service)?;
        session.negotiate(self.want.clone())?;
        Ok(session)
    }

    /// Listens for sessions of this service that the other host opens. The opening host requests the services and the
    /// quality.
    pub fn listen(&self) -> Result<Listener, Error> {
        Listener::new(&self.socket, &self.peer, &self.service, self.patience)
    }
}
