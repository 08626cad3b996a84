//! Tests with the examples of the RFCs.

use millrace_kernel::crypto::QuicKeys;

use crate::engine::{CryptoCase, CryptoEngine, CryptoShort, Operation};

pub fn hex<const N: usize>(text: &str) -> [u8; N] {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    assert_eq!(digits.len(), 2 * N);
    let digit = |byte: u8| (byte as char).to_digit(16).expect("a hexadecimal digit") as u8;
    std::array::from_fn(|i| digit(digits[2 * i]) << 4 | digit(digits[2 * i + 1]))
}

/// Protects and opens the packet of RFC 9001, appendix A.5.
#[test]
fn chacha20_short_header_packet_matches_rfc_9001() {
    let keys = QuicKeys::chacha20_poly1305(
        &hex("c6d98ff3441c3fe1b2182094f69caa2ed4b716b65488960a7a984979fb23e1c8"),
        &hex("e0459b3474bdd0e44a41c144"),
        &hex("25a282b9e82f06f21f488917a4fc8f1b73573685608597d0efcb076b0ab7a7a4"),
    );
    let number = 654_360_564;
    let wire: [u8; 21] = hex("4cfe4189655e5cd55c41f69080575d7999c25a5bfb");
    for engine in CryptoEngine::all("chacha20_short_header_packet_matches_rfc_9001") {
        let mut case = CryptoCase::to_seal(&keys, number, &hex::<4>("4200bff4"), &[1]);
        let at = case.extent.header_at as usize;
        assert_eq!(engine.run(Operation::Seal, &mut case), 0);
        assert_eq!(case.packet.bytes[at..at + 21], hex::<21>("4200bff4655e5cd55c41f69080575d7999c25a5bfb"));
        assert_eq!(engine.run(Operation::Protect, &mut case), 0);
        assert_eq!(case.packet.bytes[at..at + 21], wire);

        case.extent.text_bytes = 21; // length of the whole packet, which the operation Unprotect expects
        assert_eq!(engine.run(Operation::Unprotect, &mut case), 0);
        assert_eq!(case.header, CryptoShort { first: 0x42, number_bytes: 3, pad: 0, number: 0xbff4 });
        case.number = number - 1000;
        engine.run(Operation::Number, &mut case);
        assert_eq!(case.number, number);
        case.extent.text_bytes = 1;
        assert_eq!(engine.run(Operation::Open, &mut case), 0);
        assert_eq!(case.text(1), [1]);
    }
}

/// Seals the example of RFC 8439, section 2.8.2. Its nonce is used as the IV, with packet number 0.
#[test]
fn chacha20_poly1305_matches_rfc_8439() {
    let key = std::array::from_fn(|i| 0x80 + i as u8);
    let keys = QuicKeys::chacha20_poly1305(&key, &hex("070000004041424344454647"), &[0; 32]);
    let text =
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, \
                 sunscreen would be it.";
    for engine in CryptoEngine::all("chacha20_poly1305_matches_rfc_8439") {
        let mut case = CryptoCase::to_seal(&keys, 0, &hex::<12>("50515253c0c1c2c3c4c5c6c7"), text);
        assert_eq!(engine.run(Operation::Seal, &mut case), 0);
        let poly_key: [u8; 32] = hex("7bac2b252db447af09b67a55a4e955840ae1d6731075d9eb2a9375783ed553ff");
        assert_eq!(case.packet.once[..32], poly_key);
        assert_eq!(case.text(16), hex::<16>("d31a8d34648e60db7b86afbc53ef7ec2"));
        assert_eq!(case.text(130)[112..], hex::<18>("61161ae10b594f09e26a7e902ecbd0600691"));
    }
}

/// Applies the header protection of the client's Initial in RFC 9001, appendix A.2.
#[test]
fn aes_header_mask_matches_rfc_9001() {
    let keys = QuicKeys::aes128_gcm(&[0; 16], &[0; 12], &hex("9f50449e04a0e810283a1e9933adedd2"));
    for engine in CryptoEngine::all("aes_header_mask_matches_rfc_9001") {
        let mut case = CryptoCase::new(&keys);
        case.packet.bytes[..5].copy_from_slice(&[0x43, 0, 0, 0, 0]);
        case.packet.bytes[5..21].copy_from_slice(&hex::<16>("d1b1c98dd7689fb8ec11d242b123dc9b"));
        assert_eq!(engine.run(Operation::Protect, &mut case), 0);
        // The mask is 437b9aec36. Only 5 bits of its first byte are applied to the first byte of a short header.
        assert_eq!(case.packet.bytes[..5], hex::<5>("407b9aec36"));
    }
}

/// Checks the decoding of packet numbers: the example of RFC 9000, appendix A.3, and borderline cases.
#[test]
fn packet_numbers_are_decoded_as_in_rfc_9000() {
    let top = (1 << 62) - 1;
    let cases = [
        ("the RFC's example", 0xa82f_30eb, 2, 0x9b32, 0xa82f_9b32),
        ("the first packet", 0, 1, 0, 0),
        ("a number from before 0 does not exist", 0, 1, 0xff, 0xff),
        ("half a window ahead", 0x100, 1, 0x80, 0x180),
        ("half a window ahead is not behind", 0x180, 1, 0x00, 0x200),
        ("less than half a window behind", 0x180, 1, 0x01, 0x101),
        ("just behind", 0x1000, 1, 0xff, 0xfff),
        ("four bytes", 0x1_0000_0000, 4, 0xffff_ffff, 0xffff_ffff),
        ("four bytes ahead", 0xffff_ffff, 4, 0, 0x1_0000_0000),
        ("nothing beyond the largest", top, 1, 0, top & !0xff),
        ("the largest", top, 4, 0xffff_ffff, top),
    ];
    let keys = QuicKeys::chacha20_poly1305(&[0; 32], &[0; 12], &[0; 32]);
    for engine in CryptoEngine::all("packet_numbers_are_decoded_as_in_rfc_9000") {
        for (description, expected, number_bytes, sent, want) in cases {
            let mut case = CryptoCase::new(&keys);
            case.number = expected;
            case.header = CryptoShort { number_bytes, number: sent, ..CryptoShort::default() };
            engine.run(Operation::Number, &mut case);
            assert_eq!(case.number, want, "{description}");
        }
    }
}
