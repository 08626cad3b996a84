//! The frames of a packet, for packet traces.

use super::{Downstream, Label, PacketContent, SentFrame};

/// A frame of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFrame {
    /// Track and group that the frame belongs to.
    pub label: Label,
    /// ID of the frame's stream; `None` for a frame that belongs to no stream.
    pub stream_id: Option<u64>,
    /// The frame's content.
    pub carried: FrameContent,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameContent {
    /// A STREAM frame.
    Bytes {
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u16,
        /// True if the stream ends after these bytes.
        fin: bool,
        /// True if the bytes fill a hole: they were sent before and lost, or the kernel offload skipped them.
        again: bool,
    },
    /// A RESET_STREAM frame.
    Reset,
    /// A DATAGRAM frame.
    Datagram,
    /// A PING frame, sent as a probe without data.
    Ping,
}

impl Downstream {
    /// Returns the frames of a packet that [`Self::poll_frames`] has just filled.
    pub fn pieces<'a>(&'a self, content: &'a PacketContent) -> impl Iterator<Item = PacketFrame> + 'a {
        let of = |key, carried| {
            let stream = self.streams.get(key);
            let label = stream.map(|stream| stream.label).unwrap_or_default();
            PacketFrame { label, stream_id: stream.and_then(|stream| stream.id), carried }
        };
        content.0.iter().map(move |sent| match *sent {
            SentFrame::Bytes { key, offset, len, fin, again } => {
                of(key, FrameContent::Bytes { offset, len, fin, again })
            }
            SentFrame::Reset { key } => of(key, FrameContent::Reset),
            SentFrame::Datagram { label } => {
                PacketFrame { label, stream_id: None, carried: FrameContent::Datagram }
            }
            SentFrame::Ping => {
                PacketFrame { label: Label::default(), stream_id: None, carried: FrameContent::Ping }
            }
        })
    }
}
