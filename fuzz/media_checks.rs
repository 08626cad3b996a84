//! Checks the publishing of arbitrary bytes as media, for a fuzz target and for a test that replays its fixtures.
//!
//! Neither publishing the input nor reading the published fragments may panic. The number of published bytes is at most
//! quadratic in the input's length.

use std::sync::Arc;

use millrace_client::{
    broadcast::{Broadcast, History},
    media::{Cut, MediaPublisher, Packaging, feed, playable},
};
use millrace_moq::{GroupOrder, Location, Namespace};

/// Publishes an MP4 file. The first byte of `data` selects the packaging and how objects are cut, and the file follows.
pub fn media_input(data: &[u8]) {
    let Some((&how, input)) = data.split_first() else { return };
    let packaging = if how & 1 == 0 { Packaging::Cmaf } else { Packaging::Loc };
    let cut = if how & 2 == 0 { Cut::Whole } else { Cut::ByNeed };
    let broadcast = publish(input, packaging, cut);
    let mut written = 0;
    for track in broadcast.tracks() {
        let all = track.range(Location::default(), Location::new(u64::MAX, u64::MAX), GroupOrder::Ascending);
        let name = track.name().name().clone();
        let is_media = name.ends_with(b".m4s") || name.ends_with(b".loc");
        written += all.iter().filter(|_| is_media).map(|object| object.payload.len()).sum::<usize>();
        if name.ends_with(b"0.mp4") {
            all.iter().for_each(|object| drop(playable(&object.payload)));
        }
    }
    // A sample takes at least four bytes of the input, and 16 more in a published fragment. Samples may share bytes of
    // the input, so the bound is quadratic.
    assert!(written <= 64 * (input.len() + 64) * (input.len() + 64));
}

fn publish(input: &[u8], packaging: Packaging, cut: Cut) -> Arc<Broadcast> {
    let namespace = Namespace::from_path("a").expect("a name");
    let broadcast = Broadcast::new(namespace, History::default());
    let mut media = MediaPublisher::new(broadcast.clone(), packaging, cut).expect("names that fit");
    // An error is expected: most inputs are no valid MP4 file.
    let _ = feed(&mut media, input);
    broadcast
}
