//! Packets that a middlebox records and sends again.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow};

use super::FaultedCarrier;
use super::pair::{CARRIERS, FaultPair};
use crate::bench::site::{self, SUBSCRIBERS_LINK};
use crate::lab::{DeviceTap, LabNode};

const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
/// Largest number of frames that are recorded.
const MOST: usize = 64;
const PIECE: Duration = Duration::from_millis(50);

/// Fields of an IPv4 packet inside an Ethernet frame.
pub struct RecordedPacket<'a> {
    protocol: u8,
    to: u16,
    transport: &'a [u8],
}

impl<'a> RecordedPacket<'a> {
    pub fn from_frame(frame: &'a [u8]) -> Option<Self> {
        let ip = frame.get(ETHERNET..)?;
        let first = *ip.first()?;
        let protocol = *ip.get(9)?;
        let length = usize::from(u16::from_be_bytes([*ip.get(2)?, *ip.get(3)?]));
        if first >> 4 != 4 {
            return None;
        }
        // Ethernet pads short frames, so the packet's length is taken from the IP header.
        let transport = ip.get(usize::from(first & 15) * 4..length)?;
        let to = u16::from_be_bytes([*transport.get(2)?, *transport.get(3)?]);
        Some(Self { protocol, to, transport })
    }

    pub fn is_first_of_tcp(&self) -> bool {
        self.protocol == TCP && self.transport.get(13).is_some_and(|flags| flags & 0x3f == SYN)
    }

    fn payload(&self) -> &'a [u8] {
        let head = match self.protocol {
            UDP => 8,
            _ => self.transport.get(12).map_or(0, |offset| usize::from(offset >> 4) * 4),
        };
        self.transport.get(head..).unwrap_or_default()
    }
}

/// Recorded frames from the client, as they arrived at the server.
pub struct Recorded {
    pub frames: Vec<Vec<u8>>,
    /// UDP or TCP payloads of all recorded frames that have a payload.
    pub payloads: Vec<Vec<u8>>,
}

pub struct FrameRecording {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Vec<u8>>>,
}

impl Recorded {
    /// Starts to record the client's packets of the first tunnel connection with this protocol.
    pub fn begin(pair: &FaultPair<'_>, kind: FaultedCarrier) -> anyhow::Result<FrameRecording> {
        let mut from = None;
        Self::begin_with(pair, move |frame| {
            let Some(packet) = RecordedPacket::from_frame(frame).filter(|packet| packet.to == CARRIERS)
            else {
                return false;
            };
            let wanted = if kind == FaultedCarrier::Quic { UDP } else { TCP };
            let port = packet.transport.first_chunk::<2>().copied();
            packet.protocol == wanted && *from.get_or_insert(port) == port
        })
    }

    pub fn begin_with(
        pair: &FaultPair<'_>,
        mut wanted: impl FnMut(&[u8]) -> bool + Send + 'static,
    ) -> anyhow::Result<FrameRecording> {
        let device = device(pair.server.node)?;
        let tap = pair.server.node.enter(|| DeviceTap::new(&device))??;
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut frames = Vec::new();
            while !is_over.load(Ordering::Relaxed) && frames.len() < MOST {
                frames.extend(tap.record(MOST - frames.len(), PIECE, &mut wanted));
            }
            // Read the frames that arrived before the recording was stopped.
            frames.extend(tap.record(MOST - frames.len(), PIECE, &mut wanted));
            frames
        });
        Ok(FrameRecording { stop, thread })
    }

    pub fn is_empty(&self) -> bool {
        self.payloads.is_empty()
    }

    /// Sends the recorded frames again, from the client on the direct link.
    pub fn repeat(&self, pair: &FaultPair<'_>) -> anyhow::Result<()> {
        let device = device(pair.client.node)?;
        let tap = pair.client.node.enter(|| DeviceTap::new(&device))??;
        Ok(self.frames.iter().try_for_each(|frame| tap.send(frame))?)
    }
}

impl FrameRecording {
    pub fn end(self) -> anyhow::Result<Recorded> {
        self.stop.store(true, Ordering::Relaxed);
        let frames = self.thread.join().map_err(|_| anyhow!("the recorder panicked"))?;
        let payloads =
            frames.iter().filter_map(|frame| Some(RecordedPacket::from_frame(frame)?.payload().to_vec()));
        let payloads = payloads.filter(|payload| !payload.is_empty()).collect();
        Ok(Recorded { frames, payloads })
    }
}

impl fmt::Display for Recorded {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = self.payloads.iter().map(Vec::len).sum();
        write!(out, "{} frames, {bytes} bytes", self.frames.len())
    }
}

/// Returns the name of the device on the direct link between the hosts.
pub fn device(node: &LabNode) -> anyhow::Result<String> {
    site::device(node, SUBSCRIBERS_LINK).context("the link")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udp_and_tcp_packets_are_parsed_from_recorded_frames() {
        let mut frame = vec![0; ETHERNET];
        frame.extend([0x45, 0, 0, 31, 0, 0, 0, 0, 64, UDP, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        frame.extend([0x12, 0x34, 0x23, 0xe4, 0, 11, 0, 0, 7, 8, 9, 0, 0]);
        let packet = RecordedPacket::from_frame(&frame).unwrap();
        assert_eq!((packet.protocol, packet.to, packet.payload()), (UDP, CARRIERS, &[7, 8, 9][..]));
        assert!(!packet.is_first_of_tcp());
        for length in 0..frame.len() - 2 {
            assert!(RecordedPacket::from_frame(&frame[..length]).is_none(), "{length}");
        }
    }
}
