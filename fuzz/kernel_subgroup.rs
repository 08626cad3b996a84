//! Compares the parsers of subgroup streams: `subgroup.h` and `moq::data`.

use millrace_moq::{
    ObjectParser, Position, StreamHeader, SubgroupId,
    data::{Field, StreamHeader::Subgroup},
    vi64,
};

/// Value of `FRAMES_MAX` in frames.h.
const FRAMES_MAX: usize = 2048;

const FETCH: u64 = 0x05;

/// Copy of C's `struct subgroup_state`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SubgroupStateCopy {
    value: u64,
    left: u64,
    previous: u64,
    pub(super) field: u8,
    missing: u8,
    flags: u8,
    kind: u8,
    pad: u32,
}

impl From<Position> for SubgroupStateCopy {
    fn from(at: Position) -> Self {
        let flag = |set, bit: u8| if set { bit } else { 0 };
        Self {
            value: at.value,
            left: at.left,
            previous: at.previous.unwrap_or(0),
            field: at.field as u8,
            missing: at.missing,
            flags: flag(at.previous.is_some(), 1) | flag(at.with_properties, 2) | flag(at.ended, 4),
            kind: at.kind,
            pad: 0,
        }
    }
}

/// Copy of C's `struct subgroup_head`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SubgroupHeadCopy {
    alias: u64,
    group: u64,
    subgroup: u64,
    object: u64,
    priority: i32,
    alias_bytes: u32,
    is_read: u32,
    kind: u32,
}

unsafe extern "C" {
    fn subgroup_native_read_head(text: *const u8, at: u32, len: u32, out: *mut SubgroupHeadCopy) -> i32;
    fn subgroup_native_walk(
        state: *mut SubgroupStateCopy,
        text: *const u8,
        at: u32,
        end: u32,
        steps: *mut u32,
    ) -> i32;
    fn subgroup_native_may_end(state: *const SubgroupStateCopy) -> i32;
}

/// Parses consecutive bytes of a subgroup stream with the C parser. Returns the parser's new state; `None` if the bytes
/// are malformed.
fn walk(mut state: SubgroupStateCopy, piece: &[u8], at: usize, fill: u8) -> Option<SubgroupStateCopy> {
    let end = at + piece.len();
    let mut text = vec![fill; FRAMES_MAX + 8];
    text[at..end].copy_from_slice(piece);
    let mut steps = 0;
    // SAFETY: `text` has the size that frames.h requires, and contains the given range.
    let good =
        unsafe { subgroup_native_walk(&raw mut state, text.as_ptr(), at as u32, end as u32, &raw mut steps) };
    assert!(steps as usize <= piece.len() + 1, "a step took nothing");
    (good == 1).then_some(state)
}

/// Reads a stream's header with the C parser. Returns `None` if the kernel opens no streams to subscribers for such a
/// header.
fn read_head(stream: &[u8], at: usize, fill: u8) -> Option<SubgroupHeadCopy> {
    let mut text = vec![fill; FRAMES_MAX + 8];
    text[at..at + stream.len()].copy_from_slice(stream);
    let mut head = SubgroupHeadCopy::default();
    // SAFETY: `text` has the size that frames.h requires, and contains the given range.
    let bad =
        unsafe { subgroup_native_read_head(text.as_ptr(), at as u32, stream.len() as u32, &raw mut head) };
    (bad == 0).then_some(head)
}

/// Reads a stream's header with the Rust parser. Returns `None` unless the SUBGROUP_HEADER is complete and all its
/// integers except the alias are in the shortest form.
fn expected_head(stream: &[u8]) -> Option<SubgroupHeadCopy> {
    let mut rest = stream;
    let Ok(Some(Subgroup(header))) = StreamHeader::decode(&mut rest) else { return None };
    let taken = stream.len() - rest.len();
    let mut shortest = Vec::new();
    header.encode_padded(taken, &mut shortest);
    if shortest != stream[..taken] {
        return None;
    }
    let object = vi64::decode(&mut rest);
    Some(SubgroupHeadCopy {
        alias: header.alias,
        group: header.group,
        subgroup: match header.subgroup {
            SubgroupId::Zero => 0,
            SubgroupId::Explicit(id) => id,
            SubgroupId::FirstObject => object?,
        },
        object: object.unwrap_or(0),
        priority: header.priority.map_or(-1, i32::from),
        alias_bytes: vi64::encoded_len(stream[1]) as u32,
        is_read: 0,
        kind: stream[0].into(),
    })
}

/// The Rust parser of a subgroup stream. It buffers the header until it is complete, and parses the objects as they
/// arrive.
pub(super) enum RustSubgroupParser {
    Header(Vec<u8>),
    Objects(ObjectParser),
}

impl RustSubgroupParser {
    /// Parses the stream's next bytes. Returns `None` if they are malformed, or if the stream is no subgroup stream.
    pub(super) fn take(self, piece: &[u8]) -> Option<Self> {
        let (mut parser, bytes) = match self {
            Self::Objects(parser) => (parser, piece.to_vec()),
            Self::Header(mut bytes) => {
                bytes.extend_from_slice(piece);
                let mut rest = &bytes[..];
                match StreamHeader::decode(&mut rest).ok()? {
                    // The header of a FETCH stream, whose request ID has not arrived yet. This is no subgroup stream.
                    None if vi64::decode(&mut &bytes[..]) == Some(FETCH) => return None,
                    None => return Some(Self::Header(bytes)),
                    Some(Subgroup(header)) => {
                        let offset = bytes.len() - rest.len();
                        (ObjectParser::new(&header, offset as u64), rest.to_vec())
                    }
                    Some(_) => return None,
                }
            }
        };
        let mut rest = &bytes[..];
        while parser.next(&mut rest).ok()?.is_some() {}
        Some(Self::Objects(parser))
    }
}

/// Compares both parsers on a subgroup stream. The first byte determines the length of pieces. The second byte is a
/// piece's offset in its buffer, and the third byte fills the rest of the buffer.
pub fn kernel_subgroup(data: &[u8]) {
    let Some((&[cut, at, fill], stream)) = data.split_first_chunk() else { return };
    let place = (usize::from(at), fill);
    let stream = &stream[..stream.len().min(FRAMES_MAX - place.0)];
    let whole = walk(SubgroupStateCopy::default(), stream, place.0, place.1);
    let head = read_head(stream, place.0, place.1);
    assert_eq!(head, expected_head(stream));

    let mut state = Some(SubgroupStateCopy::default());
    let mut parser = Some(RustSubgroupParser::Header(Vec::new()));
    let mut taken = 0;
    for piece in stream.chunks(usize::from(cut) % 64 + 1) {
        taken += piece.len();
        state = state.and_then(|state| walk(state, piece, place.0, place.1));
        parser = parser.and_then(|parser| parser.take(piece));
        assert_eq!(state.is_some(), parser.is_some(), "{taken} bytes");
        let (Some(state), Some(RustSubgroupParser::Objects(parser))) = (state, &parser) else { continue };
        let position = parser.position();
        assert_eq!(
            (SubgroupStateCopy::from(position), position.offset),
            (state, taken as u64),
            "{position:?}"
        );
        // SAFETY: `state` is a valid state that outlives the call.
        assert_eq!(unsafe { subgroup_native_may_end(&raw const state) } == 1, parser.at_boundary());
    }
    assert_eq!(state, whole, "in one piece");
    // A stream with opaque content has no framing, so any bytes are accepted and leave the state unchanged.
    let opaque = SubgroupStateCopy::from(Position { field: Field::Opaque, ..Position::default() });
    assert_eq!(walk(opaque, stream, place.0, place.1), Some(opaque));
}
