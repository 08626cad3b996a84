//! A subscription to a track, or to all tracks that can stand for it, of which the relay sends each group of one
//! (draft-wilaw-moq-moqt-ssts).

use millrace_moq::message::PublishDone;
use millrace_moq::param::Assignment;
use millrace_moq::tracks::adapt::{Ladder, Rung};
use millrace_moq::{Namespace, Parameters, TrackName, msf};

use crate::receive::{Receiver, Sink, Subscription};
use crate::session::Error;

/// Of the switching sets of a session, which are all alike.
const WEIGHT: u64 = 1;

/// What stands for a track, the least demanding first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Alternates {
    /// Each with what it needs, kbit/s.
    tracks: Vec<(TrackName, u64)>,
    /// Tells switching sets of a session apart.
    set: u64,
}

impl Alternates {
    /// Those that a catalog of `namespace` has for `name`, if there are any.
    pub fn of(catalog: &msf::Catalog, namespace: &Namespace, name: &str) -> Option<Self> {
        let ladder = Ladder::of_catalog(catalog, namespace, name)?;
        let needs = |(at, rung): (usize, &Rung)| {
            // Something always comes.
            let bitrate = if at == 0 { 0 } else { rung.bitrate };
            (rung.track.clone(), bitrate.div_ceil(1000))
        };
        let first = ladder.rungs().first()?.track.name();
        let set = catalog.tracks.iter().position(|track| track.name.as_bytes() == first)?;
        Some(Self { tracks: ladder.rungs().iter().enumerate().map(needs).collect(), set: set as u64 })
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
    pub fn first(&mut self) -> Option<&mut Subscription> {
        self.0.first_mut()
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
    let mut all = Vec::new();
    for (place, (name, _)) in alternates.tracks.iter().enumerate() {
        let parameters = alternates.parameters(place, &parameters);
        all.push(receiver.subscribe(name.clone(), parameters, sink.clone()).await?);
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
        let namespace = Namespace::from_path("live/cam").unwrap();
        let name = |name: &str| TrackName::new(namespace.clone(), name.to_owned()).unwrap();
        let found = Alternates::of(&catalog, &namespace, "high").unwrap();
        assert_eq!(found.tracks, [(name("low"), 0), (name("high"), 5001)]);
        assert_eq!(Alternates::of(&catalog, &namespace, "low"), Some(Alternates { set: 2, ..found }));
        assert_eq!(Alternates::of(&catalog, &namespace, "sound"), None, "nothing stands for it");
        assert_eq!(Alternates::of(&catalog, &namespace, "other"), None);
        let found = Alternates::of(&catalog, &namespace, "low").unwrap();
        let first = found.parameters(0, &Parameters::default());
        assert_eq!(
            (first.forward, first.assignment.map(|it| (it.threshold, it.activate))),
            (Some(true), Some((0, 2)))
        );
        let second = found.parameters(1, &Parameters::default());
        assert_eq!((second.forward, second.assignment.map(|it| it.threshold)), (Some(false), Some(5001)));
    }
}
