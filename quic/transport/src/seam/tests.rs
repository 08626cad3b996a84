#![allow(clippy::unwrap_used)]

use crypto::PacketKey as _;

use super::*;
use crate::shared::tests::fresh;

/// A key that does not encrypt, so that tests can check the packet's layout. Its tag contains packet number and header
/// length.
struct Transparent;

impl crypto::PacketKey for Transparent {
    fn encrypt(&self, packet: u64, buf: &mut [u8], header_len: usize) {
        let tag = buf.len() - 16;
        buf[tag..tag + 8].copy_from_slice(&packet.to_be_bytes());
        buf[tag + 8..].copy_from_slice(&(header_len as u64).to_be_bytes());
    }

    fn decrypt(&self, _: u64, _: &[u8], _: &mut BytesMut) -> Result<(), CryptoError> {
        Ok(())
    }

    fn tag_len(&self) -> usize {
        16
    }

    fn confidentiality_limit(&self) -> u64 {
        u64::MAX
    }

    fn integrity_limit(&self) -> u64 {
        u64::MAX
    }
}

#[test]
fn quinn_packet_is_rewritten_with_a_four_byte_number_and_padding() {
    let shared = Arc::new(fresh());
    let key = SeamPacketKey { inner: Box::new(Transparent), shared, generation: 0 };
    // The payload is a STREAM frame without a Length field, so bytes appended to it would become stream data.
    let frame = [0x08, 3, 1, 2, 3, 4];
    for (number_len, number) in [(1, 0u64), (2, 1), (3, 2), (4, 3)] {
        let header =
            [&[0x40 | (number_len as u8 - 1)], b"12345678".as_slice(), &[0xee; 4][..number_len]].concat();
        let mut packet = [header.as_slice(), &frame, &vec![0; key.tag_len()]].concat();
        key.encrypt(number, &mut packet, header.len());
        let padding = vec![0; number_len - 1];
        let wire = (number as u32).to_be_bytes();
        let tag = [number.to_be_bytes(), 13u64.to_be_bytes()].concat();
        let expected = [&[0x43], b"12345678".as_slice(), &wire, &padding, &frame, &tag].concat();
        assert_eq!(packet, expected, "a number of {number_len} bytes");
    }
}
