//! The traffic secrets of a connection, passed from the handshake to the senders.

use std::sync::Arc;

use parking_lot::Mutex;
use quinn::Side;
use rustls::KeyLog;

/// A key log of rustls that keeps the traffic secrets of one connection.
pub(crate) struct HandshakeSecrets {
    secrets: Mutex<[Option<Vec<u8>>; 2]>,
    /// The operator's key log, if one is configured.
    log: Option<Arc<dyn KeyLog>>,
}

impl HandshakeSecrets {
    const LABELS: [&str; 2] = ["CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0"];

    pub fn new(log: Option<Arc<dyn KeyLog>>) -> Self {
        Self { secrets: Mutex::default(), log }
    }

    /// Removes and returns the traffic secret with which `side` (client or server) sends.
    pub fn take(&self, side: Side) -> Option<Vec<u8>> {
        self.secrets.lock()[usize::from(side == Side::Server)].take()
    }
}

impl std::fmt::Debug for HandshakeSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandshakeSecrets").finish_non_exhaustive()
    }
}

impl KeyLog for HandshakeSecrets {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        if let Some(index) = Self::LABELS.iter().position(|known| *known == label) {
            self.secrets.lock()[index] = Some(secret.to_vec());
        }
        if let Some(log) = self.log.as_ref().filter(|log| log.will_log(label)) {
            log.log(label, client_random, secret);
        }
    }
}
