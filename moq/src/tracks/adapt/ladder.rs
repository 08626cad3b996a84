//! Renditions of the same content, ordered by bit rate.

use crate::{Namespace, TrackName, msf};

/// Largest number of renditions in a ladder.
pub const MAX_RUNGS: usize = 16;

/// A rendition in a ladder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rung {
    /// The track of the rendition.
    pub track: TrackName,
    /// Bit rate, in bits per second.
    pub bitrate: u64,
}

/// Renditions that can replace each other, the lowest bit rate first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder {
    rungs: Vec<Rung>,
}

impl Ladder {
    /// Makes a ladder. Of several renditions with the same bit rate, one is kept. Returns `None` unless 2 to
    /// [`MAX_RUNGS`] renditions remain, with different tracks and bit rates above 0.
    pub fn new(mut rungs: Vec<Rung>) -> Option<Self> {
        rungs.sort_by_key(|rung| rung.bitrate);
        rungs.dedup_by_key(|rung| rung.bitrate);
        let repeats = |(at, rung): (usize, &Rung)| rungs[..at].iter().any(|other| other.track == rung.track);
        let repeated = rungs.iter().enumerate().any(repeats);
        let usable = (2..=MAX_RUNGS).contains(&rungs.len()) && !repeated && rungs[0].bitrate > 0;
        usable.then_some(Self { rungs })
    }

    /// Makes a ladder of the track `name` and its alternates in the catalog of `namespace`.
    pub fn from_catalog(catalog: &msf::MsfCatalog, namespace: &Namespace, name: &str) -> Option<Self> {
        let rung = |track: &msf::MsfTrack| {
            let own = track.namespace.is_none();
            let name = TrackName::new(namespace.clone(), track.name.clone().into_bytes()).ok()?;
            Some(Rung { track: name, bitrate: track.bitrate? }).filter(|_| own)
        };
        Self::new(catalog.alternates(name).into_iter().filter_map(rung).collect())
    }

    /// Returns the renditions.
    pub fn rungs(&self) -> &[Rung] {
        &self.rungs
    }

    /// Returns the index of the rendition whose track is `track`.
    pub fn position(&self, track: &TrackName) -> Option<usize> {
        self.rungs.iter().position(|rung| rung.track == *track)
    }

    /// Returns the part of the ladder for a subscriber that requested `track`: the rendition of that track and those
    /// with lower bit rates. Returns `None` if the track has the lowest bit rate, or is not in the ladder.
    pub fn up_to(&self, track: &TrackName) -> Option<Self> {
        let top = self.position(track)?;
        Self::new(self.rungs[..=top].to_vec())
    }
}
