//! RTCP (RFC 3550, section 6) as far as a relay reads it: the report blocks. All packets of a compound packet are
//! walked, and those that are no reports are skipped.

use super::rtp::{VERSION, word};

const SENDER_REPORT: u8 = 200;
const RECEIVER_REPORT: u8 = 201;
const BLOCK_BYTES: usize = 24;

/// A report block: a receiver's reception of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// SSRC of the source.
    pub ssrc: u32,
    /// Loss among the packets since the last report, in 256ths.
    pub fraction_lost: u8,
    /// Extended highest sequence number: cycles are in the high half.
    pub highest: u32,
    /// Interarrival jitter, in units of the RTP timestamp.
    pub jitter: u32,
    /// Middle 32 bits of the latest sender report's NTP time; 0 if none has arrived.
    pub last_report: u32,
    /// Delay since the latest sender report arrived, in 65536ths of a second.
    pub delay: u32,
}

/// Calls `each` for every report block of a compound packet, and returns the number of packets in it. Returns `None` if
/// the bytes are no compound packet, are cut off, or continue after the packet's end.
pub fn walk(mut bytes: &[u8], mut each: impl FnMut(Block)) -> Option<usize> {
    let mut packets = 0;
    while !bytes.is_empty() {
        let header: &[u8; 4] = bytes.first_chunk()?;
        let len = 4 * (usize::from(u16::from_be_bytes([header[2], header[3]])) + 1);
        let (packet, rest) = bytes.split_at_checked(len)?;
        if header[0] >> 6 != VERSION || !matches!(header[1], 192..=223) {
            return None;
        }
        blocks(header[1], usize::from(header[0] & 0x1f), packet)?.iter().for_each(|block| each(read(block)));
        bytes = rest;
        packets += 1;
    }
    Some(packets)
}

/// Returns the report blocks of one packet, or none if packets of its type have none. Returns `None` if the packet is
/// too short for the number of report blocks in its header.
fn blocks(kind: u8, count: usize, packet: &[u8]) -> Option<&[[u8; BLOCK_BYTES]]> {
    let first = match kind {
        SENDER_REPORT => 28,
        RECEIVER_REPORT => 8,
        _ => return Some(&[]),
    };
    packet.get(first..)?.as_chunks().0.get(..count)
}

fn read(block: &[u8; BLOCK_BYTES]) -> Block {
    Block {
        ssrc: word(block, 0),
        fraction_lost: block[4],
        highest: word(block, 8),
        jitter: word(block, 12),
        last_report: word(block, 16),
        delay: word(block, 20),
    }
}

/// Writes a receiver report with one block, and the source description that every compound packet has (RFC 3550,
/// section 6.1). `lost` is the number of packets lost since the beginning.
pub fn receiver_report(from: u32, block: &Block, lost: u32) -> Vec<u8> {
    const CNAME: &[u8] = b"millrace";
    let mut bytes = vec![0x81, RECEIVER_REPORT, 0, 7];
    bytes.extend(from.to_be_bytes());
    bytes.extend(block.ssrc.to_be_bytes());
    bytes.extend((u32::from(block.fraction_lost) << 24 | lost & 0xff_ffff).to_be_bytes());
    for word in [block.highest, block.jitter, block.last_report, block.delay] {
        bytes.extend(word.to_be_bytes());
    }
    bytes.extend([0x81, 202, 0, 4]);
    bytes.extend(from.to_be_bytes());
    bytes.extend([1, CNAME.len() as u8]);
    bytes.extend(CNAME);
    // The list of source description (SDES) items ends with a zero, and is padded with zeroes to a multiple of 4 bytes.
    bytes.extend([0; 2]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Block = Block {
        ssrc: 0x0102_0304,
        fraction_lost: 64,
        highest: 0x0001_0007,
        jitter: 90,
        last_report: 0xabcd_ef01,
        delay: 65536,
    };

    fn walked(bytes: &[u8]) -> Option<(usize, Vec<Block>)> {
        let mut blocks = Vec::new();
        walk(bytes, |block| blocks.push(block)).map(|packets| (packets, blocks))
    }

    #[test]
    fn receiver_report_is_read_as_it_was_written() {
        let bytes = receiver_report(7, &BLOCK, 3);
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(walked(&bytes), Some((2, vec![BLOCK])));
        for len in 1..bytes.len() {
            // Only a cut directly after the receiver report (32 bytes) leaves a whole compound packet.
            assert_eq!(walked(&bytes[..len]).is_some(), len == 32, "{len}");
        }
    }

    #[test]
    fn report_blocks_are_read_from_rtcp_compound_packets() {
        let report = receiver_report(7, &BLOCK, 3);
        let mut sender = vec![0x81, 200, 0, 12];
        sender.extend([0; 24]);
        sender.extend(&report[8..32]);
        let bye = [0x81, 203, 0, 1, 0, 0, 0, 7];
        let all = [&sender[..], &report, &bye].concat();
        assert_eq!(walked(&all), Some((4, vec![BLOCK, BLOCK])));
        let with = |at: usize, value: u8| {
            let mut bytes = report.clone();
            bytes[at] = value;
            bytes
        };
        assert_eq!(walked(&with(0, 0x82)), None, "two blocks where there is one");
        assert_eq!(walked(&with(0, 0x41)), None, "version");
        assert_eq!(walked(&with(1, 96)), None, "RTP");
        assert_eq!(walked(&with(3, 200)), None, "longer than it is");
        assert_eq!(walked(&[]), Some((0, vec![])));
    }
}
