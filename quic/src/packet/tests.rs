use super::*;
use crate::{
    frame,
    keys::{KeySuite, TrafficSecret, initial_secrets},
};

// Test vectors of RFC 9001, appendix A.

const CLIENT_CONNECTION_ID: &str = "8394c8f03e515708";
const CLIENT_HEADER: &str = "c300000001088394c8f03e5157080000449e00000002";
const SERVER_HEADER: &str = "c1000000010008f067a5502a4262b50040750001";
const CLIENT_FRAMES: &str = "\
    060040f1010000ed0303ebf8fa56f12939b9584a3896472ec40bb863cfd3e86804fe3a47f06a2b69484c0000041301130201\
    0000c000000010000e00000b6578616d706c652e636f6dff01000100000a00080006001d0017001800100007000504616c70\
    6e000500050100000000003300260024001d00209370b2c9caa47fbabaf4559fedba753de171fa71f50f1ce15d43e994ec74\
    d748002b0003020304000d0010000e0403050306030203080408050806002d00020101001c00024001003900320408ffffff\
    ffffffffff05048000ffff07048000ffff0801100104800075300901100f088394c8f03e51570806048000ffff";
const CLIENT_PACKET: &str = "\
    c000000001088394c8f03e5157080000449e7b9aec34d1b1c98dd7689fb8ec11d242b123dc9bd8bab936b47d92ec356c0bab\
    7df5976d27cd449f63300099f3991c260ec4c60d17b31f8429157bb35a1282a643a8d2262cad67500cadb8e7378c8eb7539e\
    c4d4905fed1bee1fc8aafba17c750e2c7ace01e6005f80fcb7df621230c83711b39343fa028cea7f7fb5ff89eac2308249a0\
    2252155e2347b63d58c5457afd84d05dfffdb20392844ae812154682e9cf012f9021a6f0be17ddd0c2084dce25ff9b06cde5\
    35d0f920a2db1bf362c23e596d11a4f5a6cf3948838a3aec4e15daf8500a6ef69ec4e3feb6b1d98e610ac8b7ec3faf6ad760\
    b7bad1db4ba3485e8a94dc250ae3fdb41ed15fb6a8e5eba0fc3dd60bc8e30c5c4287e53805db059ae0648db2f64264ed5e39\
    be2e20d82df566da8dd5998ccabdae053060ae6c7b4378e846d29f37ed7b4ea9ec5d82e7961b7f25a9323851f681d582363a\
    a5f89937f5a67258bf63ad6f1a0b1d96dbd4faddfcefc5266ba6611722395c906556be52afe3f565636ad1b17d508b73d874\
    3eeb524be22b3dcbc2c7468d54119c7468449a13d8e3b95811a198f3491de3e7fe942b330407abf82a4ed7c1b311663ac698\
    90f4157015853d91e923037c227a33cdd5ec281ca3f79c44546b9d90ca00f064c99e3dd97911d39fe9c5d0b23a229a234cb3\
    6186c4819e8b9c5927726632291d6a418211cc2962e20fe47feb3edf330f2c603a9d48c0fcb5699dbfe5896425c5bac4aee8\
    2e57a85aaf4e2513e4f05796b07ba2ee47d80506f8d2c25e50fd14de71e6c418559302f939b0e1abd576f279c4b2e0feb85c\
    1f28ff18f58891ffef132eef2fa09346aee33c28eb130ff28f5b766953334113211996d20011a198e3fc433f9f2541010ae1\
    7c1bf202580f6047472fb36857fe843b19f5984009ddc324044e847a4f4a0ab34f719595de37252d6235365e9b84392b0610\
    85349d73203a4a13e96f5432ec0fd4a1ee65accdd5e3904df54c1da510b0ff20dcc0c77fcb2c0e0eb605cb0504db87632cf3\
    d8b4dae6e705769d1de354270123cb11450efc60ac47683d7b8d0f811365565fd98c4c8eb936bcab8d069fc33bd801b03ade\
    a2e1fbc5aa463d08ca19896d2bf59a071b851e6c239052172f296bfb5e72404790a2181014f3b94a4e97d117b438130368cc\
    39dbb2d198065ae3986547926cd2162f40a29f0c3c8745c0f50fba3852e566d44575c29d39a03f0cda721984b6f440591f35\
    5e12d439ff150aab7613499dbd49adabc8676eef023b15b65bfc5ca06948109f23f350db82123535eb8a7433bdabcb909271\
    a6ecbcb58b936a88cd4e8f2e6ff5800175f113253d8fa9ca8885c2f552e657dc603f252e1a8e308f76f0be79e2fb8f5d5fbb\
    e2e30ecadd220723c8c0aea8078cdfcb3868263ff8f0940054da48781893a7e49ad5aff4af300cd804a6b6279ab3ff3afb64\
    491c85194aab760d58a606654f9f4400e8b38591356fbf6425aca26dc85244259ff2b19c41b9f96f3ca9ec1dde434da7d2d3\
    92b905ddf3d1f9af93d1af5950bd493f5aa731b4056df31bd267b6b90a079831aaf579be0a39013137aac6d404f518cfd468\
    40647e78bfe706ca4cf5e9c5453e9f7cfd2b8b4c8d169a44e55c88d4a9a7f9474241e221af44860018ab0856972e194cd934";
const SERVER_FRAMES: &str = "\
    02000000000600405a020000560303eefce7f7b37ba1d1632e96677825ddf73988cfc79825df566dc5430b9a045a12001301\
    00002e00330024001d00209d3c940d89690b84d08a60993c144eca684d1081287c834d5311bcf32bb9da1a002b00020304";
const SERVER_PACKET: &str = "\
    cf000000010008f067a5502a4262b5004075c0d95a482cd0991cd25b0aac406a5816b6394100f37a1c69797554780bb38cc5\
    a99f5ede4cf73c3ec2493a1839b3dbcba3f6ea46c5b7684df3548e7ddeb9c3bf9c73cc3f3bded74b562bfb19fb84022f8ef4\
    cdd93795d77d06edbb7aaf2f58891850abbdca3d20398c276456cbc42158407dd074ee";
const CHACHA_SECRET: &str = "9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b";
const CHACHA_NEXT_SECRET: &str = "1223504755036d556342ee9361d253421a826c9ecdf3c7148684b36b714881f9";
const CHACHA_PACKET: &str = "4cfe4189655e5cd55c41f69080575d7999c25a5bfb";

fn hex(text: &str) -> Vec<u8> {
    let digit = |byte: u8| (byte as char).to_digit(16).expect("a hex digit") as u8;
    text.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Seals `frames` behind a given header, like `finish`, but also with long headers and packet numbers below 4 bytes.
fn seal(header: &str, number_len: usize, number: u64, frames: &[u8], secret: &TrafficSecret) -> Vec<u8> {
    let mut packet = hex(header);
    let header_len = packet.len();
    packet.extend_from_slice(frames);
    let (header, payload) = packet.split_at_mut(header_len);
    let tag = secret.packet_key().seal(number, header, payload);
    packet.extend_from_slice(&tag);
    protect(&mut packet, header_len - number_len, &secret.header_key());
    packet
}

/// Removes header and packet protection. The number starts at `number_at`. Returns the payload.
fn unseal(packet: &mut [u8], number_at: usize, number: u64, secret: &TrafficSecret) -> Vec<u8> {
    let number_len = unprotect(packet, number_at, &secret.header_key()).expect("long enough");
    let (header, sealed) = packet.split_at_mut(number_at + number_len);
    secret.packet_key().open(number, header, sealed).expect("authentic").to_vec()
}

#[test]
fn client_initial_matches_rfc_9001() {
    let (client, _) = initial_secrets(&hex(CLIENT_CONNECTION_ID));
    let mut frames = hex(CLIENT_FRAMES);
    frames.resize(1162, 0);
    let mut packet = seal(CLIENT_HEADER, 4, 2, &frames, &client);
    assert_eq!(packet, hex(CLIENT_PACKET));
    assert_eq!(unseal(&mut packet, 18, 2, &client), frames);
    assert_eq!(packet[..22], hex(CLIENT_HEADER));
}

#[test]
fn server_initial_matches_rfc_9001() {
    let (_, server) = initial_secrets(&hex(CLIENT_CONNECTION_ID));
    let frames = hex(SERVER_FRAMES);
    let mut packet = seal(SERVER_HEADER, 2, 1, &frames, &server);
    assert_eq!(packet, hex(SERVER_PACKET));
    assert_eq!(unseal(&mut packet, 18, 1, &server), frames);
    assert_eq!(frame::Walker::new(&frames).map(Result::unwrap).count(), 2);
}

#[test]
fn chacha20_short_header_matches_rfc_9001() {
    let secret = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &hex(CHACHA_SECRET)).expect("32 bytes");
    let mut packet = seal("4200bff4", 3, 654_360_564, &[1], &secret);
    assert_eq!(packet, hex(CHACHA_PACKET));

    let key = secret.packet_key();
    let opened = open(&mut packet, 0, 654_360_560, &secret.header_key(), |_| &key).expect("authentic");
    assert_eq!(opened, OpenedPacket { number: 654_360_564, key_phase: false, payload: 4..5 });
    assert_eq!(packet[4..5], [1]);
}

#[test]
fn next_key_generation_is_derived() {
    let secret = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &hex(CHACHA_SECRET)).expect("32 bytes");
    let next = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &hex(CHACHA_NEXT_SECRET)).expect("32 bytes");
    let sealed = |secret: &TrafficSecret| secret.packet_key().seal(7, b"header", &mut [1, 2, 3]);
    assert_eq!(sealed(&secret.next()), sealed(&next));
    assert_ne!(sealed(&secret), sealed(&next));
}

#[test]
fn debug_output_shows_no_secrets() {
    let secret = TrafficSecret::new(KeySuite::ChaCha20Poly1305, &hex(CHACHA_SECRET)).expect("32 bytes");
    assert_eq!(format!("{secret:?}"), "TrafficSecret { suite: ChaCha20Poly1305, .. }");
    assert!(TrafficSecret::new(KeySuite::Aes256Gcm, &[0; 32]).is_none());
}

#[test]
fn number_decoding_example_of_rfc9000_a3() {
    assert_eq!(decode_number(0xa82f_30eb, 0x9b32, 2), 0xa82f_9b32);
    assert_eq!(decode_number(1 << 32, u64::from(u32::MAX), 4), u64::from(u32::MAX));
}

#[test]
fn sealed_packet_opens_again() {
    for suite in [KeySuite::ChaCha20Poly1305, KeySuite::Aes128Gcm, KeySuite::Aes256Gcm] {
        let secret = TrafficSecret::new(suite, &vec![7; suite.secret_len()]).expect("the suite's length");
        let key = secret.packet_key();
        let header_key = secret.header_key();
        for (id, generation, number) in [
            (&b""[..], 0, 0),
            (b"12345678", 1, 300),
            (&[9; 20], 2, (1 << 40) + 5),
            (b"1", 3, u64::from(u32::MAX)),
        ] {
            let id = ConnectionId::new(id).expect("20 bytes at most");
            let mut out = b"before".to_vec();
            start(&id, &mut out);
            frame::write_ping(&mut out);
            finish(&mut out, 6, id.len(), generation, number, &key, &header_key);
            let packet = &mut out[6..];
            assert_eq!(packet.len(), overhead(id.len()) + 1);

            let opened = open(packet, id.len(), number, &header_key, |phase| {
                assert_eq!(phase, generation % 2 == 1);
                &key
            });
            let opened = opened.expect("authentic");
            assert_eq!(opened.number, number);
            assert_eq!(packet[1..1 + id.len()], *id);
            assert_eq!(packet[opened.payload.clone()], [1]);
        }
    }
}

#[test]
fn packet_with_a_flipped_bit_is_rejected() {
    let secret = TrafficSecret::new(KeySuite::Aes128Gcm, &[3; 32]).expect("32 bytes");
    let key = secret.packet_key();
    let header_key = secret.header_key();
    let id = ConnectionId::new(b"abcd").expect("short");
    let mut sealed = Vec::new();
    start(&id, &mut sealed);
    frame::write_stream(3, 0, b"hello", true, &mut sealed);
    finish(&mut sealed, 0, id.len(), 0, 9, &key, &header_key);
    for bit in 0..8 * sealed.len() {
        let mut packet = sealed.clone();
        packet[bit / 8] ^= 1 << (bit % 8);
        assert!(open(&mut packet, id.len(), 9, &header_key, |_| &key).is_err(), "bit {bit}");
    }
    for len in 0..sealed.len() {
        assert!(open(&mut sealed[..len].to_vec(), id.len(), 9, &header_key, |_| &key).is_err());
    }
}
