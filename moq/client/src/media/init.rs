//! Reads init segments of MP4 (ftyp and moov) box by box, so that an unknown box does not make the other boxes
//! unreadable.

use bytes::Bytes;
use mp4_atom::{Atom, Elst, Trex};

use super::boxes::{Boxes, Child, HEADER, NumberReader, boxed, child, children, descendant, full, quietly};
use super::entry::SampleEntry;
use super::fragment::SampleRun;
use super::{Error, language, table};

/// The ftyp box that is added if the input has none.
const FTYP: &[u8] = b"\0\0\0\x1cftypiso6\0\0\0\0iso6mp41cmfc";
/// The empty sample tables that a moov of fragmented MP4 has (ISO/IEC 14496-12, 8.6.1.2, 8.7.3.2, 8.7.4, 8.7.5).
const NO_SAMPLES: [(&[u8; 4], usize); 4] = [(b"stts", 4), (b"stsc", 4), (b"stsz", 8), (b"stco", 4)];

/// A pssh box: initialization data for a content protection system (ISO/IEC 23001-7, 8.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct System {
    pub id: [u8; 16],
    pub pssh: Bytes,
}

/// The contents of a moov box.
#[derive(Debug)]
pub(super) struct Presentation {
    pub tracks: Vec<InitTrack>,
    pub systems: Vec<System>,
    /// Whether the moov announces fragments (mvex).
    pub is_fragmented: bool,
    /// The ftyp and moov boxes. Samples that the moov lists are removed from its tables.
    pub init: Bytes,
    /// Samples that the tables of the moov list. These samples precede the samples of the fragments.
    pub runs: Vec<SampleRun>,
}

/// The contents of a trak box.
#[derive(Debug)]
pub(super) struct InitTrack {
    pub id: u32,
    pub handler: [u8; 4],
    pub timescale: u32,
    /// Language tag (RFC 5646).
    pub language: Option<String>,
    pub label: Option<String>,
    /// Roles of the DASH role scheme, which muxers write into kind boxes.
    pub kinds: Vec<String>,
    /// The alternate group: tracks with the same number are alternates of each other. 0 means none.
    pub alternate: u16,
    pub entries: Vec<SampleEntry>,
    pub defaults: Trex,
    /// Time by which the edit list presents samples earlier than their time stamps say, in units of the timescale.
    pub edit: i64,
}

impl InitTrack {
    /// Returns the first sample entry of the track.
    pub fn entry(&self) -> Option<&SampleEntry> {
        self.entries.first()
    }

    pub fn is_video(&self) -> bool {
        self.handler == *b"vide"
    }

    pub fn is_sound(&self) -> bool {
        self.handler == *b"soun"
    }
}

impl Presentation {
    /// Reads an init segment. If the input has no ftyp box, a default one is added.
    ///
    /// # Errors
    /// Fails if a required box is missing, or extends beyond its end.
    pub fn read(ftyp: Option<&[u8]>, moov: &[u8]) -> Result<Self, Error> {
        let body = Child::first(moov).ok_or(Error::Malformed("a moov box without a body"))?.body;
        let parts = children(body)?;
        let movie = parts.iter().find(|part| part.kind == *b"mvhd").and_then(movie_timescale).unwrap_or(1000);
        let mvex = parts.iter().find(|part| part.kind == *b"mvex");
        let extends = mvex.map(|mvex| children(mvex.body)).transpose()?.unwrap_or_default();
        let mut tracks = Vec::new();
        let mut runs = Vec::new();
        for trak in parts.iter().filter(|part| part.kind == *b"trak") {
            let mut track = read_track(trak, movie)?;
            let extends = extends.iter().filter(|part| part.kind == *b"trex");
            let own = extends.filter_map(|trex| Trex::decode_body(&mut &trex.body[..]).ok());
            track.defaults = own.into_iter().find(|trex| trex.track_id == track.id).unwrap_or_default();
            runs.extend(table::samples(trak, track.id)?);
            tracks.push(track);
        }
        let systems = parts.iter().filter(|part| part.kind == *b"pssh").filter_map(|pssh| {
            let id = *pssh.full()?.2.first_chunk()?;
            Some(System { id, pssh: Bytes::copy_from_slice(pssh.whole) })
        });
        let systems = systems.collect();
        let moov = boxed(b"moov", &without_samples(body, !runs.is_empty())?);
        let init = [ftyp.unwrap_or(FTYP), &moov].concat().into();
        Ok(Self { tracks, systems, is_fragmented: mvex.is_some(), init, runs })
    }

    /// Reads a complete init segment.
    ///
    /// # Errors
    /// Fails if it has no moov box, or the moov box cannot be read.
    pub fn parse(init: &[u8]) -> Result<Self, Error> {
        let (ftyp, moov) = split(init)?;
        Self::read(ftyp.as_deref(), &moov)
    }
}

/// Returns the ftyp and moov boxes of an init segment.
fn split(init: &[u8]) -> Result<(Option<Bytes>, Bytes), Error> {
    let mut boxes = Boxes::default();
    boxes.push(init);
    let mut ftyp = None;
    while let Some((kind, bytes)) = boxes.pop()? {
        match kind.as_ref() {
            b"ftyp" => ftyp = Some(bytes),
            b"moov" => return Ok((ftyp, bytes)),
            _ => {}
        }
    }
    Err(Error::Malformed("an init segment without a moov box"))
}

fn movie_timescale(mvhd: &Child<'_>) -> Option<u32> {
    let (version, _, rest) = mvhd.full()?;
    let mut numbers = NumberReader(rest);
    numbers.take(if version == 1 { 16 } else { 8 })?;
    numbers.u32().filter(|timescale| *timescale > 0)
}

fn read_track(trak: &Child<'_>, movie: u32) -> Result<InitTrack, Error> {
    let tkhd = child(trak.body, b"tkhd").and_then(|tkhd| track_header(&tkhd));
    let (id, alternate) = tkhd.ok_or(Error::Malformed("a trak box without a track ID"))?;
    let mdia = child(trak.body, b"mdia").ok_or(Error::Malformed("a trak box without an mdia"))?;
    let media = child(mdia.body, b"mdhd").and_then(|mdhd| media_header(&mdhd));
    let (timescale, code) = media.ok_or(Error::Malformed("a trak box without a timescale"))?;
    let handler = child(mdia.body, b"hdlr").and_then(|hdlr| hdlr.full()?.2.get(4..8)?.first_chunk().copied());
    let handler = handler.ok_or(Error::Malformed("a trak box without a handler"))?;
    let stsd = descendant(mdia.body, &[b"minf", b"stbl", b"stsd"]);
    let extended = child(mdia.body, b"elng").and_then(|elng| language::tag(&text(elng.full()?.2)));
    let edit = descendant(trak.body, &[b"edts", b"elst"]).map_or(0, |elst| shift(&elst, timescale, movie));
    Ok(InitTrack {
        id,
        handler,
        timescale,
        language: extended.or_else(|| language::tag(&code)),
        label: label(trak),
        kinds: kinds(trak),
        alternate,
        entries: stsd.map(|stsd| SampleEntry::all(&stsd, handler)).unwrap_or_default(),
        defaults: Trex::default(),
        edit,
    })
}

fn track_header(tkhd: &Child<'_>) -> Option<(u32, u16)> {
    let (version, _, rest) = tkhd.full()?;
    let is_long = version == 1;
    let mut numbers = NumberReader(rest);
    numbers.take(if is_long { 16 } else { 8 })?;
    let id = numbers.u32()?;
    // The skipped fields of the tkhd box are a reserved word, the duration, two reserved words, and the layer.
    numbers.take(4 + if is_long { 8 } else { 4 } + 8 + 2)?;
    Some((id, numbers.u16()?))
}

/// Returns the timescale and the language code (ISO 639-2) of an mdhd box.
fn media_header(mdhd: &Child<'_>) -> Option<(u32, String)> {
    let (version, _, rest) = mdhd.full()?;
    let is_long = version == 1;
    let mut numbers = NumberReader(rest);
    numbers.take(if is_long { 16 } else { 8 })?;
    let timescale = numbers.u32()?.max(1);
    numbers.word(is_long)?;
    let code = numbers.u16()?;
    // Each letter of the language code has five bits, and 1 stands for `a`.
    let letter = |at: u16| char::from((code >> at & 0x1f) as u8 + 0x60);
    Some((timescale, [10, 5, 0].map(letter).iter().collect()))
}

/// Returns by how much an edit list presents samples earlier than their time stamps say: the media time that the list
/// skips at the start, minus the empty edit that it inserts at the start. Later edits are ignored, because live streams
/// have none.
fn shift(elst: &Child<'_>, timescale: u32, movie: u32) -> i64 {
    let Ok(elst) = quietly(|| Elst::decode_body(&mut &elst.body[..])) else { return 0 };
    let mut empty = 0_i64;
    for entry in elst.entries {
        let Some(start) = entry.media_time else {
            let units = u128::from(entry.segment_duration) * u128::from(timescale) / u128::from(movie);
            empty = empty.saturating_add(i64::try_from(units).unwrap_or(0));
            continue;
        };
        return i64::try_from(start).unwrap_or(0).saturating_sub(empty);
    }
    empty.saturating_neg()
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// Returns a track's title, from a labl box (ISO/IEC 14496-12, 8.10.5) or from QuickTime's name box.
fn label(trak: &Child<'_>) -> Option<String> {
    let udta = child(trak.body, b"udta")?;
    let labelled = child(udta.body, b"labl").and_then(|labl| {
        // A labl box has a label number, a zero-terminated language tag and the label.
        let rest = labl.full()?.2.get(2..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        Some(text(&rest[end + 1..]))
    });
    let named = || child(udta.body, b"name").map(|name| text(name.body));
    labelled.or_else(named).filter(|label| !label.is_empty())
}

fn kinds(trak: &Child<'_>) -> Vec<String> {
    const DASH_ROLE: &str = "urn:mpeg:dash:role:2011";
    let udta = child(trak.body, b"udta").map(|udta| children(udta.body).unwrap_or_default());
    let kinds = udta.unwrap_or_default().into_iter().filter(|part| part.kind == *b"kind");
    let value = |kind: Child<'_>| {
        let body = kind.full()?.2;
        let scheme = text(body);
        let value = body.get(scheme.len() + 1..).map(text)?;
        (scheme == DASH_ROLE).then_some(value)
    };
    kinds.filter_map(value).collect()
}

/// Copies the boxes of a moov. If `has_samples` is true, its sample tables are replaced by empty ones.
fn without_samples(body: &[u8], has_samples: bool) -> Result<Vec<u8>, Error> {
    if !has_samples {
        return Ok(body.to_vec());
    }
    let mut out = Vec::new();
    for part in children(body)? {
        match &part.kind {
            b"trak" | b"mdia" | b"minf" | b"edts" => {
                out.extend(boxed(&part.kind, &without_samples(part.body, true)?))
            }
            b"stbl" => out.extend(boxed(b"stbl", &empty_table(part.body)?)),
            // The durations in the following boxes include the samples that were removed, so the durations are set to
            // 0.
            b"elst" => out.extend(open_ended(&part)),
            b"mvhd" | b"mdhd" => out.extend(without_duration(&part, if is_long(&part) { 24 } else { 16 })),
            b"tkhd" => out.extend(without_duration(&part, if is_long(&part) { 28 } else { 20 })),
            _ => out.extend_from_slice(part.whole),
        }
    }
    Ok(out)
}

fn empty_table(body: &[u8]) -> Result<Vec<u8>, Error> {
    let kept = children(body)?.into_iter().filter(|part| matches!(&part.kind, b"stsd" | b"sgpd"));
    let mut out: Vec<u8> = kept.flat_map(|part| part.whole.to_vec()).collect();
    NO_SAMPLES.iter().for_each(|(kind, length)| out.extend(full(kind, 0, 0, &vec![0; *length])));
    Ok(out)
}

fn is_long(part: &Child<'_>) -> bool {
    part.body.first() == Some(&1)
}

/// Copies a box and sets the duration field at this offset of its body to 0.
fn without_duration(part: &Child<'_>, at: usize) -> Vec<u8> {
    let mut body = part.body.to_vec();
    let length = if is_long(part) { 8 } else { 4 };
    if let Some(duration) = body.get_mut(at..at + length) {
        duration.fill(0);
    }
    boxed(&part.kind, &body)
}

/// Copies an edit list, with the duration of its last entry set to 0.
fn open_ended(part: &Child<'_>) -> Vec<u8> {
    let mut body = part.body.to_vec();
    let (entry, length) = if is_long(part) { (20, 8) } else { (12, 4) };
    let last = body.len().checked_sub(entry).filter(|last| *last >= 8);
    if let Some(duration) = last.and_then(|last| body.get_mut(last..last + length)) {
        duration.fill(0);
    }
    boxed(&part.kind, &body)
}

/// Returns the init segment with only one of its tracks. The boxes that remain are copied unchanged, even if their
/// types are unknown.
pub(super) fn single_track_init(init: &[u8], track: u32) -> Result<Bytes, Error> {
    let (ftyp, moov) = split(init)?;
    let body = Child::first(&moov).map_or(&[][..], |moov| moov.body);
    let own = children(body)?.into_iter().filter_map(|part| match &part.kind {
        b"trak" => is_of(&part, track).then(|| part.whole.to_vec()),
        b"mvex" => Some(boxed(b"mvex", &extends(&part, |id| id == track))),
        _ => Some(part.whole.to_vec()),
    });
    Ok([ftyp.as_deref().unwrap_or(FTYP), &boxed(b"moov", &own.collect::<Vec<_>>().concat())].concat().into())
}

/// Returns an init segment with the tracks of `init` and `other`, or `None` if both have a track with the same ID.
pub(super) fn join(init: &[u8], other: &[u8]) -> Result<Option<Bytes>, Error> {
    let (ftyp, moov) = split(init)?;
    let (_, added) = split(other)?;
    let body = |moov: &[u8]| Child::first(moov).map(|moov| moov.body.to_vec()).unwrap_or_default();
    let own = body(&moov);
    let added = body(&added);
    let own = children(&own)?;
    let added = children(&added)?;
    let ids = |parts: &[Child<'_>]| parts.iter().filter_map(track_id).collect::<Vec<_>>();
    let taken = ids(&own);
    if ids(&added).iter().any(|id| taken.contains(id)) {
        return Ok(None);
    }
    let of_kind = |kind: [u8; 4]| added.iter().filter(move |part| part.kind == kind);
    let more: Vec<u8> = of_kind(*b"mvex").flat_map(|mvex| extends(mvex, |_| true)).collect();
    let mut out = Vec::new();
    let mut is_extended = false;
    for part in &own {
        match &part.kind {
            b"mvex" if !is_extended => {
                is_extended = true;
                out.extend(boxed(b"mvex", &[part.body, &more].concat()));
            }
            _ => out.extend_from_slice(part.whole),
        }
    }
    if !is_extended {
        out.extend(boxed(b"mvex", &more));
    }
    for kind in [*b"trak", *b"pssh"] {
        // If both segments have the same pssh box, it is copied once.
        of_kind(kind)
            .filter(|part| kind == *b"trak" || !own.contains(part))
            .for_each(|part| out.extend_from_slice(part.whole));
    }
    Ok(Some([ftyp.as_deref().unwrap_or(FTYP), &boxed(b"moov", &out)].concat().into()))
}

fn track_id(part: &Child<'_>) -> Option<u32> {
    let tkhd = child(part.body, b"tkhd").filter(|_| part.kind == *b"trak")?;
    track_header(&tkhd).map(|(id, _)| id)
}

fn is_of(trak: &Child<'_>, track: u32) -> bool {
    track_id(trak) == Some(track)
}

/// Copies the entries of an mvex box for the tracks that `wanted` accepts.
fn extends(mvex: &Child<'_>, wanted: impl Fn(u32) -> bool) -> Vec<u8> {
    let own = children(mvex.body).unwrap_or_default().into_iter().filter(|part| {
        let track = part.full().and_then(|(_, _, rest)| NumberReader(rest).u32());
        part.kind != *b"trex" || track.is_some_and(&wanted)
    });
    own.flat_map(|part| part.whole.to_vec()).collect()
}

/// Reports whether an mdat box is not empty.
pub(super) fn has_content(mdat: &[u8]) -> bool {
    mdat.len() > HEADER
}
