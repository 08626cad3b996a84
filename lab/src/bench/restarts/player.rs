//! Video players: which fragments they write to standard output, and when.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use millrace_client::media::Boxes;
use millrace_kernel::clock::monotonic_ns;

use super::super::process::BenchProcess;
use super::report::{Gap, RestartFailure};

const LOOK: Duration = Duration::from_millis(10);
/// Number of fragments that are read after the first fragment of the restarted publisher, since fragments may be
/// written twice.
const BEHIND: usize = 30;

/// A player process that writes fragmented MP4 to standard output.
pub struct RestartPlayer {
    pub name: &'static str,
    process: BenchProcess,
    output: PathBuf,
    read: u64,
    boxes: Boxes,
    played: Vec<Played>,
}

/// A fragment that the player has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Played {
    at_ns: u64,
    /// Number that the encoder gave to the fragment (`mfhd`). A restarted publisher counts from the first one again.
    number: u32,
}

impl RestartPlayer {
    /// Starts the player `command`. Its output goes to the file `file` in `directory`.
    pub fn start(
        name: &'static str,
        file: &'static str,
        command: Command,
        directory: &std::path::Path,
    ) -> anyhow::Result<Self> {
        let process = BenchProcess::start(file, command, directory)?;
        let output = directory.join(format!("{file}.out"));
        Ok(Self { name, process, output, read: 0, boxes: Boxes::default(), played: Vec::new() })
    }

    /// Reads everything that the player has written since the last call.
    fn look(&mut self) -> anyhow::Result<()> {
        let mut file = File::open(&self.output)?;
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.read))?;
        file.read_to_end(&mut bytes)?;
        let at_ns = monotonic_ns();
        self.read += bytes.len() as u64;
        self.boxes.push(&bytes);
        while let Some((kind, bytes)) = self.boxes.pop()? {
            if kind.as_ref() == b"moof" {
                self.played.push(Played { at_ns, number: number(&bytes)? });
            }
        }
        Ok(())
    }

    fn wait_for<T>(
        &mut self,
        what: &str,
        patience: Duration,
        mut found: impl FnMut(&[Played]) -> Option<T>,
    ) -> Result<T, RestartFailure> {
        let began = Instant::now();
        loop {
            self.look()?;
            if let Some(found) = found(&self.played) {
                return Ok(found);
            }
            if let Err(error) = self.process.check_runs() {
                return Err(RestartFailure { ended: true, why: format!("{error:#}") });
            }
            if began.elapsed() > patience {
                let why = format!("{what} within {patience:?}; {}", self.process.last_words());
                return Err(RestartFailure { ended: false, why });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until the player has written this fragment or a later one.
    pub fn play_to(&mut self, fragment: u32, patience: Duration) -> Result<(), RestartFailure> {
        self.wait_for("no media", patience, |played| (played.last()?.number >= fragment).then_some(()))
    }

    /// Waits for a fragment of the publisher that was restarted at `back`, which counts fragments from the first one
    /// again. Returns the gap before it.
    pub fn gap(&mut self, back: u64, patience: Duration) -> Result<Gap, RestartFailure> {
        // Fragments of the old publisher cannot arrive any more: starting the new publisher takes longer than a
        // fragment is on its way.
        self.wait_for("no media again", patience, |played| anew(played).map(drop))?;
        let enough = |played: &[Played]| (played.len() >= anew(played)? + BEHIND).then_some(());
        self.wait_for("media have ended", patience, enough)?;
        Ok(gap(&self.played, back).context("there was a fragment of the new publisher")?)
    }
}

/// Returns the index of the first fragment of the restarted publisher.
fn anew(played: &[Played]) -> Option<usize> {
    Some(played.windows(2).position(|pair| pair[1].number + 10 < pair[0].number)? + 1)
}

fn gap(played: &[Played], back: u64) -> Option<Gap> {
    let (before, after) = played.split_at(anew(played)?);
    let last = before.last()?.at_ns;
    let first = after.first()?.at_ns;
    let milliseconds = |from: u64| first.saturating_sub(from) as f64 / 1e6;
    let duplicates = [before, after].map(repeated).iter().sum();
    Some(Gap { gap_ms: milliseconds(last), again_ms: milliseconds(back), duplicates })
}

/// Returns how many of the written fragments have the number of another written fragment.
fn repeated(played: &[Played]) -> usize {
    let mut numbers: Vec<_> = played.iter().map(|played| played.number).collect();
    numbers.sort_unstable();
    let all = numbers.len();
    numbers.dedup();
    all - numbers.len()
}

/// Returns the sequence number of a movie fragment (ISO/IEC 14496-12, section 8.8.5).
fn number(moof: &[u8]) -> anyhow::Result<u32> {
    let place = moof.windows(4).position(|kind| kind == b"mfhd");
    let number = place.and_then(|place| moof.get(place + 8..place + 12)?.try_into().ok());
    number.map(u32::from_be_bytes).context("an MP4 fragment has no sequence number")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(numbers: &[u32]) -> Vec<Played> {
        let at = |(index, number): (usize, &u32)| Played { at_ns: 1_000_000 * index as u64, number: *number };
        numbers.iter().enumerate().map(at).collect()
    }

    #[test]
    fn restart_gap_lasts_from_last_old_to_first_new_publisher_fragment() {
        let seen = played(&[50, 51, 52, 1, 2, 2]);
        let gap = gap(&seen, 1_500_000).unwrap();
        assert_eq!((gap.gap_ms, gap.again_ms, gap.duplicates), (1.0, 1.5, 1));
        assert_eq!(anew(&played(&[50, 51, 51, 49])), None, "repeated objects do not start a new life");
    }

    #[test]
    fn fragment_number_of_the_encoder_is_read() {
        let moof = [b"\0\0\0\x18moof\0\0\0\x10mfhd\0\0\0\0", &7u32.to_be_bytes()[..]].concat();
        assert_eq!(number(&moof).unwrap(), 7);
        assert!(number(b"\0\0\0\x08moof").is_err());
    }
}
