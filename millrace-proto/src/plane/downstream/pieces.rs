//! What a packet carries, as told to whoever watches.

use super::{Content, Downstream, Label, Sent};

/// A frame of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub label: Label,
    /// `None` for what belongs to no stream.
    pub stream_id: Option<u64>,
    pub carried: Carried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    Bytes {
        offset: u64,
        len: u16,
        fin: bool,
        /// They fill a hole: what was sent before and lost, or what another sender left out.
        again: bool,
    },
    Reset,
    Datagram,
    /// A probe that has nothing to carry.
    Ping,
}

impl Downstream {
    /// What a packet carries that [`Self::poll_frames`] has just filled.
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
