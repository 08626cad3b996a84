//! Renditions of one content, by what they take.

use crate::{Namespace, TrackName, msf};

/// Renditions that a ladder has at most.
pub const MAX_RUNGS: usize = 16;

/// A rendition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rung {
    pub track: TrackName,
    /// Bits per second.
    pub bitrate: u64,
}

/// Renditions that can stand for each other, the least demanding first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder {
    rungs: Vec<Rung>,
}

impl Ladder {
    /// `None` if these are not two or more, each with a name and a bitrate of its own, or too many.
    pub fn new(mut rungs: Vec<Rung>) -> Option<Self> {
        rungs.sort_by_key(|rung| rung.bitrate);
        rungs.dedup_by_key(|rung| rung.bitrate);
        let repeats = |(at, rung): (usize, &Rung)| rungs[..at].iter().any(|other| other.track == rung.track);
        let repeated = rungs.iter().enumerate().any(repeats);
        let usable = (2..=MAX_RUNGS).contains(&rungs.len()) && !repeated && rungs[0].bitrate > 0;
        usable.then_some(Self { rungs })
    }

    /// Of the alternates of `name` that a catalog of `namespace` names.
    pub fn of_catalog(catalog: &msf::Catalog, namespace: &Namespace, name: &str) -> Option<Self> {
        let rung = |track: &msf::Track| {
            let own = track.namespace.is_none();
            let name = TrackName::new(namespace.clone(), track.name.clone().into_bytes()).ok()?;
            Some(Rung { track: name, bitrate: track.bitrate? }).filter(|_| own)
        };
        Self::new(catalog.alternates(name).into_iter().filter_map(rung).collect())
    }

    pub fn rungs(&self) -> &[Rung] {
        &self.rungs
    }

    pub fn position(&self, track: &TrackName) -> Option<usize> {
        self.rungs.iter().position(|rung| rung.track == *track)
    }

    /// The part that is for whoever asked for `track`: nothing above it. `None` if nothing is below it, or it is not there.
    pub fn up_to(&self, track: &TrackName) -> Option<Self> {
        let top = self.position(track)?;
        Self::new(self.rungs[..=top].to_vec())
    }
}
