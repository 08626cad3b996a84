//! The hostile client's part of HTTP/3.

use anyhow::{Context as _, Result};
use millrace_quic::{frame, varint, webtransport::Binding};
use web_transport_proto::{ConnectError, ConnectRequest, ConnectResponse, Settings};

use super::{DRAFT, Kind, Peer, Target};

/// HTTP/3's frames.
pub const DATA: u64 = 0;
pub const HEADERS: u64 = 1;

impl Peer {
    /// Asks for a session of WebTransport, and waits until it is there.
    pub(super) fn ask(&mut self, target: &Target) -> Result<()> {
        let id = self.ask_unanswered(target)?;
        let mut answer = Vec::new();
        loop {
            answer.extend_from_slice(&self.more(id)?);
            match ConnectResponse::decode(&mut &answer[..]) {
                Ok(_) => break,
                Err(ConnectError::UnexpectedEnd) => {}
                Err(error) => return Err(error).context("no session of WebTransport"),
            }
        }
        self.binding = Binding::Session(id);
        Ok(())
    }

    /// Asks, and does not wait; the request's stream.
    pub fn ask_unanswered(&mut self, target: &Target) -> Result<u64> {
        self.open_control()?;
        self.open_bare(Kind::Request, &request(target)?, false)
    }

    /// Opens HTTP/3's control stream, with SETTINGS.
    pub fn open_control(&mut self) -> Result<u64> {
        let mut settings = Settings::default();
        settings.enable_webtransport(1);
        let mut bytes = Vec::new();
        settings.encode(&mut bytes);
        self.open_bare(Kind::Data, &bytes, false)
    }

    /// Sends a datagram of MoQ's.
    pub fn datagram(&mut self, bytes: &[u8]) -> Result<()> {
        let mut frames = Vec::new();
        frame::write_datagram(&[&self.binding.datagram(), bytes].concat(), &mut frames);
        self.send(frames, true)
    }
}

/// The request for a session.
pub fn request(target: &Target) -> Result<Vec<u8>> {
    let path = if target.path.is_empty() { "/" } else { &target.path };
    let host = if target.name.contains(':') { format!("[{}]", target.name) } else { target.name.clone() };
    let url: url::Url = format!("https://{host}{path}").parse()?;
    let mut bytes = Vec::new();
    ConnectRequest::new(url).with_protocol(DRAFT.protocol()).encode(&mut bytes)?;
    Ok(bytes)
}

/// Bytes of Millrace's answer to such a request.
pub fn answer_len() -> Result<u64> {
    let mut bytes = Vec::new();
    ConnectResponse::OK.with_protocol(DRAFT.protocol()).encode(&mut bytes)?;
    Ok(bytes.len() as u64)
}

/// A frame, or a capsule, that says it has so many bytes.
pub fn front(kind: u64, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    [kind, len].into_iter().for_each(|field| varint::encode(field, &mut bytes));
    bytes
}

/// A frame, or a capsule.
pub fn unit(kind: u64, payload: &[u8]) -> Vec<u8> {
    [&front(kind, payload.len() as u64), payload].concat()
}
