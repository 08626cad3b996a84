//! Writes reports to log files and reads them: lines of JSON, gzipped, flushed after each report.
//!
//! The first line of a file is the [`Header`]. Each other line is a [`Report`] whose stacks and unmeasured figures are
//! in the field `tables`, which refers to names in earlier lines by their positions. If the writer was killed, the file
//! ends in the middle of the gzip stream, and reading ends after the last complete report.

mod tables;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::{Compression, bufread::MultiGzDecoder, write::GzEncoder};
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use self::tables::WrittenTables;
pub(crate) use self::tables::{CountedTrace, LineRest, LineStacks, ReadTables};
use crate::report::{self, Report};

/// The version of the log file's format. Reports have a version of their own, [`report::VERSION`].
pub const VERSION: u32 = 2;

/// The first line of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The text [`MAGIC`], which identifies a log.
    pub log: String,
    /// The version of the file's format, [`VERSION`].
    pub version: u32,
}

/// Identifies a log: the value of [`Header::log`].
pub const MAGIC: &str = "millrace-cost";

/// The reason why a log cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// A path of the log is no regular file. A log renames its old files, and renaming a device or a directory could
    /// break the machine.
    #[error("{path}: not a regular file; a log is never anything else")]
    Special { path: PathBuf },
    #[error("{path}: line {line} is not of a log of millrace cost: {source}")]
    Report { path: PathBuf, line: u64, source: serde_json::Error },
    #[error("{path}: line {line}: version {found}; this program knows {known}")]
    Version { path: PathBuf, line: u64, found: u32, known: u32 },
}

/// Writes reports to the log file `path`. An existing file is first renamed to `path.1`, an existing `path.1` to
/// `path.2`, and so on.
///
/// ```no_run
/// use std::{path::Path, time::Duration};
/// use millrace_cost::{Config, Observer, log::{LogLimits, ReportWriter}};
///
/// // Eight files of 64 MiB at most.
/// let limits = LogLimits { bytes: 64 << 20, files: 8 };
/// let mut log = ReportWriter::create(Path::new("/var/lib/millrace/cost.jsonl"), limits)?;
/// let mut observer = Observer::start(Config::new()?)?;
/// for _ in 0..60 {
///     log.write(&observer.next(Duration::from_secs(10))?)?;
/// }
/// log.finish()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ReportWriter {
    path: PathBuf,
    limits: LogLimits,
    /// The open file; `None` until the first report, so that a program that ends without a report leaves old logs
    /// unchanged.
    out: Option<GzipLines<CountedFile>>,
    tables: WrittenTables,
    skipped: u64,
}

/// The disk space that a log may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// Size in bytes at which a new file is begun. A file may be longer by one report.
    pub bytes: u64,
    /// Number of files that are kept, including the one being written; 0 counts as 1.
    pub files: u32,
}

impl ReportWriter {
    /// Checks that a log can be written, and creates its file with the first report. Existing logs are never appended
    /// to, since their last line may be incomplete.
    pub fn create(path: &Path, limits: LogLimits) -> Result<Self, Error> {
        let writer =
            Self { path: path.to_owned(), limits, out: None, tables: WrittenTables::default(), skipped: 0 };
        writer.check()?;
        Ok(writer)
    }

    /// Writes a report and flushes it to the kernel. After an error the next call first writes the rest of this report.
    /// If that fails again, the next call's report is skipped and counted.
    pub fn write(&mut self, report: &Report) -> Result<(), Error> {
        if let Err(error) = self.make_ready() {
            self.skipped += 1;
            return Err(error);
        }
        let Some(out) = &mut self.out else { return Ok(()) };
        let written = self.tables.line(report).map_err(io::Error::from).and_then(|line| out.write(&line));
        written.map_err(|source| self.error(source))
    }

    /// Returns the number of reports that are not in the log because an earlier report could not be written.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Completes the gzip stream. Dropping the writer does so too, but ignores errors.
    pub fn finish(mut self) -> Result<(), Error> {
        self.close().map_err(|source| self.error(source))
    }

    /// Completes unfinished writes, and begins a new file if the present one is full.
    fn make_ready(&mut self) -> Result<(), Error> {
        let has_room = match &mut self.out {
            Some(out) => out.settle().map(|()| out.out.bytes < self.limits.bytes),
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
        let file = CountedFile { file: File::create_new(&self.path)?, bytes: 0 };
        let mut out = GzipLines::new(file);
        out.add(&serde_json::to_vec(&Header { log: MAGIC.to_owned(), version: VERSION })?)?;
        (self.out, self.tables) = (Some(out), WrittenTables::default());
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        if let Some(out) = &mut self.out {
            out.settle()?;
        }
        self.out.take().map_or(Ok(()), |mut out| out.finish())
    }

    /// Checks that all files that would be renamed are regular files, and that the directory can be written to.
    fn check(&self) -> Result<(), Error> {
        for number in 0..self.limits.files.max(1) {
            let path = numbered(&self.path, number);
            if fs::symlink_metadata(&path).is_ok_and(|metadata| !metadata.is_file()) {
                return Err(Error::Special { path });
            }
        }
        // The appended `.` makes the check fail if the parent is not a directory, and stands for the current directory
        // if the path is only a file name.
        let directory = self.path.parent().unwrap_or(Path::new("")).join(".");
        access(&directory, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| self.error(errno.into()))
    }

    fn error(&self, source: io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }
}

impl Drop for ReportWriter {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// Lines of text, gzipped. After a write error, the next attempt continues where that one stopped, so no byte of the
/// gzip stream is missing or repeated.
struct GzipLines<W: Write> {
    /// The encoder writes to memory, which never fails: flushing it a second time after an error would add bytes to the
    /// stream.
    gzip: GzEncoder<Vec<u8>>,
    flushed: bool,
    out: W,
}

impl<W: Write> GzipLines<W> {
    fn new(out: W) -> Self {
        Self { gzip: GzEncoder::new(Vec::new(), Compression::default()), flushed: true, out }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        self.add(line)?;
        self.settle()
    }

    fn add(&mut self, line: &[u8]) -> io::Result<()> {
        self.gzip.write_all(line)?;
        self.flushed = false;
        self.gzip.write_all(b"\n")
    }

    fn settle(&mut self) -> io::Result<()> {
        if !self.flushed {
            self.gzip.flush()?;
            self.flushed = true;
        }
        self.pass_on()?;
        self.out.flush()
    }

    /// Ends the gzip stream. No line may be added afterwards.
    fn finish(&mut self) -> io::Result<()> {
        self.gzip.try_finish()?;
        self.pass_on()
    }

    fn pass_on(&mut self) -> io::Result<()> {
        let encoded = self.gzip.get_mut();
        while !encoded.is_empty() {
            let written = self.out.write(encoded)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            encoded.drain(..written);
        }
        Ok(())
    }
}

/// Renames `path` and its older files, so that no file has the name `path`. At most `files - 1` older files are kept.
fn rotate(path: &Path, files: u32) -> io::Result<()> {
    // If an earlier attempt failed after the renames, `path` does not exist and the files have their new names already.
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

struct CountedFile {
    file: File,
    bytes: u64,
}

impl Write for CountedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Iterator over the reports of one file: a log, or the lines that `millrace cost --json` prints, gzipped or not.
pub struct ReportReader {
    pub(crate) path: PathBuf,
    lines: Box<dyn BufRead + Send>,
    /// The functions, stacks and unmeasured figures that the lines read so far have defined, to which later lines refer
    /// by position. `None` if the file has no header.
    tables: Option<Arc<ReadTables>>,
    /// Number of the line that was read last, from 1 on.
    line: u64,
    /// Length in bytes of the line that was read last, to allocate memory for the next line, which is about as long.
    length: usize,
    torn: bool,
    /// True after a read error. The iterator ends after the error.
    failed: bool,
}

impl ReportReader {
    /// Opens a log, compressed with gzip or not.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let error = |source| Error::Io { path: path.to_owned(), source };
        let mut file = BufReader::new(File::open(path).map_err(error)?);
        let gzip = file.fill_buf().map_err(error)?.starts_with(&GZIP);
        let lines: Box<dyn BufRead + Send> =
            if gzip { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
        Ok(Self {
            path: path.to_owned(),
            lines,
            tables: None,
            line: 0,
            length: 0,
            torn: false,
            failed: false,
        })
    }

    /// Reports whether the file ended in the middle of a line. The incomplete line is skipped.
    pub fn torn(&self) -> bool {
        self.torn
    }

    /// Returns the next line that is not the header, or `None` at the end of the file.
    pub(crate) fn next_report(&mut self) -> Result<Option<ReportLine>, Error> {
        let text = self.read_line()?;
        let header = |text: &Vec<u8>| serde_json::from_slice::<Header>(text).ok();
        if self.line == 1
            && let Some(Header { version, .. }) = text.as_ref().and_then(header)
        {
            is_known(&self.path, self.line, version, VERSION)?;
            self.tables = Some(Arc::default());
            return self.next_report();
        }
        let number = self.line;
        let Some(mut text) = text else { return Ok(None) };
        let rest = match &mut self.tables {
            Some(tables) => tables::cut(&mut text, tables).map_err(|source| {
                self.failed = true; // later lines may refer to names that this line would have defined
                Error::Report { path: self.path.clone(), line: number, source }
            })?,
            None => None,
        };
        Ok(Some(ReportLine { number, text, rest }))
    }

    /// Reads a line; `None` at the end of the file.
    fn read_line(&mut self) -> Result<Option<Vec<u8>>, Error> {
        if self.failed {
            return Ok(None);
        }
        let mut text = Vec::with_capacity(self.length + self.length / 8);
        let read = self.lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut text);
        self.line += 1;
        self.length = text.len();
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
            Err(source) => {
                self.failed = true;
                Err(Error::Io { path: self.path.clone(), source })
            }
        }
    }
}

const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Limit of a line's length in bytes. A report of a thousand CPUs with all stacks has only some megabytes.
const LONGEST_LINE: u64 = 256 << 20;

fn is_known(path: &Path, line: u64, found: u32, known: u32) -> Result<(), Error> {
    match found == known {
        true => Ok(()),
        false => Err(Error::Version { path: path.to_owned(), line, found, known }),
    }
}

/// One line of a log: the JSON of a report without the field `tables`, and the content of this field.
pub(crate) struct ReportLine {
    pub(crate) number: u64,
    pub(crate) text: Vec<u8>,
    /// The content of the line's field `tables` (stacks and unmeasured figures); `None` if the line lacks the field.
    pub(crate) rest: Option<LineRest>,
}

impl ReportLine {
    /// Parses the line and returns its report.
    pub(crate) fn parse(self, path: &Path) -> Result<Report, Error> {
        let (mut report, stacks) = self.parse_head(path)?;
        if let Some(LineStacks { tables, counted }) = stacks {
            report.stacks = Some(tables.resolve(counted));
        }
        Ok(report)
    }

    /// Parses the line and returns its report without stacks, and the stacks from the line's field `tables`.
    pub(crate) fn parse_head(self, path: &Path) -> Result<(Report, Option<LineStacks>), Error> {
        let mut report = self.parse_text(path)?;
        let Some(LineRest { stacks, missing }) = self.rest else { return Ok((report, None)) };
        report.missing = missing;
        Ok((report, stacks))
    }

    /// Estimates the memory that the line takes, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let stacks = self.rest.iter().filter_map(|rest| rest.stacks.as_ref());
        self.text.len() + stacks.map(|stacks| size_of_val(&*stacks.counted)).sum::<usize>()
    }

    fn parse_text(&self, path: &Path) -> Result<Report, Error> {
        let Self { number, text, .. } = self;
        let error = |source| Error::Report { path: path.to_owned(), line: *number, source };
        // `version` is the first field of a report, since fields of another version may have another meaning. Text that
        // is known to be UTF-8 is parsed faster.
        let report = match std::str::from_utf8(text) {
            Ok(text) => serde_json::from_str(text),
            Err(_) => serde_json::from_slice(text),
        };
        if let Ok(Report { version: report::VERSION, .. }) = report {
            return report.map_err(error);
        }
        let Versioned { version } = serde_json::from_slice(text).map_err(error)?;
        is_known(path, *number, version, report::VERSION)?;
        report.map_err(error)
    }
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Iterator for ReportReader {
    type Item = Result<Report, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.next_report().transpose()?;
        Some(line.and_then(|line| line.parse(&self.path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ahead::{BATCH_BYTES, BATCHES, PARSERS};
    use crate::samples::report;

    const BIG: LogLimits = LogLimits { bytes: 1 << 20, files: 3 };

    /// Returns the sequence numbers of a file's reports, and whether its last line is incomplete. Checks that reading
    /// ahead gives the same.
    fn read(path: &Path) -> (Vec<u64>, bool) {
        let mut reader = ReportReader::open(path).expect("it opens");
        let sequences: Vec<u64> = reader.by_ref().map(|report| report.expect("a report").sequence).collect();
        let mut ahead = ReportReader::open(path).expect("it opens").ahead(0);
        let same = ahead.by_ref().map(|summed| summed.expect("a report").report.sequence);
        assert!(same.eq(sequences.iter().copied()));
        assert_eq!(ahead.torn(), reader.torn());
        (sequences, reader.torn())
    }

    #[test]
    fn cost_log_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = ReportWriter::create(&path, BIG).expect("a log");
        for sequence in 0..3 {
            writer.write(&report(sequence)).expect("written");
        }
        // Every report was flushed, and the gzip stream has no end yet.
        assert_eq!(read(&path), (vec![0, 1, 2], true));
        writer.finish().expect("finished");
        assert_eq!(read(&path), (vec![0, 1, 2], false));
        let first = ReportReader::open(&path).expect("it opens").next().expect("one").expect("a report");
        assert_eq!(first, report(0));
    }

    /// Wherever a file is cut off, all reports that were flushed before that byte can be read.
    #[test]
    fn truncated_log_loses_at_most_its_last_report() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = ReportWriter::create(&path, BIG).expect("a log");
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
    fn oldest_rotated_log_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        // The size limit of a log file is 1 byte, so each report begins a new file.
        let mut writer = ReportWriter::create(&path, LogLimits { bytes: 1, files: 3 }).expect("a log");
        for sequence in 0..5 {
            writer.write(&report(sequence)).expect("written");
        }
        writer.finish().expect("finished");
        let files = |number| read(&numbered(&path, number)).0;
        assert_eq!([files(0), files(1), files(2)], [[4], [3], [2]]);
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 3);
        // A new writer changes no files until its first report.
        for _ in 0..3 {
            drop(ReportWriter::create(&path, LogLimits { bytes: 1, files: 3 }).expect("a log"));
        }
        assert_eq!([files(0), files(1), files(2)], [[4], [3], [2]]);
        let mut writer = ReportWriter::create(&path, LogLimits { bytes: 1, files: 3 }).expect("a log");
        writer.write(&report(7)).expect("written");
        assert_eq!([files(0), files(1), files(2)], [[7], [4], [3]]);
    }

    /// A writer that accepts at most 37 bytes at a time, and fails at every other call.
    #[derive(Default)]
    struct HesitantWriter {
        bytes: Vec<u8>,
        refuse: bool,
    }

    impl Write for HesitantWriter {
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

    /// After an error such as a full disk, writing continues at the byte where it stopped.
    #[test]
    fn write_error_leaves_no_torn_log_line() {
        let mut lines = GzipLines::new(HesitantWriter::default());
        let mut refused = 0;
        for sequence in 0..3 {
            lines.add(&serde_json::to_vec(&report(sequence)).expect("JSON")).expect("room");
            while lines.settle().is_err() {
                refused += 1;
            }
        }
        assert!(refused > 10, "{refused}");
        let mut written = std::mem::take(&mut lines.out.bytes);
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), &written).expect("written");
        assert_eq!(read(file.path()), (vec![0, 1, 2], true));
        // After one byte is removed, the file cannot be read completely. So the test would notice a lost byte.
        written.remove(written.len() / 2);
        fs::write(file.path(), &written).expect("written");
        let broken = ReportReader::open(file.path()).expect("it opens").filter_map(Result::ok).count();
        assert!(broken < 3);
    }

    /// A damaged log is reported as an error, not as a log whose writer was interrupted.
    #[test]
    fn log_with_wrong_checksum_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let mut writer = ReportWriter::create(&path, BIG).expect("a log");
        writer.write(&report(0)).expect("written");
        writer.finish().expect("finished");
        let mut bytes = fs::read(&path).expect("the log");
        // A gzip file ends in a checksum and a length of 4 bytes each (RFC 1952, section 2.3).
        let checksum = bytes.len() - 8;
        bytes[checksum] ^= 1;
        fs::write(&path, &bytes).expect("written");
        let mut reader = ReportReader::open(&path).expect("it opens");
        assert_eq!(reader.next().expect("one").expect("a report"), report(0));
        assert!(matches!(reader.next(), Some(Err(Error::Io { .. }))));
        assert!(!reader.torn());
    }

    /// The log has more reports than all queues together, and the threads end when the iterator is dropped.
    #[test]
    fn reports_that_are_read_ahead_keep_their_order() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("log");
        let line = |sequence| serde_json::to_string(&report(sequence)).expect("JSON");
        let most = (2 * BATCHES + 3) * PARSERS * BATCH_BYTES;
        let count = (most / line(0).len()) as u64;
        let mut out = GzipLines::new(File::create(&path).expect("a file"));
        (0..count).for_each(|sequence| out.add(line(sequence).as_bytes()).expect("room"));
        out.settle().expect("written");
        out.finish().expect("finished");
        let (sequences, torn) = read(&path);
        assert!(!torn && sequences.into_iter().eq(0..count));
        let mut ahead = ReportReader::open(&path).expect("it opens").ahead(0);
        assert_eq!(ahead.next().expect("one").expect("a report").report.sequence, 0);
        drop(ahead);
    }

    #[test]
    fn log_rotation_renames_only_regular_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let create = |path: &Path| ReportWriter::create(path, BIG);
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
        // `log.1` becomes a directory while the writer is open: the next rotation fails.
        let path = dir.path().join("log");
        let mut writer = ReportWriter::create(&path, LogLimits { bytes: 1, files: 3 }).expect("a log");
        writer.write(&report(0)).expect("written");
        fs::create_dir(dir.path().join("log.1")).expect("a directory");
        assert!(matches!(writer.write(&report(1)), Err(Error::Special { .. })));
        assert_eq!(writer.skipped(), 1);
        fs::remove_dir(dir.path().join("log.1")).expect("removed");
        writer.write(&report(2)).expect("written");
        assert_eq!([read(&path).0, read(&numbered(&path, 1)).0], [[2], [0]]);
    }

    #[test]
    fn json_lines_without_gzip_are_read_as_a_log() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let line = |sequence| serde_json::to_string(&report(sequence)).expect("JSON");
        let write = |text: String| fs::write(file.path(), text).expect("written");
        write(format!("{}\n{}\n", line(0), line(1)));
        assert_eq!(read(file.path()), (vec![0, 1], false));
        write(format!("{}\n{}", line(0), &line(1)[..100]));
        assert_eq!(read(file.path()), (vec![0], true));
    }

    #[test]
    fn log_of_an_unknown_version_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let refused = |text: String| {
            fs::write(file.path(), text).expect("written");
            let error =
                ReportReader::open(file.path()).expect("it opens").find_map(Result::err).expect("an error");
            let ahead = ReportReader::open(file.path()).expect("it opens").ahead(0).find_map(Result::err);
            assert_eq!(ahead.expect("an error").to_string(), error.to_string());
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
