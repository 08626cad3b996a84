//! Sample entries: the codec and decoder configuration of a track's samples, which may be encrypted.

use bytes::Bytes;
use mp4_atom::{Codec, Decode, FourCC};

use super::boxes::{Child, HEADER, NumberReader, child, children, quietly};

/// The encryption parameters of samples (ISO/IEC 23001-7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Protection {
    /// The protection scheme, such as `cenc` or `cbcs`.
    pub scheme: String,
    pub key: Option<[u8; 16]>,
    /// Length of an initialization vector in a sample's auxiliary information, in bytes.
    pub iv_size: u8,
}

/// A sample entry (ISO/IEC 14496-12, 8.5.2).
#[derive(Clone, Debug)]
pub(super) struct SampleEntry {
    /// The type of the entry. For an encrypted entry, the type of the unencrypted original.
    pub kind: [u8; 4],
    /// The entry as `mp4-atom` parses it, or `Unknown` if it cannot.
    pub codec: Codec,
    pub protection: Option<Protection>,
    raw: Bytes,
    is_visual: bool,
}

impl SampleEntry {
    /// Reads all sample entries of an stsd box. `handler` is the handler type of the track, such as `vide`.
    pub fn all(stsd: &Child<'_>, handler: [u8; 4]) -> Vec<Self> {
        let entries = stsd.full().and_then(|(_, _, rest)| rest.get(4..)).unwrap_or_default();
        children(entries).unwrap_or_default().iter().map(|entry| Self::read(entry, handler)).collect()
    }

    fn read(entry: &Child<'_>, handler: [u8; 4]) -> Self {
        let is_visual = handler == *b"vide";
        let mut raw = entry.whole.to_vec();
        let mut kind = entry.kind;
        let mut protection = None;
        if let Some(sinf) = child(skip_fields(entry.body, handler), b"sinf") {
            // The frma box of an encrypted entry has the original type. With that type in its header, the entry decodes
            // like an unencrypted one.
            if let Some(original) =
                child(sinf.body, b"frma").and_then(|frma| frma.body.first_chunk::<4>().copied())
            {
                kind = original;
                raw[4..HEADER].copy_from_slice(&original);
            }
            protection = Some(Protection::read(&sinf));
        }
        let codec = quietly(|| Codec::decode(&mut &raw[..]));
        let codec = codec.unwrap_or_else(|_| Codec::Unknown(FourCC::from(kind), Vec::new()));
        Self { kind, codec, protection, raw: raw.into(), is_visual }
    }

    /// Returns the body of a box that is contained in the entry.
    pub fn part(&self, kind: &[u8; 4]) -> Option<&[u8]> {
        let handler = if self.is_visual { *b"vide" } else { *b"soun" };
        let entry = Child::first(&self.raw)?;
        child(skip_fields(entry.body, handler), kind).map(|part| part.body)
    }

    /// Returns width and height in pixels, or `None` if the track is not video.
    pub fn size(&self) -> Option<(u16, u16)> {
        let mut numbers = NumberReader(self.raw.get(HEADER + 24..)?);
        Some((numbers.u16()?, numbers.u16()?)).filter(|_| self.is_visual)
    }

    /// Returns the number of channels and the sampling rate (in Hz) that the entry itself states.
    pub fn sound(&self) -> Option<(u16, u32)> {
        let body = self.raw.get(HEADER..)?;
        let mut numbers = NumberReader(body.get(8..)?);
        let version = numbers.u16()?;
        if version == 2 {
            // Version 2 of QuickTime's sound description has the sampling rate as a 64-bit float and the number of
            // channels as a 32-bit integer.
            let mut numbers = NumberReader(body.get(32..)?);
            let rate = f64::from_bits(numbers.u64()?);
            return Some((numbers.u32()?.try_into().ok()?, rate as u32));
        }
        let mut numbers = NumberReader(body.get(16..)?);
        let channels = numbers.u16()?;
        numbers.take(6)?;
        Some((channels, numbers.u32()? >> 16))
    }
}

impl Protection {
    fn read(sinf: &Child<'_>) -> Self {
        let scheme = child(sinf.body, b"schm").and_then(|schm| Some(schm.full()?.2.get(..4)?.to_vec()));
        let scheme =
            scheme.map_or_else(|| "cenc".to_owned(), |scheme| String::from_utf8_lossy(&scheme).into_owned());
        let tenc =
            child(sinf.body, b"schi").and_then(|schi| Some(child(schi.body, b"tenc")?.full()?.2.to_vec()));
        let mut numbers = NumberReader(tenc.as_deref().unwrap_or_default());
        // The skipped bytes of the tenc box are a reserved byte, the encryption pattern, and the flag for protected
        // samples.
        numbers.take(3);
        let iv_size = numbers.u8().unwrap_or(0);
        let key = numbers.take(16).and_then(|key| key.try_into().ok());
        Self { scheme, key, iv_size }
    }
}

/// Returns the boxes that a sample entry contains. Fixed fields precede the boxes; their length depends on the kind of
/// track.
fn skip_fields(body: &[u8], handler: [u8; 4]) -> &[u8] {
    const PLAIN: usize = 8;
    const VISUAL: usize = 78;
    const SOUND: usize = 28;
    let length = match &handler {
        b"vide" => VISUAL,
        b"soun" => {
            let version = body.get(8..10).map_or(0, |version| u16::from_be_bytes([version[0], version[1]]));
            SOUND
                + match version {
                    1 => 16,
                    2 => 36,
                    _ => 0,
                }
        }
        _ => PLAIN,
    };
    body.get(length..).unwrap_or_default()
}
