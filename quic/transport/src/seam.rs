//! The seam between quinn and the data plane: an implementation of quinn's crypto traits that wraps quinn's rustls
//! session.
//!
//! Only the 1-RTT packet keys are wrapped. quinn seals and opens packets through them. quinn does not notice that its
//! packets have other packet numbers on the wire, nor that frames for other senders arrive.

use std::{any::Any, sync::Arc, time::Instant};

use crate::shared::{OpenedArrival, SharedConnection};
use bytes::BytesMut;
use quinn::{
    ConnectError, ConnectionId, Side,
    crypto::{
        self, CryptoError, ExportKeyingMaterialError, HeaderKey, KeyPair, Keys, UnsupportedVersion,
        rustls::{QuicClientConfig, QuicServerConfig},
    },
};
use quinn_proto::{TransportError, TransportErrorCode, transport_parameters::TransportParameters};

/// Bytes that quinn has to leave free behind a payload, in addition to the tag: quinn's packet number may have only one
/// byte, and the one on the wire has four.
const NUMBER_GROWTH: usize = 3;

/// The server side of one connection's TLS.
pub(crate) struct ServerCrypto {
    pub inner: Arc<QuicServerConfig>,
    pub shared: Arc<SharedConnection>,
}

impl crypto::ServerConfig for ServerCrypto {
    fn initial_keys(&self, version: u32, dst_cid: &ConnectionId) -> Result<Keys, UnsupportedVersion> {
        self.inner.initial_keys(version, dst_cid)
    }

    fn retry_tag(&self, version: u32, orig_dst_cid: &ConnectionId, packet: &[u8]) -> [u8; 16] {
        self.inner.retry_tag(version, orig_dst_cid, packet)
    }

    fn start_session(
        self: Arc<Self>,
        version: u32,
        params: &TransportParameters,
    ) -> Box<dyn crypto::Session> {
        let inner = Arc::clone(&self.inner).start_session(version, params);
        Box::new(SeamSession::new(inner, Arc::clone(&self.shared), Side::Server))
    }
}

/// The client side of one connection's TLS.
pub(crate) struct ClientCrypto {
    pub inner: Arc<QuicClientConfig>,
    pub shared: Arc<SharedConnection>,
}

impl crypto::ClientConfig for ClientCrypto {
    fn start_session(
        self: Arc<Self>,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Box<dyn crypto::Session>, ConnectError> {
        let inner = Arc::clone(&self.inner).start_session(version, server_name, params)?;
        Ok(Box::new(SeamSession::new(inner, Arc::clone(&self.shared), Side::Client)))
    }
}

struct SeamSession {
    inner: Box<dyn crypto::Session>,
    shared: Arc<SharedConnection>,
    side: Side,
    /// Key generation of the next 1-RTT keys; `None` until quinn has requested the handshake keys.
    generation: Option<u16>,
}

impl SeamSession {
    fn new(inner: Box<dyn crypto::Session>, shared: Arc<SharedConnection>, side: Side) -> Self {
        Self { inner, shared, side, generation: None }
    }

    fn wrap(&mut self, keys: KeyPair<Box<dyn crypto::PacketKey>>) -> KeyPair<Box<dyn crypto::PacketKey>> {
        let generation = self.generation.unwrap_or_default();
        self.generation = Some(self.shared.next_generation(generation));
        let wrap = |inner| Box::new(SeamPacketKey { inner, shared: Arc::clone(&self.shared), generation });
        KeyPair { local: wrap(keys.local), remote: wrap(keys.remote) }
    }
}

impl crypto::Session for SeamSession {
    fn initial_keys(&self, dst_cid: &ConnectionId, side: Side) -> Keys {
        self.inner.initial_keys(dst_cid, side)
    }

    fn handshake_data(&self) -> Option<Box<dyn Any>> {
        self.inner.handshake_data()
    }

    fn peer_identity(&self) -> Option<Box<dyn Any>> {
        self.inner.peer_identity()
    }

    /// Returns `None`, because 0-RTT packets would use numbers of the 1-RTT space without the shared counter.
    fn early_crypto(&self) -> Option<(Box<dyn HeaderKey>, Box<dyn crypto::PacketKey>)> {
        None
    }

    fn early_data_accepted(&self) -> Option<bool> {
        self.inner.early_data_accepted()
    }

    fn is_handshaking(&self) -> bool {
        self.inner.is_handshaking()
    }

    fn read_handshake(&mut self, buf: &[u8]) -> Result<bool, TransportError> {
        let has_data = self.inner.read_handshake(buf)?;
        if !self.inner.is_handshaking() {
            self.shared.on_established();
        }
        Ok(has_data)
    }

    /// Returns the peer's transport parameters, with only quinn's part of the connection credit.
    fn transport_parameters(&self) -> Result<Option<TransportParameters>, TransportError> {
        let Some(params) = self.inner.transport_parameters()? else { return Ok(None) };
        let mut encoded = Vec::new();
        params.write(&mut encoded);
        let capped = self.shared.on_peer_params(&encoded, self.side == Side::Server);
        let encoded = capped.map_err(|error| TransportError {
            code: TransportErrorCode::TRANSPORT_PARAMETER_ERROR,
            frame: None,
            reason: error.to_string(),
        })?;
        Ok(Some(TransportParameters::read(self.side, &mut encoded.as_slice())?))
    }

    fn write_handshake(&mut self, buf: &mut Vec<u8>) -> Option<Keys> {
        let keys = self.inner.write_handshake(buf)?;
        // rustls returns the handshake keys first, and the 1-RTT keys second.
        if self.generation.is_none() {
            self.generation = Some(0);
            return Some(keys);
        }
        self.shared.on_keys(self.side, keys.packet.local.integrity_limit());
        Some(Keys { header: keys.header, packet: self.wrap(keys.packet) })
    }

    fn next_1rtt_keys(&mut self) -> Option<KeyPair<Box<dyn crypto::PacketKey>>> {
        let keys = self.inner.next_1rtt_keys()?;
        Some(self.wrap(keys))
    }

    fn is_valid_retry(&self, orig_dst_cid: &ConnectionId, header: &[u8], payload: &[u8]) -> bool {
        self.inner.is_valid_retry(orig_dst_cid, header, payload)
    }

    fn export_keying_material(
        &self,
        output: &mut [u8],
        label: &[u8],
        context: &[u8],
    ) -> Result<(), ExportKeyingMaterialError> {
        self.inner.export_keying_material(output, label, context)
    }
}

/// A 1-RTT key of one direction and generation.
struct SeamPacketKey {
    inner: Box<dyn crypto::PacketKey>,
    shared: Arc<SharedConnection>,
    generation: u16,
}

impl crypto::PacketKey for SeamPacketKey {
    /// Seals with a number of the shared sequence instead of quinn's number `packet`.
    ///
    /// quinn's layout is header, payload, room for [`Self::tag_len`]. The payload moves back by [`NUMBER_GROWTH`]
    /// bytes, and the number takes four bytes. The bytes between number and payload become PADDING. PADDING must not
    /// follow the payload, where it would become data of a STREAM frame without a Length field.
    fn encrypt(&self, packet: u64, buf: &mut [u8], header_len: usize) {
        let number_len = usize::from(buf[0] & 0x03) + 1;
        let number_at = header_len - number_len;
        let payload = header_len..buf.len() - self.tag_len();
        let size = buf.len();
        let wire = {
            let (header, rest) = buf.split_at(header_len);
            let payload = &rest[..payload.len()];
            self.shared.on_quinn_packet(
                Instant::now(),
                self.generation,
                packet,
                &header[1..number_at],
                payload,
                size,
            )
        };
        // The first byte's two lowest bits hold the packet number's length minus one. The packet number is four bytes
        // long now.
        buf[0] |= 0x03;
        buf.copy_within(payload, header_len + NUMBER_GROWTH);
        buf[number_at..number_at + 4].copy_from_slice(&(wire as u32).to_be_bytes());
        buf[number_at + 4..header_len + NUMBER_GROWTH].fill(0);
        self.inner.encrypt(wire, buf, number_at + 4);
    }

    fn decrypt(&self, packet: u64, header: &[u8], payload: &mut BytesMut) -> Result<(), CryptoError> {
        let size = header.len() + payload.len();
        // Decrypting removes the tag, so the packet's last bytes, which identify it, are copied before.
        let end = payload.last_chunk().copied().unwrap_or_default();
        self.inner.decrypt(packet, header, payload)?;
        // The connection ID is between the first byte and the packet number.
        let id = header.get(1..header.len() - 1 - usize::from(header[0] & 0x03)).unwrap_or_default();
        let arrival = OpenedArrival { now: Instant::now(), size, end };
        self.shared.on_received(arrival, self.generation, packet, id, payload);
        Ok(())
    }

    fn tag_len(&self) -> usize {
        self.inner.tag_len() + NUMBER_GROWTH
    }

    fn confidentiality_limit(&self) -> u64 {
        self.inner.confidentiality_limit()
    }

    fn integrity_limit(&self) -> u64 {
        self.inner.integrity_limit()
    }
}

#[cfg(test)]
mod tests;
