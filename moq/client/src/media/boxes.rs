//! Splits a stream into MP4 boxes, reads nested boxes, and writes boxes.

use bytes::{Buf, Bytes, BytesMut};
use mp4_atom::{Decode, FourCC, Header};

use super::Error;

/// The largest box that is read into memory, in bytes.
pub(super) const MAX_BOX: usize = 256 << 20;
/// Length of a box header (size and type), in bytes.
pub(super) const HEADER: usize = 8;
/// Length of a box header with a 64-bit size, in bytes.
const LONG_HEADER: usize = 16;

/// Types of boxes that files and streams begin with.
const FIRST: [&[u8; 4]; 17] = [
    b"ftyp", b"styp", b"moov", b"moof", b"free", b"skip", b"mdat", b"wide", b"emsg", b"sidx", b"ssix",
    b"prft", b"pdin", b"uuid", b"meta", b"mfra", b"junk",
];

/// A splitter that divides a byte stream into MP4 boxes.
#[derive(Debug, Default)]
pub struct Boxes {
    buffer: BytesMut,
    /// Number of bytes in the boxes that were returned so far.
    taken: u64,
    /// Whether the type of the first box is one with which an MP4 input may begin.
    is_mp4: bool,
}

impl Boxes {
    /// Appends bytes of the input.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the byte offset of the next box in the input.
    pub fn position(&self) -> u64 {
        self.taken
    }

    /// Returns the next whole box with its header, or `None` if the box has not arrived completely.
    ///
    /// # Errors
    /// Fails if the input is not MP4, or a box is too large to be read into memory.
    pub fn pop(&mut self) -> Result<Option<(FourCC, Bytes)>, Error> {
        // A box header has 8 bytes, or 16 if its 32-bit size is 1, which announces a 64-bit size.
        let needed = if self.buffer.starts_with(&[0, 0, 0, 1]) { LONG_HEADER } else { HEADER };
        if self.buffer.len() < HEADER {
            return Ok(None);
        }
        if !self.is_mp4 && !FIRST.iter().any(|kind| kind[..] == self.buffer[4..HEADER]) {
            return Err(Error::NotMp4(foreign(&self.buffer)));
        }
        self.is_mp4 = true;
        if self.buffer.len() < needed {
            return Ok(None);
        }
        let mut front = &self.buffer[..];
        let header =
            Header::decode(&mut front).map_err(|source| Error::NotABox { at: self.taken, source })?;
        // A box with size 0 extends to the end of the input.
        let body = header.size.unwrap_or_else(|| front.remaining());
        if body > MAX_BOX {
            return Err(Error::TooLarge { kind: header.kind, size: body });
        }
        let whole = needed + body;
        if header.size.is_none() || self.buffer.len() < whole {
            self.buffer.reserve(whole.saturating_sub(self.buffer.len()));
            return Ok(None);
        }
        Ok(Some((header.kind, self.split(whole))))
    }

    /// Returns the last box of the input if the size in its header is 0. Such a box ends where the input ends.
    ///
    /// # Errors
    /// Fails if the input ends within a box, or is not MP4.
    pub fn finish(&mut self) -> Result<Option<(FourCC, Bytes)>, Error> {
        let there = self.buffer.len();
        if there == 0 {
            return Ok(None);
        }
        if !self.is_mp4 {
            return Err(Error::NotMp4(foreign(&self.buffer)));
        }
        let Ok(header) = Header::decode(&mut &self.buffer[..]) else {
            return Err(Error::Truncated { kind: FourCC::new(b"    "), at: self.taken, there, size: HEADER });
        };
        match header.size {
            None => Ok(Some((header.kind, self.split(there)))),
            Some(body) => {
                let size = body.saturating_add(HEADER);
                Err(Error::Truncated { kind: header.kind, at: self.taken, there, size })
            }
        }
    }

    fn split(&mut self, whole: usize) -> Bytes {
        self.taken += whole as u64;
        self.buffer.split_to(whole).freeze()
    }
}

/// Returns the name of the format of an input that is not MP4, as recognized by its first bytes.
fn foreign(front: &[u8]) -> Option<&'static str> {
    match front {
        // M2TS has a time stamp of four bytes before each transport stream packet.
        [0x47, ..] | [_, _, _, _, 0x47, ..] => Some("MPEG-TS"),
        [0x1a, 0x45, 0xdf, 0xa3, ..] => Some("Matroska or WebM"),
        [b'F', b'L', b'V', ..] => Some("FLV"),
        [b'O', b'g', b'g', b'S', ..] => Some("Ogg"),
        [b'R', b'I', b'F', b'F', ..] => Some("AVI or WAV"),
        [0, 0, 1, 0xba, ..] => Some("an MPEG program stream"),
        [0, 0, 0, 1, ..] | [0, 0, 1, ..] => Some("a bare video stream without a container"),
        [0xff, 0xf1 | 0xf9, ..] => Some("a bare AAC stream without a container"),
        [b'I', b'D', b'3', ..] => Some("MP3"),
        _ => None,
    }
}

/// A box that is contained in another box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Child<'a> {
    pub kind: [u8; 4],
    /// The box including its header.
    pub whole: &'a [u8],
    pub body: &'a [u8],
}

impl<'a> Child<'a> {
    /// Reads the box at the start of `bytes`. A box of size 0 extends to the end of `bytes`.
    pub fn first(bytes: &'a [u8]) -> Option<Self> {
        let (size, rest) = bytes.split_first_chunk::<4>()?;
        let (kind, rest) = rest.split_first_chunk::<4>()?;
        let (size, header) = match u32::from_be_bytes(*size) {
            0 => (bytes.len(), HEADER),
            1 => (usize::try_from(u64::from_be_bytes(*rest.first_chunk::<8>()?)).ok()?, LONG_HEADER),
            size => (size as usize, HEADER),
        };
        let whole = bytes.get(..size)?;
        Some(Self { kind: *kind, whole, body: whole.get(header..)? })
    }

    /// Returns version and flags of a full box, and the rest of its body.
    pub fn full(&self) -> Option<(u8, u32, &'a [u8])> {
        let (head, rest) = self.body.split_first_chunk::<4>()?;
        Some((head[0], u32::from_be_bytes(*head) & 0x00ff_ffff, rest))
    }
}

/// Returns the boxes in the body of another box. Remaining bytes that are fewer than a header are padding.
///
/// # Errors
/// Fails if a box goes beyond the end of the box that contains it.
pub(super) fn children(mut body: &[u8]) -> Result<Vec<Child<'_>>, Error> {
    let mut children = Vec::new();
    while body.len() >= HEADER {
        let child = Child::first(body)
            .ok_or(Error::Malformed("a box that extends beyond the box that contains it"))?;
        body = &body[child.whole.len()..];
        children.push(child);
    }
    Ok(children)
}

/// Returns the first box of a type in the body of another box.
pub(super) fn child<'a>(body: &'a [u8], kind: &[u8; 4]) -> Option<Child<'a>> {
    children(body).ok()?.into_iter().find(|child| child.kind == *kind)
}

/// Returns the nested box that a path of box types leads to.
pub(super) fn descendant<'a>(body: &'a [u8], path: &[&[u8; 4]]) -> Option<Child<'a>> {
    let (first, rest) = path.split_first()?;
    let found = child(body, first)?;
    if rest.is_empty() { Some(found) } else { descendant(found.body, rest) }
}

/// Writes a box.
pub(super) fn boxed(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let size = HEADER + body.len();
    let mut whole = Vec::with_capacity(size);
    // The size fits into 32 bits, because the contents were read from boxes that are smaller than [`MAX_BOX`].
    whole.extend_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
    whole.extend_from_slice(kind);
    whole.extend_from_slice(body);
    whole
}

/// Writes a full box, which has a version and flags.
pub(super) fn full(kind: &[u8; 4], version: u8, flags: u32, body: &[u8]) -> Vec<u8> {
    let head = (u32::from(version) << 24 | flags & 0x00ff_ffff).to_be_bytes();
    boxed(kind, &[&head, body].concat())
}

/// Runs `read` without logging. `mp4-atom` warns about unknown parts of a decoder configuration, which would mislead,
/// because those parts are passed on unchanged.
pub(super) fn quietly<T>(read: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), read)
}

/// A reader of big-endian numbers from the start of a byte slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct NumberReader<'a>(pub &'a [u8]);

impl<'a> NumberReader<'a> {
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(*self.take(2)?.first_chunk()?))
    }

    pub fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(*self.take(4)?.first_chunk()?))
    }

    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(*self.take(8)?.first_chunk()?))
    }

    /// Reads a number of 64 bits if `is_long`, or else of 32 bits.
    pub fn word(&mut self, is_long: bool) -> Option<u64> {
        if is_long { self.u64() } else { self.u32().map(u64::from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(bytes: &[u8]) -> Result<Vec<(FourCC, Bytes)>, Error> {
        let mut boxes = Boxes::default();
        let mut found = Vec::new();
        for byte in bytes {
            boxes.push(&[*byte]);
            found.extend(boxes.pop()?);
        }
        found.extend(boxes.finish()?);
        Ok(found)
    }

    #[test]
    fn boxes_with_all_forms_of_size_are_split() {
        let long = [&[0, 0, 0, 1][..], b"moov", &19_u64.to_be_bytes(), b"abc"].concat();
        let open = b"\0\0\0\0mdatto the end";
        let found = cut(&[&boxed(b"emsg", b"x")[..], &long, &boxed(b"zzzz", b""), open].concat()).unwrap();
        let kinds: Vec<_> = found.iter().map(|(kind, bytes)| (kind.to_string(), bytes.len())).collect();
        let expected = [("emsg", 9), ("moov", 19), ("zzzz", 8), ("mdat", 18)];
        assert_eq!(kinds, expected.map(|(kind, length)| (kind.to_owned(), length)));
        assert_eq!(Child::first(&found[1].1).unwrap().body, b"abc");
        assert_eq!(Child::first(&found[3].1).unwrap().body, b"to the end");
    }

    #[test]
    fn input_that_ends_within_a_box_is_an_error() {
        let error = cut(b"\0\0\0\x10ftypabc").unwrap_err().to_string();
        assert!(error.contains("\"ftyp\"") && error.contains("11 of 16 bytes"), "{error}");
    }

    #[test]
    fn box_with_invalid_size_is_an_error() {
        assert!(cut(b"\0\0\0\x03mdat").is_err());
        assert!(cut(b"\0\0\0\x01mdat\0\0\0\0\0\0\0\x0f").is_err());
        assert!(matches!(cut(b"\xff\0\0\0mdat"), Err(Error::TooLarge { .. })));
        assert!(matches!(cut(b"\0\0\0\x01mdat\xff\0\0\0\0\0\0\0"), Err(Error::TooLarge { .. })));
    }

    #[test]
    fn input_in_another_container_format_is_named() {
        let table: [(&[u8], Option<&str>); 7] = [
            (&[0x47, 0x40, 0, 0x10, 0, 0, 0xb0, 0x0d, 0], Some("MPEG-TS")),
            (&[1, 2, 3, 4, 0x47, 0x40, 0, 0x10, 0], Some("MPEG-TS")),
            (b"\x1a\x45\xdf\xa3\x01\0\0\0", Some("Matroska or WebM")),
            (b"FLV\x01\x05\0\0\0\x09", Some("FLV")),
            (b"\0\0\0\x01\x67\x42\xc0\x1e", Some("a bare video stream without a container")),
            (b"\xff\xf1\x50\x80\x02\x1f\xfc\0", Some("a bare AAC stream without a container")),
            (b"secret token", None),
        ];
        for (bytes, name) in table {
            let Err(Error::NotMp4(found)) = cut(bytes) else { panic!("{bytes:?}") };
            assert_eq!(found, name);
        }
        assert!(matches!(cut(b"abc"), Err(Error::NotMp4(None))), "less than a header");
    }
}
