//! Scenarios with stream data that is sent twice, the second time with different bytes.

use anyhow::{Result, bail};
use bytes::Bytes;
use millrace_moq::{ObjectDatagram, Parameters, Status, data::encode_object_header, message::Subscribe};
use millrace_quic::frame;

use super::{
    MOMENT, ScenarioAttack,
    requests::{publish, subgroup, track},
};
use crate::hostile::peer::{HostilePeer, StreamKind};

/// Number of groups for each kind of overlap. The first groups arrive before the relay's fast path is ready.
const GROUPS: u64 = 6;
/// Payload sizes of the objects in a stream: in the first version of the data (`LONG`) and in the second (`SHORT`).
const LONG: usize = 1000;
const SHORT: usize = 51;
const DATAGRAMS: u64 = 50;
/// Largest number of stream bytes in each packet that follows the overlapping packets.
const PIECE: usize = 300;

/// Ways in which a stream contains two versions of the same bytes.
#[derive(Clone, Copy, Debug)]
enum Overlap {
    InPacket,
    InTwoPackets,
    FromBehind,
    OverHole,
    OverTwoHoles,
    BehindManyFrames,
    Beginning,
    BehindEnd,
    EndBefore,
    BehindReset,
    Hidden,
}

const ALL: [Overlap; 11] = [
    Overlap::InPacket,
    Overlap::InTwoPackets,
    Overlap::FromBehind,
    Overlap::OverHole,
    Overlap::OverTwoHoles,
    Overlap::BehindManyFrames,
    Overlap::Beginning,
    Overlap::BehindEnd,
    Overlap::EndBefore,
    Overlap::BehindReset,
    Overlap::Hidden,
];

/// Returns encoded objects with payloads of `len` bytes. No payload could be parsed as the start of an object.
fn objects(len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for id in 1.. {
        encode_object_header(Some(id - 1), id, Some(&[]), len as u64, Status::Normal, &mut bytes);
        bytes.resize(bytes.len() + len, 0xff);
        if bytes.len() > 2 * LONG {
            break;
        }
    }
    bytes
}

impl Overlap {
    /// Returns the frames of packets with both versions (`x` and `y`) of stream `id` from offset `at` on.
    fn packets(self, id: u64, at: u64, x: &[u8], y: &[u8]) -> Vec<Vec<u8>> {
        let frames = |parts: &[(usize, &[u8], bool)]| {
            let mut out = Vec::new();
            for (from, bytes, fin) in parts {
                frame::write_stream(id, at + *from as u64, bytes, *fin, &mut out);
            }
            out
        };
        match self {
            Self::InPacket => vec![frames(&[(0, &x[..53], false), (0, &y[..54], false)])],
            Self::InTwoPackets | Self::Hidden => {
                vec![frames(&[(0, &x[..53], false)]), frames(&[(0, &y[..54], false)])]
            }
            Self::FromBehind => vec![frames(&[(0, &x[..100], false)]), frames(&[(50, &y[50..200], false)])],
            Self::OverHole => vec![frames(&[(100, &y[100..150], false)]), frames(&[(0, &x[..200], false)])],
            Self::OverTwoHoles => vec![
                frames(&[(60, &y[60..80], false)]),
                frames(&[(100, &y[100..120], false)]),
                frames(&[(0, &x[..200], false)]),
            ],
            Self::BehindManyFrames => {
                let mut many = vec![(0, &x[..1], false); 8];
                many.push((1, &y[1..100], false));
                vec![frames(&many), frames(&[(1, &x[1..200], false)])]
            }
            Self::Beginning => vec![frames(&[(60, &y[60..120], false)]), frames(&[(0, &x[..200], false)])],
            Self::BehindEnd => {
                vec![frames(&[(0, &y[..SHORT + 3], true)]), frames(&[(SHORT + 3, &x[SHORT + 3..200], false)])]
            }
            Self::EndBefore => vec![frames(&[(0, &y[..200], false)]), frames(&[(SHORT + 3, &[], true)])],
            Self::BehindReset => {
                let mut reset = frames(&[(0, &x[..100], false)]);
                frame::write_reset_stream(id, 0, at + 100, &mut reset);
                vec![reset, frames(&[(0, &y[..100], false)]), frames(&[(100, &x[100..200], false)])]
            }
        }
    }
}

/// Publishes one group with an overlap, and continues it with the second version.
fn publish_group(publisher: &mut HostilePeer, alias: u64, group: u64, overlap: Overlap) -> Result<()> {
    let mut front = subgroup(alias, group);
    encode_object_header(None, 0, Some(&[]), 10, Status::Normal, &mut front);
    front.resize(front.len() + 10, 0xff);
    let [mut x, mut y] = [objects(LONG), objects(SHORT)];
    let id = publisher.open(StreamKind::Data, &[], false)?;
    if matches!(overlap, Overlap::Beginning) {
        [&mut x, &mut y].into_iter().for_each(|bytes| *bytes = [&*front, bytes].concat());
    } else {
        publisher.write(id, &front, false)?;
        publisher.settle()?;
    }
    let at = publisher.claim(id, y.len() as u64);
    let mut packets = overlap.packets(id, at, &x, &y);
    if matches!(overlap, Overlap::Hidden) {
        // Send the second version first, in a datagram that the fast path does not process. The fast path sees the
        // first version later.
        packets.pop().into_iter().try_for_each(|packet| publisher.send_hidden(packet))?;
    }
    for packet in packets {
        publisher.send(packet, true)?;
        publisher.settle()?;
    }
    for (piece, offset) in y[54..].chunks(PIECE).zip((54..).step_by(PIECE)) {
        let mut frames = Vec::new();
        frame::write_stream(id, at + offset, piece, false, &mut frames);
        publisher.send(frames, true)?;
    }
    publisher.settle()
}

/// Publishes datagrams, each object twice with different payloads.
fn publish_datagrams(publisher: &mut HostilePeer, alias: u64, group: u64) -> Result<()> {
    for object in 0..DATAGRAMS {
        for payload in [&b"first"[..], b"and another one"] {
            let datagram = ObjectDatagram {
                alias,
                group,
                object,
                priority: None,
                end_of_group: false,
                properties: Bytes::new(),
                status: None,
                payload: Bytes::from_static(payload),
            };
            let mut bytes = Vec::new();
            datagram.encode(&mut bytes);
            publisher.datagram(&bytes)?;
        }
    }
    publisher.settle()
}

/// Publishes tracks with each kind of overlap, and one subscriber receives them all. The relay may close a publisher
/// that sends overlaps, but must not close the subscriber.
pub fn overlap(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut subscriber = attack.peer()?;
    for (number, overlap) in (0..).zip(ALL) {
        let mut publisher = attack.peer()?;
        let track = track(&attack.namespace, number)?;
        let request = publisher.request(publish(0, track.clone()))?;
        publisher.answer(request)?;
        let parameters = Parameters::default();
        let request = subscriber.request(Subscribe { request_id: number * 2, track, parameters })?;
        subscriber.answer(request)?;
        for group in 0..GROUPS {
            // The relay may have closed the publisher: some overlaps are malformed, or contradict the end of a stream.
            if publish_group(&mut publisher, 0, group, overlap).is_err() || publisher.closed.is_some() {
                break;
            }
            subscriber.pump(MOMENT / 10, |_| false);
        }
        let _ = publish_datagrams(&mut publisher, 0, GROUPS); // fails if the relay has closed the publisher
        subscriber.pump(MOMENT, |_| false);
        if let Some(reason) = &subscriber.closed {
            bail!("the relay closed the subscriber after the overlap {overlap:?}: {reason}");
        }
        attack.close(publisher)?;
    }
    attack.close(subscriber)
}
