//! Views that are printed again every second. On a terminal a view replaces the previous one until q is pressed; in
//! files and pipes it follows the previous one.

use std::{
    io::{self, IsTerminal as _},
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use millrace_cost_daemon::signals::CostSignals;
use millrace_daemon::render::{print, size, width};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// Interval at which a view is printed again.
const PERIOD: Duration = Duration::from_secs(1);
/// Clears a terminal and moves the cursor to the top left corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// The space on the terminal for a view that is printed every second, in characters and lines. `rows` is `usize::MAX`
/// for files and pipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScreenSize {
    pub columns: usize,
    pub rows: usize,
}

/// Prints the text that `next` returns, every second.
///
/// # Errors
/// Fails if `next` fails, or the output has no reader.
pub fn every_second(mut next: impl FnMut(ScreenSize) -> anyhow::Result<String>) -> anyhow::Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        loop {
            print(&next(ScreenSize { columns: width(), rows: usize::MAX })?)?;
            std::thread::sleep(PERIOD);
        }
    }
    let keys = KeyReader::open()?;
    loop {
        let (columns, height) = size();
        let room = ScreenSize { columns, rows: height.saturating_sub(1) };
        print(&format!("{CLEAR}{}", fit(&next(room)?, columns, height)))?;
        if keys.quit_within(PERIOD)? {
            return Ok(());
        }
    }
}

/// Returns the part of the text that fits into `width` columns and `height` rows. The last row says how to quit.
fn fit(text: &str, width: usize, height: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let room = height.saturating_sub(1);
    let mut shown: String = lines.iter().take(room).fold(String::new(), |mut shown, line| {
        shown.extend(line.chars().take(width));
        shown.push('\n');
        shown
    });
    let more = lines.len().saturating_sub(room);
    let foot = if more > 0 {
        format!("q quits; {more} more lines in a larger window")
    } else {
        "q quits".to_owned()
    };
    shown.extend(foot.chars().take(width));
    shown
}

/// Reads keys without echo. Dropping this restores the terminal's settings.
struct KeyReader {
    before: Termios,
    signals: CostSignals,
}

impl KeyReader {
    fn open() -> anyhow::Result<Self> {
        let signals = CostSignals::block()?;
        let before = tcgetattr(io::stdin())?;
        let mut typed = before.clone();
        // Without canonical mode, a key is readable before Enter is pressed.
        typed.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Now, &typed)?;
        Ok(Self { before, signals })
    }

    /// Returns whether q was pressed, or a signal arrived, within `time`.
    fn quit_within(&self, time: Duration) -> anyhow::Result<bool> {
        let end = Instant::now() + time;
        let stdin = io::stdin();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut ready = [
                PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            poll(&mut ready, PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO))?;
            let [key, signal] = ready.map(|fd| fd.any().unwrap_or(false));
            if signal {
                return Ok(true);
            }
            if !key {
                return Ok(false);
            }
            let mut bytes = [0; 16];
            let read = nix::unistd::read(&stdin, &mut bytes)?;
            // 0 bytes from a readable terminal mean that the terminal was closed.
            if read == 0 || bytes.iter().take(read).any(|byte| matches!(byte, b'q' | b'Q')) {
                return Ok(true);
            }
        }
    }
}

impl Drop for KeyReader {
    fn drop(&mut self) {
        // An error is ignored: it means that the terminal was closed.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
        let _ = print("\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_larger_than_screen_is_cut_to_its_size() {
        let text = "a long line\n".repeat(30);
        let shown = fit(&text, 6, 24);
        assert_eq!(shown.lines().count(), 24);
        assert!(shown.lines().all(|line| line.chars().count() <= 6), "{shown}");
        assert!(fit(&text, 80, 24).ends_with("q quits; 7 more lines in a larger window"));
        assert_eq!(fit("one\n", 80, 24), "one\nq quits");
    }
}
