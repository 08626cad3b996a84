//! The fixed headers of RTP and RTCP (RFC 3550), which SRTP leaves in the clear; `rtp.h` is the same in C.

pub const VERSION: u8 = 2;
pub const HEADER_BYTES: usize = 12;
pub const RTCP_HEADER_BYTES: usize = 8;
const REPORT_BYTES: usize = 28;
const SENDER_REPORT: u8 = 200;

/// What one datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    Media {
        ssrc: u32,
        sequence: u16,
        timestamp: u32,
    },
    Control {
        ssrc: u32,
        /// Of a sender report, the middle 32 bits of its NTP time.
        ntp_middle: Option<u32>,
    },
}

impl Packet {
    /// `None`: neither. Types with the marker bit that are RTCP's on one port with RTP are told by RFC 5761, section 4.
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

    pub fn ssrc(self) -> u32 {
        let (Self::Media { ssrc, .. } | Self::Control { ssrc, .. }) = self;
        ssrc
    }
}

/// 0 where there is none.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |word| u32::from_be_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_and_control_are_told_apart() {
        let media = [0x80, 0xe0, 0, 7, 0, 0, 0, 9, 1, 2, 3, 4, 0xff];
        assert_eq!(
            Packet::read(&media),
            Some(Packet::Media { ssrc: 0x0102_0304, sequence: 7, timestamp: 9 }),
            "payload type 96 with the marker"
        );
        let mut report = [0; 28];
        report[..12].copy_from_slice(&[0x80, 200, 0, 6, 1, 2, 3, 4, 0, 0, 0xab, 0xcd]);
        report[12..14].copy_from_slice(&[0xef, 1]);
        let sent = Packet::Control { ssrc: 0x0102_0304, ntp_middle: Some(0xabcd_ef01) };
        assert_eq!(Packet::read(&report), Some(sent));
        assert_eq!(
            Packet::read(&report[..8]),
            Some(Packet::Control { ssrc: 0x0102_0304, ntp_middle: None }),
            "cut"
        );
        for (what, bytes) in [
            ("short", &media[..11]),
            ("RTCP cut", &report[..7]),
            ("version 1", &[0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("STUN", &[0; 20]),
        ] {
            assert_eq!(Packet::read(bytes), None, "{what}");
        }
    }
}
