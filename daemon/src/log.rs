//! Logging of all commands.
//!
//! A log never blocks its daemon. Lines go through a bounded queue to a separate writer thread. Lines that a slow or
//! full disk cannot store are dropped and counted. [`LogLimit`] bounds the rate of lines, and `lines` escapes text that
//! came from a peer.

mod lines;

use std::{
    fs::{File, OpenOptions},
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::JoinHandle,
};

use clap::ValueEnum;
use millrace_logging::LogLimit;
use tracing::Dispatch;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter, layer::SubscriberExt, util::SubscriberInitExt};

pub use self::lines::printable;
use self::lines::{JsonLogLines, TextFields};

/// Level, format and destination of a daemon's log.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A level, or directives such as `info,millrace=debug`.
    pub level: String,
    /// The format of the lines.
    pub format: LogFormat,
    /// The log file. `None`: standard error.
    pub file: Option<PathBuf>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "clap would show the text in --help")]
pub enum LogFormat {
    Text,
    Json,
}

/// Largest number of lines that wait to be written.
const QUEUE: usize = 8192;

static DROPPED: AtomicU64 = AtomicU64::new(0);
static LIMIT: LazyLock<LogLimit> = LazyLock::new(LogLimit::default);

/// Returns how many log lines this process has lost since start, because the queue was full or a write failed.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Returns how many log lines this process suppressed since start, because their call site exceeded its limit.
pub fn suppressed() -> u64 {
    LIMIT.suppressed()
}

/// Reason why logging cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("cannot open log file {}: {source}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("the log level is not usable: {0}")]
    Level(#[from] tracing_subscriber::filter::ParseError),
    #[error("cannot start logging: {0}")]
    Subscriber(#[from] tracing::subscriber::SetGlobalDefaultError),
}

/// Starts logging to standard error, for client commands. The level is RUST_LOG, or `warn` by default. Standard output
/// is reserved for media and results.
pub fn to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,millrace=info"));
    let dispatch = dispatch(LogFormat::Text, filter, io::stderr, io::stderr().is_terminal());
    // The call fails if a test or another command of this process has set up logging already.
    let _ = dispatch.try_init();
}

/// Builds the subscriber of the process. Events that pass `filter` and the rate limit become lines of `writer`.
fn dispatch<W>(format: LogFormat, filter: EnvFilter, writer: W, ansi: bool) -> Dispatch
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let builder = builder.with_ansi(ansi).log_internal_errors(false);
    match format {
        LogFormat::Text => builder.fmt_fields(TextFields).finish().with(LIMIT.clone()).into(),
        LogFormat::Json => builder.json().map_event_format(JsonLogLines).finish().with(LIMIT.clone()).into(),
    }
}

/// Starts logging for a daemon. Lines are written until the handle is dropped.
///
/// # Errors
/// Fails if the file cannot be opened, the level is not valid, or the process logs already.
pub fn start(log: &Settings) -> Result<Handle, Error> {
    let sink = match &log.file {
        Some(path) => LogSink::file(path).map_err(|source| Error::Open { path: path.clone(), source })?,
        None => LogSink { out: Box::new(io::stderr()), path: None, torn: false },
    };
    let filter = EnvFilter::builder().parse(&log.level)?;
    let handle = Handle::new(sink);
    let ansi = log.file.is_none() && io::stderr().is_terminal();
    tracing::dispatcher::set_global_default(dispatch(log.format, filter, handle.queue(), ansi))?;
    Ok(handle)
}

enum LogCommand {
    Line(Vec<u8>),
    Reopen,
    Stop,
}

/// The handle of the thread that writes log lines. Dropping the handle writes the waiting lines and ends the thread.
pub struct Handle {
    commands: SyncSender<LogCommand>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn new(mut sink: LogSink) -> Self {
        let (commands, queue) = sync_channel(QUEUE);
        let thread = std::thread::spawn(move || sink.run(&queue));
        Self { commands, thread: Some(thread) }
    }

    fn queue(&self) -> LogQueue {
        LogQueue(self.commands.clone())
    }

    /// Opens the log file again. Call it after the file was renamed, for example by logrotate.
    pub fn reopen(&self) {
        let _ = self.commands.try_send(LogCommand::Reopen);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The send blocks while the queue is full, which lasts at most until one line has been written.
        let _ = self.commands.send(LogCommand::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The sending end of the queue of log lines. `tracing` calls `write` once for each event.
#[derive(Clone)]
struct LogQueue(SyncSender<LogCommand>);

impl Write for LogQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.0.try_send(LogCommand::Line(line.to_vec()))
        {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for LogQueue {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// The file or stream that log lines are written to.
struct LogSink {
    out: Box<dyn Write + Send>,
    path: Option<PathBuf>,
    /// Whether the last line was only partly written, so that the next one has to begin with a newline.
    torn: bool,
}

impl LogSink {
    fn file(path: &Path) -> io::Result<Self> {
        Ok(Self { out: Box::new(append(path)?), path: Some(path.to_owned()), torn: false })
    }

    fn run(&mut self, queue: &Receiver<LogCommand>) {
        while let Ok(command) = queue.recv() {
            match command {
                LogCommand::Line(line) => self.write(&line),
                LogCommand::Reopen => self.reopen(),
                LogCommand::Stop => return,
            }
        }
    }

    fn write(&mut self, line: &[u8]) {
        let mend: &[u8] = if self.torn { b"\n" } else { b"" };
        self.torn = self.out.write_all(mend).and_then(|()| self.out.write_all(line)).is_err();
        if self.torn {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match append(path) {
            Ok(file) => self.out = Box::new(file),
            Err(error) => {
                tracing::error!(%error, path = %path.display(), "cannot open the log file again: log lines still go to the old one")
            }
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Track names and namespaces in log lines are written as people type them, not with the escapes of the MoQ draft.
    /// Code that logs such a name calls `.typed()`.
    #[test]
    fn moq_name_is_logged_without_escapes() {
        fn look(directory: &Path, wrong: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    look(&path, wrong);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let text = std::fs::read_to_string(&path).unwrap();
                    let fields =
                        ["namespace = %", "track = %", "name = %"].map(|field| text.split(field).skip(1));
                    let shown = fields
                        .into_iter()
                        .flatten()
                        .map(|rest| rest.split([',', '\n']).next().unwrap_or(rest));
                    let raw = shown.filter(|shown| {
                        shown.contains("name") && !shown.contains(".typed()") && !shown.starts_with('"')
                    });
                    wrong.extend(raw.map(|shown| format!("{}: {shown}", path.display())));
                }
            }
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut wrong = Vec::new();
        for package in
            ["millrace", "moq/client", "relay", "relay/daemon", "quic/transport", "quic/webtransport"]
        {
            look(&root.join(package).join("src"), &mut wrong);
        }
        assert_eq!(wrong, Vec::<String>::new());
    }

    #[test]
    fn full_disk_loses_log_lines_only() {
        let before = dropped();
        let handle = Handle::new(LogSink::file(Path::new("/dev/full")).unwrap());
        for _ in 0..100 {
            handle.queue().write_all(b"a line\n").unwrap();
        }
        drop(handle);
        assert!(dropped() - before >= 100);
    }

    #[test]
    fn log_line_after_a_partial_write_is_complete() {
        /// A file that accepts three bytes of the first line, then fails once.
        struct Disk(std::sync::Arc<parking_lot::Mutex<Vec<u8>>>, u8);
        impl Write for Disk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1 += 1;
                let taken = match self.1 {
                    1 => &bytes[..3],
                    2 => return Err(io::ErrorKind::StorageFull.into()),
                    _ => bytes,
                };
                self.0.lock().extend_from_slice(taken);
                Ok(taken.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let disk = std::sync::Arc::<parking_lot::Mutex<Vec<u8>>>::default();
        let mut sink = LogSink { out: Box::new(Disk(disk.clone(), 0)), path: None, torn: false };
        sink.write(b"first\n");
        sink.write(b"second\n");
        sink.write(b"third\n");
        assert_eq!(*disk.lock(), b"fir\nsecond\nthird\n");
    }

    #[test]
    fn renamed_log_file_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let moved = dir.path().join("log.1");
        let handle = Handle::new(LogSink::file(&path).unwrap());
        handle.queue().write_all(b"one\n").unwrap();
        let start = std::time::Instant::now();
        while std::fs::read(&path).unwrap() != b"one\n" {
            assert!(start.elapsed().as_secs() < 60, "the line never came");
            std::thread::yield_now();
        }
        std::fs::rename(&path, &moved).unwrap();
        handle.reopen();
        handle.queue().write_all(b"two\n").unwrap();
        drop(handle);
        assert_eq!(std::fs::read(&moved).unwrap(), b"one\n");
        assert_eq!(std::fs::read(&path).unwrap(), b"two\n");
    }
}
