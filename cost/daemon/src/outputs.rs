//! Writes reports to standard output, the log and export files.

use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use millrace_cost::export;
use millrace_cost::log::{LogLimits, ReportWriter};
use millrace_cost::merge::Merge;
use millrace_cost::report::Report;
use millrace_daemon::render;
use nix::unistd::{AccessFlags, access};

use super::losses::ReportLosses;
use super::sink::ReportSink;
use super::text;

/// Output of reports as JSON, one in each line.
pub struct JsonOutput {
    /// True if the JSON contains the sampled stacks of each report.
    pub stacks: bool,
}

impl ReportSink for JsonOutput {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        let written = match report.stacks.is_some() && !self.stacks {
            true => serde_json::to_writer(&mut out, &report.without_stacks()),
            false => serde_json::to_writer(&mut out, &**report),
        };
        written.map_err(io::Error::from)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    }
}

/// Output of reports as text.
pub struct TextOutput {
    /// True if there is only one report, so no empty line follows.
    pub one: bool,
}

impl ReportSink for TextOutput {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text::report(report, render::width()).as_bytes())?;
        if !self.one {
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }
}

/// Output to the log file. It continues after errors, since a disk may be full for a while.
pub struct LogOutput {
    /// The log's writer; `None` when finished.
    writer: Option<ReportWriter>,
    losses: Arc<ReportLosses>,
    /// Number of reports that the writer skipped because of errors, as far as `losses` already includes them.
    skipped: u64,
}

impl LogOutput {
    /// Name of the output in [`ReportLosses`].
    pub const NAME: &str = "log";

    /// Creates a log whose files stay within `limits`.
    ///
    /// # Errors
    /// Fails if the file cannot be created.
    pub fn create(path: &Path, limits: LogLimits, losses: Arc<ReportLosses>) -> anyhow::Result<Self> {
        Ok(Self { writer: Some(ReportWriter::create(path, limits)?), losses, skipped: 0 })
    }
}

impl ReportSink for LogOutput {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let written = writer.write(report);
        let skipped = writer.skipped() - std::mem::replace(&mut self.skipped, writer.skipped());
        match written {
            Ok(()) => self.losses.mark_over(Self::NAME),
            Err(error) => self.losses.add(Self::NAME, skipped, &error.to_string()),
        }
        Ok(())
    }

    fn finish(&mut self, _patience: Option<Duration>) -> anyhow::Result<()> {
        Ok(self.writer.take().map_or(Ok(()), ReportWriter::finish)?)
    }
}

/// Output of the sum of all reports to export files, which are written at the end.
pub struct ExportOutput {
    merge: Merge,
    folded: Option<ExportTarget>,
    pprof: Option<ExportTarget>,
    flame: Option<ExportTarget>,
}

impl ExportOutput {
    /// Opens the given files: folded stacks, pprof, flame graph. Fails now, not at the end, if one cannot be written.
    pub fn create([folded, pprof, flame]: [Option<&Path>; 3]) -> anyhow::Result<Self> {
        let create = |path: Option<&Path>| {
            path.map(|path| ExportTarget::open(path).with_context(|| path.display().to_string())).transpose()
        };
        Ok(Self {
            merge: Merge::default(),
            folded: create(folded)?,
            pprof: create(pprof)?,
            flame: create(flame)?,
        })
    }
}

impl ReportSink for ExportOutput {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        self.merge.add(report);
        Ok(())
    }

    fn finish(&mut self, _patience: Option<Duration>) -> anyhow::Result<()> {
        let Some(report) = std::mem::take(&mut self.merge).finish() else { return Ok(()) };
        let write = |target: Option<ExportTarget>, content: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
            let Some(target) = target else { return Ok(()) };
            let name = target.path.display().to_string();
            target.write(content).with_context(|| name.clone())?;
            // An error is ignored, since standard error may be closed.
            let _ = writeln!(io::stderr(), "millrace: {name} is written");
            Ok(())
        };
        write(self.folded.take(), &|out| match &report.stacks {
            Some(stacks) => out.write_all(export::folded(stacks).as_bytes()),
            None => Ok(()),
        })?;
        write(self.pprof.take(), &|out| export::pprof(&report, out))?;
        write(self.flame.take(), &|out| out.write_all(export::svg(&report).as_bytes()))
    }
}

/// A file that is written at the end. It is replaced as a whole, or stays unchanged after an error.
struct ExportTarget {
    path: PathBuf,
    /// The open file if it is a pipe or a device, which cannot be replaced and is written to directly.
    special: Option<File>,
}

impl ExportTarget {
    /// Checks that the file can be written, without changing it.
    fn open(path: &Path) -> io::Result<Self> {
        let is_special = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        let special = match is_special {
            true => Some(File::options().write(true).open(path)?),
            false => None,
        };
        // If the path is a symbolic link, the link stays and the file to which it points is replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if special.is_none() {
            access(&directory(&path), AccessFlags::W_OK | AccessFlags::X_OK)?;
        }
        Ok(Self { path, special })
    }

    fn write(self, content: &dyn Fn(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        if let Some(special) = self.special {
            return fill(special, content).map(drop);
        }
        // The new file is made in the target's directory, since a rename works only within one file system.
        let new = tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(directory(&self.path))?;
        let new = fill(new, content)?;
        new.persist(&self.path).map(drop).map_err(|error| error.error)
    }
}

fn fill<W: Write>(out: W, content: &dyn Fn(&mut dyn Write) -> io::Result<()>) -> io::Result<W> {
    let mut out = BufWriter::new(out);
    content(&mut out)?;
    // Dropping a `BufWriter` ignores errors of its last write, so the buffer is flushed here.
    out.into_inner().map_err(io::IntoInnerError::into_error)
}

/// Returns the directory of a file, with `.` appended. That makes a lone file name's directory `.`, and fails later if
/// the parent is not a directory.
fn directory(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(".")
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;

    use nix::libc;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn output_file_is_replaced_as_a_whole_or_not_at_all() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let link = dir.path().join("link");
        fs::write(&path, "before").expect("written");
        std::os::unix::fs::symlink("file", &link).expect("a link");
        let content = || fs::read_to_string(&path).expect("read");
        let target = || ExportTarget::open(&link).expect("it can be written");

        drop(target());
        target()
            .write(&|out| out.write_all(b"half").and(Err(io::Error::other("full"))))
            .expect_err("an error");
        assert_eq!(content(), "before");
        target().write(&|out| out.write_all(b"after")).expect("written");
        assert_eq!(content(), "after");
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 2, "nothing is left over");

        for wrong in [dir.path().to_owned(), dir.path().join("none/file")] {
            assert!(ExportTarget::open(&wrong).is_err(), "{}", wrong.display());
        }
        // A pipe is written to directly, not replaced.
        let pipe = dir.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRWXU).expect("a pipe");
        let mut reader =
            File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&pipe).expect("its end");
        ExportTarget::open(&pipe)
            .and_then(|target| target.write(&|out| out.write_all(b"x")))
            .expect("written");
        let mut read = String::new();
        reader.read_to_string(&mut read).expect("read");
        assert_eq!((read.as_str(), fs::metadata(&pipe).expect("there").is_file()), ("x", false));
    }
}
