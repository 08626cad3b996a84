//! What a runtime has learned, as a file: for the one that comes after it.
//!
//! It says who was spoken with, so nobody else may read it. A file that is not as it should be is put aside, not written over.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use millrace_graft_proto::select::{
    kind::{self, Kind, Kinds, Saw},
    online::Place,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, Identity, Settings, Side,
    replace::{beside, replace},
};

const VERSION: u32 = 1;
/// Of a file: more than all that there is room for.
const BYTES_MAX: u64 = 64 << 20;

/// What was learned, and for what it holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    version: u32,
    /// Of the model by whose leaves places go.
    pub(crate) model: Option<String>,
    pub(crate) places: Vec<At>,
    /// The best of late, Mbit/s.
    pub(crate) rates: Vec<(IpAddr, f64)>,
    kinds: Vec<Lesson>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct At {
    pub peer: IpAddr,
    pub leaf: u32,
    pub known: Place,
}

/// As it is after a restart of the host, too: cgroups have other numbers then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lesson {
    side: Side,
    port: u16,
    command: String,
    cgroup: Option<PathBuf>,
    saw: Saw,
}

impl Learned {
    pub(crate) fn of(kinds: &Kinds, settings: &Settings) -> Self {
        let lessons = kinds.lessons();
        let kinds = lessons.into_iter().filter_map(|lesson| Lesson::of(lesson, settings)).collect();
        Self { version: VERSION, kinds, ..Self::default() }
    }

    pub(crate) fn teach(&self, kinds: &mut Kinds, settings: &Settings) {
        let lessons = self.kinds.iter().filter_map(|lesson| lesson.known(settings));
        lessons.for_each(|lesson| kinds.teach(lesson));
    }

    /// `None`: there is no such file.
    ///
    /// # Errors
    /// It cannot be read, or is not as it should be; then it lies beside, under another name.
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let text = match read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(path, error)),
        };
        match serde_json::from_str::<Self>(&text) {
            Ok(learned) if learned.version == VERSION => return Ok(Some(learned)),
            Ok(other) => Err(format!("it is of version {}, and this program reads {VERSION}", other.version)),
            Err(error) => Err(error.to_string()),
        }
        .or_else(|why| {
            let aside = beside(path, "unreadable");
            fs::rename(path, &aside).map_err(|error| failed(path, error))?;
            Err(failed(path, format!("{why}: nothing is known from before; it is {} now", aside.display())))
        })
    }

    /// Whole or not at all.
    ///
    /// # Errors
    /// It cannot be written; what was there stays.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = serde_json::to_vec(self).map_err(|error| failed(path, error))?;
        replace(path, &text, 0o600).map_err(|error| failed(path, error))
    }
}

impl Lesson {
    /// `None`: of a cgroup that no rule names any more.
    fn of(kind::Lesson { kind, seen }: kind::Lesson, settings: &Settings) -> Option<Self> {
        let Kind { is_client, port, command, cgroup } = kind;
        let cgroup = match cgroup {
            0 => None,
            id => Some(settings.cgroup_of(id)?.path().to_owned()),
        };
        let side = if is_client { Side::Client } else { Side::Server };
        Some(Self { side, port, command, cgroup, saw: seen })
    }

    /// `None`: likewise, or it is not there.
    fn known(&self, settings: &Settings) -> Option<kind::Lesson> {
        let cgroup = match &self.cgroup {
            None => 0,
            Some(path) => settings.cgroups().find(|cgroup| cgroup.path() == path)?.id()?,
        };
        let (is_client, command) = (self.side == Side::Client, self.command.clone());
        let kind = Kind { is_client, port: self.port, command, cgroup };
        Some(kind::Lesson { kind, seen: self.saw.clone() })
    }
}

/// By which a model is known again.
pub(crate) fn identity(model: &impl Serialize) -> Option<String> {
    serde_json::to_vec(model).ok().map(|bytes| Identity::of(&bytes).to_string())
}

fn read(path: &Path) -> io::Result<String> {
    let bytes = fs::metadata(path)?.len();
    if bytes > BYTES_MAX {
        return Err(io::Error::other(format!("it has {bytes} bytes; such a file has at most {BYTES_MAX}")));
    }
    fs::read_to_string(path)
}

fn failed(path: &Path, error: impl ToString) -> Error {
    Error::File { path: path.display().to_string(), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::settings::Cgroup;

    fn settings(cgroup: &Path) -> Settings {
        Settings::parse(&format!(
            "[[rule]]\nname = \"copy\"\nside = \"client\"\nport = 873\nagree = false\ncongestion = \"reno\"\ncgroup = {cgroup:?}\n"
        ))
        .expect("settings")
    }

    fn kind(port: u16, cgroup: u64) -> Kind {
        Kind { is_client: true, port, command: "rsync".to_owned(), cgroup }
    }

    fn kinds(cgroup: u64) -> Kinds {
        let mut kinds = Kinds::default();
        kinds.note(kind(873, cgroup), 1, kind::Flow { asked: 1, answered: u64::MAX, turns: None });
        kinds.note(kind(22, 0), 2, kind::Flow { asked: 2, answered: 3, turns: Some(9) });
        kinds.note(kind(22, 0), 3, kind::Flow { asked: 4, answered: 5, turns: Some(1) });
        kinds
    }

    fn taught(learned: &Learned, settings: &Settings) -> Kinds {
        let mut kinds = Kinds::default();
        learned.teach(&mut kinds, settings);
        kinds
    }

    #[test]
    fn what_is_written_is_read_by_its_owner_and_nobody_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let settings = settings(directory.path());
        let id = settings.cgroups().next().and_then(Cgroup::id).expect("it is there");
        let rates = vec![("2001:db8::1".parse().expect("an address"), 12.5)];
        let learned = Learned { rates, ..Learned::of(&kinds(id), &settings) };
        let path = directory.path().join("learned.json");
        assert_eq!(Learned::read(&path).expect("nothing is wrong"), None);
        learned.write(&path).expect("room");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = Learned::read(&path).expect("it is whole").expect("it is there");
        assert_eq!(read, learned);
        assert_eq!(taught(&read, &settings).lessons(), kinds(id).lessons());
        // Half of a file, of somebody who was killed then, is nobody's; and no link is followed.
        let (new, other) = (directory.path().join("learned.json.new"), directory.path().join("other"));
        fs::write(&new, "{").expect("room");
        learned.write(&path).expect("room");
        std::os::unix::fs::symlink(&other, &new).expect("a link");
        learned.write(&path).expect("room");
        assert!(!other.exists() && !new.exists());
        assert_eq!(Learned::read(&path).expect("it is whole"), Some(learned));
    }

    /// Its number is another after a restart of the host.
    #[test]
    fn a_cgroup_is_known_by_its_path() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("copy.slice");
        fs::create_dir(&path).expect("a directory");
        let before = settings(&path);
        let id = before.cgroups().next().and_then(Cgroup::id).expect("it is there");
        let learned = Learned::of(&kinds(id), &before);
        fs::rename(&path, directory.path().join("other.slice")).expect("it is there");
        assert_eq!(taught(&learned, &settings(&path)).lessons().len(), 2, "it is not there");
        fs::create_dir(&path).expect("a directory");
        let after = settings(&path);
        let now = after.cgroups().next().and_then(Cgroup::id).expect("it is there");
        assert_ne!(now, id);
        assert_eq!(taught(&learned, &after).lessons(), kinds(now).lessons());
        let nobody = Settings::default();
        assert_eq!(Learned::of(&kinds(id), &nobody).kinds.len(), 2, "no rule names it");
    }

    #[test]
    fn what_is_wrong_is_said_and_put_aside() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, aside) = (directory.path().join("l"), directory.path().join("l.unreadable"));
        let whole = serde_json::to_string(&Learned { version: VERSION, ..Learned::default() }).expect("JSON");
        let table = [
            (String::new(), "EOF while parsing"),
            (whole[..whole.len() / 2].to_owned(), "EOF while parsing"),
            (whole.replace(":1,", ":7,"), "it is of version 7, and this program reads 1"),
            (whole.replace("\"kinds\":[]", "\"kinds\":[{\"port\":70000}]"), "70000"),
            (whole.replace("\"rates\":[]", "\"rates\":[[\"10.0.0.1\",null]]"), "null"),
        ];
        for (text, wanted) in table {
            fs::write(&path, &text).expect("room");
            let error = Learned::read(&path).expect_err(wanted).to_string();
            assert!(error.contains(wanted) && error.contains("l.unreadable now"), "{error}");
            assert!(!path.exists());
            assert_eq!(fs::read_to_string(&aside).expect("it is kept"), text);
        }
        let nowhere = directory.path().join("no/l");
        let error = Learned::default().write(&nowhere).expect_err("no directory").to_string();
        assert!(error.contains("no/l: No such file"), "{error}");
        fs::File::create(&path).and_then(|file| file.set_len(BYTES_MAX + 1)).expect("a hole");
        let error = Learned::read(&path).expect_err("too long").to_string();
        assert!(error.contains("such a file has at most"), "{error}");
    }
}
