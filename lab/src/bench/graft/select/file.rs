//! The CSV file of results. Each result is appended when it is measured, and a later run can continue the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use crate::train::runs::{self, TrainingNetwork, TrainingRun};
use anyhow::{Context as _, bail, ensure};
use parking_lot::Mutex;

pub struct RowFile(Mutex<File>);

impl RowFile {
    /// Opens the CSV file and reads the results in it, one per line. An incomplete last line of an interrupted run is
    /// removed.
    pub fn open(
        path: &Path,
        resume: bool,
        networks: &[TrainingNetwork],
    ) -> anyhow::Result<(Self, Vec<TrainingRun>)> {
        let name = || path.display().to_string();
        let text = match fs::read_to_string(path) {
            Ok(_) if !resume => bail!("{} exists already: use --resume to continue it", name()),
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(name),
        };
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let done = if whole.is_empty() { Vec::new() } else { runs::parse(whole).with_context(name)? };
        for run in &done {
            let same = networks.get(run.network as usize) == Some(&run.truth);
            ensure!(
                same,
                "{}: network {} differs: the file was made with other options",
                name(),
                run.network
            );
        }
        let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(name)?;
        file.set_len(whole.len() as u64)?;
        if whole.is_empty() {
            writeln!(file, "{}", runs::head())?;
        }
        Ok((Self(Mutex::new(file)), done))
    }

    /// Appends a result as one line in a single write, so that lines of several threads are not mixed.
    pub fn add(&self, run: &TrainingRun) -> io::Result<()> {
        self.0.lock().write_all(format!("{}\n", run.line()).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_file_of_training_runs_is_continued() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rows.csv");
        let networks = [TrainingNetwork { rtt_ms: 10.0, ..TrainingNetwork::default() }; 2];
        let run = |network| TrainingRun {
            network,
            candidate: "bbr".into(),
            seed: 1,
            truth: networks[0],
            seen: Default::default(),
            came: Default::default(),
        };
        let (rows, done) = RowFile::open(&path, false, &networks).expect("a new file");
        assert!(done.is_empty());
        rows.add(&run(0)).expect("a row");
        let cut = format!("{}1,bbr", fs::read_to_string(&path).unwrap());
        fs::write(&path, cut).unwrap();
        let (rows, done) = RowFile::open(&path, true, &networks).expect("an old file");
        assert_eq!(done, [run(0)]);
        rows.add(&run(1)).expect("a row");
        assert_eq!(RowFile::open(&path, true, &networks).expect("an old file").1, [run(0), run(1)]);
        let error = |resume, networks: &[TrainingNetwork]| {
            RowFile::open(&path, resume, networks).err().expect("it is refused").to_string()
        };
        assert!(error(false, &networks).contains("--resume"));
        assert!(error(true, &networks[..1]).contains("network 1 differs"));
        fs::write(&path, "what,is,this\n").unwrap();
        assert!(error(true, &networks).contains("rows.csv"));
    }
}
