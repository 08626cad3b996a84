//! Scenarios with HTTP/3: on connections without a WebTransport session, and on streams that are not part of a
//! connection's WebTransport session.

use anyhow::Result;
use millrace_quic::varint;

use super::{MOMENT, ScenarioAttack};
use crate::hostile::{
    params::ClientLimits,
    peer::{
        HostilePeer, PATIENCE, StreamKind,
        web::{DATA, HEADERS, front, request, unit},
    },
};

/// Number of connections at the same time.
const CONNECTIONS: usize = 50;
const STREAMS: u64 = 900;
const REQUESTS: usize = 200;
const DATAGRAMS: u64 = 2_000;
/// Size that exceeds the relay's limit for an HTTP/3 request, bytes.
const MUCH: usize = 100_000;
/// Bytes that are sent in one frame or capsule. A relay may buffer far fewer of them.
const WITHOUT_END: usize = 2 << 20;
/// Type of the capsule that closes a session (WT_CLOSE_SESSION).
const CLOSE: u64 = 0x2843;
/// A reserved type of frames, capsules and streams, which receivers must ignore.
const NOTHING: u64 = 0x21;

/// Opens an HTTP/3 connection without a request.
fn begun(attack: &ScenarioAttack<'_>) -> Result<HostilePeer> {
    let mut peer = HostilePeer::handshake(attack.target, ClientLimits::default())?;
    peer.open_control()?;
    Ok(peer)
}

/// Opens a WebTransport session and sends SETUP.
fn session(attack: &ScenarioAttack<'_>) -> Result<HostilePeer> {
    attack.peer()
}

/// Calls a function that may make the relay close the connection. Waits until the relay has received everything or has
/// closed the connection.
fn dare(
    attack: &mut ScenarioAttack<'_>,
    mut peer: HostilePeer,
    act: impl FnOnce(&mut HostilePeer) -> Result<()>,
) {
    let _ = act(&mut peer).and_then(|()| peer.settle());
    attack.vanish(peer);
}

pub fn half_requests(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let whole = request(attack.target)?;
    let half = &whole[..whole.len() / 2];
    let mut peers = Vec::new();
    for number in 0..CONNECTIONS {
        let mut peer = begun(attack)?;
        match number % 3 {
            0 => {} // a connection without a request
            1 => drop(peer.open_bare(StreamKind::Request, half, false)?),
            _ => drop(peer.open_bare(StreamKind::Request, &front(HEADERS, 10_000), false)?),
        }
        peers.push(peer);
    }
    std::thread::sleep(MOMENT);
    // The last connection waits until the relay closes it.
    if let Some(last) = peers.last_mut() {
        last.pump(PATIENCE, |peer| peer.closed.is_some());
    }
    peers.into_iter().for_each(|peer| attack.vanish(peer));
    // Send endless unknown frames before a request.
    let peer = begun(attack)?;
    dare(attack, peer, |peer| {
        let id = peer.open_bare(StreamKind::Request, &unit(NOTHING, &[0; 1000]), false)?;
        for _ in 0..MUCH / 1000 {
            peer.write(id, &unit(NOTHING, &[0; 1000]), false)?;
        }
        Ok(())
    });
    Ok(())
}

/// Sends malformed or oversized field sections. Each starts with two zero bytes, which say that the dynamic table is
/// not used.
pub fn headers(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let fields = |bytes: &[u8]| [&[0, 0], bytes].concat();
    // In HPACK's Huffman code, `a` is 00011.
    let letters = |count: usize| {
        let bits = count * 5;
        let mut bytes = vec![0; bits.div_ceil(8)];
        let ones =
            (0..count).flat_map(|letter| [letter * 5 + 3, letter * 5 + 4]).chain(bits..bytes.len() * 8);
        ones.for_each(|at| bytes[at / 8] |= 0x80 >> (at % 8));
        bytes
    };
    let expanding = letters(24_000);
    // The section has the literal name `x` and a value of this length (RFC 9204, section 4.5.6; RFC 7541, section 5.1).
    let len = expanding.len() - 127;
    let mut expands = vec![0x21, b'x', 0xff, len as u8 | 0x80, (len >> 7) as u8];
    expands.extend_from_slice(&expanding);
    let sections = [
        fields(&[0xd7; 15_000]),                   // the field `:scheme: https`, 15,000 times
        fields(&[0x21, b'x', 0].repeat(4_000)),    // the field `x` with an empty value, 4,000 times
        fields(&expands),                          // a Huffman-coded value that is much longer when decoded
        fields(&[0x80, 0x10, 0x00, 0xff]),         // a field from the dynamic table
        fields(&[&[0xff; 12][..], &[0]].concat()), // a field beyond the static table
        fields(&[0x21, b'x', 0x7f, 0xff, 0xff, 0xff, 0x7f]), // a field whose value is missing
        vec![0xff; 3],
        vec![0; 60_000],
        vec![],
    ];
    for section in sections {
        let peer = begun(attack)?;
        dare(attack, peer, |peer| {
            peer.open_bare(StreamKind::Request, &unit(HEADERS, &section), true).map(drop)
        });
    }
    Ok(())
}

pub fn posts(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    // The static table has the fields :method POST, :scheme https, :path / and :authority.
    let post = unit(HEADERS, &[0, 0, 0xd4, 0xd7, 0xc1, 0xc0]);
    let body = |peer: &mut HostilePeer| {
        let id = peer.open_bare(StreamKind::Request, &post, false)?;
        peer.write(id, &front(DATA, varint::MAX), false)?;
        for _ in 0..WITHOUT_END / MUCH {
            peer.write(id, &[b'x'; MUCH], false)?;
        }
        Ok(())
    };
    let peer = begun(attack)?;
    dare(attack, peer, body);
    let peer = session(attack)?;
    dare(attack, peer, body);
    Ok(())
}

pub fn requests(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let again = request(attack.target)?;
    let peer = session(attack)?;
    dare(attack, peer, |peer| {
        for _ in 0..REQUESTS {
            peer.open_bare(StreamKind::Request, &again, false)?;
        }
        Ok(())
    });
    Ok(())
}

pub fn capsules(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    // These bytes follow the request on the stream of the request, which is the connection's first stream.
    let fronts = [
        [front(DATA, varint::MAX), front(NOTHING, varint::MAX)].concat(),
        front(NOTHING, varint::MAX),
        [front(DATA, varint::MAX), front(CLOSE, 1028)].concat(),
    ];
    for bytes in fronts {
        let peer = session(attack)?;
        dare(attack, peer, |peer| {
            peer.write(0, &bytes, false)?;
            for _ in 0..WITHOUT_END / MUCH {
                peer.write(0, &[b'x'; MUCH], false)?;
            }
            Ok(())
        });
    }
    // This capsule is too short to close the session. The DATA frames that follow are not part of it.
    let short = unit(DATA, &front(CLOSE, 0));
    // This capsule has the largest allowed length, and its last byte is missing.
    let waits = unit(DATA, &[front(CLOSE, 1028), vec![b'x'; 1027]].concat());
    for bytes in [short, waits, unit(DATA, &unit(CLOSE, &[0xff; 8])), front(DATA, 1 << 40)] {
        let peer = session(attack)?;
        dare(attack, peer, |peer| {
            peer.write(0, &bytes, false)?;
            for _ in 0..20 {
                peer.write(0, &unit(NOTHING, &[0; 60_000]), false)?;
            }
            Ok(())
        });
    }
    Ok(())
}

pub fn half_preambles(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peer = session(attack)?;
    for number in 0..STREAMS {
        let (uni, bidi): (&[u8], &[u8]) = match number % 3 {
            0 => (&[0x40], &[0x40]),
            1 => (&[0x40, 0x54], &[0x40, 0x41]),
            _ => (&[0x40, 0x54, 0xc0, 0, 0, 0, 0, 0, 0], &[0x40, 0x41, 0x80, 0, 0]),
        };
        peer.open_bare(StreamKind::Data, uni, false)?;
        peer.open_bare(StreamKind::Request, bidi, false)?;
    }
    peer.settle()?;
    attack.close(peer)
}

pub fn strays(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    for (kind, first) in [(StreamKind::Data, 0x54), (StreamKind::Request, 0x41)] {
        for number in [4, 44, varint::MAX - 3] {
            let peer = session(attack)?;
            dare(attack, peer, |peer| peer.open_bare(kind, &front(first, number), true).map(drop));
        }
        // Send WebTransport streams on a connection that has no WebTransport session and never gets one.
        let peer = begun(attack)?;
        dare(attack, peer, |peer| {
            (0..STREAMS / 10).try_for_each(|_| peer.open_bare(kind, &front(first, 0), false).map(drop))
        });
    }
    let mut peer = session(attack)?;
    let own = std::mem::take(&mut peer.binding);
    for number in 0..DATAGRAMS {
        let mut bytes = Vec::new();
        if number % 10 > 0 {
            varint::encode(number + 1, &mut bytes);
            bytes.resize(100, 0);
        }
        peer.datagram(&bytes)?;
    }
    peer.binding = own;
    peer.settle()?;
    attack.close(peer)
}

pub fn streams(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let peer = session(attack)?;
    dare(attack, peer, |peer| {
        for number in 0..STREAMS {
            let mut bytes = Vec::new();
            varint::encode(NOTHING + 0x1f * number, &mut bytes);
            bytes.resize(5_000, 0);
            peer.open_bare(StreamKind::Data, &bytes, false)?;
        }
        Ok(())
    });
    Ok(())
}
