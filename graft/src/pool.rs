//! Where grafts lie: what is compiled in, and directories of object files with their manifests.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use millrace_graft_kernel::{Object, SHIPPED};

use crate::{Error, Identity, Manifest, identity::Key, manifest::Joint};

/// Of an object file; ours have some 30 KB.
const OBJECT_MAX_BYTES: u64 = 4 << 20;
const MANIFEST_MAX_BYTES: u64 = 64 << 10;
/// Of one directory.
const GRAFTS_MAX: usize = 256;

const MANIFESTS: [(&str, &str); 4] = [
    ("hybla", include_str!("../pool/hybla.toml")),
    ("longhaul", include_str!("../pool/longhaul.toml")),
    ("pcc", include_str!("../pool/pcc.toml")),
    ("westwood", include_str!("../pool/westwood.toml")),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Compiled in.
    Shipped,
    /// The manifest.
    File(PathBuf),
}

/// One that may be loaded: its manifest is usable and its object is what that says.
#[derive(Clone, Debug)]
pub struct Graft {
    pub manifest: Manifest,
    pub identity: Identity,
    pub source: Source,
    /// Of the congestion control, as TCP knows it.
    pub congestion: String,
    /// As they are compiled.
    pub defaults: BTreeMap<String, u64>,
    pub(crate) image: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub struct Pool {
    grafts: BTreeMap<String, Graft>,
    /// Of those that are not usable: manifest and reason.
    pub unusable: Vec<(String, String)>,
}

impl Pool {
    /// What is compiled in, and what lies in the directories. A name that comes again is not usable: nobody replaces a graft
    /// by putting another file beside it.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn read(directories: &[PathBuf], keys: &[Key]) -> Result<Self, Error> {
        let mut pool = Self::default();
        for (name, text) in MANIFESTS {
            let image = SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, image)| image.to_vec());
            let made = image.ok_or_else(|| "it has no object".to_owned());
            let made = made.and_then(|image| Graft::shipped(text, image));
            pool.add(name.to_owned(), made);
        }
        for directory in directories {
            pool.read_directory(directory, keys)?;
        }
        Ok(pool)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Graft> {
        self.grafts.values()
    }

    pub fn find(&self, name: &str) -> Result<&Graft, Error> {
        let known = || self.grafts.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.grafts.get(name).ok_or_else(|| {
            match self
                .unusable
                .iter()
                .find(|(path, _)| Path::new(path).file_stem().is_some_and(|it| it == name))
            {
                Some((path, message)) => Error::File { path: path.clone(), message: message.clone() },
                None => Error::Unknown { name: name.to_owned(), known: known() },
            }
        })
    }

    fn read_directory(&mut self, directory: &Path, keys: &[Key]) -> Result<(), Error> {
        let failed = |error: std::io::Error| file_error(directory, error);
        let mut manifests = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                manifests.push(path);
            }
        }
        if manifests.len() > GRAFTS_MAX {
            return Err(file_error(directory, format!("more than {GRAFTS_MAX} manifests")));
        }
        manifests.sort();
        for path in manifests {
            self.add(path.display().to_string(), Graft::read(&path, keys));
        }
        Ok(())
    }

    fn add(&mut self, place: String, made: Result<Graft, String>) {
        match made {
            Ok(graft) if self.grafts.contains_key(&graft.manifest.name) => {
                self.unusable.push((place, format!("there is a graft {} already", graft.manifest.name)));
            }
            Ok(graft) => {
                self.grafts.insert(graft.manifest.name.clone(), graft);
            }
            Err(message) => self.unusable.push((place, message)),
        }
    }
}

impl Graft {
    /// By its manifest.
    ///
    /// # Errors
    /// What is wrong with manifest or object.
    pub fn read(path: &Path, keys: &[Key]) -> Result<Self, String> {
        let text = read_bounded(path, MANIFEST_MAX_BYTES)?;
        let text = String::from_utf8(text).map_err(|_| "it is not UTF-8".to_owned())?;
        let manifest = Manifest::parse(&text)?;
        manifest.check_signature(&text, keys)?;
        let object = path.with_file_name(&manifest.object);
        let image = read_bounded(&object, OBJECT_MAX_BYTES)
            .map_err(|error| format!("{}: {error}", object.display()))?;
        manifest.check_identity(Identity::of(&image))?;
        Self::new(manifest, image, Source::File(path.to_owned()))
    }

    /// An object alone, while it is being written: its parameters have no ranges, so they cannot be set.
    ///
    /// # Errors
    /// What is wrong with the object.
    pub fn without_manifest(path: &Path) -> Result<Self, String> {
        let image = read_bounded(path, OBJECT_MAX_BYTES)?;
        let object = Object::open(&image).map_err(|error| error.to_string())?;
        let defaults = object.parameters().iter().map(|it| (it.name.clone(), it.default)).collect();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let manifest = Manifest {
            abi: millrace_graft_kernel::ABI,
            object: name.clone(),
            name,
            sha256: None,
            signature: None,
            about: String::new(),
            joints: vec![Joint::Cc],
            services: Vec::new(),
            paths: Vec::new(),
            kernel: String::new(),
            fairness: String::new(),
            state_version: 0,
            parameters: BTreeMap::new(),
        };
        let (identity, congestion) = (Identity::of(&image), object.name().to_owned());
        Ok(Self { manifest, identity, source: Source::File(path.to_owned()), congestion, defaults, image })
    }

    fn shipped(text: &str, image: Vec<u8>) -> Result<Self, String> {
        Self::new(Manifest::parse(text)?, image, Source::Shipped)
    }

    fn new(manifest: Manifest, image: Vec<u8>, source: Source) -> Result<Self, String> {
        let object = Object::open(&image).map_err(|error| format!("{}: {error}", manifest.object))?;
        let compiled: BTreeMap<_, _> =
            object.parameters().iter().map(|parameter| (parameter.name.clone(), parameter.default)).collect();
        for name in manifest.parameters.keys() {
            let value =
                compiled.get(name).ok_or_else(|| format!("{} has no parameter {name}", manifest.object))?;
            manifest.check_parameter(name, *value).map_err(|error| format!("as it is compiled, {error}"))?;
        }
        let defaults =
            compiled.into_iter().filter(|(name, _)| manifest.parameters.contains_key(name)).collect();
        let congestion = object.name().to_owned();
        Ok(Self { identity: Identity::of(&image), manifest, source, congestion, defaults, image })
    }

    /// Its manifest as it is in a pool, for one that is compiled in.
    pub fn export(&self, directory: &Path) -> Result<(), Error> {
        let known = MANIFESTS.iter().find(|(name, _)| *name == self.manifest.name);
        let text = match (&self.source, known) {
            (Source::Shipped, Some((_, text))) => {
                let line = format!("object = \"{}\"\n", self.manifest.object);
                text.replacen(&line, &format!("{line}sha256 = \"{}\"\n", self.identity), 1)
            }
            _ => return Err(self.error("it lies in a pool already")),
        };
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.join(name);
            fs::write(&path, bytes).map_err(|error| file_error(&path, error))
        };
        write(&self.manifest.object, &self.image)?;
        write(&format!("{}.toml", self.manifest.name), text.as_bytes())
    }

    /// Values other than those that it was compiled with.
    pub(crate) fn values(&self, wanted: &BTreeMap<String, u64>) -> Result<Vec<(String, u64)>, Error> {
        let checked = wanted.iter().map(|(name, value)| {
            self.manifest.check_parameter(name, *value).map_err(|error| self.error(error))?;
            Ok((name.clone(), *value))
        });
        checked.collect()
    }

    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        Error::Graft { name: self.manifest.name.clone(), message: message.into() }
    }
}

fn file_error(path: &Path, message: impl ToString) -> Error {
    Error::File { path: path.display().to_string(), message: message.to_string() }
}

fn read_bounded(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let length = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > most {
        return Err(format!("{length} bytes are more than {most}"));
    }
    fs::read(path).map_err(|error| error.to_string())
}
