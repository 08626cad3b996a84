//! Records frames that arrive at a device, and puts frames on a wire.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::emulator::{input, output};
use super::{Error, Result};

const FRAME_MOST: usize = 65_600;
const LOOK: Duration = Duration::from_millis(1);

/// A tap of a device of the calling thread's namespace.
pub struct DeviceTap {
    input: OwnedFd,
    output: OwnedFd,
}

impl DeviceTap {
    /// Opens the tap. It keeps packets that arrive at the device from now on, as far as there is room.
    pub fn new(device: &str) -> Result<Self> {
        let io = |source: Errno| Error::Io { what: format!("packet socket {device}"), source: source.into() };
        Ok(Self { input: input(device).map_err(io)?, output: output(device).map_err(io)? })
    }

    /// Returns frames that arrived and that `wanted` accepts, up to this number or for this time.
    pub fn record(
        &self,
        most: usize,
        limit: Duration,
        mut wanted: impl FnMut(&[u8]) -> bool,
    ) -> Vec<Vec<u8>> {
        let start = Instant::now();
        let mut frames = Vec::new();
        let mut buffer = vec![0; FRAME_MOST];
        while frames.len() < most && start.elapsed() < limit {
            match recv(self.input.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => {
                    let frame = buffer.get(..length).unwrap_or_default();
                    if wanted(frame) {
                        frames.push(frame.to_vec());
                    }
                }
                Err(_) => std::thread::sleep(LOOK),
            }
        }
        frames
    }

    /// Puts a frame on the wire, away from the device's host.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = send(self.output.as_raw_fd(), frame, MsgFlags::empty());
        sent.map(drop).map_err(|source| Error::Io { what: "send a frame".into(), source: source.into() })
    }
}
