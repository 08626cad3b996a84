//! The file in which a runtime stores the measured costs, rates and traffic patterns of connections, so that the next
//! runtime can read them.
//!
//! The file names the peers of connections, so only its owner may read it. An invalid file is renamed, not
//! overwritten.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use millrace_base::file;
use millrace_graft_proto::select::{
    kind::{self, Kinds, Saw, TrafficClass},
    online::OnlineState,
};
use serde::{Deserialize, Serialize};

use crate::{
    Error, ObjectIdentity, Settings, SideSetting,
    replace::{replace, sibling_path},
};

const VERSION: u32 = 1;
/// Limit of the file's size in bytes. A file with the most costs, rates and connections that a runtime remembers is
/// smaller.
const BYTES_MAX: usize = 64 << 20;

/// Rates to peers and observed connections, as stored in the file, and the identity of the model that they belong to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    version: u32,
    /// Identity of the model. The entries in `places` refer to leaves of this model's tree.
    pub(crate) model: Option<String>,
    pub(crate) places: Vec<LearnedEntry>,
    /// Highest recently measured transfer rate to each peer's address, in Mbit/s.
    pub(crate) rates: Vec<(IpAddr, f64)>,
    kinds: Vec<LearnedLesson>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LearnedEntry {
    pub peer: IpAddr,
    pub leaf: u32,
    pub known: OnlineState,
}

/// One observed connection of a traffic class. It stores the path of its cgroup, since the cgroup's ID changes when the
/// host restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LearnedLesson {
    side: SideSetting,
    port: u16,
    command: String,
    cgroup: Option<PathBuf>,
    saw: Saw,
}

impl Learned {
    pub(crate) fn from_kinds(kinds: &Kinds, settings: &Settings) -> Self {
        let lessons = kinds.lessons();
        let kinds =
            lessons.into_iter().filter_map(|lesson| LearnedLesson::from_lesson(lesson, settings)).collect();
        Self { version: VERSION, kinds, ..Self::default() }
    }

    pub(crate) fn teach(&self, kinds: &mut Kinds, settings: &Settings) {
        let lessons = self.kinds.iter().filter_map(|lesson| lesson.to_lesson(settings));
        lessons.for_each(|lesson| kinds.teach(lesson));
    }

    /// Reads a file of learned state. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid. An invalid file is renamed.
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let text = match file::text(path, BYTES_MAX) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(path, error)),
        };
        match serde_json::from_str::<Self>(&text) {
            Ok(learned) if learned.version == VERSION => return Ok(Some(learned)),
            Ok(other) => {
                Err(format!("the file is of version {}, and this program reads {VERSION}", other.version))
            }
            Err(error) => Err(error.to_string()),
        }
        .or_else(|why| {
            let aside = sibling_path(path, "unreadable");
            fs::rename(path, &aside).map_err(|error| failed(path, error))?;
            Err(failed(
                path,
                format!(
                    "{why}: nothing that was learned before is known; the file was renamed to {}",
                    aside.display()
                ),
            ))
        })
    }

    /// Writes the file atomically: after a failure the previous file stays.
    ///
    /// # Errors
    /// The file cannot be written. The previous one stays.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let text = serde_json::to_vec(self).map_err(|error| failed(path, error))?;
        replace(path, &text, 0o600).map_err(|error| failed(path, error))
    }
}

impl LearnedLesson {
    /// Converts an observed connection for the file, or returns `None` if no rule names its cgroup any more.
    fn from_lesson(kind::ClassLesson { kind, seen }: kind::ClassLesson, settings: &Settings) -> Option<Self> {
        let TrafficClass { is_client, port, command, cgroup } = kind;
        let cgroup = match cgroup {
            0 => None,
            id => Some(settings.cgroup_of(id)?.path().to_owned()),
        };
        let side = if is_client { SideSetting::Client } else { SideSetting::Server };
        Some(Self { side, port, command, cgroup, saw: seen })
    }

    /// Converts an observed connection that was read from the file, or returns `None` if no rule names its cgroup or
    /// the cgroup does not exist.
    fn to_lesson(&self, settings: &Settings) -> Option<kind::ClassLesson> {
        let cgroup = match &self.cgroup {
            None => 0,
            Some(path) => settings.cgroups().find(|cgroup| cgroup.path() == path)?.id()?,
        };
        let is_client = self.side == SideSetting::Client;
        let command = self.command.clone();
        let kind = TrafficClass { is_client, port: self.port, command, cgroup };
        Some(kind::ClassLesson { kind, seen: self.saw.clone() })
    }
}

/// Returns the identity of a model: the SHA-256 of its JSON.
pub(crate) fn identity(model: &impl Serialize) -> Option<String> {
    serde_json::to_vec(model).ok().map(|bytes| ObjectIdentity::from_image(&bytes).to_string())
}

fn failed(path: &Path, error: impl ToString) -> Error {
    Error::File { path: path.display().to_string(), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::settings::CgroupSetting;

    fn settings(cgroup: &Path) -> Settings {
        Settings::parse(&format!(
            "[[rule]]\nname = \"copy\"\nside = \"client\"\nport = 873\nagree = false\ncongestion = \"reno\"\ncgroup = {cgroup:?}\n"
        ))
        .expect("settings")
    }

    fn kind(port: u16, cgroup: u64) -> TrafficClass {
        TrafficClass { is_client: true, port, command: "rsync".to_owned(), cgroup }
    }

    fn kinds(cgroup: u64) -> Kinds {
        let mut kinds = Kinds::default();
        kinds.note(kind(873, cgroup), 1, kind::FlowFigures { asked: 1, answered: u64::MAX, turns: None });
        kinds.note(kind(22, 0), 2, kind::FlowFigures { asked: 2, answered: 3, turns: Some(9) });
        kinds.note(kind(22, 0), 3, kind::FlowFigures { asked: 4, answered: 5, turns: Some(1) });
        kinds
    }

    fn taught(learned: &Learned, settings: &Settings) -> Kinds {
        let mut kinds = Kinds::default();
        learned.teach(&mut kinds, settings);
        kinds
    }

    #[test]
    fn learned_file_is_readable_by_its_owner_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let settings = settings(directory.path());
        let id = settings.cgroups().next().and_then(CgroupSetting::id).expect("it is there");
        let rates = vec![("2001:db8::1".parse().expect("an address"), 12.5)];
        let learned = Learned { rates, ..Learned::from_kinds(&kinds(id), &settings) };
        let path = directory.path().join("learned.json");
        assert_eq!(Learned::read(&path).expect("nothing is wrong"), None);
        learned.write(&path).expect("room");
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = Learned::read(&path).expect("it is whole").expect("it is there");
        assert_eq!(read, learned);
        assert_eq!(taught(&read, &settings).lessons(), kinds(id).lessons());
        // An incomplete file of a killed process is not read, and the runtime follows no symbolic link.
        let new = directory.path().join("learned.json.new");
        let other = directory.path().join("other");
        fs::write(&new, "{").expect("room");
        learned.write(&path).expect("room");
        std::os::unix::fs::symlink(&other, &new).expect("a link");
        learned.write(&path).expect("room");
        assert!(!other.exists() && !new.exists());
        assert_eq!(Learned::read(&path).expect("it is whole"), Some(learned));
    }

    /// The same cgroup has a different ID after the host has restarted.
    #[test]
    fn learned_flows_of_a_cgroup_are_kept_when_its_id_changes() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("copy.slice");
        fs::create_dir(&path).expect("a directory");
        let before = settings(&path);
        let id = before.cgroups().next().and_then(CgroupSetting::id).expect("it is there");
        let learned = Learned::from_kinds(&kinds(id), &before);
        fs::rename(&path, directory.path().join("other.slice")).expect("it is there");
        assert_eq!(taught(&learned, &settings(&path)).lessons().len(), 2, "it is not there");
        fs::create_dir(&path).expect("a directory");
        let after = settings(&path);
        let now = after.cgroups().next().and_then(CgroupSetting::id).expect("it is there");
        assert_ne!(now, id);
        assert_eq!(taught(&learned, &after).lessons(), kinds(now).lessons());
        let nobody = Settings::default();
        assert_eq!(Learned::from_kinds(&kinds(id), &nobody).kinds.len(), 2, "no rule names it");
    }

    #[test]
    fn invalid_learned_file_is_reported_and_renamed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("l");
        let aside = directory.path().join("l.unreadable");
        let whole = serde_json::to_string(&Learned { version: VERSION, ..Learned::default() }).expect("JSON");
        let table = [
            (String::new(), "EOF while parsing"),
            (whole[..whole.len() / 2].to_owned(), "EOF while parsing"),
            (whole.replace(":1,", ":7,"), "the file is of version 7, and this program reads 1"),
            (whole.replace("\"kinds\":[]", "\"kinds\":[{\"port\":70000}]"), "70000"),
            (whole.replace("\"rates\":[]", "\"rates\":[[\"10.0.0.1\",null]]"), "null"),
        ];
        for (text, wanted) in table {
            fs::write(&path, &text).expect("room");
            let error = Learned::read(&path).expect_err(wanted).to_string();
            let renamed = format!("the file was renamed to {}", aside.display());
            assert!(error.contains(wanted) && error.ends_with(&renamed), "{error}");
            assert!(!path.exists());
            assert_eq!(fs::read_to_string(&aside).expect("it is kept"), text);
        }
        let nowhere = directory.path().join("no/l");
        let error = Learned::default().write(&nowhere).expect_err("no directory").to_string();
        assert!(error.contains("no/l: No such file"), "{error}");
        fs::File::create(&path).and_then(|file| file.set_len(BYTES_MAX as u64 + 1)).expect("a hole");
        let error = Learned::read(&path).expect_err("too long").to_string();
        assert!(error.contains("the file has more than 67108864 bytes"), "{error}");
    }
}
