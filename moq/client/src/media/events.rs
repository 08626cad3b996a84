//! Boxes that precede fragments: prft (the wall-clock time of a picture) and emsg (events, such as SCTE-35).
//!
//! A CMAF object contains the prft and emsg boxes that precede its fragment in the input. In addition, events are
//! published in an event timeline of MSF, and wall-clock times in a media timeline. LOC objects contain no boxes, so
//! with LOC there are only the timelines.

use std::collections::VecDeque;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_moq::name::NameError;
use millrace_moq::{Properties, SubgroupId, msf};
use mp4_atom::{Decode, Emsg, EmsgTimestamp, FourCC, Prft};
use serde_json::{Value, json};

use super::boxes::quietly;
use crate::broadcast::{Broadcast, BroadcastTrack};

/// Names of the tracks that contain the timelines.
pub(super) const EVENTS: &str = "events";
pub(super) const TIMELINE: &str = "timeline";
/// The event type that our event timeline declares. Its data are the fields of an emsg box.
const EVENT_TYPE: &str = "org.mpeg.dash.emsg";
/// Number of past records that each object of a timeline repeats.
const KEPT: usize = 64;
/// Largest number of boxes that wait for the next fragment, and their largest total length in bytes.
const WAITING: usize = 64;
const WAITING_BYTES: usize = 1 << 20;
/// Seconds from 1900, the epoch of NTP, to 1970.
const NTP_TO_UNIX: i64 = 2_208_988_800;

/// A box that waits for the fragment that follows it in the input.
#[derive(Clone, Debug)]
pub(super) struct WaitingBox {
    pub raw: Bytes,
    meaning: Meaning,
}

#[derive(Clone, Debug)]
enum Meaning {
    Clock(Prft),
    Event(Emsg),
    /// A box that could not be read, and is passed on unchanged.
    Unknown,
}

/// A record in a timeline that refers to an object.
#[derive(Clone, Debug)]
pub(super) enum TimelineRecord {
    /// The wall-clock time of the object's first sample, in milliseconds since 1970.
    Clock(i64),
    Event(Value),
}

impl TimelineRecord {
    /// Returns the record's wall-clock time, in milliseconds since 1970.
    pub fn wall(&self) -> Option<i64> {
        match self {
            Self::Clock(wall) => Some(*wall),
            Self::Event(_) => None,
        }
    }
}

impl WaitingBox {
    /// Reads a box if it is of a type that precedes fragments. Returns `None` for other types.
    pub fn read(kind: FourCC, raw: &Bytes) -> Option<Self> {
        let meaning = match kind.as_ref() {
            b"prft" => quietly(|| Prft::decode(&mut &raw[..])).map_or(Meaning::Unknown, Meaning::Clock),
            b"emsg" => quietly(|| Emsg::decode(&mut &raw[..])).map_or(Meaning::Unknown, Meaning::Event),
            _ => return None,
        };
        Some(Self { raw: raw.clone(), meaning })
    }

    /// Returns the ID of the only track that the box applies to, or `None` if it applies to all tracks.
    pub fn track(&self) -> Option<u32> {
        match &self.meaning {
            Meaning::Clock(prft) => Some(prft.reference_track_id),
            Meaning::Event(_) | Meaning::Unknown => None,
        }
    }

    /// Returns the timeline record for a fragment whose first sample is presented at `presented`, in units of
    /// 1/`timescale` second. `later` is an offset in seconds that is added to the presentation times of events.
    pub fn mark(&self, presented: i128, timescale: u32, later: f64) -> Option<TimelineRecord> {
        match &self.meaning {
            Meaning::Clock(prft) => {
                let millis = ntp_to_millis(prft.ntp_timestamp);
                let since = (presented - i128::from(prft.media_time)) * 1000 / i128::from(timescale);
                Some(TimelineRecord::Clock(millis.saturating_add(i64::try_from(since).ok()?)))
            }
            Meaning::Event(emsg) => {
                let scale = f64::from(emsg.timescale.max(1));
                let at = match emsg.presentation_time {
                    EmsgTimestamp::Absolute(time) => time as f64 / scale,
                    EmsgTimestamp::Relative(delta) => {
                        presented as f64 / f64::from(timescale) + f64::from(delta) / scale
                    }
                };
                let duration =
                    (emsg.event_duration != u32::MAX).then(|| millis(f64::from(emsg.event_duration) / scale));
                let data = json!({
                    "schemeIdUri": emsg.scheme_id_uri,
                    "value": emsg.value,
                    "id": emsg.id,
                    "duration": duration,
                    "messageData": STANDARD.encode(&emsg.message_data),
                });
                Some(TimelineRecord::Event(json!({ "m": millis(at + later), "data": data })))
            }
            Meaning::Unknown => None,
        }
    }
}

fn millis(seconds: f64) -> i64 {
    (seconds * 1000.0).round() as i64
}

fn ntp_to_millis(ntp: u64) -> i64 {
    let seconds = (ntp >> 32) as i64 - NTP_TO_UNIX;
    // The lower 32 bits of an NTP time are a fraction of a second, which is rounded to milliseconds.
    let fraction = ((ntp & 0xffff_ffff) * 1000 + (1 << 31)) >> 32;
    seconds * 1000 + fraction as i64
}

/// Adds a box to the boxes that wait for the next fragment. If too many boxes wait, the oldest are dropped.
pub(super) fn wait(waiting: &mut Vec<WaitingBox>, front: WaitingBox) {
    waiting.push(front);
    while waiting.len() > WAITING
        || waiting.iter().map(|front| front.raw.len()).sum::<usize>() > WAITING_BYTES
    {
        let gone = waiting.remove(0);
        tracing::warn!(
            bytes = gone.raw.len(),
            "dropped an event or clock box (emsg, prft): too many wait for a fragment"
        );
    }
}

/// A timeline track. Each object contains the latest records, including those of earlier objects.
struct Timeline {
    track: Arc<BroadcastTrack>,
    records: VecDeque<Value>,
    next_group: u64,
}

impl Timeline {
    fn add(&mut self, record: Value) {
        self.records.push_back(record);
        if self.records.len() > KEPT {
            self.records.pop_front();
        }
        let records: Vec<_> = self.records.iter().collect();
        let json = serde_json::to_vec(&records).unwrap_or_default();
        self.track.open(self.next_group, SubgroupId::Zero, 0).write(0, json.into());
        self.next_group += 1;
    }
}

/// The timelines of a broadcast. A timeline's track is created when its first record is added.
#[derive(Default)]
pub(super) struct Timelines {
    events: Option<Timeline>,
    clock: Option<Timeline>,
}

impl Timelines {
    /// Adds a record about an object. `seconds` is the presentation time of the object's first sample, and `place` is
    /// the object's group and object ID. For the first record of a timeline, it returns the timeline's description for
    /// the catalog.
    pub fn add(
        &mut self,
        broadcast: &Broadcast,
        mark: TimelineRecord,
        seconds: f64,
        place: (u64, u64),
    ) -> Result<Option<msf::MsfTrack>, NameError> {
        let (slot, name, record) = match mark {
            // Media timelines contain only objects with which a decoder can start, which begin groups.
            TimelineRecord::Clock(_) if place.1 != 0 => return Ok(None),
            TimelineRecord::Clock(wall) => {
                let group = broadcast.first_group().saturating_add(place.0);
                (&mut self.clock, TIMELINE, json!([millis(seconds), [group, place.1], wall]))
            }
            TimelineRecord::Event(record) => (&mut self.events, EVENTS, record),
        };
        let (timeline, described) = match slot {
            Some(timeline) => (timeline, None),
            None => {
                let track = broadcast.create(name, Properties::default())?;
                (
                    slot.insert(Timeline { track, records: VecDeque::new(), next_group: 0 }),
                    Some(described(name)),
                )
            }
        };
        timeline.add(record);
        Ok(described)
    }
}

fn described(name: &str) -> msf::MsfTrack {
    let packaging = if name == EVENTS { "eventtimeline" } else { "mediatimeline" };
    msf::MsfTrack {
        name: name.to_owned(),
        packaging: packaging.to_owned(),
        is_live: true,
        role: Some(packaging.to_owned()),
        mime_type: Some("application/json".to_owned()),
        event_type: (name == EVENTS).then(|| EVENT_TYPE.to_owned()),
        ..msf::MsfTrack::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ntp_time_is_converted_to_milliseconds_since_1970() {
        // This NTP time is 2026-11-28 00:00:00.5 UTC.
        let ntp = ((1_795_824_000 + 2_208_988_800_u64) << 32) | 1 << 31;
        assert_eq!(ntp_to_millis(ntp), 1_795_824_000_500);
        assert_eq!(ntp_to_millis(0), -2_208_988_800_000);
        // The fragment begins half a second after the time that the prft box refers to.
        let prft = Prft { ntp_timestamp: ntp, media_time: 100, ..Prft::default() };
        let front = WaitingBox { raw: Bytes::new(), meaning: Meaning::Clock(prft) };
        let Some(TimelineRecord::Clock(wall)) = front.mark(150, 100, 0.0) else { panic!() };
        assert_eq!(wall, 1_795_824_001_000);
    }

    #[test]
    fn boxes_that_wait_for_their_fragment_are_limited_in_bytes() {
        let mut waiting = Vec::new();
        for _ in 0..100 {
            wait(
                &mut waiting,
                WaitingBox { raw: Bytes::from_static(&[0; 40_000]), meaning: Meaning::Unknown },
            );
        }
        assert_eq!(waiting.len(), WAITING_BYTES / 40_000);
    }
}
