//! Compares how the two readers of a stream resolve overlapping STREAM frames. `relay_judge.h` forwards data in the
//! kernel. Userspace, which reads through `quic::received`, sends the data that the kernel did not forward.

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

/// Values of C's `enum relay_frame_outcome`.
const GOOD: u32 = 0;
const MALFORMED: u32 = 5;
/// Values of C's `enum subgroup_field`.
const OVER: u8 = 12;
const BROKEN: u8 = 13;

/// ID of the tested stream. `STREAM` is the stream's length in bytes.
const ID: u64 = 6;
const STREAM: usize = 600;
/// Length of the stream's SUBGROUP_HEADER, bytes.
const HEADER: usize = 3;

/// Copy of C's `struct relay_ingress`.
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

/// Versions of the stream's content. The hostile publisher sends a piece of one version in each frame. All versions are
/// well-formed, and they differ from the first object on.
static STREAMS: LazyLock<[Vec<u8>; 3]> =
    LazyLock::new(|| [&[53usize, 1, 200, 0][..], &[51, 3], &[0, 7, 0, 190, 2]].map(subgroup));
/// Lock for the C code's only `struct relay_ingress`, which all tests of this process share.
static TURN: Mutex<()> = Mutex::new(());

/// Returns a subgroup stream of [`STREAM`] bytes. The payload lengths of its objects, in bytes, cycle through
/// `lengths`.
fn subgroup(lengths: &[usize]) -> Vec<u8> {
    let mut bytes = vec![0x30, 2, 0];
    for (id, len) in (0..).zip(lengths.iter().cycle()).take_while(|(id, _)| *id < 300) {
        encode_object_header(u64::checked_sub(id, 1), id, None, *len as u64, Status::Normal, &mut bytes);
        bytes.extend(vec![id as u8; *len]);
    }
    bytes.truncate(STREAM);
    bytes
}

/// Stream data that quinn has received after `ReceivedStreams` has removed repeated bytes.
#[derive(Default)]
struct UserspaceReceiver {
    kept: BTreeMap<u64, u8>,
    size: Option<u64>,
    largest: u64,
}

impl UserspaceReceiver {
    /// Receives the STREAM frames that `ReceivedStreams` has left in a packet. Returns `false` if quinn closes the
    /// connection.
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
                // No byte may arrive twice, so quinn's rule for repeated bytes does not matter.
                assert_eq!(self.kept.insert(offset, *byte), None, "byte {offset} came twice");
            }
        }
        true
    }

    /// Returns the bytes from the start of the stream up to the first gap.
    fn front(&self) -> Vec<u8> {
        (0..).map_while(|offset| self.kept.get(&offset).copied()).collect()
    }
}

/// Returns the state of userspace's parser after it has parsed `bytes`; `None` if the bytes are malformed.
fn position(bytes: &[u8]) -> Option<SubgroupStateCopy> {
    match RustSubgroupParser::Header(Vec::new()).take(bytes)? {
        RustSubgroupParser::Header(_) => None,
        RustSubgroupParser::Objects(parser) => Some(SubgroupStateCopy::from(parser.position())),
    }
}

/// Checks a sequence of operations, each encoded in four bytes. In an operation either userspace reads its packets, or
/// the publisher sends a STREAM frame from one of the three versions of the stream. That frame is in the previous
/// packet or a new one, and the BPF program may leave the frame unread.
pub fn kernel_overlap(data: &[u8]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the lock is held, so there is no other reference to the C code's `struct relay_ingress`.
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
                // SAFETY: the C function takes no pointers.
                assert_eq!(unsafe { judge_native_leave(*offset, len, fin) }, 0, "nobody has the lock");
                continue;
            }
            // SAFETY: `data` has `len` bytes.
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
    /// Whether the BPF program leaves the frame unread, as it does with frames beyond its limit for a packet.
    unread: bool,
}

/// Decodes the input's operations into packets. `None` stands for an operation in which userspace reads its packets.
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

/// Checks repeated object datagrams of one track. Userspace accepts only the first datagram with a group and object ID,
/// and the BPF program must forward no other.
pub fn kernel_twice(data: &[u8]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the lock is held, so no other thread uses the C code's `struct relay_ingress`.
    unsafe { judge_native_begin() };
    let mut kept = BTreeSet::new();
    let mut last = None;
    for &[group, object] in data.as_chunks().0 {
        let at = (u64::from(group & 3), u64::from(object) << (group >> 2 & 7));
        // SAFETY: the C function takes no pointers.
        let is_good = unsafe { judge_native_datagram(at.0, at.1) } == GOOD;
        let is_first = kept.insert(at);
        assert!(is_first || !is_good, "{at:?} was forwarded twice");
        // Objects that arrive in ascending order of their IDs must all be forwarded.
        assert!(is_good || last.is_some_and(|last| at <= last), "{at:?} behind {last:?}");
        last = last.max(Some(at));
    }
}
