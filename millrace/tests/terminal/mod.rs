//! Commands that run on a terminal of their own.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    process::{Child, Command, Stdio},
    time::Instant,
};

use millrace_testkit::BOUND;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

/// Milliseconds without output after which all output of an ended command has been read.
const SILENCE: u16 = 1000;
/// Longest time that each read waits for output, in ms.
const LOOK: u16 = 20;
/// The control sequence with which a view that is updated every second begins each redraw.
pub const CLEAR: &str = "\x1b[2J\x1b[H";

/// Makes a command in a session of its own with a controlling terminal, so that Ctrl-C sends it a signal.
pub fn command(program: &str) -> Command {
    let mut command = Command::new("setsid");
    command.args(["--ctty", program]);
    command
}

pub struct PseudoTerminal {
    child: Child,
    master: File,
    /// The pseudoterminal's slave side. It stays open, so that the terminal's settings and the last output can be read.
    slave: OwnedFd,
    /// Output that [`wait_for`](Self::wait_for) has not returned yet.
    seen: String,
}

impl PseudoTerminal {
    pub fn start(mut command: Command, columns: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let path = std::ffi::OsStr::from_bytes(path.as_bytes());
        let slave: OwnedFd = File::options().read(true).write(true).open(path).unwrap().into();
        let end = || Stdio::from(slave.try_clone().unwrap());
        tcsetwinsize(&slave, size(columns, rows)).unwrap();
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        Self { child, master: master.into(), slave, seen: String::new() }
    }

    /// Waits until `want` was written; returns the output up to and including it.
    pub fn wait_for(&mut self, want: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.seen.find(want) {
                let rest = self.seen.split_off(at + want.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            assert!(start.elapsed() < BOUND, "no {want:?} in the output, which ends with {:?}", self.end());
            self.read(LOOK);
        }
    }

    /// Returns the end of the output that was not returned yet.
    fn end(&self) -> &str {
        let last = self.seen.len().saturating_sub(4000);
        let at = (0..=last).rev().find(|at| self.seen.is_char_boundary(*at));
        &self.seen[at.unwrap_or(0)..]
    }

    /// Returns the lines of the next complete redraw of a view, without colours. Each redraw begins with `start`.
    pub fn picture(&mut self, start: &str) -> Vec<String> {
        self.wait_for(start);
        let picture = self.wait_for(start);
        // The `start` that was read last begins the next redraw, so it is put back.
        self.seen.insert_str(0, start);
        let picture = picture.strip_suffix(start).unwrap_or(&picture);
        picture.split("\r\n").map(plain).collect()
    }

    /// Returns the lines of the next redraw that contains `part`.
    pub fn picture_with(&mut self, start: &str, part: &str) -> Vec<String> {
        self.picture_that(start, part, |lines| lines.iter().any(|line| line.contains(part)))
    }

    /// Returns the lines of the next redraw that fits into this size. Earlier redraws may be from before the terminal
    /// was made smaller.
    pub fn picture_within(&mut self, start: &str, columns: usize, rows: usize) -> Vec<String> {
        self.picture_that(start, "smaller picture", |lines| fits(lines, columns, rows).is_ok())
    }

    fn picture_that(&mut self, start: &str, what: &str, is: impl Fn(&[String]) -> bool) -> Vec<String> {
        let begin = Instant::now();
        loop {
            let picture = self.picture(start);
            if is(&picture) {
                return picture;
            }
            assert!(begin.elapsed() < BOUND, "no {what:?}: {picture:#?}");
        }
    }

    /// Returns all output until the command has ended. Panics if the command fails.
    pub fn rest(&mut self) -> String {
        assert!(self.ends().success(), "{}", self.seen);
        while self.read(SILENCE) {}
        std::mem::take(&mut self.seen)
    }

    /// Waits for the end of the command.
    pub fn ends(&mut self) -> std::process::ExitStatus {
        let start = Instant::now();
        loop {
            self.read(LOOK);
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < BOUND, "the command does not end: {:?}", self.seen);
        }
    }

    pub fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    pub fn resize(&self, columns: u16, rows: u16) {
        tcsetwinsize(&self.slave, size(columns, rows)).unwrap();
    }

    /// Reports whether the terminal echoes typed lines, which it does unless the command has changed the settings.
    pub fn echoes(&self) -> bool {
        tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON)
    }

    /// Reads output that is available or arrives within `within` ms. Returns whether there was any.
    fn read(&mut self, within: u16) -> bool {
        let mut ready = [PollFd::new(self.master.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::from(within)).unwrap() == 0 {
            return false;
        }
        let mut bytes = [0; 65536];
        let read = self.master.read(&mut bytes).unwrap_or(0);
        self.seen.push_str(&String::from_utf8_lossy(&bytes[..read]));
        read > 0
    }
}

impl Drop for PseudoTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks that the lines fit into this number of columns and rows.
#[track_caller]
pub fn assert_fits(lines: &[String], columns: usize, rows: usize) {
    if let Err(why) = fits(lines, columns, rows) {
        panic!("{why}: {lines:#?}");
    }
}

fn fits(lines: &[String], columns: usize, rows: usize) -> Result<(), String> {
    let wide = lines.iter().find(|line| line.chars().count() > columns);
    match (lines.len() > rows, wide) {
        (true, _) => Err(format!("{} lines", lines.len())),
        (false, Some(line)) => Err(format!("{} wide, {line:?}", line.chars().count())),
        (false, None) => Ok(()),
    }
}

/// Removes control sequences.
fn plain(line: &str) -> String {
    let mut pieces = line.split('\x1b');
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let end = piece.find(|c: char| c.is_ascii_alphabetic()).map_or(piece.len(), |at| at + 1);
        plain.push_str(&piece[end..]);
    }
    plain
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}
