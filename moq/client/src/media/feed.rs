//! Publishes an input as fast as it arrives, or at the pace of its own time stamps.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use mp4_atom::FourCC;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::Instant;

use super::{Boxes, Error, MediaPublisher};

/// The time when the first fragment of a broadcast was published, and that fragment's media time.
pub(crate) type FirstFragment = OnceLock<(Instant, Duration)>;

/// Duration of published media above which publishing much faster than real time is logged, because the user may have
/// forgotten `--realtime`.
const NOTICED: Duration = Duration::from_secs(2);
/// Step in the media time above which the input is assumed to have switched to another clock. The publisher does not
/// wait for the step to elapse.
const JUMP: Duration = Duration::from_secs(10);

/// The reason why an input was not published to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stopped {
    #[error(transparent)]
    Media(#[from] Error),
    #[error(transparent)]
    Read(#[from] io::Error),
}

/// The clock of an input. It says when media are due, and measures how fast they were published.
struct FeedClock<'a> {
    /// The start time that all paced inputs of a broadcast share. `None`: the input is not paced.
    pace: Option<&'a FirstFragment>,
    /// The reference point for pacing: a time on the local clock, and the media time that is due then. It is set again
    /// when the media time jumps.
    own: (Instant, Duration),
    last: Duration,
    length: Duration,
    began: Instant,
    /// Number of init segments (moov boxes) so far.
    inits: u32,
}

impl<'a> FeedClock<'a> {
    fn new(pace: Option<&'a FirstFragment>, first: Duration, inits: u32) -> Self {
        let now = Instant::now();
        let own = pace.map_or((now, first), |pace| *pace.get_or_init(|| (now, first)));
        Self { pace, own, last: first, length: Duration::ZERO, began: now, inits }
    }

    /// Returns when media with the media time `time` should be published, or `None` if immediately. After an init
    /// segment the media time may restart, because the encoder may have restarted its clock.
    fn due_time(&mut self, time: Duration, inits: u32) -> Option<Instant> {
        let step = time.abs_diff(self.last);
        let is_anew = std::mem::replace(&mut self.inits, inits) != inits && time < self.last;
        if is_anew {
            self.own = (Instant::now(), time);
        } else if step > JUMP {
            if self.pace.is_some() {
                tracing::warn!(
                    "the clock of the input jumps from {:.1} s to {:.1} s: the media after it are published without waiting",
                    self.last.as_secs_f64(),
                    time.as_secs_f64()
                );
            }
            self.own = (Instant::now(), time);
        } else if time > self.last {
            self.length += step;
        }
        self.last = time;
        self.pace.map(|_| self.own.0 + time.saturating_sub(self.own.1))
    }

    fn say_if_hasty(&self) {
        let length = self.length;
        let took = self.began.elapsed();
        if self.pace.is_none() && length > NOTICED && length > 2 * took {
            tracing::warn!(
                "{:.1} s of media were published in {:.1} s: for input that is not live, use --realtime",
                length.as_secs_f64(),
                took.as_secs_f64()
            );
        }
    }
}

/// Publishes an input to its end. If `pace` is set, media are published only when their time stamps are due. The
/// renditions of a broadcast share `pace`.
pub(crate) async fn play(
    mut media: MediaPublisher,
    mut reader: Box<dyn AsyncRead + Unpin>,
    pace: Option<&FirstFragment>,
) -> Result<(), Stopped> {
    let mut boxes = Boxes::default();
    let mut piece = vec![0; 64 << 10];
    let mut clock = None;
    loop {
        while let Some((kind, bytes)) = boxes.pop()? {
            take(&mut media, &boxes, kind, bytes)?;
            publish(&mut media, &mut clock, pace).await?;
        }
        match reader.read(&mut piece).await? {
            0 => break,
            length => boxes.push(&piece[..length]),
        }
    }
    if let Some((kind, bytes)) = last(&mut boxes)? {
        take(&mut media, &boxes, kind, bytes)?;
        publish(&mut media, &mut clock, pace).await?;
    }
    media.finish();
    clock.ok_or(Error::Empty)?.say_if_hasty();
    Ok(())
}

async fn publish<'a>(
    media: &mut MediaPublisher,
    clock: &mut Option<FeedClock<'a>>,
    pace: Option<&'a FirstFragment>,
) -> Result<(), Error> {
    while let Some(time) = media.next_time() {
        let clock = clock.get_or_insert_with(|| FeedClock::new(pace, time, media.inits()));
        if let Some(due) = clock.due_time(time, media.inits()) {
            tokio::time::sleep_until(due).await;
        }
        media.publish_next()?;
    }
    Ok(())
}

/// Passes a box to `media`. The box must be the one that `boxes` has just returned.
fn take(media: &mut MediaPublisher, boxes: &Boxes, kind: FourCC, bytes: bytes::Bytes) -> Result<(), Error> {
    let at = boxes.position() - bytes.len() as u64;
    media.take(kind, at, bytes)
}

/// Returns the last box of the input if its header states size 0, so that it extends to the end of the input. If the
/// input is cut off within a box, this function logs a warning.
fn last(boxes: &mut Boxes) -> Result<Option<(FourCC, bytes::Bytes)>, Error> {
    match boxes.finish() {
        Err(error @ Error::Truncated { .. }) => {
            tracing::warn!("the end of the input is incomplete, so its last box was dropped: {error}");
            Ok(None)
        }
        other => other,
    }
}

/// Publishes a complete input without waiting.
///
/// # Errors
/// Fails if the input cannot be read as media.
pub fn feed(media: &mut MediaPublisher, input: &[u8]) -> Result<(), Error> {
    let mut boxes = Boxes::default();
    for piece in input.chunks(1 << 16) {
        boxes.push(piece);
        while let Some((kind, bytes)) = boxes.pop()? {
            take(media, &boxes, kind, bytes)?;
            media.publish()?;
        }
    }
    if let Some((kind, bytes)) = last(&mut boxes)? {
        take(media, &boxes, kind, bytes)?;
        media.publish()?;
    }
    media.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_of_the_media_time_by_an_hour_does_not_delay_publishing() {
        let pace = FirstFragment::new();
        let seconds = Duration::from_secs;
        let mut clock = FeedClock::new(Some(&pace), seconds(5), 1);
        let first = clock.due_time(seconds(5), 1).unwrap();
        assert_eq!(clock.due_time(seconds(7), 1), Some(first + seconds(2)));
        // The media times of different tracks are interleaved, so the time may go back although the input's clock was
        // not restarted.
        assert_eq!(clock.due_time(seconds(6), 1), Some(first + seconds(1)));
        let hour = clock.due_time(seconds(3607), 1).unwrap();
        assert!(hour < first + seconds(60), "an hour is not waited for");
        assert_eq!(clock.due_time(seconds(3608), 1), Some(hour + seconds(1)));
        let back = clock.due_time(seconds(0), 1).unwrap();
        assert_eq!(clock.due_time(seconds(3), 1), Some(back + seconds(3)));
        // If the time goes back by a second after a new init segment, the encoder has restarted its clock.
        let anew = clock.due_time(seconds(2), 2).unwrap();
        assert_eq!(clock.due_time(seconds(4), 2), Some(anew + seconds(2)));
        assert_eq!(clock.length, seconds(2 + 1 + 3 + 2));
    }
}
