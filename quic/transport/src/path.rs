//! The path of the data plane's packets: addresses, connection ID, and whether the peer's address is validated.

use std::net::{IpAddr, SocketAddr};

use millrace_quic::packet::ConnectionId;

/// The peer's addresses and connection ID, as far as quinn's packets and methods show them.
#[derive(Debug)]
pub(crate) struct PeerAddress {
    pub remote: SocketAddr,
    /// This endpoint's IP address that the peer uses, if the socket is bound to several addresses.
    pub local: Option<IpAddr>,
    /// The peer's connection ID in quinn's last packet.
    pub id: ConnectionId,
    /// The last validated address of the peer.
    validated: SocketAddr,
    /// The PATH_CHALLENGE that quinn has sent to a new address of the peer, until the peer answers it (RFC 9000,
    /// section 9.3.1).
    ///
    /// Until the answer arrives, only quinn may send. It may send three times as many bytes as arrived (RFC 9000,
    /// section 8), and does not count bytes of other senders.
    challenge: Option<[u8; 8]>,
}

impl PeerAddress {
    pub fn new(remote: SocketAddr) -> Self {
        Self { remote, local: None, id: ConnectionId::default(), validated: remote, challenge: None }
    }

    /// Notes that quinn sends a PATH_CHALLENGE, because the peer's address has changed. Returns whether the challenge
    /// differs from the one sent before.
    pub fn on_challenge(&mut self, challenge: [u8; 8]) -> bool {
        self.challenge.replace(challenge) != Some(challenge)
    }

    /// Notes a PATH_RESPONSE of the peer. Like quinn, this accepts only the answer to the last challenge, and only for
    /// the current address.
    pub fn on_response(&mut self, response: [u8; 8]) {
        if self.challenge == Some(response) {
            self.validated = self.remote;
            self.challenge = None;
        }
    }

    /// Notes the peer's address `remote` from quinn. Returns whether the path has changed. If only the port is new, the
    /// path counts as unchanged, because a NAT may change ports without a new route (RFC 9000, section 9.4).
    pub fn on_remote(&mut self, remote: SocketAddr) -> bool {
        let moved = remote.ip() != self.remote.ip();
        self.remote = remote;
        // quinn has returned to an address that is validated already.
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
    fn new_peer_address_must_be_validated_before_use() {
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
    fn return_to_a_validated_address_needs_no_new_validation() {
        let mut path = PeerAddress::new(at("192.0.2.1:1000"));
        path.on_challenge([1; 8]);
        assert!(path.on_remote(at("198.51.100.7:1000")));
        assert!(!path.is_validated());
        assert!(path.on_remote(at("192.0.2.1:1000")));
        assert!(path.is_validated());
    }
}
