//! The fixed headers of RTP and RTCP (RFC 3550), which SRTP leaves in the clear; `rtp.h` is the same in C.

/// Version of RTP and RTCP.
pub const VERSION: u8 = 2;
/// Length of RTP's fixed header, in bytes.
pub const HEADER_BYTES: usize = 12;
/// Length of RTCP's header with the SSRC of its author, in bytes.
pub const RTCP_HEADER_BYTES: usize = 8;
const REPORT_BYTES: usize = 28;
const SENDER_REPORT: u8 = 200;

/// The kind of one datagram.
///
/// ```
/// use millrace_fanout::rtp::DatagramKind;
///
/// let header = [0x80, 96, 0, 7, 0, 0, 0, 90, 0, 0, 0, 1];
/// assert_eq!(DatagramKind::read(&header), Some(DatagramKind::Media { ssrc: 1, sequence: 7, timestamp: 90 }));
/// // A STUN request has other bits in front.
/// assert_eq!(DatagramKind::read(&[0; 20]), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramKind {
    /// An RTP packet.
    Media {
        /// Synchronisation source (SSRC) of the packet.
        ssrc: u32,
        /// Sequence number of the packet.
        sequence: u16,
        /// Timestamp of the packet, in units of the payload's clock.
        timestamp: u32,
    },
    /// An RTCP packet.
    Control {
        /// Synchronisation source of the sender of the report.
        ssrc: u32,
        /// Middle 32 bits of a sender report's NTP time.
        ntp_middle: Option<u32>,
    },
}

impl DatagramKind {
    /// Classifies a datagram. Returns `None` if it is neither RTP nor RTCP. RTCP packet types on a port shared with RTP
    /// are those of RFC 5761, section 4.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; RTCP_HEADER_BYTES] = bytes.first_chunk()?;
        if header[0] >> 6 != VERSION {
            return None;
        }
        if matches!(header[1], 192..=223) {
            let report: Option<&[u8; REPORT_BYTES]> =
                bytes.first_chunk().filter(|_| header[1] == SENDER_REPORT);
            let ntp_middle = report.map(|report| word(report, 10)).filter(|middle| *middle != 0);
            return Some(Self::Control { ssrc: word(header, 4), ntp_middle });
        }
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        let sequence = u16::from_be_bytes([header[2], header[3]]);
        Some(Self::Media { ssrc: word(header, 8), sequence, timestamp: word(header, 4) })
    }

    /// Returns the SSRC of the packet's author.
    pub fn ssrc(self) -> u32 {
        let (Self::Media { ssrc, .. } | Self::Control { ssrc, .. }) = self;
        ssrc
    }
}

/// Returns the big-endian word at an offset, or 0 past the end.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |word| u32::from_be_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rtp_and_rtcp_packets_are_distinguished() {
        let media = [0x80, 0xe0, 0, 7, 0, 0, 0, 9, 1, 2, 3, 4, 0xff];
        assert_eq!(
            DatagramKind::read(&media),
            Some(DatagramKind::Media { ssrc: 0x0102_0304, sequence: 7, timestamp: 9 }),
            "payload type 96 with the marker"
        );
        let mut report = [0; 28];
        report[..12].copy_from_slice(&[0x80, 200, 0, 6, 1, 2, 3, 4, 0, 0, 0xab, 0xcd]);
        report[12..14].copy_from_slice(&[0xef, 1]);
        let sent = DatagramKind::Control { ssrc: 0x0102_0304, ntp_middle: Some(0xabcd_ef01) };
        assert_eq!(DatagramKind::read(&report), Some(sent));
        assert_eq!(
            DatagramKind::read(&report[..8]),
            Some(DatagramKind::Control { ssrc: 0x0102_0304, ntp_middle: None }),
            "cut"
        );
        for (what, bytes) in [
            ("short", &media[..11]),
            ("RTCP cut", &report[..7]),
            ("version 1", &[0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("STUN", &[0; 20]),
        ] {
            assert_eq!(DatagramKind::read(bytes), None, "{what}");
        }
    }
}
