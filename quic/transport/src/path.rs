//! The path of the data plane's packets: address, connection ID, and whether the peer has answered from there.

use std::net::{IpAddr, SocketAddr};

use millrace_quic::packet::ConnectionId;

/// The peer's end of a connection, as far as quinn has let on.
#[derive(Debug)]
pub(crate) struct PeerAddress {
    pub remote: SocketAddr,
    /// This end's address, where the socket has several.
    pub local: Option<IpAddr>,
    /// The peer's connection ID: the one in quinn's last packet.
    pub id: ConnectionId,
    /// The last address that answered a challenge.
    validated: SocketAddr,
    /// quinn found the peer at a new address and waits for an answer to this from there (RFC 9000, section 9.3.1).
    ///
    /// Meanwhile only quinn sends: it sends three times as much as arrived (RFC 9000, section 8), and cannot be told that
    /// somebody else has used a part of that.
    challenge: Option<[u8; 8]>,
}

impl PeerAddress {
    pub fn new(remote: SocketAddr) -> Self {
        Self { remote, local: None, id: ConnectionId::default(), validated: remote, challenge: None }
    }

    /// quinn sends PATH_CHALLENGE: the peer's address has changed. Returns whether that is news.
    pub fn on_challenge(&mut self, challenge: [u8; 8]) -> bool {
        self.challenge.replace(challenge) != Some(challenge)
    }

    /// The peer answers. quinn takes an answer from the current address only, and so does this, since its
    /// challenge is the last that quinn sends on a change.
    pub fn on_response(&mut self, response: [u8; 8]) {
        if self.challenge == Some(response) {
            self.validated = self.remote;
            self.challenge = None;
        }
    }

    /// quinn says that the peer is at `remote`. Returns whether the path is another one, for more than a
    /// NAT's sake: a port alone changes when a NAT forgets, and the route stays (RFC 9000, section 9.4).
    pub fn on_remote(&mut self, remote: SocketAddr) -> bool {
        let moved = remote.ip() != self.remote.ip();
        self.remote = remote;
        if remote == self.validated {
            self.challenge = None;
        }
        moved
    }

    pub fn is_validated(&self) -> bool {
        self.challenge.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn new_peer_address_must_answer_before_use() {
        let mut path = PeerAddress::new(at("192.0.2.1:1000"));
        assert!(path.is_validated());
        assert!(path.on_challenge([1; 8]));
        assert!(!path.on_challenge([1; 8]));
        assert!(!path.on_remote(at("192.0.2.1:2000")), "a port alone is no new path");
        path.on_response([2; 8]);
        assert!(!path.is_validated());
        path.on_response([1; 8]);
        assert!(path.is_validated());
        assert_eq!(path.remote, at("192.0.2.1:2000"));
    }

    #[test]
    fn return_to_a_validated_address_needs_no_answer() {
        let mut path = PeerAddress::new(at("192.0.2.1:1000"));
        path.on_challenge([1; 8]);
        assert!(path.on_remote(at("198.51.100.7:1000")));
        assert!(!path.is_validated());
        assert!(path.on_remote(at("192.0.2.1:1000")));
        assert!(path.is_validated());
    }
}
