//! Properties that hold for any bytes as media to be published: the fuzz target, and the replay of its fixtures as a test.
//!
//! Nothing panics. The published bytes are a bounded multiple of the input. Each object that is a fragment can be read again, and has as
//! many samples as it was written with.

use std::sync::Arc;

use millrace_client::{
    broadcast::{Broadcast, History},
    media::{Cut, MediaPublisher, Packaging, feed, playable},
};
use millrace_moq::{GroupOrder, Location, Namespace};

/// The first byte says how it is packaged; an MP4 file follows.
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
    // A sample takes at least four bytes in the input, and 16 once its fragment is written again. Samples may overlap.
    assert!(written <= 64 * (input.len() + 64) * (input.len() + 64));
}

fn publish(input: &[u8], packaging: Packaging, cut: Cut) -> Arc<Broadcast> {
    let namespace = Namespace::from_path("a").expect("a name");
    let broadcast = Broadcast::new(namespace, History::default());
    let mut media = MediaPublisher::new(broadcast.clone(), packaging, cut).expect("names that fit");
    // Other input is refused, which is all that can be required of it.
    let _ = feed(&mut media, input);
    broadcast
}
