//! A subscription to a track, or to all tracks that can stand for it, of which the relay sends each group of one
//! (draft-wilaw-moq-moqt-ssts).

use millrace_proto::moq::message::PublishDone;
use millrace_proto::moq::param::Assignment;
use millrace_proto::moq::{Namespace, Parameters, TrackName, msf};

use crate::receive::{Receiver, Sink, Subscription};
use crate::session::Error;

/// Of the switching sets of a session, which are all alike.
const WEIGHT: u64 = 1;

/// What stands for a track, the least demanding first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Alternates {
    /// Each with what it needs, kbit/s.
    tracks: Vec<(String, u64)>,
    /// Tells switching sets of a session apart.
    set: u64,
}

impl Alternates {
    /// Those that a catalog has for `name`, if there are any.
    pub fn of(catalog: &msf::Catalog, name: &str) -> Option<Self> {
        let described = |track: &msf::Track| Some((track.name.clone(), track.bitrate?.div_ceil(1000)));
        let mut tracks: Vec<_> = catalog.alternates(name).into_iter().filter_map(described).collect();
        tracks.sort_by_key(|(_, kbps)| *kbps);
        // Something always comes.
        tracks.first_mut()?.1 = 0;
        let first = &tracks.first()?.0;
        let set = catalog.tracks.iter().position(|track| track.name == *first)?;
        (tracks.len() > 1).then_some(Self { tracks, set: set as u64 })
    }

    fn parameters(&self, place: usize, parameters: &Parameters) -> Parameters {
        let assignment = Assignment {
            set: self.set,
            algorithm: Assignment::ALGORITHM,
            threshold: self.tracks.get(place).map_or(0, |(_, kbps)| *kbps),
            weight: WEIGHT,
            activate: self.tracks.len() as u64,
            rank: 0,
        };
        // The first picture is of what any path has room for.
        Parameters { forward: Some(place == 0), assignment: Some(assignment), ..parameters.clone() }
    }
}

/// Established subscriptions to what can stand for one track.
pub(crate) struct Subscribed(Vec<Subscription>);

impl Subscribed {
    /// Of the only one, or of the least demanding.
    pub fn first(&self) -> Option<&Subscription> {
        self.0.first()
    }

    /// Waits for the end of all of them; returns the last one's.
    pub async fn done(&mut self) -> Result<Option<PublishDone>, Error> {
        let mut last = None;
        for subscription in &mut self.0 {
            last = Some(subscription.done().await?);
        }
        Ok(last)
    }

    pub fn cancel(&mut self) {
        self.0.iter_mut().for_each(Subscription::cancel);
    }
}

/// Subscribes to a track, or to its `alternates`, with one sink for all.
pub(crate) async fn subscribe(
    receiver: &Receiver,
    track: TrackName,
    alternates: Option<&Alternates>,
    parameters: Parameters,
    sink: Sink,
) -> Result<Subscribed, Error> {
    let Some(alternates) = alternates else {
        return Ok(Subscribed(vec![receiver.subscribe(track, parameters, sink).await?]));
    };
    let namespace: &Namespace = track.namespace();
    let mut all = Vec::new();
    for (place, (name, _)) in alternates.tracks.iter().enumerate() {
        // It was read from a catalog, and may be no name.
        let Ok(name) = TrackName::new(namespace.clone(), name.clone().into_bytes()) else { continue };
        all.push(receiver.subscribe(name, alternates.parameters(place, &parameters), sink.clone()).await?);
    }
    Ok(Subscribed(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(name: &str, bitrate: Option<u64>, alt_group: Option<u32>) -> msf::Track {
        msf::Track {
            name: name.to_owned(),
            packaging: "loc".to_owned(),
            codec: Some("av01".to_owned()),
            alt_group,
            bitrate,
            ..msf::Track::default()
        }
    }

    #[test]
    fn the_least_demanding_needs_nothing() {
        let catalog = msf::Catalog::new(vec![
            track("sound", Some(128_000), None),
            track("high", Some(5_000_001), Some(1)),
            track("low", Some(800_000), Some(1)),
            track("unknown", None, Some(1)),
        ]);
        let found = Alternates::of(&catalog, "high").unwrap();
        assert_eq!(found.tracks, [("low".to_owned(), 0), ("high".to_owned(), 5001)]);
        assert_eq!(Alternates::of(&catalog, "low"), Some(Alternates { set: 2, ..found }));
        assert_eq!(Alternates::of(&catalog, "sound"), None, "nothing stands for it");
        assert_eq!(Alternates::of(&catalog, "other"), None);
        let found = Alternates::of(&catalog, "low").unwrap();
        let first = found.parameters(0, &Parameters::default());
        assert_eq!(
            (first.forward, first.assignment.map(|it| (it.threshold, it.activate))),
            (Some(true), Some((0, 2)))
        );
        let second = found.parameters(1, &Parameters::default());
        assert_eq!((second.forward, second.assignment.map(|it| it.threshold)), (Some(false), Some(5001)));
    }
}
