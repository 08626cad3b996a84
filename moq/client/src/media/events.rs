//! What stands in front of fragments: prft (which wall-clock time a picture is of) and emsg (events, such as SCTE-35).
//!
//! As CMAF they stay in front of the fragment that they came with. Besides, and as LOC only there, events are an event timeline of
//! MSF, and times a media timeline.

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
use crate::broadcast::{Broadcast, Track};

/// Names of the tracks of timelines.
pub(super) const EVENTS: &str = "events";
pub(super) const TIMELINE: &str = "timeline";
/// What the data of our event timeline is: the fields of an emsg box.
const EVENT_TYPE: &str = "org.mpeg.dash.emsg";
/// Records of a timeline that its newest object repeats.
const KEPT: usize = 64;
/// Boxes, and bytes of them, that wait for a fragment at most.
const WAITING: usize = 64;
const WAITING_BYTES: usize = 1 << 20;
/// Seconds from 1900, where NTP begins, to 1970.
const NTP_TO_UNIX: i64 = 2_208_988_800;

/// A box that waits for the fragment behind it.
#[derive(Clone, Debug)]
pub(super) struct Front {
    pub raw: Bytes,
    meaning: Meaning,
}

#[derive(Clone, Debug)]
enum Meaning {
    Clock(Prft),
    Event(Emsg),
    /// It could not be read, and is passed on.
    Unknown,
}

/// What a timeline says of an object.
#[derive(Clone, Debug)]
pub(super) enum Mark {
    /// The wall-clock time of its first sample, in milliseconds since 1970.
    Clock(i64),
    Event(Value),
}

impl Front {
    /// Takes a box, if it is one that belongs in front of fragments.
    pub fn read(kind: FourCC, raw: &Bytes) -> Option<Self> {
        let meaning = match kind.as_ref() {
            b"prft" => quietly(|| Prft::decode(&mut &raw[..])).map_or(Meaning::Unknown, Meaning::Clock),
            b"emsg" => quietly(|| Emsg::decode(&mut &raw[..])).map_or(Meaning::Unknown, Meaning::Event),
            _ => return None,
        };
        Some(Self { raw: raw.clone(), meaning })
    }

    /// Returns the track that it is about, of which the others are not told.
    pub fn track(&self) -> Option<u32> {
        match &self.meaning {
            Meaning::Clock(prft) => Some(prft.reference_track_id),
            Meaning::Event(_) | Meaning::Unknown => None,
        }
    }

    /// Returns what a timeline says of a fragment whose first sample is presented at this time, of so many units a second; `later` is what
    /// is added to the media's own times, in seconds.
    pub fn mark(&self, presented: i128, timescale: u32, later: f64) -> Option<Mark> {
        match &self.meaning {
            Meaning::Clock(prft) => {
                let millis = ntp_to_millis(prft.ntp_timestamp);
                let since = (presented - i128::from(prft.media_time)) * 1000 / i128::from(timescale);
                Some(Mark::Clock(millis.saturating_add(i64::try_from(since).ok()?)))
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
                Some(Mark::Event(json!({ "m": millis(at + later), "data": data })))
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
    let fraction = ((ntp & 0xffff_ffff) * 1000 + (1 << 31)) >> 32;
    seconds * 1000 + fraction as i64
}

/// Adds a box to those that wait; the oldest go where there are too many.
pub(super) fn wait(waiting: &mut Vec<Front>, front: Front) {
    waiting.push(front);
    while waiting.len() > WAITING
        || waiting.iter().map(|front| front.raw.len()).sum::<usize>() > WAITING_BYTES
    {
        let gone = waiting.remove(0);
        tracing::warn!(
            bytes = gone.raw.len(),
            "an event or clock box is left out: too many wait for a fragment"
        );
    }
}

/// A track of records, whose newest object has the last of them.
struct Timeline {
    track: Arc<Track>,
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

/// The timelines of a broadcast, each of which begins with its first record.
#[derive(Default)]
pub(super) struct Timelines {
    events: Option<Timeline>,
    clock: Option<Timeline>,
}

impl Timelines {
    /// Adds what is known of an object: when its first sample is presented, in seconds, and where it is. Returns how the catalog describes
    /// a timeline that begins with it.
    pub fn add(
        &mut self,
        broadcast: &Broadcast,
        mark: Mark,
        seconds: f64,
        place: (u64, u64),
    ) -> Result<Option<msf::Track>, NameError> {
        let (slot, name, record) = match mark {
            // Media timelines are about places to begin at.
            Mark::Clock(_) if place.1 != 0 => return Ok(None),
            Mark::Clock(wall) => {
                let group = broadcast.first_group().saturating_add(place.0);
                (&mut self.clock, TIMELINE, json!([millis(seconds), [group, place.1], wall]))
            }
            Mark::Event(record) => (&mut self.events, EVENTS, record),
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

fn described(name: &str) -> msf::Track {
    let packaging = if name == EVENTS { "eventtimeline" } else { "mediatimeline" };
    msf::Track {
        name: name.to_owned(),
        packaging: packaging.to_owned(),
        is_live: true,
        role: Some(packaging.to_owned()),
        mime_type: Some("application/json".to_owned()),
        event_type: (name == EVENTS).then(|| EVENT_TYPE.to_owned()),
        ..msf::Track::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_of_ntp_is_counted_from_1970() {
        // 2026-11-28 00:00:00.5 UTC.
        let ntp = ((1_795_824_000 + 2_208_988_800_u64) << 32) | 1 << 31;
        assert_eq!(ntp_to_millis(ntp), 1_795_824_000_500);
        assert_eq!(ntp_to_millis(0), -2_208_988_800_000);
        // Half a second behind the time that the box is about.
        let prft = Prft { ntp_timestamp: ntp, media_time: 100, ..Prft::default() };
        let front = Front { raw: Bytes::new(), meaning: Meaning::Clock(prft) };
        let Some(Mark::Clock(wall)) = front.mark(150, 100, 0.0) else { panic!() };
        assert_eq!(wall, 1_795_824_001_000);
    }

    #[test]
    fn boxes_that_wait_are_bounded() {
        let mut waiting = Vec::new();
        for _ in 0..100 {
            wait(&mut waiting, Front { raw: Bytes::from_static(&[0; 40_000]), meaning: Meaning::Unknown });
        }
        assert_eq!(waiting.len(), WAITING_BYTES / 40_000);
    }
}
