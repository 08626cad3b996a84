//! Probe datagrams between two hosts that have an agreement, over UDP. Each probe contains a token
//! that only these two hosts know, so other hosts get no answer. An answer is never longer than the question, so probes
//! cannot be used for amplification.

/// Label of the TLS exporter (RFC 5705) from which both hosts derive the token.
pub const TOKEN_LABEL: &[u8] = b"EXPORTER-millrace-graft-probe";
/// Length of a token in bytes.
pub const TOKEN_BYTES: usize = 16;
/// Length in bytes of a probe's header: magic, kind, padding, length, token and sequence number.
pub const HEADER_BYTES: usize = 28;

const MAGIC: &[u8; 4] = b"MRp1";

/// A secret that two hosts share, by which they recognise each other's probes.
pub type ProbeToken = [u8; TOKEN_BYTES];

/// The kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// A question, which is as long as the packets whose passage it tests.
    Ask,
    /// An answer, which consists of the header only.
    Answer,
}

/// The header of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbePacket {
    /// Whether the probe is a question or an answer.
    pub kind: ProbeKind,
    /// The token of the two hosts.
    pub token: ProbeToken,
    /// Sequence number of the question, which the answer repeats.
    pub sequence: u32,
    /// Length of the question in bytes, which the answer repeats.
    pub bytes: u16,
}

impl ProbePacket {
    /// Returns a question that is padded to `bytes` bytes, but not shorter than [`HEADER_BYTES`].
    pub fn ask(token: ProbeToken, sequence: u32, bytes: u16) -> Vec<u8> {
        let bytes = bytes.max(HEADER_BYTES as u16);
        let mut datagram = Self { kind: ProbeKind::Ask, token, sequence, bytes }.header().to_vec();
        // The padding makes the question as long as the packets whose passage it tests.
        datagram.resize(usize::from(bytes), 0);
        datagram
    }

    /// Returns the answer to this question, which has the header only.
    pub fn answer(self) -> [u8; HEADER_BYTES] {
        Self { kind: ProbeKind::Answer, ..self }.header()
    }

    fn header(self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let kind = if self.kind == ProbeKind::Ask { 1 } else { 2 };
        let parts: [&[u8]; 5] =
            [MAGIC, &[kind, 0], &self.bytes.to_be_bytes(), &self.token, &self.sequence.to_be_bytes()];
        let bytes = parts.into_iter().flatten();
        header.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        header
    }

    /// Parses a datagram. `None` means that it is not a probe, or a question whose length differs from the stated one.
    pub fn read(datagram: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER_BYTES] = datagram.first_chunk()?;
        let (magic, rest) = header.split_first_chunk::<4>()?;
        let ([kind, 0], rest) = rest.split_first_chunk::<2>()? else { return None };
        let (bytes, rest) = rest.split_first_chunk::<2>()?;
        let (token, rest) = rest.split_first_chunk::<TOKEN_BYTES>()?;
        let bytes = u16::from_be_bytes(*bytes);
        let kind = match kind {
            // A question that was cut or padded on the path must not count as arrived.
            1 if usize::from(bytes) == datagram.len() => ProbeKind::Ask,
            2 => ProbeKind::Answer,
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
    fn probe_is_answered() {
        let datagram = ProbePacket::ask([7; 16], 9, 1400);
        assert_eq!(datagram.len(), 1400);
        let ask = ProbePacket::read(&datagram).unwrap();
        assert_eq!(ask, ProbePacket { kind: ProbeKind::Ask, token: [7; 16], sequence: 9, bytes: 1400 });
        assert_eq!(ProbePacket::read(&ask.answer()), Some(ProbePacket { kind: ProbeKind::Answer, ..ask }));
        assert_eq!(ProbePacket::ask([7; 16], 9, 1).len(), HEADER_BYTES, "never shorter than its answer");
    }

    #[test]
    fn malformed_probe_is_ignored() {
        let datagram = ProbePacket::ask([7; 16], 9, 64);
        assert_eq!(ProbePacket::read(&datagram[..63]), None, "cut off");
        assert_eq!(ProbePacket::read(&datagram[..HEADER_BYTES - 1]), None);
        for at in [0, 4, 5, 6] {
            let mut other = datagram.clone();
            other[at] ^= 4;
            assert_eq!(ProbePacket::read(&other), None, "byte {at}");
        }
    }
}
