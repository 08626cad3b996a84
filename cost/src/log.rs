//! Reports in files: JSON lines, gzipped, flushed after each report. `zcat FILE | jq` reads them too.
//!
//! The first line says what it is ([`Header`]), each of the others is a [`Report`]. A file whose writer was killed ends
//! in the middle of the stream; everything up to its last whole report is read.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use flate2::{Compression, bufread::MultiGzDecoder, write::GzEncoder};
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use crate::report::{self, Report};

/// Of the file's form; that of its reports is [`report::VERSION`].
pub const VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`MAGIC`].
    pub log: String,
    pub version: u32,
}

pub const MAGIC: &str = "millrace-cost";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// Renaming a device or a directory could break the machine.
    #[error("{path}: not a regular file; a log is never anything else")]
    Special { path: PathBuf },
    #[error("{path}: line {line} is not of a log of millrace cost: {source}")]
    Report { path: PathBuf, line: u64, source: serde_json::Error },
    #[error("{path}: line {line}: version {found}; this program knows {known}")]
    Version { path: PathBuf, line: u64, found: u32, known: u32 },
}

/// Writes `path`; what was there becomes `path.1`, that `path.2`, and so on.
pub struct Writer {
    path: PathBuf,
    limits: Limits,
    /// `None` until there is a report: a program that ends before has changed nothing.
    out: Option<Lines<Counted>>,
    skipped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A file that has as many bytes is full; it may be longer by one report.
    pub bytes: u64,
    /// Files that are kept, the one that is written among them; at least 1.
    pub files: u32,
}

impl Writer {
    /// A log is never appended to: its end may be torn. Creates nothing yet, but fails where writing would.
    pub fn create(path: &Path, limits: Limits) -> Result<Self, Error> {
        let writer = Self { path: path.to_owned(), limits, out: None, skipped: 0 };
        writer.check()?;
        Ok(writer)
    }

    /// Afterwards it is with the kernel. After an error the next call goes on where this one stopped, and leaves out its
    /// own report if that still fails.
    pub fn write(&mut self, report: &Report) -> Result<(), Error> {
        if let Err(error) = self.make_ready() {
            self.skipped += 1;
            return Err(error);
        }
        let Some(out) = &mut self.out else { return Ok(()) };
        out.write(report).map_err(|source| self.error(source))
    }

    /// Reports that were left out.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Ends the file as a whole one. Dropping does so too, without telling of errors.
    pub fn finish(mut self) -> Result<(), Error> {
        self.close().map_err(|source| self.error(source))
    }

    /// A file with room, all of whose lines are written.
    fn make_ready(&mut self) -> Result<(), Error> {
        let has_room = match &mut self.out {
            Some(out) => out.settle().map(|()| out.gzip.get_ref().bytes < self.limits.bytes),
            None => Ok(false),
        };
        if has_room.map_err(|source| self.error(source))? {
            return Ok(());
        }
        self.check()?;
        self.open().map_err(|source| self.error(source))
    }

    fn open(&mut self) -> io::Result<()> {
        self.close()?;
        rotate(&self.path, self.limits.files)?;
        let file = Counted { file: File::create_new(&self.path)?, bytes: 0 };
        let mut out = Lines::new(file);
        out.add(&Header { log: MAGIC.to_owned(), version: VERSION })?;
        self.out = Some(out);
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        if let Some(out) = &mut self.out {
            out.settle()?;
        }
        self.out.take().map_or(Ok(()), |out| out.gzip.finish().map(drop))
    }

    /// Whatever would be renamed is a regular file, and the directory can be written to.
    fn check(&self) -> Result<(), Error> {
        for number in 0..self.limits.files.max(1) {
            let path = numbered(&self.path, number);
            if fs::symlink_metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
                return Err(Error::Special { path });
            }
        }
        // The point also says that it is a directory, and is what a lone name is in.
        let directory = self.path.parent().unwrap_or(Path::new("")).join(".");
        access(&directory, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| self.error(errno.into()))
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }
}

/// Lines of JSON, gzipped. After an error of what is written to, the next attempt goes on where that one stopped, so that
/// the stream stays whole.
struct Lines<W: Write> {
    gzip: GzEncoder<W>,
    /// Not compressed yet.
    pending: Vec<u8>,
    flushed: bool,
}

impl<W: Write> Lines<W> {
    fn new(out: W) -> Self {
        Self { gzip: GzEncoder::new(out, Compression::default()), pending: Vec::new(), flushed: true }
    }

    fn write(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.add(line)?;
        self.settle()
    }

    fn add(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.pending.extend(serde_json::to_vec(line)?);
        self.pending.push(b'\n');
        self.flushed = false;
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            let taken = self.gzip.write(&self.pending)?;
            self.pending.drain(..taken);
        }
        if !self.flushed {
            self.gzip.flush()?;
            self.flushed = true;
        }
        Ok(())
    }
}

/// `path` is free afterwards, and at most `files - 1` older ones are left.
fn rotate(path: &Path, files: u32) -> io::Result<()> {
    // If the last attempt ended here, files have moved already.
    if !path.try_exists()? {
        return Ok(());
    }
    for number in (0..files.max(1)).rev() {
        let from = numbered(path, number);
        let moved = match number + 1 < files {
            true => fs::rename(&from, numbered(path, number + 1)),
            false => fs::remove_file(&from),
        };
        match moved {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = OsString::from(path);
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

struct Counted {
    file: File,
    bytes: u64,
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The reports of one file, gzipped or as `millrace cost --json` prints them.
pub struct Reader {
    path: PathBuf,
    lines: Box<dyn BufRead>,
    line: u64,
    torn: bool,
}

impl Reader {
    pub fn open(path: &Path) -> Result<Self, Error> {
        let error = |source| Error::Io { path: path.to_owned(), source };
        let mut file = BufReader::new(File::open(path).map_err(error)?);
        let gzip = file.fill_buf().map_err(error)?.starts_with(&GZIP);
        let lines: Box<dyn BufRead> =
            if gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
        Ok(Self { path: path.to_owned(), lines, line: 0, torn: false })
    }

    /// Whether the file ended in the middle of something, which was left out.
    pub fn torn(&self) -> bool {
        self.torn
    }

    /// Nothing at the end.
    fn read_line(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let mut text = Vec::new();
        let read = self.lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut text);
        self.line += 1;
        match read {
            Ok(_) if text.ends_with(b"\n") => Ok(Some(text)),
            Ok(_) => {
                self.torn |= !text.is_empty();
                Ok(None)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.torn = true;
                Ok(None)
            }
            Err(source) => Err(Error::Io { path: self.path.clone(), source }),
        }
    }

    fn parse(&self, text: &[u8]) -> Result<Option<Report>, Error> {
        let error = |source| Error::Report { path: self.path.clone(), line: self.line, source };
        if self.line == 1
            && let Ok(header) = serde_json::from_slice::<Header>(text)
        {
            return self.known(header.version, VERSION).map(|()| None);
        }
        // What another version means by its fields is not known: the version comes first.
        let Versioned { version } = serde_json::from_slice(text).map_err(error)?;
        self.known(version, report::VERSION)?;
        serde_json::from_slice(text).map(Some).map_err(error)
    }

    fn known(&self, found: u32, known: u32) -> Result<(), Error> {
        if found == known {
            return Ok(());
        }
        Err(Error::Version { path: self.path.clone(), line: self.line, found, known })
    }
}

const GZIP: [u8; 2] = [0x1f, 0x8b];
/// A report of a thousand CPUs with all stacks is some megabytes.
const LONGEST_LINE: u64 = 256 << 20;

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Iterator for Reader {
    type Item = Result<Report, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let text = match self.read_line() {
                Ok(text) => text?,
                Err(error) => return Some(Err(error)),
            };
            match self.parse(&text) {
                Ok(None) => {}
                Ok(Some(report)) => return Some(Ok(report)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::report;

    const BIG: Limits = Limits { bytes: 1 << 20, files: 3 };

    fn read(path: &Path) -> (Vec<u64>, bool) {
        let mut reader = Reader::open(path).expect("it opens");
        let sequences = reader.by_ref().map(|report| report.expect("a report").sequence).collect();
        (sequences, reader.torn())
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = Writer::create(&path, BIG).expect("a log");
        for sequence in 0..3 {
            writer.write(&report(sequence)).expect("written");
        }
        // Nothing waits in the process, and there is no proper end yet.
        assert_eq!(read(&path), (vec![0, 1, 2], true));
        writer.finish().expect("finished");
        assert_eq!(read(&path), (vec![0, 1, 2], false));
        let first = Reader::open(&path).expect("it opens").next().expect("one").expect("a report");
        assert_eq!(first, report(0));
    }

    /// However a writer ends, what it had written before can be read.
    #[test]
    fn any_end_loses_the_last_report_at_most() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = Writer::create(&path, BIG).expect("a log");
        let mut ends = Vec::new();
        for sequence in 0..4 {
            writer.write(&report(sequence)).expect("written");
            ends.push(fs::metadata(&path).expect("there").len());
        }
        drop(writer);
        let whole = fs::read(&path).expect("the log");
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).expect("cut");
            let (sequences, torn) = read(&path);
            let complete = ends.iter().filter(|end| **end <= length as u64).count();
            assert!(sequences.len() >= complete, "{length}: {sequences:?}");
            assert!(sequences.iter().copied().eq(0..sequences.len() as u64), "{length}: {sequences:?}");
            assert!(torn || length < 2, "{length} of {} is not the whole", whole.len());
        }
    }

    #[test]
    fn old_files_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        // Each report fills a file.
        let mut writer = Writer::create(&path, Limits { bytes: 1, files: 3 }).expect("a log");
        for sequence in 0..5 {
            writer.write(&report(sequence)).expect("written");
        }
        writer.finish().expect("finished");
        let files = |number| read(&numbered(&path, number)).0;
        assert_eq!([files(0), files(1), files(2)], [[4], [3], [2]]);
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 3);
        // A new writer leaves the old end alone, and all until it has something to write.
        for _ in 0..3 {
            drop(Writer::create(&path, Limits { bytes: 1, files: 3 }).expect("a log"));
        }
        assert_eq!([files(0), files(1), files(2)], [[4], [3], [2]]);
        let mut writer = Writer::create(&path, Limits { bytes: 1, files: 3 }).expect("a log");
        writer.write(&report(7)).expect("written");
        assert_eq!([files(0), files(1), files(2)], [[7], [4], [3]]);
    }

    /// Takes a few bytes at a time, and none at all every other time.
    #[derive(Default)]
    struct Full {
        bytes: Vec<u8>,
        refuse: bool,
    }

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.refuse = !self.refuse;
            if self.refuse {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = bytes.len().min(37);
            self.bytes.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A disk that is full goes on where it stopped.
    #[test]
    fn errors_tear_no_line() {
        let mut lines = Lines::new(Full::default());
        let mut refused = 0;
        for sequence in 0..3 {
            lines.add(&report(sequence)).expect("JSON");
            while lines.settle().is_err() {
                refused += 1;
            }
        }
        assert!(refused > 10, "{refused}");
        let mut written = std::mem::take(&mut lines.gzip.get_mut().bytes);
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), &written).expect("written");
        assert_eq!(read(file.path()), (vec![0, 1, 2], true));
        // And if it had been torn, that would be seen.
        written.remove(written.len() / 2);
        fs::write(file.path(), &written).expect("written");
        let broken = Reader::open(file.path()).expect("it opens").filter_map(Result::ok).count();
        assert!(broken < 3);
    }

    /// A damaged log must not pass for one whose writer was interrupted.
    #[test]
    fn log_with_wrong_checksum_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = Writer::create(&path, BIG).expect("a log");
        writer.write(&report(0)).expect("written");
        writer.finish().expect("finished");
        let mut bytes = fs::read(&path).expect("the log");
        // A gzip file ends in a checksum and a length of 4 bytes each (RFC 1952, section 2.3).
        let checksum = bytes.len() - 8;
        bytes[checksum] ^= 1;
        fs::write(&path, &bytes).expect("written");
        let mut reader = Reader::open(&path).expect("it opens");
        assert_eq!(reader.next().expect("one").expect("a report"), report(0));
        assert!(matches!(reader.next(), Some(Err(Error::Io { .. }))));
        assert!(!reader.torn());
    }

    #[test]
    fn only_regular_files_are_renamed() {
        let dir = tempfile::tempdir().expect("a directory");
        let create = |path: &Path| Writer::create(path, BIG);
        let inside = dir.path().join("inside");
        let log = inside.join("log");
        fs::create_dir_all(inside.join("log.1")).expect("a directory");
        std::os::unix::fs::symlink("/dev/null", inside.join("link")).expect("a link");
        for (path, special) in
            [(&inside, &inside), (&inside.join("link"), &inside.join("link")), (&log, &inside.join("log.1"))]
        {
            let error = create(path).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.starts_with(&format!("{}: not a regular file", special.display())), "{error}");
        }
        assert!(create(&dir.path().join("none/log")).is_err());
        assert!(inside.is_dir() && inside.join("log.1").is_dir());
        // What has become something else meanwhile, too.
        let path = dir.path().join("log");
        let mut writer = Writer::create(&path, Limits { bytes: 1, files: 3 }).expect("a log");
        writer.write(&report(0)).expect("written");
        fs::create_dir(dir.path().join("log.1")).expect("a directory");
        assert!(matches!(writer.write(&report(1)), Err(Error::Special { .. })));
        assert_eq!(writer.skipped(), 1);
        fs::remove_dir(dir.path().join("log.1")).expect("removed");
        writer.write(&report(2)).expect("written");
        assert_eq!([read(&path).0, read(&numbered(&path, 1)).0], [[2], [0]]);
    }

    #[test]
    fn json_lines_are_a_log_too() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let line = |sequence| serde_json::to_string(&report(sequence)).expect("JSON");
        let write = |text: String| fs::write(file.path(), text).expect("written");
        write(format!("{}\n{}\n", line(0), line(1)));
        assert_eq!(read(file.path()), (vec![0, 1], false));
        write(format!("{}\n{}", line(0), &line(1)[..100]));
        assert_eq!(read(file.path()), (vec![0], true));
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let refused = |text: String| {
            fs::write(file.path(), text).expect("written");
            let error = Reader::open(file.path()).expect("it opens").find_map(Result::err).expect("an error");
            error.to_string()
        };
        let line = serde_json::to_string(&report(0)).expect("JSON");
        let other = |version| line.replacen(&format!("\"version\":{}", report::VERSION), version, 1);
        for (version, says) in
            [("\"version\":1", "line 2: version 1"), ("\"version\":7", "line 2: version 7")]
        {
            assert!(refused(format!("{line}\n{}\n", other(version))).contains(says));
        }
        assert!(refused("{\"log\":\"millrace-cost\",\"version\":9}\n".to_owned()).contains("version 9"));
        assert!(refused(format!("{line}\nnonsense\n{line}\n")).contains("line 2"));
    }
}
