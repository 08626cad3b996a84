//! Recognises keys and certificates, which others may know, in files that a setting names as secrets.
//!
//! This is the second of two checks. The first is that a file is read as a secret only where a setting says so. If a
//! file that should be a secret is a public key by mistake, this module refuses it. Otherwise anyone with the public
//! key could make tokens.

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// The decoder of base64, which accepts text with and without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Returns text without the byte order mark that some editors put before it, and without white space around it.
pub fn trimmed(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii()
}

/// Reports whether the bytes contain PEM, possibly between other text.
pub fn has_pem(bytes: &[u8]) -> bool {
    contains(bytes, b"-----BEGIN ")
}

/// Returns the name of the format if the bytes are a key or a certificate, plain or encoded in base64 or hexadecimal.
pub fn recognise(bytes: &[u8]) -> Option<&'static str> {
    plain(bytes).or_else(|| {
        let inner = decoded(bytes).into_iter().find_map(|inner| plain(&inner))?;
        Some(match inner {
            "DER" => "DER in base64 or hexadecimal",
            _ => "a key or a certificate in base64 or hexadecimal",
        })
    })
}

fn plain(bytes: &[u8]) -> Option<&'static str> {
    let text = trimmed(bytes);
    let forms: [(&'static str, bool); 5] = [
        ("PEM", has_pem(text) || contains(text, b"---- BEGIN ")),
        ("JSON", is_json(text)),
        ("an SSH key", is_ssh(bytes) || is_ssh_line(text)),
        ("text in UTF-16", is_utf16(bytes)),
        ("DER", is_der(bytes) || is_der(text)),
    ];
    forms.into_iter().find_map(|(name, is_it)| is_it.then_some(name))
}

/// Reports whether text is an object or array in JSON. It must parse, or contain `"kty"` or `"keys"`, names of fields
/// in JSON Web Keys, since a random secret may begin with a bracket.
fn is_json(text: &[u8]) -> bool {
    let parses = || serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok();
    matches!(text.first(), Some(b'{' | b'['))
        && (contains(text, b"\"kty\"") || contains(text, b"\"keys\"") || parses())
}

/// Reports whether text has a line like those of OpenSSH's files `authorized_keys` and `known_hosts`.
fn is_ssh_line(text: &[u8]) -> bool {
    contains(text, b" AAAA") && (contains(text, b"ssh-") || contains(text, b"ecdsa-sha2-"))
}

/// Reports whether bytes begin like an SSH public key (RFC 4253, section 6.6): with the length of its type's name, and
/// the name.
fn is_ssh(bytes: &[u8]) -> bool {
    let Some((len, rest)) = bytes.split_first_chunk() else { return false };
    let name = rest.get(..u32::from_be_bytes(*len) as usize).unwrap_or_default();
    name.starts_with(b"ssh-") || name.starts_with(b"ecdsa-sha2-") || name.starts_with(b"sk-")
}

/// Reports whether bytes are text in UTF-16: a byte order mark and then letters of ASCII.
fn is_utf16(bytes: &[u8]) -> bool {
    let big = bytes.strip_prefix(b"\xfe\xff");
    let little = bytes.strip_prefix(b"\xff\xfe");
    let zeros_at = |text: &[u8], odd: usize| {
        let high = text.iter().skip(odd).step_by(2).take(8);
        text.len() >= 16 && high.into_iter().all(|byte| *byte == 0)
    };
    big.is_some_and(|text| zeros_at(text, 0)) || little.is_some_and(|text| zeros_at(text, 1))
}

/// Reports whether bytes are one SEQUENCE in DER, with nothing but white space behind it. Its content must begin as
/// keys and certificates do: with a SEQUENCE, a number, an object identifier or a version. Less than one in a million
/// random secrets looks like that.
fn is_der(bytes: &[u8]) -> bool {
    let Some((&0x30, rest)) = bytes.split_first() else { return false };
    let (len, content) = match rest.split_first() {
        Some((&short @ ..=0x7f, content)) => (usize::from(short), content),
        Some((&long @ 0x81..=0x84, rest)) if rest.len() >= usize::from(long & 0x7f) => {
            let (len, content) = rest.split_at(usize::from(long & 0x7f));
            (len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), content)
        }
        _ => return false,
    };
    let Some((content, rest)) = content.split_at_checked(len) else { return false };
    rest.trim_ascii().is_empty() && matches!(content.first(), Some(0x30 | 0x02 | 0x06 | 0xa0))
}

/// Decodes text as base64 of either alphabet and as hexadecimal, without its white space. Returns the results of the
/// decodings that succeed.
fn decoded(bytes: &[u8]) -> Vec<Vec<u8>> {
    let of_standard = |byte: &u8| match byte {
        b'-' => b'+',
        b'_' => b'/',
        other => *other,
    };
    let text = trimmed(bytes).iter().filter(|byte| !byte.is_ascii_whitespace());
    let text: Vec<u8> = text.map(of_standard).collect();
    BASE64.decode(&text).ok().into_iter().chain(decode_hexadecimal(&text)).collect()
}

fn decode_hexadecimal(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, rest) = text.as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
