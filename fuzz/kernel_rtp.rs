//! Compares the parsers of RTP and RTCP headers: `rtp.h` and `millrace_fanout::rtp`.

use millrace_fanout::rtp::DatagramKind;

/// Copy of C's `struct rtp_packet`.
#[repr(C)]
#[derive(Debug, Default, PartialEq, Eq)]
struct RtpPacketCopy {
    ssrc: u32,
    timestamp: u32,
    ntp_middle: u32,
    sequence: u16,
    kind: u8,
    second: u8,
}

unsafe extern "C" {
    fn rtp_native_read(payload: *const u8, bytes: u32, out: *mut RtpPacketCopy) -> i32;
}

const NOT: i32 = 0;
const MEDIA: i32 = 1;
const CONTROL: i32 = 2;

pub fn kernel_rtp(data: &[u8]) {
    let mut parsed = RtpPacketCopy::default();
    // SAFETY: the length is that of `data`, and `parsed` has the type that the C function writes.
    let kind = unsafe { rtp_native_read(data.as_ptr(), data.len() as u32, &raw mut parsed) };
    match DatagramKind::read(data) {
        None => assert_eq!(kind, NOT, "{data:?}"),
        Some(DatagramKind::Media { ssrc, sequence, timestamp }) => {
            assert_eq!(kind, MEDIA, "{data:?}");
            assert_eq!((parsed.ssrc, parsed.sequence, parsed.timestamp), (ssrc, sequence, timestamp));
        }
        Some(DatagramKind::Control { ssrc, ntp_middle }) => {
            assert_eq!(kind, CONTROL, "{data:?}");
            assert_eq!((parsed.ssrc, parsed.ntp_middle), (ssrc, ntp_middle.unwrap_or(0)));
        }
    }
}
