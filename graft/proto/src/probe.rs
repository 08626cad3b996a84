//! Datagrams between two hosts that have agreed, over UDP or IP protocol 253. Each shows a token that only these two know, so
//! nothing is answered to anybody else, and an answer is never longer than what it answers.

/// Of the TLS exporter (RFC 5705) that both take the token from.
pub const TOKEN_LABEL: &[u8] = b"EXPORTER-millrace-graft-probe";
pub const TOKEN_BYTES: usize = 16;
/// Magic, kind, padding, length, token, sequence number.
pub const HEADER_BYTES: usize = 28;

const MAGIC: &[u8; 4] = b"MRp1";

pub type Token = [u8; TOKEN_BYTES];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ask,
    Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub kind: Kind,
    pub token: Token,
    pub sequence: u32,
    /// Bytes of the datagram that asked.
    pub bytes: u16,
}

impl Probe {
    /// One that asks, padded to so many bytes; at least [`HEADER_BYTES`].
    pub fn ask(token: Token, sequence: u32, bytes: u16) -> Vec<u8> {
        let bytes = bytes.max(HEADER_BYTES as u16);
        let mut datagram = Self { kind: Kind::Ask, token, sequence, bytes }.header().to_vec();
        datagram.resize(usize::from(bytes), 0);
        datagram
    }

    /// To this one.
    pub fn answer(self) -> [u8; HEADER_BYTES] {
        Self { kind: Kind::Answer, ..self }.header()
    }

    fn header(self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let kind = if self.kind == Kind::Ask { 1 } else { 2 };
        let parts: [&[u8]; 5] =
            [MAGIC, &[kind, 0], &self.bytes.to_be_bytes(), &self.token, &self.sequence.to_be_bytes()];
        let bytes = parts.into_iter().flatten();
        header.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        header
    }

    /// `None`: it is none. One that asks is as long as it says.
    pub fn read(datagram: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER_BYTES] = datagram.first_chunk()?;
        let (magic, rest) = header.split_first_chunk::<4>()?;
        let ([kind, 0], rest) = rest.split_first_chunk::<2>()? else { return None };
        let (bytes, rest) = rest.split_first_chunk::<2>()?;
        let (token, rest) = rest.split_first_chunk::<TOKEN_BYTES>()?;
        let bytes = u16::from_be_bytes(*bytes);
        let kind = match kind {
            1 if usize::from(bytes) == datagram.len() => Kind::Ask,
            2 => Kind::Answer,
            _ => return None,
        };
        let sequence = u32::from_be_bytes(*rest.first_chunk()?);
        (magic == MAGIC).then_some(Self { kind, token: *token, sequence, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_answered() {
        let datagram = Probe::ask([7; 16], 9, 1400);
        assert_eq!(datagram.len(), 1400);
        let ask = Probe::read(&datagram).unwrap();
        assert_eq!(ask, Probe { kind: Kind::Ask, token: [7; 16], sequence: 9, bytes: 1400 });
        assert_eq!(Probe::read(&ask.answer()), Some(Probe { kind: Kind::Answer, ..ask }));
        assert_eq!(Probe::ask([7; 16], 9, 1).len(), HEADER_BYTES, "never shorter than its answer");
    }

    #[test]
    fn what_is_none_is_not_read() {
        let datagram = Probe::ask([7; 16], 9, 64);
        assert_eq!(Probe::read(&datagram[..63]), None, "cut off");
        assert_eq!(Probe::read(&datagram[..HEADER_BYTES - 1]), None);
        for at in [0, 4, 5, 6] {
            let mut other = datagram.clone();
            other[at] ^= 4;
            assert_eq!(Probe::read(&other), None, "byte {at}");
        }
    }
}
