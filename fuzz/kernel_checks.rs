//! Compares the kernel programs' parsers with Rust parsers on arbitrary bytes. The C source, compiled natively
//! (`testkit/parsers/src/bpf/parsers.native.c`), must accept the same input and extract the same values.
#![allow(dead_code, unused_imports, reason = "each target uses one of these")]

use millrace_quic::{
    frame::{Frame, Walker},
    keys::{KeySuite, TrafficSecret},
    packet,
};

#[path = "kernel_ack.rs"]
mod ack;
pub use ack::{Controlled, kernel_ack};
#[path = "kernel_gate.rs"]
mod gate;
pub use gate::{gate_verdict, kernel_gate};
#[path = "kernel_graft.rs"]
mod graft;
pub use graft::kernel_graft;
#[path = "kernel_overlap.rs"]
mod overlap;
pub use overlap::{kernel_overlap, kernel_twice};
#[path = "kernel_rtp.rs"]
mod rtp;
pub use rtp::kernel_rtp;
#[path = "kernel_subgroup.rs"]
mod subgroup;
pub use subgroup::kernel_subgroup;
#[path = "kernel_web.rs"]
mod web;
pub use web::kernel_web;

type Check = fn(&[u8]);

/// The checks by name. A check, its fuzz target and its directory of fixtures have the same name.
pub const ALL: [(&str, Check); 11] = [
    ("kernel_ack", kernel_ack),
    ("kernel_frames", kernel_frames),
    ("kernel_gate", kernel_gate),
    ("kernel_graft", kernel_graft),
    ("kernel_udp", kernel_udp),
    ("kernel_overlap", kernel_overlap),
    ("kernel_quic", kernel_quic),
    ("kernel_rtp", kernel_rtp),
    ("kernel_subgroup", kernel_subgroup),
    ("kernel_twice", kernel_twice),
    ("kernel_web", kernel_web),
];

/// Value of `FRAMES_MAX` in frames.h.
const FRAMES_MAX: usize = 2048;
/// Value of `QUIC_AT_MAX` in aead.h.
const AT_MAX: usize = 2047;

/// Copy of C's `struct frame_stream`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FrameStream {
    id: u64,
    offset: u64,
    at: u32,
    len: u32,
    fin: u32,
    pad: u32,
}

/// Copy of C's `struct native_walk`.
#[repr(C)]
struct NativeWalkCopy {
    steps: u32,
    count: u32,
    streams: *mut FrameStream,
}

/// Copy of C's `struct udp_packet`. Ports are in network byte order.
#[repr(C)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UdpPacket {
    source: [u8; 16],
    destination: [u8; 16],
    source_port: [u8; 2],
    destination_port: [u8; 2],
    payload_offset: u32,
    payload_bytes: u32,
    udp_bytes: u16,
    vlan: u16,
    family: u8,
}

/// Copy of C's `struct ip_carried`.
/// Copy of C's `struct quic_short`.
#[repr(C)]
#[derive(Default)]
struct QuicShortCopy {
    first: u8,
    number_bytes: u8,
    pad: u16,
    number: u32,
}

unsafe extern "C" {
    fn frames_native_walk(text: *const u8, at: u32, end: u32, out: *mut NativeWalkCopy) -> i32;
    fn udp_native_parse(frame: *const u8, bytes: u32, vlan_tci: *const u16, out: *mut UdpPacket) -> i32;
    fn quic_native_unprotect(
        key: *const u8,
        packet: *mut u8,
        bytes: u32,
        at: u32,
        id_bytes: u32,
        expected: u64,
        header: *mut QuicShortCopy,
        number: *mut u64,
    ) -> i32;
    fn quic_native_protect(key: *const u8, packet: *mut u8, bytes: u32, at: u32, id_bytes: u32) -> i32;
}

/// Compares the parsers of a decrypted packet's frames. The first byte is the offset of the frames in their buffer. The
/// second byte fills the rest of the buffer, which must not affect the result.
pub fn kernel_frames(data: &[u8]) {
    let Some((&[at, fill], payload)) = data.split_first_chunk() else { return };
    let at = usize::from(at);
    let payload = &payload[..payload.len().min(FRAMES_MAX - at)];
    let end = at + payload.len();
    let mut text = vec![fill; FRAMES_MAX + 8];
    text[at..end].copy_from_slice(payload);

    let mut want = Vec::new();
    let mut good = true;
    for item in Walker::new(payload) {
        match item {
            Ok((_, Frame::Stream(stream))) => want.push(FrameStream {
                id: stream.id,
                offset: stream.offset,
                at: (stream.data.as_ptr().addr() - payload.as_ptr().addr() + at) as u32,
                len: stream.data.len() as u32,
                fin: u32::from(stream.fin),
                pad: 0,
            }),
            Ok(_) => {}
            Err(_) => good = false,
        }
    }

    let mut streams = vec![FrameStream::default(); payload.len()];
    let mut walk = NativeWalkCopy { steps: 0, count: 0, streams: streams.as_mut_ptr() };
    // SAFETY: `text` has the size that frames.h requires. A STREAM frame takes at least one byte, so `streams` has room
    // for all frames.
    let accepted = unsafe { frames_native_walk(text.as_ptr(), at as u32, end as u32, &raw mut walk) };
    assert_eq!(&streams[..walk.count as usize], want, "STREAM frames");
    assert_eq!(accepted == 1, good, "whether all are frames");
    assert!(walk.steps as usize <= payload.len() + 1, "a step took nothing");
}

/// Compares the UDP parsers on an Ethernet frame. If the lowest bit of the first byte is set, the next two bytes are a
/// VLAN tag that the kernel keeps outside of the frame.
pub fn kernel_udp(data: &[u8]) {
    let Some((&[beside, tci0, tci1], frame)) = data.split_first_chunk() else { return };
    let tci = (beside & 1 == 1).then(|| u16::from_be_bytes([tci0, tci1]));
    // The buffer has the exact size of the frame and is on the heap, so that a read past its end is found.
    let frame: Box<[u8]> = frame.into();
    let mut found = UdpPacket::default();
    let tci_pointer = tci.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the pointers refer to values of the declared types, and only the pointer to the VLAN tag may be null.
    // `frame` has the given length.
    let verdict =
        unsafe { udp_native_parse(frame.as_ptr(), frame.len() as u32, tci_pointer, &raw mut found) };
    match udp(&frame, tci) {
        Ok(want) => assert_eq!((verdict, found), (OK, want)),
        Err(refusal) => assert_eq!(verdict, refusal),
    }
}

/// Returns the verdict of the TC programs' parser on a frame for which the kernel keeps no VLAN tag outside of the
/// frame.
pub fn skb_verdict(frame: &[u8]) -> &'static str {
    let mut found = UdpPacket::default();
    // SAFETY: the pointers refer to values of the declared types, and only the pointer to the VLAN tag may be null.
    // `frame` has the given length.
    let verdict =
        unsafe { udp_native_parse(frame.as_ptr(), frame.len() as u32, std::ptr::null(), &raw mut found) };
    match verdict {
        OK => "UDP",
        NOT_UDP => "not UDP",
        FRAGMENT => "fragment",
        _ => "malformed",
    }
}

/// Values of `enum parse` in skb_udp.h.
const OK: i32 = 0;
const NOT_UDP: i32 = 1;
const FRAGMENT: i32 = 2;
const MALFORMED: i32 = 3;

/// Returns the values that the parser in skb_udp.h must find, or the verdict with which it must refuse the frame.
fn udp(frame: &[u8], beside: Option<u16>) -> Result<UdpPacket, i32> {
    let word = |at: usize| frame.get(at..at + 2).map(|two| u16::from_be_bytes([two[0], two[1]]));
    let mut packet = UdpPacket { vlan: beside.map_or(0, |tci| tci & 0xfff), ..UdpPacket::default() };

    let mut kind = word(12).ok_or(MALFORMED)?;
    let mut at = 14;
    for _ in 0..2 {
        if matches!(kind, 0x8100 | 0x88a8) {
            let tci = word(at).ok_or(MALFORMED)?;
            kind = word(at + 2).ok_or(MALFORMED)?;
            at += 4;
            packet.vlan = if packet.vlan == 0 { tci & 0xfff } else { packet.vlan };
        }
    }
    match kind {
        0x0800 => {
            let ip: &[u8; 20] = frame.get(at..).and_then(|rest| rest.first_chunk()).ok_or(MALFORMED)?;
            if ip[0] >> 4 != 4 || ip[0] & 15 < 5 {
                return Err(MALFORMED);
            } else if ip[9] != 17 {
                return Err(NOT_UDP);
            } else if u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0 {
                return Err(FRAGMENT);
            }
            packet.family = 4;
            packet.source[..4].copy_from_slice(&ip[12..16]);
            packet.destination[..4].copy_from_slice(&ip[16..]);
            at += usize::from(ip[0] & 15) * 4;
        }
        0x86dd => {
            let ip: &[u8; 40] = frame.get(at..).and_then(|rest| rest.first_chunk()).ok_or(MALFORMED)?;
            if ip[0] >> 4 != 6 {
                return Err(MALFORMED);
            }
            packet.family = 6;
            packet.source.copy_from_slice(&ip[8..24]);
            packet.destination.copy_from_slice(&ip[24..]);
            at = skip_extensions(frame, ip[6], at + 40)?;
        }
        _ => return Err(NOT_UDP),
    }
    let header: &[u8; 8] = frame.get(at..).and_then(|rest| rest.first_chunk()).ok_or(MALFORMED)?;
    packet.source_port = [header[0], header[1]];
    packet.destination_port = [header[2], header[3]];
    packet.udp_bytes = u16::from_be_bytes([header[4], header[5]]);
    packet.payload_offset = at as u32 + 8;
    packet.payload_bytes = (frame.len() - at - 8) as u32;
    Ok(packet)
}

/// Skips at most four IPv6 extension headers (hop-by-hop options, destination options, routing). Returns the offset of
/// the UDP header.
fn skip_extensions(frame: &[u8], mut next: u8, mut at: usize) -> Result<usize, i32> {
    for _ in 0..4 {
        match next {
            17 => return Ok(at),
            44 => return Err(FRAGMENT),
            0 | 43 | 60 => {
                let extension = frame.get(at..at + 2).ok_or(MALFORMED)?;
                next = extension[0];
                at += 8 + usize::from(extension[1]) * 8;
            }
            _ => return Err(NOT_UDP),
        }
    }
    if next == 17 { Ok(at) } else { Err(MALFORMED) }
}

/// Compares header protection of 1-RTT packets: removing it, decoding the packet number, and applying it again. Before
/// the packet, `data` has the expected packet number, the packet's offset in its buffer, and the length of its
/// connection ID.
pub fn kernel_quic(data: &[u8]) {
    let Some((expected, data)) = data.split_first_chunk() else { return };
    let Some((&[at0, at1, id_len], packet)) = data.split_first_chunk() else { return };
    if packet.is_empty() {
        return;
    }
    let expected = u64::from_be_bytes(*expected) & ((1 << 62) - 1);
    let at = usize::from(u16::from_be_bytes([at0, at1])) % (AT_MAX + 1);
    let id_len = usize::from(id_len % 21);
    let mut packet = packet[..packet.len().min(1500)].to_vec();
    packet[0] &= 0x7f;
    let original = packet.clone();

    let secret =
        TrafficSecret::new(KeySuite::ChaCha20Poly1305, &[7; 32]).expect("a secret of the suite's length");
    let key = secret.key_material().header;
    let mut header = QuicShortCopy::default();
    let mut number = 0;
    // SAFETY: all pointers refer to values of the declared types, and `packet` has the given length. The C function's
    // buffer has room for the packet at offset `at`.
    let result = unsafe {
        quic_native_unprotect(
            key.as_ptr(),
            packet.as_mut_ptr(),
            packet.len() as u32,
            at as u32,
            id_len as u32,
            expected,
            &raw mut header,
            &raw mut number,
        )
    };
    let number_at = 1 + id_len;
    let mut opened = original.clone();
    let unprotected = packet::unprotect(&mut opened, number_at, &secret.header_key());
    let (Ok(number_len), true) = (unprotected, at + number_at <= AT_MAX) else {
        assert_eq!((result, &packet), (-1, &original), "refused and untouched");
        return;
    };
    assert_eq!((result, &packet), (0, &opened));
    let truncated = opened[number_at..][..number_len].iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
    assert_eq!((header.first, usize::from(header.number_bytes)), (opened[0], number_len));
    assert_eq!(u64::from(header.number), truncated);
    assert_eq!(number, packet::decode_number(expected, truncated, number_len));

    // SAFETY: `key` and `packet` are valid for the given lengths, and the C function's buffer has room for the packet
    // at offset `at`.
    let result = unsafe {
        quic_native_protect(key.as_ptr(), packet.as_mut_ptr(), packet.len() as u32, at as u32, id_len as u32)
    };
    assert_eq!((result, packet), (0, original));
}
