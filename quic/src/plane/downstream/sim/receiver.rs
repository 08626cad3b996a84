//! The receiver at the end of the link.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use crate::{
    ack::EcnCounts,
    frame::{Frame, Walker},
    plane::types::AckRanges,
    ranges::Ranges,
};

use super::Codepoint;

/// The credit that the receiver gives: the number of bytes or streams by which its flow control limits exceed what it
/// has consumed.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverCredit {
    pub data: u64,
    pub stream_data: u64,
    pub streams: u64,
}

impl Default for ReceiverCredit {
    fn default() -> Self {
        Self { data: 1 << 24, stream_data: 1 << 20, streams: 1000 }
    }
}

#[derive(Default)]
pub struct ReceivedBytes {
    pub ranges: Ranges,
    pub data: Vec<u8>,
    pub fin: Option<u64>,
    pub fins: u32,
    pub reset: Option<(u64, u64)>,
    granted: u64,
    /// Time when the last missing byte of the stream arrived.
    pub complete: Option<Instant>,
    /// The times at which the stream's contiguous bytes from offset 0 grew, each with the number of these bytes. A
    /// reset ends the list, because the application gets no more bytes.
    pub progress: Vec<(Instant, u64)>,
}

impl ReceivedBytes {
    fn end(&self) -> u64 {
        self.ranges.iter().last().map_or(0, |range| range.end)
    }

    /// Returns the number of contiguous bytes received from offset 0.
    fn contiguous(&self) -> u64 {
        self.ranges.first().filter(|range| range.start == 0).map_or(0, |range| range.end)
    }

    pub fn is_complete(&self) -> bool {
        self.fin == Some(self.contiguous())
    }

    fn note_progress(&mut self, now: Instant) {
        let contiguous = self.contiguous();
        if self.reset.is_none() && self.progress.last().map_or(0, |(_, before)| *before) < contiguous {
            self.progress.push((now, contiguous));
        }
    }

    /// Returns the time at which all bytes before `offset` had arrived.
    pub fn had(&self, offset: u64) -> Option<Instant> {
        let at = self.progress.partition_point(|(_, contiguous)| *contiguous < offset);
        self.progress.get(at).map(|(at, _)| *at)
    }

    pub fn tag(&self) -> u64 {
        u64::from_be_bytes(self.data[..8].try_into().expect("8 bytes"))
    }
}

/// The reference receiver, which checks RFC 9000 as strictly as possible.
pub struct ReferenceReceiver {
    credit: ReceiverCredit,
    /// True if the receiver never raises its limits.
    pub is_stingy: bool,
    pub streams: BTreeMap<u64, ReceivedBytes>,
    pub datagrams: Vec<Vec<u8>>,
    granted_data: u64,
    granted_streams: u64,
    ecn: EcnCounts,
    pub(super) seen: BTreeSet<u64>,
    pub(super) unacked: u32,
    pub(super) ack_at: Option<Instant>,
    /// Error codes of STOP_SENDING frames, by stream ID. The receiver repeats them until the sender resets the stream.
    pub stop: HashMap<u64, u64>,
}

#[derive(Clone)]
pub struct Feedback {
    pub ack: AckRanges,
    pub max_data: u64,
    pub max_streams: u64,
    pub max_stream_data: Vec<(u64, u64)>,
    pub stop: Vec<(u64, u64)>,
}

impl ReferenceReceiver {
    pub fn new(credit: ReceiverCredit) -> Self {
        Self {
            credit,
            is_stingy: false,
            streams: BTreeMap::new(),
            datagrams: Vec::new(),
            granted_data: credit.data,
            granted_streams: credit.streams,
            ecn: EcnCounts::default(),
            seen: BTreeSet::new(),
            unacked: 0,
            ack_at: None,
            stop: HashMap::new(),
        }
    }

    pub(super) fn count(&mut self, marks: Codepoint) {
        self.ecn.ect0 += u64::from(marks == Codepoint::Ect0);
        self.ecn.ce += u64::from(marks == Codepoint::Ce);
    }

    pub fn receive(&mut self, now: Instant, frames: &[u8]) {
        for frame in Walker::new(frames) {
            match frame.expect("well-formed").1 {
                Frame::Stream(frame) => {
                    let stream = self.stream(frame.id);
                    let end = frame.offset + frame.data.len() as u64;
                    assert!(end <= stream.granted, "stream {} exceeds its credit", frame.id);
                    assert!(stream.fin.is_none_or(|fin| end <= fin && (!frame.fin || fin == end)));
                    assert!(stream.reset.is_none_or(|(_, size)| end <= size));
                    stream.data.resize(stream.data.len().max(end as usize), 0);
                    stream.data[frame.offset as usize..end as usize].copy_from_slice(frame.data);
                    stream.ranges.insert(frame.offset..end);
                    stream.note_progress(now);
                    if frame.fin {
                        assert!(stream.end() <= end);
                        stream.fins += u32::from(stream.fin.is_none());
                        stream.fin = Some(end);
                    }
                    if stream.is_complete() {
                        stream.complete.get_or_insert(now);
                    }
                }
                Frame::ResetStream { id, code, final_size } => {
                    let stream = self.stream(id);
                    assert!(final_size <= stream.granted && final_size >= stream.end());
                    assert!(stream.reset.is_none_or(|old| old == (code, final_size)));
                    stream.reset = Some((code, final_size));
                    self.stop.remove(&id);
                }
                Frame::Datagram(data) => self.datagrams.push(data.to_vec()),
                Frame::Ping => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        let total: u64 = self.streams.values().map(ReceivedBytes::end).sum();
        assert!(total <= self.granted_data, "the connection exceeds its credit");
    }

    fn stream(&mut self, id: u64) -> &mut ReceivedBytes {
        assert_eq!(id & 0x3, 0x3, "not a server's unidirectional stream");
        assert!((1..self.granted_streams).contains(&(id >> 2)), "stream {id} exceeds the limit of streams");
        let granted = self.credit.stream_data;
        self.streams.entry(id).or_insert_with(|| ReceivedBytes { granted, ..ReceivedBytes::default() })
    }

    /// Consumes all received bytes, and returns the frames to send back. Credit grows with the bytes consumed, and the
    /// stream limit with the streams that have ended.
    pub fn feedback(&mut self, delay: Duration) -> Feedback {
        let mut read = 0;
        for stream in self.streams.values_mut() {
            let contiguous = stream.contiguous();
            let granted = if self.is_stingy { 0 } else { contiguous + self.credit.stream_data };
            stream.granted = stream.granted.max(granted);
            read += stream.reset.map_or(contiguous, |(_, size)| size);
        }
        if !self.is_stingy {
            self.granted_data = self.granted_data.max(read + self.credit.data);
        }
        let over = self.streams.values().filter(|s| s.is_complete() || s.reset.is_some()).count() as u64;
        if !self.is_stingy {
            self.granted_streams = over + self.credit.streams;
        }
        let mut ranges: Vec<RangeInclusive<u64>> = Vec::new();
        for number in self.seen.iter().rev() {
            if let Some(range) = ranges.last_mut().filter(|range| *range.start() == number + 1) {
                *range = *number..=*range.end();
            } else if ranges.len() < 64 {
                ranges.push(*number..=*number);
            } else {
                break;
            }
        }
        Feedback {
            ack: AckRanges { delay, ranges, ecn: (self.ecn != EcnCounts::default()).then_some(self.ecn) },
            max_data: self.granted_data,
            max_streams: self.granted_streams,
            max_stream_data: self.streams.iter().map(|(id, stream)| (*id, stream.granted)).collect(),
            stop: self.stop.iter().map(|(id, code)| (*id, *code)).collect(),
        }
    }
}
