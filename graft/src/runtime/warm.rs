//! Relocates grafts for this kernel before they are needed, which takes some 10 ms for each: those of the pool when the
//! runtime starts, and those whose files appear or change later.

use std::{fs, path::PathBuf, thread::JoinHandle, time::SystemTime};

use millrace_graft_kernel::CongestionProgram;

use crate::{GraftPool, identity::SignatureKey};

/// Limit of files whose grafts are relocated in advance, over all directories. Grafts of further files are relocated
/// when they are loaded.
const FILES_MAX: usize = 1024;

/// Path, size and modification time of a file. If one of them differs, the file has changed.
type Sign = (PathBuf, u64, SystemTime);

#[derive(Default)]
/// The files whose grafts were relocated last, and the thread that relocates them.
pub(super) struct Warm {
    seen: Vec<Sign>,
    worker: Option<JoinHandle<()>>,
}

impl Warm {
    /// Relocates the grafts in a separate thread. Errors are only reported when a graft is loaded.
    pub fn prepare(&mut self, pool: &GraftPool, directories: &[PathBuf]) {
        self.seen = signs(directories);
        let images: Vec<Vec<u8>> = pool.iter().map(|graft| graft.image.clone()).collect();
        self.worker = Some(std::thread::spawn(move || load_each(images)));
    }

    /// Relocates grafts again if files have changed. Does nothing while the thread of the previous relocation runs.
    pub fn look(&mut self, directories: &[PathBuf], keys: &[SignatureKey]) {
        // At most one thread relocates grafts at a time.
        if self.worker.as_ref().is_some_and(|worker| !worker.is_finished()) {
            return;
        }
        let signs = signs(directories);
        if signs == self.seen {
            return;
        }
        self.seen = signs;
        let directories = directories.to_vec();
        let keys = keys.to_vec();
        self.worker = Some(std::thread::spawn(move || {
            // The error of an unusable directory is reported when a graft is loaded from it.
            let pool = GraftPool::read(&directories, &keys).unwrap_or_default();
            load_each(pool.iter().map(|graft| graft.image.clone()).collect());
        }));
    }
}

fn load_each(images: Vec<Vec<u8>>) {
    images.iter().for_each(|image| drop(CongestionProgram::prepare(image)));
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
    use crate::ObjectIdentity;

    #[test]
    fn new_graft_bpf_objects_are_relocated_in_advance() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP new_graft_bpf_objects_are_relocated_in_advance: needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let directories = [directory.path().to_owned()];
        let mut warm = Warm::default();
        warm.prepare(&GraftPool::default(), &directories);
        let shipped = GraftPool::read(&[], &[]).expect("what is shipped");
        let graft = shipped.find("longhaul").expect("longhaul");
        // Additional bytes at the end give the file another SHA-256, and so another identity.
        let image = [&graft.image[..], &u64::to_ne_bytes(std::process::id().into())].concat();
        assert!(!CongestionProgram::is_prepared(&image));
        CongestionProgram::prepare(&graft.image).expect("what is shipped is loaded");
        if !CongestionProgram::is_prepared(&graft.image) {
            println!("SKIP new_graft_bpf_objects_are_relocated_in_advance: the kernel is before 6.4");
            return;
        }
        graft.export(directory.path()).expect("files");
        let manifest = directory.path().join("longhaul.toml");
        let text = fs::read_to_string(&manifest).expect("its manifest");
        let text = text.replace(&graft.identity.to_string(), &ObjectIdentity::from_image(&image).to_string());
        fs::write(directory.path().join("longhaul.bpf.o"), &image).expect("its object");
        fs::write(&manifest, text.replace("name = \"longhaul\"", "name = \"other\"")).expect("its manifest");
        wait_for("it to be relocated", || {
            warm.look(&directories, &[]);
            CongestionProgram::is_prepared(&image)
        });
        wait_for("the end of that", || warm.worker.as_ref().is_some_and(JoinHandle::is_finished));
        let before = warm.seen.clone();
        warm.look(&directories, &[]);
        assert_eq!(warm.seen, before);
    }
}
