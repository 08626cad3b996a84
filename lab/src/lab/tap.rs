//! Records frames that arrive at a device, and sends frames from it.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use super::emulator::{input, output};
use super::{Error, Result};

const FRAME_MOST: usize = 65_600;
const LOOK: Duration = Duration::from_millis(1);

/// Access to the frames of a device in the calling thread's namespace.
pub struct DeviceTap {
    input: OwnedFd,
    output: OwnedFd,
}

impl DeviceTap {
    /// Opens the device. From now on the kernel keeps arriving frames for this tap, up to its buffer's size.
    pub fn new(device: &str) -> Result<Self> {
        let io = |source: Errno| Error::Io { what: format!("packet socket {device}"), source: source.into() };
        Ok(Self { input: input(device).map_err(io)?, output: output(device).map_err(io)? })
    }

    /// Returns arriving frames that `wanted` accepts: at most `most`, and only within `limit`.
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

    /// Sends a frame from the device to the other end of its link.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        let sent = send(self.output.as_raw_fd(), frame, MsgFlags::empty());
        sent.map(drop).map_err(|source| Error::Io { what: "send a frame".into(), source: source.into() })
    }
}
