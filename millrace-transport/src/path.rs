//! Where the data plane's packets go: address, connection ID, and whether the peer was seen there.

use std::net::{IpAddr, SocketAddr};

use millrace_proto::quic::packet::ConnectionId;

/// The peer's end of a connection, as far as quinn has let on.
#[derive(Debug)]
pub(crate) struct Path {
    pub remote: SocketAddr,
    /// This end's address, where the socket has several.
    pub local: Option<IpAddr>,
    /// The peer's connection ID: the one in quinn's last packet.
    pub id: ConnectionId,
    /// The last address that answered a challenge.
    validated: SocketAddr,
    validation: Option<Validation>,
}

/// quinn found the peer at a new address and waits for an answer from there (RFC 9000, section 9.3.1).
#[derive(Debug)]
struct Validation {
    challenge: [u8; 8],
    /// Bytes that may be sent before the answer: three times what arrived (RFC 9000, section 8).
    budget: usize,
}

impl Path {
    pub fn new(remote: SocketAddr) -> Self {
        Self { remote, local: None, id: ConnectionId::default(), validated: remote, validation: None }
    }

    /// quinn sends PATH_CHALLENGE: the peer's address has changed. Returns whether that is news.
    pub fn on_challenge(&mut self, challenge: [u8; 8]) -> bool {
        if self.validation.as_ref().is_some_and(|validation| validation.challenge == challenge) {
            return false;
        }
        self.validation = Some(Validation { challenge, budget: 0 });
        true
    }

    /// The peer answers. quinn takes an answer from the current address only, and so does this, since its
    /// challenge is the last that quinn sends on a change.
    pub fn on_response(&mut self, response: [u8; 8]) {
        if self.validation.as_ref().is_some_and(|validation| validation.challenge == response) {
            self.validated = self.remote;
            self.validation = None;
        }
    }

    /// quinn says that the peer is at `remote`. Returns whether the path is another one, for more than a
    /// NAT's sake: a port alone changes when a NAT forgets, and the route stays (RFC 9000, section 9.4).
    pub fn on_remote(&mut self, remote: SocketAddr) -> bool {
        let moved = remote.ip() != self.remote.ip();
        self.remote = remote;
        if remote == self.validated {
            self.validation = None;
        }
        moved
    }

    pub fn on_received(&mut self, bytes: usize) {
        if let Some(validation) = &mut self.validation {
            validation.budget = validation.budget.saturating_add(3 * bytes);
        }
    }

    pub fn on_sent(&mut self, bytes: usize) {
        if let Some(validation) = &mut self.validation {
            validation.budget = validation.budget.saturating_sub(bytes);
        }
    }

    pub fn may_send(&self, bytes: usize) -> bool {
        self.validation.as_ref().is_none_or(|validation| validation.budget >= bytes)
    }

    pub fn is_validated(&self) -> bool {
        self.validation.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn three_times_what_arrived_until_the_answer() {
        let mut path = Path::new(at("192.0.2.1:1000"));
        assert!(path.may_send(usize::MAX));
        assert!(path.on_challenge([1; 8]));
        assert!(!path.on_challenge([1; 8]));
        assert!(!path.on_remote(at("192.0.2.1:2000")), "a port alone is no new path");
        assert!(!path.may_send(1));
        path.on_received(100);
        assert!(path.may_send(300) && !path.may_send(301));
        path.on_sent(300);
        assert!(!path.may_send(1));
        path.on_response([2; 8]);
        assert!(!path.is_validated());
        path.on_response([1; 8]);
        assert!(path.may_send(usize::MAX));
        assert_eq!(path.remote, at("192.0.2.1:2000"));
    }

    #[test]
    fn going_back_needs_no_answer() {
        let mut path = Path::new(at("192.0.2.1:1000"));
        path.on_challenge([1; 8]);
        assert!(path.on_remote(at("198.51.100.7:1000")));
        assert!(!path.is_validated());
        assert!(path.on_remote(at("192.0.2.1:1000")));
        assert!(path.is_validated());
    }
}
