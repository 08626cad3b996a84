//! Records of TLS 1.3 (RFC 8446, section 5), by the keys that a handshake has made.
//!
//! The handshake is the library's. Its record layer reads 4 KiB at a time and copies each byte three times, which for a proxy is
//! most of what there is to do: here what was read is opened where it lies, and what goes is sealed where it was gathered. Keys are not
//! changed: a connection that has used its own up is over, and what it carried goes on with another.

use bytes::{Buf as _, Bytes, BytesMut};
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Of what one record holds.
pub const PLAIN_MOST: usize = 1 << 14;
const SEALED_MOST: usize = PLAIN_MOST + 256;
const HEAD: usize = 5;
const TAG: usize = 16;
/// Each holds its content's type, and a tag.
const SEALED_LEAST: usize = 1 + TAG;
/// What AES-GCM is good for with one key, rounded down (RFC 8446, section 5.5).
const RECORDS_MOST: u64 = 1 << 24;

const APPLICATION_DATA: u8 = 23;
const ALERT: u8 = 21;
const VERSION: [u8; 2] = [3, 3];
const FATAL: u8 = 2;
/// Who sends this alert has been told by its application to reset the connection.
const USER_CANCELED: u8 = 90;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    #[error("it is no record of TLS, or was changed on the way")]
    Record,
    #[error("its keys are used up")]
    Spent,
}

/// What came in a record.
#[derive(Debug, PartialEq, Eq)]
pub enum Content {
    Data(Bytes),
    /// The other application has reset the connection.
    Reset,
    /// The other end says that it is over, in whichever way.
    Over,
}

/// Of one direction.
struct Keys {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    next: u64,
}

impl Keys {
    /// With the number of the next record. `None`: an AEAD that is not here.
    fn new((next, secrets): &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return None,
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key.as_ref()).ok()?);
        Some(Self { key, iv: iv.as_ref().try_into().ok()?, next: *next })
    }

    fn nonce(&mut self) -> Result<Nonce, Bad> {
        if self.next >= RECORDS_MOST {
            return Err(Bad::Spent);
        }
        let (mut nonce, number) = (self.iv, self.next.to_be_bytes());
        let low = nonce.iter_mut().skip(NONCE_LEN - number.len());
        low.zip(number).for_each(|(byte, number)| *byte ^= number);
        self.next += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

pub struct Sealer(Keys);

impl Sealer {
    pub fn new(secrets: &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        Keys::new(secrets).map(Self)
    }

    /// Takes as much from the front of `batch` as one record holds, and appends the record.
    pub fn seal(&mut self, batch: &mut Batch, out: &mut Vec<u8>) -> Result<(), Bad> {
        self.record(APPLICATION_DATA, |out| batch.take(PLAIN_MOST, out), out)
    }

    /// Appends what tells the other end that the application has reset the connection.
    pub fn reset(&mut self, out: &mut Vec<u8>) -> Result<(), Bad> {
        self.record(ALERT, |out| out.extend_from_slice(&[FATAL, USER_CANCELED]), out)
    }

    fn record(&mut self, kind: u8, put: impl FnOnce(&mut Vec<u8>), out: &mut Vec<u8>) -> Result<(), Bad> {
        let nonce = self.0.nonce()?;
        let start = out.len();
        out.extend_from_slice(&[0; HEAD]);
        put(out);
        out.push(kind);
        let length = u16::try_from(out.len() - start - HEAD + TAG).map_err(|_| Bad::Record)?.to_be_bytes();
        let head = [APPLICATION_DATA, VERSION[0], VERSION[1], length[0], length[1]];
        let (place, plain) = out.split_at_mut(start + HEAD);
        place[start..].copy_from_slice(&head);
        let sealed = self.0.key.seal_in_place_separate_tag(nonce, Aad::from(head), plain);
        out.extend_from_slice(sealed.map_err(|_| Bad::Record)?.as_ref());
        Ok(())
    }
}

pub struct Opener(Keys);

impl Opener {
    pub fn new(secrets: &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        Keys::new(secrets).map(Self)
    }

    /// The first of the records that were read. `None`: it is not all there.
    pub fn open(&mut self, read: &mut BytesMut) -> Result<Option<Content>, Bad> {
        let Some(head) = read.first_chunk::<HEAD>().copied() else { return Ok(None) };
        let [kind, major, minor, length @ ..] = head;
        let length = usize::from(u16::from_be_bytes(length));
        if kind != APPLICATION_DATA
            || [major, minor] != VERSION
            || !(SEALED_LEAST..=SEALED_MOST).contains(&length)
        {
            return Err(Bad::Record);
        }
        if read.len() < HEAD + length {
            return Ok(None);
        }
        let nonce = self.0.nonce()?;
        let mut record = read.split_to(HEAD + length);
        record.advance(HEAD);
        let plain = self.0.key.open_in_place(nonce, Aad::from(head), &mut record).map_err(|_| Bad::Record)?;
        // Behind the type there may be zeros.
        let at = plain.iter().rposition(|byte| *byte != 0).ok_or(Bad::Record)?;
        let kind = plain[at];
        record.truncate(at);
        match kind {
            APPLICATION_DATA if record.len() <= PLAIN_MOST => Ok(Some(Content::Data(record.freeze()))),
            ALERT if record[..] == [FATAL, USER_CANCELED] => Ok(Some(Content::Reset)),
            ALERT => Ok(Some(Content::Over)),
            _ => Err(Bad::Record),
        }
    }
}

/// What is to go, the first perhaps in part.
#[derive(Debug, Default)]
pub struct Batch(pub Vec<Bytes>);

impl Batch {
    /// Appends at most so many of its bytes, which are no longer in it.
    fn take(&mut self, most: usize, out: &mut Vec<u8>) {
        let (mut left, mut whole) = (most, 0);
        for bytes in &mut self.0 {
            let length = bytes.len().min(left);
            out.extend_from_slice(&bytes[..length]);
            left -= length;
            if length < bytes.len() {
                bytes.advance(length);
                break;
            }
            whole += 1;
        }
        drop(self.0.drain(..whole));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    fn ends(next: u64) -> (Sealer, Opener) {
        let secrets = || {
            let (key, iv) = (AeadKey::from([7; 32]), Iv::from([9; NONCE_LEN]));
            (next, ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv })
        };
        (Sealer::new(&secrets()).unwrap(), Opener::new(&secrets()).unwrap())
    }

    fn sealed(sealer: &mut Sealer, pieces: Vec<Bytes>) -> Vec<u8> {
        let (mut batch, mut out) = (Batch(pieces), Vec::new());
        while !batch.0.is_empty() {
            sealer.seal(&mut batch, &mut out).unwrap();
        }
        out
    }

    fn opened(opener: &mut Opener, sealed: &[u8], sizes: &[usize]) -> Result<Vec<u8>, Bad> {
        let (mut read, mut plain, mut rest) = (BytesMut::new(), Vec::new(), sealed);
        for size in sizes.iter().cycle() {
            while let Some(content) = opener.open(&mut read)? {
                let Content::Data(bytes) = content else { panic!("{content:?}") };
                plain.extend_from_slice(&bytes);
            }
            if rest.is_empty() {
                break;
            }
            let (piece, more) = rest.split_at((*size).min(rest.len()));
            read.extend_from_slice(piece);
            rest = more;
        }
        Ok(plain)
    }

    proptest! {
        #[test]
        fn what_is_sealed_is_opened_however_it_is_cut(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40_000), 1..5),
            sizes in prop::collection::vec(1_usize..20_000, 1..5),
        ) {
            let (mut sealer, mut opener) = ends(3);
            let all = pieces.concat();
            let sealed = sealed(&mut sealer, pieces.into_iter().map(Bytes::from).collect());
            prop_assert_eq!(opened(&mut opener, &sealed, &sizes), Ok(all));
        }

        #[test]
        fn what_was_changed_is_not_opened(at in 0_usize..122, bit in 0_u8..8) {
            let (mut sealer, mut opener) = ends(0);
            let mut sealed = sealed(&mut sealer, vec![Bytes::from_static(&[1; 100])]);
            sealed[at] ^= 1 << bit;
            // A larger length waits for more.
            let opened = opened(&mut opener, &sealed, &[1000]);
            prop_assert!(opened == Err(Bad::Record) || ((3..5).contains(&at) && opened == Ok(vec![])));
        }

        #[test]
        fn anything_is_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = opened(&mut ends(0).1, &bytes, &[50]);
            let head = [&[APPLICATION_DATA, 3, 3, 0, 100][..], &bytes].concat();
            let _ = opened(&mut ends(0).1, &head, &[50]);
        }
    }

    #[test]
    fn records_are_neither_repeated_nor_left_out() {
        let (mut sealer, mut opener) = ends(0);
        let [first, second] = [1, 2].map(|it| sealed(&mut sealer, vec![Bytes::from(vec![it; 10])]));
        assert_eq!(opened(&mut opener, &second, &[100]), Err(Bad::Record));
        let (_, mut opener) = ends(0);
        assert_eq!(opened(&mut opener, &first, &[100]), Ok(vec![1; 10]));
        assert_eq!(opened(&mut opener, &first, &[100]), Err(Bad::Record));
    }

    #[test]
    fn a_reset_is_told_from_an_end() {
        let (mut sealer, mut opener) = ends(0);
        let mut out = Vec::new();
        sealer.reset(&mut out).unwrap();
        sealer.record(ALERT, |out| out.extend_from_slice(&[1, 0]), &mut out).unwrap();
        let mut read = BytesMut::from(&out[..]);
        assert_eq!(opener.open(&mut read), Ok(Some(Content::Reset)));
        assert_eq!(opener.open(&mut read), Ok(Some(Content::Over)));
        assert_eq!(opener.open(&mut read), Ok(None));
    }

    #[test]
    fn keys_are_used_up() {
        let (mut sealer, mut opener) = ends(RECORDS_MOST - 1);
        let last = sealed(&mut sealer, vec![Bytes::from_static(b"last")]);
        let mut batch = Batch(vec![Bytes::from_static(b"more")]);
        assert_eq!(sealer.seal(&mut batch, &mut Vec::new()), Err(Bad::Spent));
        assert_eq!(opened(&mut opener, &last, &[100]), Ok(b"last".to_vec()));
        assert_eq!(opened(&mut opener, &last, &[100]), Err(Bad::Spent));
    }
}
