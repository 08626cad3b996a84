//! Records of TLS 1.3 (RFC 8446, section 5), with the keys of a finished handshake.
//!
//! rustls does the handshake only. Its record layer reads 4 KiB at a time and copies each byte three times, which is
//! most of the work of a proxy. Here received records are decrypted in place, and outgoing data is encrypted in the
//! buffer in which it was gathered. Keys are never updated: a connection that has used up its keys is closed, and the
//! tunnelled connection continues on another one.

use bytes::{Buf as _, Bytes, BytesMut};
use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Largest plaintext of one record, in bytes.
pub const PLAIN_MOST: usize = 1 << 14;
/// Largest ciphertext of one record, in bytes (RFC 8446, section 5.2).
const SEALED_MOST: usize = PLAIN_MOST + 256;
const HEAD: usize = 5;
const TAG: usize = 16;
/// Smallest ciphertext of one record, in bytes: the content type and the AEAD tag.
const SEALED_LEAST: usize = 1 + TAG;
/// Limit of records for one key of AES-GCM, rounded down (RFC 8446, section 5.5).
const RECORDS_MOST: u64 = 1 << 24;

const APPLICATION_DATA: u8 = 23;
const ALERT: u8 = 21;
const VERSION: [u8; 2] = [3, 3];
const FATAL: u8 = 2;
/// TLS alert that a tunnel broker sends after its application has reset the tunnelled connection.
const USER_CANCELED: u8 = 90;

/// The reason why a TLS record cannot be encrypted or decrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the bytes are no TLS record, or were changed on the way")]
    Record,
    #[error("the connection's keys have protected as many records as they may")]
    Spent,
}

/// Content of a received record.
#[derive(Debug, PartialEq, Eq)]
pub enum RecordContent {
    Data(Bytes),
    /// The application on the other host has reset the connection.
    Reset,
    /// The other broker has closed the connection.
    Over,
}

/// Keys of one direction of a TLS connection.
struct RecordKeys {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    /// Sequence number of the next record, from which its nonce is computed.
    next: u64,
}

impl RecordKeys {
    /// Creates the keys of one direction, with the sequence number of the next record. Returns `None` if the AEAD is
    /// not supported.
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

    fn nonce(&mut self) -> Result<Nonce, RecordError> {
        if self.next >= RECORDS_MOST {
            return Err(RecordError::Spent);
        }
        let mut nonce = self.iv;
        // The record's sequence number is XORed into the end of the IV (RFC 8446, section 5.3).
        let number = self.next.to_be_bytes();
        let low = nonce.iter_mut().skip(NONCE_LEN - number.len());
        low.zip(number).for_each(|(byte, number)| *byte ^= number);
        self.next += 1;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// Encrypts the TLS 1.3 records that this end sends (RFC 8446, section 5.2).
pub struct Sealer(RecordKeys);

impl Sealer {
    pub fn new(secrets: &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        RecordKeys::new(secrets).map(Self)
    }

    /// Encrypts one record with bytes from the front of `batch`, and appends it to `out`.
    pub fn seal(&mut self, batch: &mut RecordBatch, out: &mut Vec<u8>) -> Result<(), RecordError> {
        self.record(APPLICATION_DATA, |out| batch.take(PLAIN_MOST, out), out)
    }

    /// Appends an alert that tells the other end that the application has reset the connection.
    pub fn reset(&mut self, out: &mut Vec<u8>) -> Result<(), RecordError> {
        self.record(ALERT, |out| out.extend_from_slice(&[FATAL, USER_CANCELED]), out)
    }

    fn record(
        &mut self,
        kind: u8,
        put: impl FnOnce(&mut Vec<u8>),
        out: &mut Vec<u8>,
    ) -> Result<(), RecordError> {
        let nonce = self.0.nonce()?;
        let start = out.len();
        out.extend_from_slice(&[0; HEAD]);
        put(out);
        // The plaintext is followed by its content type (RFC 8446, section 5.2).
        out.push(kind);
        let length =
            u16::try_from(out.len() - start - HEAD + TAG).map_err(|_| RecordError::Record)?.to_be_bytes();
        let head = [APPLICATION_DATA, VERSION[0], VERSION[1], length[0], length[1]];
        let (place, plain) = out.split_at_mut(start + HEAD);
        place[start..].copy_from_slice(&head);
        // The record's header is authenticated as well.
        let sealed = self.0.key.seal_in_place_separate_tag(nonce, Aad::from(head), plain);
        out.extend_from_slice(sealed.map_err(|_| RecordError::Record)?.as_ref());
        Ok(())
    }
}

/// Decrypts the TLS 1.3 records that this end receives.
pub struct Opener(RecordKeys);

impl Opener {
    pub fn new(secrets: &(u64, ConnectionTrafficSecrets)) -> Option<Self> {
        RecordKeys::new(secrets).map(Self)
    }

    /// Decrypts the first record of the bytes that were read. Returns `None` if the record is not complete.
    pub fn open(&mut self, read: &mut BytesMut) -> Result<Option<RecordContent>, RecordError> {
        let Some(head) = read.first_chunk::<HEAD>().copied() else { return Ok(None) };
        let [kind, major, minor, length @ ..] = head;
        let length = usize::from(u16::from_be_bytes(length));
        // The header of an encrypted record always has the type application data and the version of TLS 1.2.
        if kind != APPLICATION_DATA
            || [major, minor] != VERSION
            || !(SEALED_LEAST..=SEALED_MOST).contains(&length)
        {
            return Err(RecordError::Record);
        }
        if read.len() < HEAD + length {
            return Ok(None);
        }
        let nonce = self.0.nonce()?;
        let mut record = read.split_to(HEAD + length);
        record.advance(HEAD);
        let plain =
            self.0.key.open_in_place(nonce, Aad::from(head), &mut record).map_err(|_| RecordError::Record)?;
        // Zeros may follow the content's type as padding.
        let at = plain.iter().rposition(|byte| *byte != 0).ok_or(RecordError::Record)?;
        let kind = plain[at];
        record.truncate(at);
        match kind {
            APPLICATION_DATA if record.len() <= PLAIN_MOST => Ok(Some(RecordContent::Data(record.freeze()))),
            ALERT if record[..] == [FATAL, USER_CANCELED] => Ok(Some(RecordContent::Reset)),
            ALERT => Ok(Some(RecordContent::Over)),
            _ => Err(RecordError::Record),
        }
    }
}

/// Buffers whose bytes are to be sent in order. Bytes that were already taken are removed from the first buffer.
#[derive(Debug, Default)]
pub struct RecordBatch(pub Vec<Bytes>);

impl RecordBatch {
    /// Moves at most `most` bytes from the batch to `out`.
    fn take(&mut self, most: usize, out: &mut Vec<u8>) {
        let mut left = most;
        let mut whole = 0;
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
            let key = AeadKey::from([7; 32]);
            let iv = Iv::from([9; NONCE_LEN]);
            (next, ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv })
        };
        (Sealer::new(&secrets()).unwrap(), Opener::new(&secrets()).unwrap())
    }

    fn sealed(sealer: &mut Sealer, pieces: Vec<Bytes>) -> Vec<u8> {
        let mut batch = RecordBatch(pieces);
        let mut out = Vec::new();
        while !batch.0.is_empty() {
            sealer.seal(&mut batch, &mut out).unwrap();
        }
        out
    }

    fn opened(opener: &mut Opener, sealed: &[u8], sizes: &[usize]) -> Result<Vec<u8>, RecordError> {
        let mut read = BytesMut::new();
        let mut plain = Vec::new();
        let mut rest = sealed;
        for size in sizes.iter().cycle() {
            while let Some(content) = opener.open(&mut read)? {
                let RecordContent::Data(bytes) = content else { panic!("{content:?}") };
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
        fn sealed_records_are_opened_from_any_fragments(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40_000), 1..5),
            sizes in prop::collection::vec(1_usize..20_000, 1..5),
        ) {
            let (mut sealer, mut opener) = ends(3);
            let all = pieces.concat();
            let sealed = sealed(&mut sealer, pieces.into_iter().map(Bytes::from).collect());
            prop_assert_eq!(opened(&mut opener, &sealed, &sizes), Ok(all));
        }

        #[test]
        fn altered_record_is_refused(at in 0_usize..122, bit in 0_u8..8) {
            let (mut sealer, mut opener) = ends(0);
            let mut sealed = sealed(&mut sealer, vec![Bytes::from_static(&[1; 100])]);
            sealed[at] ^= 1 << bit;
            // A flipped bit in the length field may announce a larger record, for which the receiver then waits without
            // an error.
            let opened = opened(&mut opener, &sealed, &[1000]);
            prop_assert!(opened == Err(RecordError::Record) || ((3..5).contains(&at) && opened == Ok(vec![])));
        }

        #[test]
        fn random_bytes_are_opened_or_refused_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = opened(&mut ends(0).1, &bytes, &[50]);
            let head = [&[APPLICATION_DATA, 3, 3, 0, 100][..], &bytes].concat();
            let _ = opened(&mut ends(0).1, &head, &[50]);
        }
    }

    #[test]
    fn repeated_or_missing_record_is_refused() {
        let (mut sealer, mut opener) = ends(0);
        let [first, second] = [1, 2].map(|it| sealed(&mut sealer, vec![Bytes::from(vec![it; 10])]));
        assert_eq!(opened(&mut opener, &second, &[100]), Err(RecordError::Record));
        let (_, mut opener) = ends(0);
        assert_eq!(opened(&mut opener, &first, &[100]), Ok(vec![1; 10]));
        assert_eq!(opened(&mut opener, &first, &[100]), Err(RecordError::Record));
    }

    #[test]
    fn reset_alert_is_distinguished_from_close() {
        let (mut sealer, mut opener) = ends(0);
        let mut out = Vec::new();
        sealer.reset(&mut out).unwrap();
        sealer.record(ALERT, |out| out.extend_from_slice(&[1, 0]), &mut out).unwrap();
        let mut read = BytesMut::from(&out[..]);
        assert_eq!(opener.open(&mut read), Ok(Some(RecordContent::Reset)));
        assert_eq!(opener.open(&mut read), Ok(Some(RecordContent::Over)));
        assert_eq!(opener.open(&mut read), Ok(None));
    }

    #[test]
    fn encryption_key_is_refused_after_its_limit_of_records() {
        let (mut sealer, mut opener) = ends(RECORDS_MOST - 1);
        let last = sealed(&mut sealer, vec![Bytes::from_static(b"last")]);
        let mut batch = RecordBatch(vec![Bytes::from_static(b"more")]);
        assert_eq!(sealer.seal(&mut batch, &mut Vec::new()), Err(RecordError::Spent));
        assert_eq!(opened(&mut opener, &last, &[100]), Ok(b"last".to_vec()));
        assert_eq!(opened(&mut opener, &last, &[100]), Err(RecordError::Spent));
    }
}
