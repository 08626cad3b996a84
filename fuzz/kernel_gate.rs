//! Compares the gate's parser (`gate_packet.h`) with an independent parser in Rust.

/// Copy of C's `struct gate_packet`.
#[repr(C)]
#[derive(Clone, Debug, Default)]
struct GatePacketCopy {
    source: [u8; 16],
    destination: [u8; 16],
    source_port: [u8; 2],
    destination_port: [u8; 2],
    family: u8,
    fragment: u8,
    options: u8,
    bad_lengths: u8,
    end: u32,
    ip_at: u16,
    udp_at: u16,
    quic_at: u16,
    kind: u8,
    first: u8,
    id_len: u8,
    source_id_len: u8,
    long_ids: u8,
    goes_on: u8,
    version: [u8; 4],
    id_at: u16,
    source_id_at: u16,
    token_at: u16,
    token_len: u16,
}

unsafe extern "C" {
    fn gate_native_read(frame: *const u8, bytes: u32, fill: u8, bare: u32, out: *mut GatePacketCopy) -> i32;
}

/// Number of bytes at the start of a frame that the gate reads. `UDP_AT_MAX` is the largest offset of a UDP header in
/// these bytes.
const HEAD: usize = 256;
const UDP_AT_MAX: usize = 160;
/// Values of C's `enum gate_find`.
const OK: i32 = 0;
const OTHER: i32 = 1;
const NO_PORT: i32 = 2;
const TOO_MANY: i32 = 3;

/// Copy of C's `enum quic_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuicKindCopy {
    Nothing,
    Short,
    Initial,
    ZeroRtt,
    Handshake,
    OtherVersion,
    Impossible,
}

/// Compares both parsers on an Ethernet frame, and on the same frame without its Ethernet header. The first byte fills
/// the buffer after the frame, which must not affect the result.
pub fn kernel_gate(data: &[u8]) {
    let Some((fill, frame)) = data.split_first() else { return };
    let Some(bare) = frame.get(14..) else { return };
    compare(frame, *fill, false);
    compare(bare, *fill, true);
}

fn compare(frame: &[u8], fill: u8, bare: bool) {
    let mut found = GatePacketCopy::default();
    // SAFETY: all pointers refer to values of the declared types, and `frame` has the given length.
    let verdict =
        unsafe { gate_native_read(frame.as_ptr(), frame.len() as u32, fill, bare.into(), &raw mut found) };
    let mut want = GateDatagram::default();
    let refusal = want.find(frame, bare).err().unwrap_or(OK);
    assert_eq!(verdict, refusal);
    if verdict == OTHER {
        return;
    }
    assert_eq!((found.source, found.destination), (want.source, want.destination));
    assert_eq!(found.fragment != 0, want.fragment, "fragment");
    if verdict != OK {
        return;
    }
    assert_eq!((found.options != 0, found.bad_lengths != 0), (want.options, want.bad_lengths));
    assert_eq!((found.source_port, found.destination_port), want.ports);
    if want.fragment || want.bad_lengths {
        return;
    }
    assert_eq!((found.quic_at as usize, found.end as usize), (want.at, want.end));
    quic(frame, &want, &found);
}

/// Returns the verdict of the gate's parser on a frame of at least 14 bytes, and the properties that rules can match:
/// fragment, IP options, wrong lengths.
pub fn gate_verdict(frame: &[u8]) -> (&'static str, Vec<&'static str>) {
    let mut found = GatePacketCopy::default();
    // SAFETY: all pointers refer to values of the declared types, and `frame` has the given length.
    let verdict = unsafe { gate_native_read(frame.as_ptr(), frame.len() as u32, 0, 0, &raw mut found) };
    let verdict = match verdict {
        OK => "UDP",
        OTHER => return ("other", Vec::new()),
        NO_PORT => "no port",
        _ => "too many",
    };
    let noted = [("fragment", found.fragment), ("options", found.options), ("lengths", found.bad_lengths)];
    (verdict, noted.into_iter().filter(|(_, is)| *is != 0).map(|(what, _)| what).collect())
}

#[derive(Default)]
struct GateDatagram {
    source: [u8; 16],
    destination: [u8; 16],
    ports: ([u8; 2], [u8; 2]),
    fragment: bool,
    options: bool,
    bad_lengths: bool,
    /// Offset of the UDP payload.
    at: usize,
    end: usize,
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let two = bytes.get(at..at + 2)?;
    Some(usize::from(u16::from_be_bytes([two[0], two[1]])))
}

fn mapped(address: &[u8]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[10..12].fill(0xff);
    bytes[16 - address.len()..].copy_from_slice(address);
    bytes
}

/// Returns the EtherType after at most two VLAN tags, and the offset of the header that follows.
fn ethernet(head: &[u8]) -> (Option<usize>, usize) {
    let mut at = 12;
    for _ in 0..2 {
        if matches!(word(head, at), Some(0x8100 | 0x88a8)) {
            at += 4;
        }
    }
    (word(head, at), at + 2)
}

/// Returns the EtherType of a frame that begins with its IP header, and that header's offset, which is 0.
fn version(head: &[u8]) -> (Option<usize>, usize) {
    let protocol = match head.first().map(|first| first >> 4) {
        Some(4) => Some(0x0800),
        Some(6) => Some(0x86dd),
        _ => None,
    };
    (protocol, 0)
}

impl GateDatagram {
    /// Finds the UDP payload.
    ///
    /// # Errors
    /// Fails if the packet has no UDP payload that the gate can read. The error is the gate's verdict.
    fn find(&mut self, frame: &[u8], bare: bool) -> Result<(), i32> {
        let head = &frame[..frame.len().min(HEAD)];
        let (protocol, at) = if bare { version(head) } else { ethernet(head) };
        let rest = &head[head.len().min(at)..];
        let (udp, end) = match protocol {
            Some(0x0800) => self.ipv4(rest)?,
            Some(0x86dd) => self.ipv6(rest)?,
            _ => return Err(OTHER),
        };
        let udp = at + udp;
        let end = at + end;
        if udp > UDP_AT_MAX {
            return Err(TOO_MANY);
        }
        let header: &[u8; 8] = head.get(udp..).and_then(|rest| rest.first_chunk()).ok_or(TOO_MANY)?;
        self.ports = ([header[0], header[1]], [header[2], header[3]]);
        let len = usize::from(u16::from_be_bytes([header[4], header[5]]));
        self.bad_lengths |= end > frame.len() || len < 8 || (udp + len > end && !self.fragment);
        (self.at, self.end) = (udp + 8, udp + len);
        Ok(())
    }

    /// Returns the offsets of the UDP header and of the packet's end, relative to the start of the IP header.
    fn ipv4(&mut self, bytes: &[u8]) -> Result<(usize, usize), i32> {
        let ip: &[u8; 20] = bytes.first_chunk().ok_or(OTHER)?;
        if ip[0] >> 4 != 4 || ip[0] & 15 < 5 || ip[9] != 17 {
            return Err(OTHER);
        }
        let header = usize::from(ip[0] & 15) * 4;
        let fragment = u16::from_be_bytes([ip[6], ip[7]]);
        (self.source, self.destination) = (mapped(&ip[12..16]), mapped(&ip[16..]));
        (self.options, self.fragment) = (header > 20, fragment & 0x3fff != 0);
        if fragment & 0x1fff != 0 {
            return Err(NO_PORT);
        }
        let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        self.bad_lengths = total < header + 8;
        Ok((header, total))
    }

    fn ipv6(&mut self, bytes: &[u8]) -> Result<(usize, usize), i32> {
        let ip: &[u8; 40] = bytes.first_chunk().ok_or(OTHER)?;
        if ip[0] >> 4 != 6 {
            return Err(OTHER);
        }
        self.source.copy_from_slice(&ip[8..24]);
        self.destination.copy_from_slice(&ip[24..]);
        let end = 40 + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
        let mut next = ip[6];
        let mut at = 40;
        for _ in 0..8 {
            match next {
                17 => return Ok((at, end)),
                0 | 43 | 44 | 60 => {}
                _ => return Err(OTHER),
            }
            let extension: &[u8; 8] = bytes.get(at..).and_then(|rest| rest.first_chunk()).ok_or(TOO_MANY)?;
            self.options = true;
            let is_fragment = next == 44;
            next = extension[0];
            at += 8;
            if is_fragment {
                self.fragment = true;
                if u16::from_be_bytes([extension[2], extension[3]]) >> 3 != 0 {
                    return Err(if next == 17 { NO_PORT } else { OTHER });
                }
            } else {
                at += usize::from(extension[1]) * 8;
            }
        }
        if next == 17 { Ok((at, end)) } else { Err(TOO_MANY) }
    }
}

fn quic(frame: &[u8], datagram: &GateDatagram, found: &GatePacketCopy) {
    let payload = &frame[datagram.at..datagram.end];
    let kind = match payload.first() {
        None => QuicKindCopy::Nothing,
        Some(first) if first & 0x80 == 0 => QuicKindCopy::Short,
        Some(_) if payload.len() < 7 => QuicKindCopy::Nothing,
        Some(first) => {
            let mut long = GateLongHeader { at: datagram.at, payload, offset: 5, frame, found };
            long.kind(*first)
        }
    };
    assert_eq!(found.kind, kind as u8, "{kind:?}");
    if let Some(first) = payload.first() {
        assert_eq!(found.first, *first);
    }
}

/// A QUIC long header that is being read. `offset` is the position of the next field in the payload.
struct GateLongHeader<'a> {
    at: usize,
    payload: &'a [u8],
    offset: usize,
    frame: &'a [u8],
    found: &'a GatePacketCopy,
}

impl<'a> GateLongHeader<'a> {
    fn kind(&mut self, first: u8) -> QuicKindCopy {
        let version: [u8; 4] = self.payload[1..5].try_into().expect("four bytes");
        assert_eq!(self.found.version, version);
        let kind = match (u32::from_be_bytes(version), first >> 4 & 3) {
            (0, _) => QuicKindCopy::Impossible,
            (1, 0) | (0x6b33_43cf, 1) => QuicKindCopy::Initial,
            (1, 1) | (0x6b33_43cf, 2) => QuicKindCopy::ZeroRtt,
            (1, 2) | (0x6b33_43cf, 3) => QuicKindCopy::Handshake,
            (1 | 0x6b33_43cf, _) => QuicKindCopy::Impossible,
            _ => QuicKindCopy::OtherVersion,
        };
        let Some((id, from)) = self.ids() else {
            let too_long = self.payload.get(self.offset).is_some_and(|len| *len > 20);
            return if too_long && kind == QuicKindCopy::OtherVersion {
                kind
            } else {
                QuicKindCopy::Impossible
            };
        };
        let range = |at: u16, len: u8| &self.frame[usize::from(at)..][..usize::from(len)];
        assert_eq!(range(self.found.id_at, self.found.id_len), id, "destination ID");
        assert_eq!(range(self.found.source_id_at, self.found.source_id_len), from, "source ID");
        if matches!(kind, QuicKindCopy::OtherVersion | QuicKindCopy::Impossible) || self.rest(kind).is_some()
        {
            return kind;
        }
        QuicKindCopy::Impossible
    }

    fn ids(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let mut places = [(0, 0); 2];
        for place in &mut places {
            let len = usize::from(*self.payload.get(self.offset)?);
            if len > 20 {
                return None;
            }
            *place = (self.offset + 1, len);
            self.payload.get(self.offset + 1..)?.get(..len)?;
            self.offset += 1 + len;
        }
        let payload = self.payload;
        let [id, from] = places.map(|(at, len)| &payload[at..at + len]);
        Some((id, from))
    }

    /// Checks the token and the length field, as far as they are in the bytes that the gate reads. Returns `None` if
    /// the header is malformed.
    fn rest(&mut self, kind: QuicKindCopy) -> Option<()> {
        if kind == QuicKindCopy::Initial {
            let len = self.varint()?;
            let token = self.payload.get(self.offset..)?.get(..usize::try_from(len).ok()?)?;
            let at = usize::from(self.found.token_at);
            assert_eq!(&self.frame[at..][..usize::from(self.found.token_len)], token, "token");
            self.offset += token.len();
        }
        self.payload.get(self.offset..)?.get(..21)?;
        if self.at + self.offset + 8 > HEAD {
            return Some(());
        }
        let len = usize::try_from(self.varint()?).ok()?;
        (len >= 20 && len <= self.payload.len() - self.offset).then_some(())
    }

    fn varint(&mut self) -> Option<u64> {
        let bytes = self.payload.get(self.offset..)?;
        let len = 1 << (bytes.first()? >> 6);
        let value = bytes.get(..len)?.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        self.offset += len;
        Some(value & ((1 << (8 * len - 2)) - 1))
    }
}
