//! A subscription to a track or to all its alternates. With alternates, the relay sends each group from only one of the
//! alternates (draft-wilaw-moq-moqt-ssts).

use millrace_moq::message::PublishDone;
use millrace_moq::param::Assignment;
use millrace_moq::tracks::adapt::{Ladder, Rung};
use millrace_moq::{Location, Namespace, Parameters, TrackName, msf};

use crate::receive::{EstablishedSubscription, ObjectReceiver, ObjectSink};
use crate::session::Error;

/// The weight of each switching set, by which the relay divides capacity among a session's sets. All sets of a session
/// have the same weight.
const WEIGHT: u64 = 1;

/// The alternates of a track, the lowest bit rate first.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Alternates {
    /// Each alternate with the throughput above which the relay selects it, in kbit/s.
    tracks: Vec<(TrackName, u64)>,
    /// The ID of the switching set, unique in its session.
    set: u64,
}

impl Alternates {
    /// Returns the alternates of the track `name` in a catalog of `namespace`, or `None` if the track has none.
    pub fn from_catalog(catalog: &msf::MsfCatalog, namespace: &Namespace, name: &str) -> Option<Self> {
        let ladder = Ladder::from_catalog(catalog, namespace, name)?;
        let needs = |(at, rung): (usize, &Rung)| {
            // The alternate with the lowest bit rate has a threshold of 0, so that the relay always sends at least that
            // one.
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
        // At first only the alternate with the lowest bit rate is forwarded, because any path has enough capacity for
        // it.
        Parameters { forward: Some(place == 0), assignment: Some(assignment), ..parameters.clone() }
    }
}

/// Established subscriptions to the alternates of one track.
pub(crate) struct SubscribedAlternates(Vec<EstablishedSubscription>);

impl SubscribedAlternates {
    /// Returns the subscription to the alternate with the lowest bit rate, or to the track itself if it has no
    /// alternates.
    pub fn first(&mut self) -> Option<&mut EstablishedSubscription> {
        self.0.first_mut()
    }

    /// Returns the track's largest location at the start of the first subscription.
    pub fn largest(&self) -> Option<Location> {
        self.0.first()?.ok.parameters.largest_object
    }

    /// Waits until all subscriptions have ended. Returns the PUBLISH_DONE of the last one.
    pub async fn done(&mut self) -> Result<Option<PublishDone>, Error> {
        let mut last = None;
        for subscription in &mut self.0 {
            last = Some(subscription.done().await?);
        }
        Ok(last)
    }

    pub fn cancel(&mut self) {
        self.0.iter_mut().for_each(EstablishedSubscription::cancel);
    }
}

/// Subscribes to a track, or to all its `alternates`. The objects of all of them are passed to the same `sink`.
pub(crate) async fn subscribe(
    receiver: &ObjectReceiver,
    track: TrackName,
    alternates: Option<&Alternates>,
    parameters: Parameters,
    sink: ObjectSink,
) -> Result<SubscribedAlternates, Error> {
    let Some(alternates) = alternates else {
        return Ok(SubscribedAlternates(vec![receiver.subscribe(track, parameters, sink).await?]));
    };
    let mut all = Vec::new();
    for (place, (name, _)) in alternates.tracks.iter().enumerate() {
        let parameters = alternates.parameters(place, &parameters);
        all.push(receiver.subscribe(name.clone(), parameters, sink.clone()).await?);
    }
    Ok(SubscribedAlternates(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(name: &str, bitrate: Option<u64>, alt_group: Option<u32>) -> msf::MsfTrack {
        msf::MsfTrack {
            name: name.to_owned(),
            packaging: "loc".to_owned(),
            codec: Some("av01".to_owned()),
            alt_group,
            bitrate,
            ..msf::MsfTrack::default()
        }
    }

    #[test]
    fn rendition_with_the_lowest_bitrate_has_switching_threshold_zero() {
        let catalog = msf::MsfCatalog::new(vec![
            track("sound", Some(128_000), None),
            track("high", Some(5_000_001), Some(1)),
            track("low", Some(800_000), Some(1)),
            track("unknown", None, Some(1)),
        ]);
        let namespace = Namespace::from_path("live/cam").unwrap();
        let name = |name: &str| TrackName::new(namespace.clone(), name.to_owned()).unwrap();
        let found = Alternates::from_catalog(&catalog, &namespace, "high").unwrap();
        assert_eq!(found.tracks, [(name("low"), 0), (name("high"), 5001)]);
        assert_eq!(
            Alternates::from_catalog(&catalog, &namespace, "low"),
            Some(Alternates { set: 2, ..found })
        );
        assert_eq!(Alternates::from_catalog(&catalog, &namespace, "sound"), None, "it has no alternates");
        assert_eq!(Alternates::from_catalog(&catalog, &namespace, "other"), None);
        let found = Alternates::from_catalog(&catalog, &namespace, "low").unwrap();
        let first = found.parameters(0, &Parameters::default());
        assert_eq!(
            (first.forward, first.assignment.map(|it| (it.threshold, it.activate))),
            (Some(true), Some((0, 2)))
        );
        let second = found.parameters(1, &Parameters::default());
        assert_eq!((second.forward, second.assignment.map(|it| it.threshold)), (Some(false), Some(5001)));
    }
}
