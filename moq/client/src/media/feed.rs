//! Publishes an input as it arrives, or at the pace of its own clock.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use mp4_atom::FourCC;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::Instant;

use super::{Boxes, Error, MediaPublisher};

/// The time when the first fragment was published, and that fragment's time in the media.
pub(crate) type FirstFragment = OnceLock<(Instant, Duration)>;

/// Length of media that is logged if it is published at once, since that may be a mistake.
const NOTICED: Duration = Duration::from_secs(2);
/// Step of an input's clock that counts as a jump to another clock: publishing does not wait for it.
const JUMP: Duration = Duration::from_secs(10);

/// The reason why an input was not published to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stopped {
    #[error(transparent)]
    Media(#[from] Error),
    #[error(transparent)]
    Read(#[from] io::Error),
}

/// The clock of an input: paces the input, and measures how fast it was published.
struct FeedClock<'a> {
    /// The pace that is shared with other inputs, if there is one.
    pace: Option<&'a FirstFragment>,
    /// Time when the input's own pace began, and the media's time then. A jump of the media's time begins a new pace.
    own: (Instant, Duration),
    last: Duration,
    length: Duration,
    began: Instant,
    /// Number of init segments so far.
    inits: u32,
}

impl<'a> FeedClock<'a> {
    fn new(pace: Option<&'a FirstFragment>, first: Duration, inits: u32) -> Self {
        let now = Instant::now();
        let own = pace.map_or((now, first), |pace| *pace.get_or_init(|| (now, first)));
        Self { pace, own, last: first, length: Duration::ZERO, began: now, inits }
    }

    /// Returns when media with this time should be published, or `None` for at once. With each init segment an
    /// encoder may restart its clock.
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

/// Publishes an input to its end. With a `pace`, which renditions share, it is published at the pace of its own
/// clock.
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

/// Passes the box that was just cut out of the input to `media`.
fn take(media: &mut MediaPublisher, boxes: &Boxes, kind: FourCC, bytes: bytes::Bytes) -> Result<(), Error> {
    let at = boxes.position() - bytes.len() as u64;
    media.take(kind, at, bytes)
}

/// Returns the last box, which the end of the input ends. If the input is cut off within a box, that is logged, and the
/// rest stays published.
fn last(boxes: &mut Boxes) -> Result<Option<(FourCC, bytes::Bytes)>, Error> {
    match boxes.finish() {
        Err(error @ Error::Truncated { .. }) => {
            tracing::warn!("the end of the input is incomplete, so its last box was dropped: {error}");
            Ok(None)
        }
        other => other,
    }
}

/// Publishes a complete input at once.
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
    fn clock_jump_is_not_waited_for() {
        let pace = FirstFragment::new();
        let seconds = Duration::from_secs;
        let mut clock = FeedClock::new(Some(&pace), seconds(5), 1);
        let first = clock.due_time(seconds(5), 1).unwrap();
        assert_eq!(clock.due_time(seconds(7), 1), Some(first + seconds(2)));
        // The times of different tracks need not ascend together.
        assert_eq!(clock.due_time(seconds(6), 1), Some(first + seconds(1)));
        let hour = clock.due_time(seconds(3607), 1).unwrap();
        assert!(hour < first + seconds(60), "an hour is not waited for");
        assert_eq!(clock.due_time(seconds(3608), 1), Some(hour + seconds(1)));
        let back = clock.due_time(seconds(0), 1).unwrap();
        assert_eq!(clock.due_time(seconds(3), 1), Some(back + seconds(3)));
        // A step back of a second with another init segment is a restarted clock.
        let anew = clock.due_time(seconds(2), 2).unwrap();
        assert_eq!(clock.due_time(seconds(4), 2), Some(anew + seconds(2)));
        assert_eq!(clock.length, seconds(2 + 1 + 3 + 2));
    }
}
