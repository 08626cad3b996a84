//! Compares the bytes that both readers of a stream take of frames that overlap: `relay_judge.h`, which forwards them, and userspace
//! behind `quic::received`, which keeps them and sends whatever was not forwarded.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{LazyLock, Mutex, PoisonError},
};

use millrace_moq::{Status, data::encode_object_header};
use millrace_quic::{
    frame::{self, Frame, Walker},
    received::{ReceivedStreams, RepeatedFrame, TakenPart, cut},
};

use super::subgroup::{RustSubgroupParser, SubgroupStateCopy};

/// `enum relay_frame_outcome`.
const GOOD: u32 = 0;
const MALFORMED: u32 = 5;
/// `enum subgroup_field`.
const OVER: u8 = 12;
const BROKEN: u8 = 13;

/// The stream's ID, and its length in bytes.
const ID: u64 = 6;
const STREAM: usize = 600;
/// Bytes of its SUBGROUP_HEADER.
const HEADER: usize = 3;

/// `struct relay_ingress`.
#[repr(C)]
struct RelayIngressCopy {
    slot: [u64; 3],
    next: u64,
    final_size: u64,
    run: [u64; 2],
    apart: [u64; 2],
    contradicted: u64,
    state: SubgroupStateCopy,
    scratch: SubgroupStateCopy,
}

unsafe extern "C" {
    fn judge_native_begin() -> *mut RelayIngressCopy;
    fn judge_native_frame(data: *const u8, offset: u64, len: u32, fin: u32) -> u32;
    fn judge_native_leave(offset: u64, len: u32, fin: u32) -> i32;
    fn judge_native_datagram(group: u64, object: u64) -> u32;
}

/// Versions of the stream that the hostile publisher chooses from at each offset: well-formed, and different from their first object on.
static STREAMS: LazyLock<[Vec<u8>; 3]> =
    LazyLock::new(|| [&[53usize, 1, 200, 0][..], &[51, 3], &[0, 7, 0, 190, 2]].map(subgroup));
/// There is one ingress.
static TURN: Mutex<()> = Mutex::new(());

/// Objects of these lengths, again and again.
fn subgroup(lengths: &[usize]) -> Vec<u8> {
    let mut bytes = vec![0x30, 2, 0];
    for (id, len) in (0..).zip(lengths.iter().cycle()).take_while(|(id, _)| *id < 300) {
        encode_object_header(u64::checked_sub(id, 1), id, None, *len as u64, Status::Normal, &mut bytes);
        bytes.extend(vec![id as u8; *len]);
    }
    bytes.truncate(STREAM);
    bytes
}

/// Userspace: the seam, and quinn behind it.
#[derive(Default)]
struct UserspaceReceiver {
    kept: BTreeMap<u64, u8>,
    size: Option<u64>,
    largest: u64,
}

impl UserspaceReceiver {
    /// Takes a packet as the seam has left it; `false`: quinn closes the connection.
    fn take(&mut self, payload: &[u8]) -> bool {
        for item in Walker::new(payload) {
            let Ok((_, Frame::Stream(frame))) = item else { panic!("{item:?}") };
            let end = frame.offset + frame.data.len() as u64;
            if self.size.is_some_and(|size| end > size || (frame.fin && end != size)) {
                return false;
            }
            self.size = self.size.or(frame.fin.then_some(end));
            self.largest = self.largest.max(end);
            for (offset, byte) in (frame.offset..).zip(frame.data) {
                // Whichever rule quinn has for bytes that come twice.
                assert_eq!(self.kept.insert(offset, *byte), None, "byte {offset} came twice");
            }
        }
        true
    }

    /// Bytes from the beginning on, up to a hole.
    fn front(&self) -> Vec<u8> {
        (0..).map_while(|offset| self.kept.get(&offset).copied()).collect()
    }
}

/// Returns the state of userspace's parser behind the bytes; `None` if they are malformed.
fn position(bytes: &[u8]) -> Option<SubgroupStateCopy> {
    match RustSubgroupParser::Header(Vec::new()).take(bytes)? {
        RustSubgroupParser::Header(_) => None,
        RustSubgroupParser::Objects(parser) => Some(SubgroupStateCopy::from(parser.position())),
    }
}

/// Steps of four bytes each. A step is a frame of one of three streams, in the same packet as the one before or in the next, or one that
/// the program leaves unread. Or userspace reads its packets.
pub fn kernel_overlap(data: &[u8]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: it is the only one, and nobody has the other.
    let ingress = unsafe { &mut *judge_native_begin() };
    let mut seam = ReceivedStreams::new(8);
    let mut userspace = UserspaceReceiver::default();
    let mut forwarded = BTreeMap::new();
    for packet in packets(data, &STREAMS) {
        let Some(frames) = packet else {
            let front = userspace.front();
            if front.len() >= HEADER && front.len() as u64 > ingress.next && ingress.state.field != BROKEN {
                let Some(state) = position(&front) else { return };
                (ingress.next, ingress.state) = (front.len() as u64, state);
            }
            continue;
        };
        let mut payload = Vec::new();
        let mut repeats = Vec::new();
        let mut good = Vec::new();
        let mut malformed = false;
        for OverlapPiece { offset, data, fin, unread } in &frames {
            frame::write_stream(ID, *offset, data, *fin, &mut payload);
            let len = data.len() as u32;
            let fin = u32::from(*fin);
            if *unread {
                // SAFETY: it takes numbers.
                assert_eq!(unsafe { judge_native_leave(*offset, len, fin) }, 0, "nobody has the lock");
                continue;
            }
            // SAFETY: the data is as long as that.
            let outcome = unsafe { judge_native_frame(data.as_ptr(), *offset, len, fin) };
            malformed |= outcome == MALFORMED;
            good.extend((outcome == GOOD).then_some((*offset, *data)));
        }
        for item in Walker::new(&payload) {
            let (at, Frame::Stream(frame)) = item.expect("frames") else { panic!("a frame") };
            match seam.take(&frame) {
                TakenPart::All => {}
                TakenPart::Part(part) => repeats.push(RepeatedFrame::new(at, &frame, part)),
                TakenPart::TooMuch => panic!("one stream"),
            }
        }
        let is_open = userspace.take(&cut(&payload, &repeats));
        if !malformed {
            let bytes = good.iter().flat_map(|(offset, data)| (*offset..).zip(data.iter()));
            for (offset, byte) in bytes {
                assert_eq!(forwarded.insert(offset, *byte), None, "byte {offset} was forwarded twice");
                assert_eq!(userspace.kept.get(&offset), Some(byte), "byte {offset} is another one");
            }
        }
        if malformed || !is_open {
            let is_unread = frames.iter().any(|piece| piece.unread);
            assert!(
                malformed || is_unread || ingress.state.field == BROKEN,
                "it is forwarded what ends the connection"
            );
            return;
        }
        let judged = userspace.front().get(..ingress.next as usize).map(<[u8]>::to_vec);
        let judged = judged.expect("judged is what userspace has, too");
        if ingress.state.field != BROKEN && ingress.state.field != OVER && judged.len() >= HEADER {
            assert_eq!(Some(ingress.state), position(&judged), "behind {} bytes", ingress.next);
        }
    }
}

struct OverlapPiece<'a> {
    offset: u64,
    data: &'a [u8],
    fin: bool,
    /// More frames are in the packet than the program looks at.
    unread: bool,
}

/// `None`: userspace reads.
fn packets<'a>(data: &[u8], streams: &'a [Vec<u8>; 3]) -> Vec<Option<Vec<OverlapPiece<'a>>>> {
    let mut packets: Vec<Option<Vec<OverlapPiece<'a>>>> = Vec::new();
    for &[kind, from, len, more] in data.as_chunks().0 {
        if kind >= 0xe0 {
            packets.push(None);
            continue;
        }
        let offset = usize::from(from) + usize::from(more & 1) * 256;
        let to = (offset + usize::from(len)).min(STREAM);
        let stream = &streams[usize::from(kind & 3) % 3];
        let piece = OverlapPiece {
            offset: offset as u64,
            data: &stream[offset..to],
            fin: kind & 0x1c == 0x1c,
            unread: more & 0xf0 == 0xf0,
        };
        match packets.last_mut() {
            Some(Some(packet)) if kind & 0x20 != 0 && packet.len() < 4 => packet.push(piece),
            _ => packets.push(Some(vec![piece])),
        }
    }
    packets
}

/// Objects of one track as datagrams, with a group and an ID each: userspace keeps the first of each, and the program forwards
/// none but that.
pub fn kernel_twice(data: &[u8]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: as above.
    unsafe { judge_native_begin() };
    let mut kept = BTreeSet::new();
    let mut last = None;
    for &[group, object] in data.as_chunks().0 {
        let at = (u64::from(group & 3), u64::from(object) << (group >> 2 & 7));
        // SAFETY: it takes numbers.
        let is_good = unsafe { judge_native_datagram(at.0, at.1) } == GOOD;
        let is_first = kept.insert(at);
        assert!(is_first || !is_good, "{at:?} was forwarded twice");
        // In the order of their IDs none is left out.
        assert!(is_good || last.is_some_and(|last| at <= last), "{at:?} behind {last:?}");
        last = last.max(Some(at));
    }
}
