//! What a packet carries, for those who trace packets.

use super::{Content, Downstream, Label, Sent};

/// A frame of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub label: Label,
    /// `None` for a frame that belongs to no stream.
    pub stream_id: Option<u64>,
    pub carried: Carried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    Bytes {
        offset: u64,
        len: u16,
        fin: bool,
        /// They fill a hole: they were sent before and lost, or the offload left them out.
        again: bool,
    },
    Reset,
    Datagram,
    /// A probe without data.
    Ping,
}

impl Downstream {
    /// The frames of a packet that [`Self::poll_frames`] has just filled.
    pub fn pieces<'a>(&'a self, content: &'a Content) -> impl Iterator<Item = Piece> + 'a {
        let of = |key, carried| {
            let stream = self.streams.get(key);
            let label = stream.map(|stream| stream.label).unwrap_or_default();
            Piece { label, stream_id: stream.and_then(|stream| stream.id), carried }
        };
        content.0.iter().map(move |sent| match *sent {
            Sent::Bytes { key, offset, len, fin, again } => {
                of(key, Carried::Bytes { offset, len, fin, again })
            }
            Sent::Reset { key } => of(key, Carried::Reset),
            Sent::Datagram { label } => Piece { label, stream_id: None, carried: Carried::Datagram },
            Sent::Ping => Piece { label: Label::default(), stream_id: None, carried: Carried::Ping },
        })
    }
}
