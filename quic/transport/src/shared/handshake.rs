//! The handshake, and reports of quinn and the driver about MTU, keys and the peer's address.

use std::{net::SocketAddr, time::Instant};

use millrace_quic::{
    keys::{KeySuite, TrafficSecret},
    params::{MalformedParams, PeerParams},
    plane::downstream::PeerLimits,
};
use quinn::Side;

use super::{LAST_GENERATION, SharedConnection, attention};
use crate::plane::Plane;

impl SharedConnection {
    /// Stores the peer's transport parameters at the first call. Returns them with only quinn's part of the connection
    /// credit.
    pub fn on_peer_params(&self, encoded: &[u8], is_server: bool) -> Result<Vec<u8>, MalformedParams> {
        let peer = PeerParams::parse(encoded)?;
        let mut state = self.state.lock();
        if state.stack.set_peer(peer) {
            let limits = PeerLimits {
                max_data: state.stack.other_credit(),
                max_stream_data_uni: peer.initial_max_stream_data_uni,
                max_streams_uni: peer.initial_max_streams_uni,
                first_stream_uni: state.control_streams,
                max_datagram_frame_size: peer.max_datagram_frame_size,
                max_ack_delay: peer.max_ack_delay,
                is_server,
            };
            state.plane.set_limits(limits);
            let stream_bits = state.plane.downstream.stream_bits();
            if let Some(offload) = &mut state.offload {
                offload.set_peer(stream_bits, peer.max_datagram_frame_size);
            }
        }
        state.stack.cap(encoded)
    }

    /// Derives the data plane's keys from the traffic secret with which `side` sends, once the 1-RTT keys exist.
    pub fn on_keys(&self, side: Side, integrity_limit: u64) {
        let secret = self.secrets.take(side).and_then(|secret| {
            let suite = identify(secret.len(), integrity_limit)?;
            TrafficSecret::new(suite, &secret)
        });
        let received = self.secrets.take(!side).and_then(|received| {
            let suite = secret.as_ref()?.suite();
            TrafficSecret::new(suite, &received)
        });
        let mut state = self.state.lock();
        if let Some(offload) = &mut state.offload {
            offload.on_keys(secret.as_ref(), received);
        }
        state.plane.set_secret(secret);
    }

    pub fn suite(&self) -> Option<KeySuite> {
        self.state.lock().plane.keys.as_ref().map(|keys| keys.secret.suite())
    }

    /// Returns the key generation after `generation`, whose keys quinn derives ahead of time. Closes the connection if
    /// no generation is left.
    pub fn next_generation(&self, generation: u16) -> u16 {
        if generation >= LAST_GENERATION {
            self.close();
            self.request(attention::KEYS_EXHAUSTED);
        }
        generation.saturating_add(1)
    }

    /// Returns whether quinn has been asked for a key update and has not used newer keys yet.
    pub fn wants_keys(&self) -> bool {
        self.state.lock().plane.keys.as_ref().is_some_and(|keys| keys.requested)
    }

    pub fn on_mtu(&self, mtu: u16) {
        self.state.lock().plane.downstream.on_mtu(usize::from(mtu));
    }

    /// Notes the peer's address from quinn. Returns whether quinn is still validating that address (no PATH_RESPONSE
    /// yet).
    pub fn on_remote(&self, now: Instant, remote: SocketAddr) -> bool {
        let mut state = self.state.lock();
        let Plane { path, downstream, .. } = &mut state.plane;
        if remote != path.remote {
            self.counters.address_changes.add(1);
            if path.on_remote(remote) {
                downstream.on_path_change(now);
            }
        }
        !path.is_validated()
    }
}

/// Returns the cipher suite with this length of secrets and this integrity limit (RFC 9001, section 6.6).
fn identify(secret_len: usize, integrity_limit: u64) -> Option<KeySuite> {
    match (secret_len, integrity_limit) {
        (48, _) => Some(KeySuite::Aes256Gcm),
        (32, 0x10_0000_0000) => Some(KeySuite::ChaCha20Poly1305),
        (32, _) => Some(KeySuite::Aes128Gcm),
        _ => None,
    }
}
