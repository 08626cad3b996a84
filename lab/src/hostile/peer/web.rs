//! HTTP/3 and WebTransport of the hostile client.

use anyhow::{Context as _, Result};
use millrace_quic::{frame, varint, webtransport::Binding};
use web_transport_proto::{ConnectError, ConnectRequest, ConnectResponse, Settings};

use super::{DRAFT, HostilePeer, PeerTarget, StreamKind};

/// Type of HTTP/3's DATA frame. `HEADERS` is that of its HEADERS frame.
pub const DATA: u64 = 0;
pub const HEADERS: u64 = 1;

impl HostilePeer {
    /// Opens a WebTransport session, and waits until the relay has accepted it.
    pub(super) fn ask(&mut self, target: &PeerTarget) -> Result<()> {
        let id = self.ask_unanswered(target)?;
        let mut answer = Vec::new();
        loop {
            answer.extend_from_slice(&self.more(id)?);
            match ConnectResponse::decode(&mut &answer[..]) {
                Ok(_) => break,
                Err(ConnectError::UnexpectedEnd) => {}
                Err(error) => return Err(error).context("the relay accepts no WebTransport session"),
            }
        }
        self.binding = Binding::Session(id);
        Ok(())
    }

    /// Requests a WebTransport session without waiting for the answer. Returns the ID of the request's stream.
    pub fn ask_unanswered(&mut self, target: &PeerTarget) -> Result<u64> {
        self.open_control()?;
        self.open_bare(StreamKind::Request, &request(target)?, false)
    }

    /// Opens HTTP/3's control stream with SETTINGS.
    pub fn open_control(&mut self) -> Result<u64> {
        let mut settings = Settings::default();
        settings.enable_webtransport(1);
        let mut bytes = Vec::new();
        settings.encode(&mut bytes);
        self.open_bare(StreamKind::Data, &bytes, false)
    }

    /// Sends a MoQ datagram.
    pub fn datagram(&mut self, bytes: &[u8]) -> Result<()> {
        let mut frames = Vec::new();
        frame::write_datagram(&[&self.binding.datagram(), bytes].concat(), &mut frames);
        self.send(frames, true)
    }
}

/// Returns the encoded request for a WebTransport session.
pub fn request(target: &PeerTarget) -> Result<Vec<u8>> {
    let path = if target.path.is_empty() { "/" } else { &target.path };
    let host = if target.name.contains(':') { format!("[{}]", target.name) } else { target.name.clone() };
    let url: url::Url = format!("https://{host}{path}").parse()?;
    let mut bytes = Vec::new();
    ConnectRequest::new(url).with_protocol(DRAFT.protocol()).encode(&mut bytes)?;
    Ok(bytes)
}

/// Returns the length of Millrace's answer to a request for a session, bytes.
pub fn answer_len() -> Result<u64> {
    let mut bytes = Vec::new();
    ConnectResponse::OK.with_protocol(DRAFT.protocol()).encode(&mut bytes)?;
    Ok(bytes.len() as u64)
}

/// Returns the header of a frame or capsule of this type with this length.
pub fn front(kind: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    [kind, len].into_iter().for_each(|field| varint::encode(field, &mut bytes));
    bytes
}

/// Returns an encoded frame or capsule.
pub fn unit(kind: u64, payload: &[u8]) -> Vec<u8> {
    [&front(kind, payload.len() as u64), payload].concat()
}
