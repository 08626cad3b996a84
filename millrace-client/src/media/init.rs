//! Init segments of MP4: ftyp and moov.

use bytes::Bytes;
use mp4_atom::{Atom, Decode, Encode, Moov};

use super::{Boxes, Error};

/// Length of a box's size and type.
const HEADER: usize = 8;
/// Where a trex has its track's ID: behind its header, version and flags (ISO/IEC 14496-12, 8.8.3).
const TREX_TRACK: std::ops::Range<usize> = HEADER + 4..HEADER + 8;

/// The moov box of an init segment.
pub(super) fn moov(init: &[u8]) -> Result<Moov, Error> {
    let mut boxes = Boxes::default();
    boxes.push(init);
    while let Some((kind, bytes)) = boxes.pop()? {
        if kind == Moov::KIND {
            return Moov::decode(&mut &bytes[..]).map_err(Error::Moov);
        }
    }
    Err(Error::Malformed("the init segment has no moov box"))
}

/// The same init segment with another moov box.
pub(super) fn with_moov(init: &[u8], moov: &Moov) -> Result<Bytes, Error> {
    let mut encoded = Vec::new();
    moov.encode(&mut encoded).map_err(Error::Moov)?;
    replace_moov(init, |_| Ok(encoded.clone()))
}

/// The same init segment for one of its tracks alone. What is kept are the bytes that it has, whatever they mean.
pub(super) fn init_of(init: &[u8], track: u32) -> Result<Bytes, Error> {
    replace_moov(init, |moov| {
        let own = children(moov)?.into_iter().filter_map(|child| match &child[4..HEADER] {
            b"trak" => is_of(child, track).then(|| child.to_vec()),
            b"mvex" => extends(child, track),
            _ => Some(child.to_vec()),
        });
        Ok(parent(b"moov", &own.collect::<Vec<_>>().concat()))
    })
}

fn replace_moov(init: &[u8], other: impl Fn(&[u8]) -> Result<Vec<u8>, Error>) -> Result<Bytes, Error> {
    let mut boxes = Boxes::default();
    boxes.push(init);
    let mut out = Vec::new();
    while let Some((kind, bytes)) = boxes.pop()? {
        if kind == Moov::KIND {
            out.extend(other(&bytes)?);
        } else {
            out.extend_from_slice(&bytes);
        }
    }
    Ok(out.into())
}

/// The boxes in a box, each with its header.
fn children(parent: &[u8]) -> Result<Vec<&[u8]>, Error> {
    const WRONG: Error = Error::Malformed("a box in moov that goes beyond its end");
    let mut rest = parent.get(HEADER..).ok_or(WRONG)?;
    let mut children = Vec::new();
    while !rest.is_empty() {
        let size = rest.first_chunk::<4>().map_or(0, |size| u32::from_be_bytes(*size) as usize);
        let (child, behind) = rest.split_at_checked(size).filter(|_| size >= HEADER).ok_or(WRONG)?;
        children.push(child);
        rest = behind;
    }
    Ok(children)
}

fn parent(kind: &[u8; 4], content: &[u8]) -> Vec<u8> {
    // It is shorter than what it was made of, whose size fits.
    let size = u32::try_from(content.len() + HEADER).unwrap_or(u32::MAX);
    [&size.to_be_bytes(), &kind[..], content].concat()
}

/// Whether a trak is of this track.
fn is_of(trak: &[u8], track: u32) -> bool {
    mp4_atom::Trak::decode(&mut &trak[..]).is_ok_and(|trak| trak.tkhd.track_id == track)
}

/// What an mvex has for one track.
fn extends(mvex: &[u8], track: u32) -> Option<Vec<u8>> {
    let own = children(mvex).ok()?.into_iter().filter(|child| {
        &child[4..HEADER] != b"trex" || child.get(TREX_TRACK).is_some_and(|id| id == track.to_be_bytes())
    });
    Some(parent(b"mvex", &own.collect::<Vec<_>>().concat()))
}
