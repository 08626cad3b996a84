//! Grafts are relocated before anybody wants them, which takes some 10 ms each: those of the pool when a runtime begins, and those whose
//! files come or change while it runs.

use std::{fs, path::PathBuf, thread::JoinHandle, time::SystemTime};

use millrace_graft_kernel::Control;

use crate::{Pool, identity::Key};

/// Of all directories; what is beyond that is relocated when it is loaded.
const FILES_MAX: usize = 1024;

/// Tells whether a file is another one: its name, size and time.
type Sign = (PathBuf, u64, SystemTime);

#[derive(Default)]
pub(super) struct Warm {
    seen: Vec<Sign>,
    worker: Option<JoinHandle<()>>,
}

impl Warm {
    /// What cannot be relocated is said when it is loaded.
    pub fn prepare(&mut self, pool: &Pool, directories: &[PathBuf]) {
        self.seen = signs(directories);
        let images: Vec<Vec<u8>> = pool.iter().map(|graft| graft.image.clone()).collect();
        self.worker = Some(std::thread::spawn(move || each(images)));
    }

    /// If files have changed since, and the work before is done.
    pub fn look(&mut self, directories: &[PathBuf], keys: &[Key]) {
        if self.worker.as_ref().is_some_and(|worker| !worker.is_finished()) {
            return;
        }
        let signs = signs(directories);
        if signs == self.seen {
            return;
        }
        self.seen = signs;
        let (directories, keys) = (directories.to_vec(), keys.to_vec());
        self.worker = Some(std::thread::spawn(move || {
            let pool = Pool::read(&directories, &keys).unwrap_or_default();
            each(pool.iter().map(|graft| graft.image.clone()).collect());
        }));
    }
}

fn each(images: Vec<Vec<u8>>) {
    images.iter().for_each(|image| drop(Control::prepare(image)));
}

fn signs(directories: &[PathBuf]) -> Vec<Sign> {
    let files = directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten();
    let mut signs: Vec<_> = files
        .take(FILES_MAX)
        .filter_map(|file| {
            let file = file.ok()?;
            let about = file.metadata().ok()?;
            Some((file.path(), about.len(), about.modified().ok()?))
        })
        .collect();
    signs.sort();
    signs
}

#[cfg(test)]
mod tests {
    use millrace_testkit::wait_for;

    use super::*;
    use crate::Identity;

    #[test]
    fn files_that_come_are_relocated_before_they_are_wanted() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP files_that_come_are_relocated_before_they_are_wanted: needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let directories = [directory.path().to_owned()];
        let mut warm = Warm::default();
        warm.prepare(&Pool::default(), &directories);
        let shipped = Pool::read(&[], &[]).expect("what is shipped");
        let graft = shipped.find("hybla").expect("hybla");
        // What stands behind the end makes it another file.
        let image = [&graft.image[..], &u64::to_ne_bytes(std::process::id().into())].concat();
        assert!(!Control::is_prepared(&image));
        Control::prepare(&graft.image).expect("what is shipped is loaded");
        if !Control::is_prepared(&graft.image) {
            println!("SKIP files_that_come_are_relocated_before_they_are_wanted: the kernel is before 6.4");
            return;
        }
        graft.export(directory.path()).expect("files");
        let manifest = directory.path().join("hybla.toml");
        let text = fs::read_to_string(&manifest).expect("its manifest");
        let text = text.replace(&graft.identity.to_string(), &Identity::of(&image).to_string());
        fs::write(directory.path().join("hybla.bpf.o"), &image).expect("its object");
        fs::write(&manifest, text.replace("name = \"hybla\"", "name = \"other\"")).expect("its manifest");
        wait_for("it to be relocated", || {
            warm.look(&directories, &[]);
            Control::is_prepared(&image)
        });
        wait_for("the end of that", || warm.worker.as_ref().is_some_and(JoinHandle::is_finished));
        let before = warm.seen.clone();
        warm.look(&directories, &[]);
        assert_eq!(warm.seen, before);
    }
}
