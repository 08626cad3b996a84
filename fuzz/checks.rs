//! Checks of parsers of untrusted input with arbitrary bytes. Fuzz targets call them, and an ordinary test replays past
//! crashes.
//!
//! No parser may panic or read past the end of its input. A parsed value, encoded again, must parse to the same value.
//! An incremental parser must give the same result for every split of its input.
#![allow(dead_code, reason = "each target uses one of these")]

use std::{ops::RangeInclusive, time::Duration};

use bytes::{Bytes, BytesMut};
use millrace_fanout::{
    message::{REQUEST_BYTES, ReceiverRequest, RelayAnswer},
    reception::Reception,
    rtcp,
    rtp::DatagramKind,
};
use millrace_graft_proto::{
    carry::{
        WINDOW_MAX,
        frame::{CarryFrame as Carried, Decoder},
        ledger::{IncomingBytes, OutgoingBytes},
    },
    evidence,
    judge::{Wants, judge},
    message::{AgreementMessage as Said, OfferSide, Statement},
    probe::{ProbeKind, ProbePacket},
    select::{features::Features, model::Model},
};
use millrace_messages::{
    parts::{Assembly, HEADER_BYTES as PIECE_HEADER, MessageDatagram as Piece},
    turns::Turns,
};
use millrace_moq::{
    DecodeError, Draft, FetchEncoder, FetchItem, GroupOrder, Location, Message, ObjectParser, StreamHeader,
    data::{FetchParser, ObjectDatagram, Status, encode_fetch_header, encode_object_header},
    loc,
};
use millrace_quic::{
    ack::NumberMap,
    capsule::{Capsules, Closed, MAX_REASON, MalformedCapsule},
    frame::{self, Frame, Walker},
    params::{PeerParams, cap_initial_max_data},
    varint,
    webtransport::{Begins, Binding},
};

type Check = fn(&[u8]);

/// The checks by name. A check, its fuzz target and its directory of fixtures have the same name.
pub const ALL: [(&str, Check); 14] = [
    ("fanout_datagram", fanout_datagram),
    ("graft_carry", graft_carry),
    ("graft_message", graft_message),
    ("graft_select", graft_select),
    ("graft_parts", graft_parts),
    ("moq_message", moq_message),
    ("moq_loc", moq_loc),
    ("moq_object", moq_object),
    ("moq_fetch", moq_fetch),
    ("moq_datagram", moq_datagram),
    ("quic_frames", quic_frames),
    ("quic_ack", quic_ack),
    ("transport_params", transport_params),
    ("web_session", web_session),
];

/// Checks datagrams that arrive at a fan-out stream's port or at a receiver. Parsed requests and answers round-trip, an
/// answer is shorter than its request, and each reception report is valid RTCP.
pub fn fanout_datagram(data: &[u8]) {
    if let Some(request) = ReceiverRequest::read(data) {
        assert!(data.len() >= REQUEST_BYTES && ReceiverRequest::is_meant(data));
        assert_eq!(ReceiverRequest::read(&request.encode()), Some(request));
    }
    if let Some(answer) = RelayAnswer::read(data) {
        let bytes = answer.encode();
        assert!(bytes.len() < REQUEST_BYTES);
        assert_eq!(RelayAnswer::read(&bytes), Some(answer));
    }
    let mut blocks = 0;
    if rtcp::walk(data, |_| blocks += 1).is_some() {
        assert!(24 * blocks <= data.len());
    }
    // Reads the input as datagrams of one receiver. The byte before each datagram is its length, and also the time
    // since the previous one in ms.
    let mut reception = Reception::default();
    let mut rest = data;
    let mut now = Duration::ZERO;
    while let Some((len, more)) = rest.split_first() {
        let (datagram, more) = more.split_at(usize::from(*len).min(more.len()));
        rest = more;
        now += Duration::from_millis(u64::from(*len));
        if let Some(packet) = DatagramKind::read(datagram) {
            reception.packet(packet, now);
        }
        if let Some(report) = reception.report(1, now) {
            let mut of = 0;
            assert_eq!(rtcp::walk(&report, |_| of += 1), Some(2));
            assert_eq!(of, 1);
        }
    }
}

/// Checks the stream of a tunnelled connection. The frames that are parsed do not depend on how the stream is split. No
/// frame makes the buffer of bytes that the peer has not confirmed, or that of received bytes, exceed its limit.
pub fn graft_carry(data: &[u8]) {
    let Some((size, stream)) = data.split_first() else { return };
    let whole = carried(stream, stream.len().max(1));
    let pieces = carried(stream, usize::from(*size).max(1));
    assert_eq!(whole, pieces);
    let mut out = OutgoingBytes::default();
    let mut inn = IncomingBytes::default();
    out.take(vec![0; 1000].into());
    out.end();
    while out.give(300).is_some() {}
    for frame in whole.0 {
        let done = match frame {
            Carried::Data(bytes) => inn.receive(bytes),
            Carried::End => inn.end(),
            Carried::Confirm { delivered } => out.confirm(delivered),
            Carried::Accepted { received } | Carried::Resume { received, .. } => out.rewind(received),
            _ => Ok(()),
        };
        if done.is_err() {
            break;
        }
        assert!(out.unconfirmed() <= 1000 && inn.waiting() <= WINDOW_MAX);
    }
}

/// Decodes frames from pieces of `size` bytes, and joins consecutive data frames. Returns the frames, and whether the
/// whole stream was valid.
fn carried(mut stream: &[u8], size: usize) -> (Vec<Carried>, bool) {
    let mut decoder = Decoder::default();
    let mut frames = Vec::<Carried>::new();
    while !stream.is_empty() {
        let (piece, rest) = stream.split_at(size.min(stream.len()));
        stream = rest;
        decoder.push(Bytes::copy_from_slice(piece));
        loop {
            match (decoder.frame(), frames.last_mut()) {
                (Err(_), _) => return (frames, false),
                (Ok(None), _) => break,
                (Ok(Some(Carried::Data(more))), Some(Carried::Data(before))) => {
                    *before = [&before[..], &more].concat().into();
                }
                (Ok(Some(frame)), _) => frames.push(frame),
            }
        }
    }
    (frames, true)
}

/// Maps a byte to a draft of MoQ Transport.
fn draft(byte: u8) -> Draft {
    Draft::ALL[usize::from(byte) % Draft::ALL.len()]
}

/// Checks a message with which two hosts negotiate grafts, which are functions that change a connection's transport. If
/// both hosts have the same two offers, either both accept or both refuse.
pub fn graft_message(data: &[u8]) {
    if let Some(probe) = ProbePacket::read(data).filter(|probe| probe.kind == ProbeKind::Ask) {
        assert!(probe.answer().len() <= data.len(), "an answer is no longer than what it answers");
    }
    let Ok(message) = Said::decode(data) else { return };
    let written = message.encode().expect("no longer than what it was read from");
    assert_eq!(Said::decode(&written).as_ref(), Ok(&message));
    let (Said::Offer(theirs) | Said::Accept(theirs)) = message else { return };
    let own = opposite(&theirs);
    let wants = Wants::default();
    let here = judge(&own, &wants, &theirs);
    let there = judge(&theirs, &wants, &own);
    assert_eq!(here.is_ok(), there.is_ok(), "{here:?} {there:?}");
    assert!(here.iter().flat_map(|terms| &terms.rules).all(|(at, _)| *at < own.rules.len()));
    for (mine, other) in [(&own, &*theirs), (&*theirs, &own)] {
        let compared = evidence::compare(&mine.connections, &other.connections);
        assert!(compared.count() <= mine.connections.len());
    }
}

fn opposite(statement: &Statement) -> Statement {
    let mut other = statement.clone();
    (other.local, other.remote) = (statement.remote, statement.local);
    let flip = |side: &mut OfferSide| {
        *side = if *side == OfferSide::Client { OfferSide::Server } else { OfferSide::Client }
    };
    other.rules.iter_mut().for_each(|rule| flip(&mut rule.side));
    other.connections.iter_mut().for_each(|connection| flip(&mut connection.side));
    other
}

/// Checks model files, by which a host chooses between transports. A parsed model round-trips, and ranks the transports
/// of the file for every set of network features.
pub fn graft_select(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let features: Features = text.lines().next().unwrap_or_default().parse().unwrap_or_default();
    if let Ok(model) = Model::parse(text) {
        assert_eq!(Model::parse(&model.text().expect("it was read")).expect("it was written"), model);
        let rank = model
            .decide(&features, |candidate| model.candidates.first().is_some_and(|first| first == candidate))
            .rank;
        assert!(rank.is_some(), "every leaf ranks every candidate");
    }
}

/// Checks consecutive MoQ control messages. The first byte selects the draft.
pub fn moq_message(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    let draft = draft(choice);
    let mut input = BytesMut::from(data);
    while let Ok(Some(message)) = Message::decode(draft, &mut input) {
        let mut written = Vec::new();
        message.encode(draft, &mut written).expect("no longer than what it was read from");
        let mut again = BytesMut::from(&written[..]);
        assert_eq!(Message::decode(draft, &mut again), Ok(Some(message)));
        assert!(again.is_empty());
    }
}

/// Checks LOC (Low Overhead Media Container) payloads: a parsed media frame, encoded again, parses to the same frame.
pub fn moq_loc(data: &[u8]) {
    if let Ok(object) = loc::LocSample::parse(data) {
        assert_ne!(object.timescale, 0);
        let written = object.encode().expect("what was read fits");
        assert_eq!(loc::LocSample::parse(&written), Ok(object));
    }
}

/// Checks a subgroup stream. The first byte determines how the stream is split into pieces.
pub fn moq_object(data: &[u8]) {
    let Some((&cut, mut stream)) = data.split_first() else { return };
    let whole = stream;
    let Ok(Some(header)) = StreamHeader::decode(&mut stream) else { return };
    if let StreamHeader::Subgroup(header) = header {
        let mut written = Vec::new();
        header.encode(&mut written);
        assert_eq!(StreamHeader::decode(&mut &written[..]), Ok(Some(StreamHeader::Subgroup(header))));

        let offset = (whole.len() - stream.len()) as u64;
        let parse = |pieces: &mut dyn Iterator<Item = &[u8]>| {
            let mut parser = ObjectParser::new(&header, offset);
            let outcome = collect(pieces, |piece| parser.next(piece));
            (outcome, parser.offset(), parser.at_boundary())
        };
        let (outcome, end, boundary) = parse(&mut [stream].into_iter());
        let (in_pieces, end_in_pieces, boundary_in_pieces) = parse(&mut pieces(stream, cut));
        assert_eq!(in_pieces, outcome);
        let (objects, error) = outcome;
        // A malformed object header ends the session, so the parser's offset after it does not matter.
        if error.is_none() {
            assert_eq!((end, boundary), (end_in_pieces, boundary_in_pieces));
            assert_eq!(end, whole.len() as u64);
            assert!(!boundary || objects.last().is_none_or(|last| last.end() == end));
        }
        assert!(objects.windows(2).all(|pair| pair[0].end() == pair[1].start), "no byte between objects");
        let mut previous = None;
        for object in objects {
            let start = usize::try_from(object.start).expect("inside the stream");
            let mut written = Vec::new();
            let properties = header.properties.then_some(&object.properties[..]);
            let status = object.status.unwrap_or(Status::Normal);
            encode_object_header(previous, object.id, properties, object.payload_len, status, &mut written);
            // The peer may have encoded integers in longer forms than necessary, so the new encoding is not longer.
            assert!(start + written.len() <= object.payload as usize);
            previous = Some(object.id);
        }
    }
}

/// Checks a FETCH response. The first byte selects the draft. The lowest bit of the second byte is the group order, and
/// its other bits determine how the response is split.
pub fn moq_fetch(data: &[u8]) {
    let Some((&[spoken, choice], stream)) = data.split_first_chunk() else { return };
    let draft = draft(spoken);
    let order = if choice & 1 == 0 { GroupOrder::Ascending } else { GroupOrder::Descending };
    let parse = |order, pieces: &mut dyn Iterator<Item = &[u8]>| {
        let mut parser = FetchParser::new(draft, order, 0);
        let outcome = collect(pieces, |piece| parser.next(piece));
        (outcome, parser.at_boundary())
    };
    let (outcome, _) = parse(order, &mut [stream].into_iter());
    assert_eq!(parse(order, &mut pieces(stream, choice >> 1)).0, outcome);

    let mut header = Vec::new();
    encode_fetch_header(u64::from(choice), &mut header);
    let fetch = StreamHeader::Fetch { request_id: u64::from(choice) };
    assert_eq!(StreamHeader::decode(&mut &header[..]), Ok(Some(fetch)));

    // Encode only objects and gaps that a relay would send: locations in order, and payloads of at most 64 KiB.
    let in_order = |before: Option<Location>, now: Location| match before {
        None => true,
        Some(before) if before.group == now.group => before.object < now.object,
        Some(before) => (before.group < now.group) == (order == GroupOrder::Ascending),
    };
    let mut before = None;
    let mut items = Vec::new();
    let mut written = Vec::new();
    let mut encoder = FetchEncoder::new(draft, order);
    for item in outcome.0.into_iter().map(|start| start.item) {
        let (location, payload_len) = match &item {
            FetchItem::Object(object) => (object.location, object.payload_len),
            FetchItem::Range { last, .. } => (*last, 0),
        };
        if !in_order(before, location) || payload_len > 1 << 16 {
            break;
        }
        before = Some(location);
        encoder.encode(&item, &mut written);
        written.resize(written.len() + payload_len as usize, 0);
        items.push(item);
    }
    let ((again, error), boundary) = parse(order, &mut [&written[..]].into_iter());
    assert_eq!((again.into_iter().map(|start| start.item).collect::<Vec<_>>(), error), (items, None));
    assert!(boundary);
}

/// Checks an object datagram: a parsed one round-trips, and its new encoding is not longer.
pub fn moq_datagram(data: &[u8]) {
    let Ok(Some(datagram)) = ObjectDatagram::decode(Bytes::copy_from_slice(data)) else { return };
    let mut written = Vec::new();
    datagram.encode(&mut written);
    assert!(written.len() <= data.len());
    assert_eq!(ObjectDatagram::decode(written.into()), Ok(Some(datagram)));
}

/// Checks the frames of a decrypted QUIC packet: they are contiguous, and a frame that is written again parses to the
/// same frame.
pub fn quic_frames(data: &[u8]) {
    let mut end = 0;
    for item in Walker::new(data) {
        let Ok((range, frame)) = item else { return };
        assert_eq!(range.start, end, "no byte between frames");
        assert!(range.end > range.start);
        end = range.end;

        let mut written = Vec::new();
        match frame {
            Frame::Stream(stream) => {
                frame::write_stream(stream.id, stream.offset, stream.data, stream.fin, &mut written);
            }
            Frame::ResetStream { id, code, final_size } => {
                frame::write_reset_stream(id, code, final_size, &mut written);
            }
            Frame::Datagram(data) => frame::write_datagram(data, &mut written),
            Frame::MaxData(limit) => frame::write_max_data(limit, &mut written),
            _ => continue,
        }
        assert_eq!(Walker::new(&written).next(), Some(Ok((0..written.len(), frame))));
    }
    assert_eq!(end, data.len());
}

/// Checks the translation of a received ACK frame. The first byte determines how the sender's packet numbers map to
/// those on the wire.
pub fn quic_ack(data: &[u8]) {
    let Some((&spread, payload)) = data.split_first() else { return };
    let mut map = NumberMap::default();
    let wire = |number: u64| number * (1 + u64::from(spread % 4)) + u64::from(spread >> 4);
    (0..200).for_each(|number| map.push(wire(number), None));

    for (range, ack) in Walker::new(payload).map_while(Result::ok).filter_map(|(range, frame)| match frame {
        Frame::Ack(ack) => Some((range, ack)),
        _ => None,
    }) {
        let on_wire: Vec<RangeInclusive<u64>> = ack.ranges().collect();
        assert!(on_wire.iter().all(|range| range.start() <= range.end()));
        assert!(on_wire.windows(2).all(|pair| *pair[1].end() + 1 < *pair[0].start()));

        let mut told = Vec::new();
        ack.translate(&map, &mut told);
        let is_told = |number| told.iter().any(|range| range.contains(&number));
        let was_acked = |number| on_wire.iter().any(|range| range.contains(&wire(number)));
        assert!((0..200).all(|number| is_told(number) == was_acked(number)));
        assert!(told.iter().all(|range| *range.end() < 200), "a number that was never sent");

        for delay in [0, ack.delay, varint::MAX].into_iter().filter(|_| !told.is_empty()) {
            let mut written = Vec::new();
            ack.rewrite(range.len(), &told, delay, &mut written);
            assert!(written.len() <= range.len(), "longer than the original");
            let Some(Ok((_, Frame::Ack(again)))) = Walker::new(&written).next() else {
                panic!("an ACK frame was written");
            };
            assert_eq!(again.ranges().collect::<Vec<_>>(), told);
            assert!(again.delay <= delay && (delay > ack.delay || again.delay == delay));
        }
    }
}

/// Checks the capping of `initial_max_data` in transport parameters. The first two bytes are the limit.
pub fn transport_params(data: &[u8]) {
    let Some((limit, encoded)) = data.split_first_chunk() else { return };
    let limit = u64::from(u16::from_be_bytes(*limit));
    let Ok(capped) = cap_initial_max_data(encoded, limit) else {
        assert!(PeerParams::parse(encoded).is_err());
        return;
    };
    assert!(capped.len() <= encoded.len());
    if let Ok(params) = PeerParams::parse(encoded) {
        let initial_max_data = params.initial_max_data.min(limit);
        assert_eq!(PeerParams::parse(&capped), Ok(PeerParams { initial_max_data, ..params }));
    }
}

/// Checks a client's input in a WebTransport session. The lowest two bits of the first byte select capsules, the start
/// of a stream of either kind, or a datagram.
pub fn web_session(data: &[u8]) {
    let Some((&choice, bytes)) = data.split_first() else { return };
    match choice % 4 {
        0 => capsules(bytes, choice >> 2),
        1 => front(bytes, Binding::begins_uni, |binding| binding.uni().to_vec()),
        2 => front(bytes, Binding::begins_bidi, |binding| binding.bidi().to_vec()),
        _ => datagram_and_codes(bytes),
    }
}

/// Checks the capsules on the stream that requested the WebTransport session.
fn capsules(stream: &[u8], cut: u8) {
    let parse = |pieces: &mut dyn Iterator<Item = &[u8]>| -> (Result<Option<Closed>, MalformedCapsule>, _) {
        let mut capsules = Capsules::default();
        for mut piece in pieces {
            let outcome = capsules.next(&mut piece);
            assert!(capsules.held() <= 4 + MAX_REASON);
            if !matches!(outcome, Ok(None)) {
                return (outcome, None);
            }
            assert!(piece.is_empty());
        }
        (Ok(None), Some(capsules.finish()))
    };
    let outcome = parse(&mut [stream].into_iter());
    assert_eq!(parse(&mut pieces(stream, cut)), outcome);
    if let (Ok(Some(closed)), _) = outcome {
        let mut written = Vec::new();
        closed.encode(&mut written);
        assert_eq!(parse(&mut [&written[..]].into_iter()).0, Ok(Some(closed)));
    }
}

/// Checks the prefix that assigns a stream to a WebTransport session. The first eight bytes are the session's ID.
fn front(bytes: &[u8], begins: fn(Binding, &[u8]) -> Begins, preamble: fn(Binding) -> Vec<u8>) {
    let Some((id, bytes)) = bytes.split_first_chunk() else { return };
    let binding = Binding::Session(u64::from_be_bytes(*id) & varint::MAX & !3);
    // Once enough bytes have arrived to recognise the prefix, further bytes must not change the result.
    let known = (0..=bytes.len()).map(|end| begins(binding, &bytes[..end]));
    let mut known = known.skip_while(|begins| *begins == Begins::Unknown);
    let first = known.next().unwrap_or(Begins::Unknown);
    assert!(known.all(|later| later == first));
    if let Begins::Ours(len) = first {
        assert!(preamble(binding).len() <= len && len <= bytes.len().min(16));
    }
    let own = preamble(binding);
    assert_eq!(begins(binding, &[&own[..], bytes].concat()), Begins::Ours(own.len()));
    assert_eq!(begins(Binding::Bare, bytes), Begins::Ours(0));
}

fn datagram_and_codes(bytes: &[u8]) {
    let Some((id, datagram)) = bytes.split_first_chunk() else { return };
    let number = u64::from_be_bytes(*id) & varint::MAX;
    let binding = Binding::Session(number & !3);
    assert!(binding.strip(datagram).is_none_or(|len| len <= datagram.len().min(8)));
    let own = binding.datagram();
    assert_eq!(binding.strip(&[&own[..], datagram].concat()), Some(own.len()));

    assert!(binding.from_wire(number) <= u64::from(u32::MAX));
    assert!(binding.to_wire(number) <= varint::MAX);
    assert_eq!(binding.from_wire(binding.to_wire(number)), number.min(u64::from(u32::MAX)));
}

/// Feeds `pieces` to a parser. Returns the parsed items up to the first error or the end of the input, and the error if
/// there was one.
fn collect<'a, T>(
    pieces: &mut dyn Iterator<Item = &'a [u8]>,
    mut next: impl FnMut(&mut &'a [u8]) -> Result<Option<T>, DecodeError>,
) -> (Vec<T>, Option<DecodeError>) {
    let mut found = Vec::new();
    for mut piece in pieces {
        loop {
            match next(&mut piece) {
                Ok(Some(item)) => found.push(item),
                Ok(None) => break,
                Err(error) => return (found, Some(error)),
            }
        }
        assert!(piece.is_empty(), "a piece is left over");
    }
    (found, None)
}

/// Splits `bytes` into pieces of 1 to 8 bytes, whose lengths follow from `seed`.
fn pieces(mut bytes: &[u8], seed: u8) -> impl Iterator<Item = &[u8]> {
    let mut state = seed;
    std::iter::from_fn(move || {
        state = state.wrapping_mul(29).wrapping_add(41);
        let len = usize::from(1 + (state >> 5)).min(bytes.len());
        let (piece, rest) = bytes.split_at(len);
        bytes = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Checks the reassembly of messages from arbitrary datagrams. A parsed datagram is encoded to the same bytes. The
/// input's length bounds the numbers of delivered and of abandoned messages.
pub fn graft_parts(data: &[u8]) {
    let mut assembly = Assembly::default();
    let mut turns = Turns::default();
    let mut taken = 0;
    let mut rest = data;
    while let Some((&length, behind)) = rest.split_first() {
        let (datagram, behind) = behind.split_at(usize::from(length).min(behind.len()));
        rest = behind;
        let Some(piece) = Piece::read(datagram) else { continue };
        assert_eq!(piece.write(), datagram);
        if let Piece::Part(part) = piece {
            assert!(part.part < part.parts && part.bytes.len() + PIECE_HEADER == datagram.len());
            let message = part.message;
            let whole = assembly.take(part);
            assert!(whole.as_ref().is_none_or(|whole| whole.len() <= data.len()));
            whole.into_iter().for_each(|whole| turns.put(message, whole));
            taken += std::iter::from_fn(|| turns.take()).count();
        }
    }
    while turns.skip() {
        taken += std::iter::from_fn(|| turns.take()).count();
    }
    assert!(taken <= data.len());
    assembly.end();
    assert!(assembly.given_up() <= data.len() as u64);
}
