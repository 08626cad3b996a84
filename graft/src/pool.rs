//! The pool of grafts: those that are compiled in, and directories of object files with their manifests.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use millrace_base::file;
use millrace_graft_kernel::{GraftObject, SHIPPED, ShippedObject};

use crate::{
    Error, GraftManifest, ObjectIdentity,
    identity::SignatureKey,
    manifest::{ManifestHook, OBJECT_MAX_BYTES},
};

pub(crate) const MANIFEST_MAX_BYTES: usize = 64 << 10;
/// Largest number of grafts in one directory.
const GRAFTS_MAX: usize = 256;

/// The origin of a graft's object file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolSource {
    /// The graft is compiled in.
    Shipped,
    /// The graft was read from a directory: path of its manifest.
    File(PathBuf),
}

/// A graft that can be loaded: its manifest is valid, and its object has the manifest's hash.
#[derive(Clone, Debug)]
pub struct PoolGraft {
    /// The graft's manifest.
    pub manifest: GraftManifest,
    /// SHA-256 of the object file.
    pub identity: ObjectIdentity,
    /// Origin of the graft.
    pub source: PoolSource,
    /// Name of the graft's congestion control in TCP.
    pub congestion: String,
    /// Values of the parameters that are compiled into the object.
    pub defaults: BTreeMap<String, u64>,
    pub(crate) image: Vec<u8>,
}

/// The known grafts, by name.
#[derive(Clone, Debug, Default)]
pub struct GraftPool {
    grafts: BTreeMap<String, PoolGraft>,
    /// Manifests that are not usable, with the reasons.
    pub unusable: Vec<(String, String)>,
}

impl GraftPool {
    /// Reads the grafts that are compiled in, and those of the directories. If two grafts have the same name, only the
    /// first is usable, so no file can replace another graft.
    ///
    /// # Errors
    /// Fails if a directory cannot be read.
    pub fn read(directories: &[PathBuf], keys: &[SignatureKey]) -> Result<Self, Error> {
        let mut pool = Self::default();
        for ShippedObject { name, image, manifest } in SHIPPED {
            let made = GraftManifest::parse(manifest)
                .and_then(|manifest| PoolGraft::new(manifest, image.to_vec(), PoolSource::Shipped));
            pool.add((*name).to_owned(), made);
        }
        for directory in directories {
            pool.read_directory(directory, keys)?;
        }
        Ok(pool)
    }

    /// Returns the grafts, by name.
    pub fn iter(&self) -> impl Iterator<Item = &PoolGraft> {
        self.grafts.values()
    }

    /// Returns the graft with this name.
    ///
    /// # Errors
    /// Fails if there is no graft with this name. The error names the grafts that exist.
    pub fn find(&self, name: &str) -> Result<&PoolGraft, Error> {
        let known = || self.grafts.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.grafts.get(name).ok_or_else(|| {
            match self
                // If a manifest of this name is not usable, the error says why.
                .unusable
                .iter()
                .find(|(path, _)| Path::new(path).file_stem().is_some_and(|it| it == name))
            {
                Some((path, message)) => Error::File { path: path.clone(), message: message.clone() },
                None => Error::Unknown { name: name.to_owned(), known: known() },
            }
        })
    }

    fn read_directory(&mut self, directory: &Path, keys: &[SignatureKey]) -> Result<(), Error> {
        for path in manifests(directory)? {
            self.add(path.display().to_string(), PoolGraft::read(&path, keys));
        }
        Ok(())
    }

    fn add(&mut self, place: String, made: Result<PoolGraft, String>) {
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

impl PoolGraft {
    /// Reads a graft, whose manifest is at the given path.
    ///
    /// # Errors
    /// The error names what is wrong with the manifest or the object.
    pub fn read(path: &Path, keys: &[SignatureKey]) -> Result<Self, String> {
        let text = file::text(path, MANIFEST_MAX_BYTES).map_err(|error| error.to_string())?;
        let manifest = GraftManifest::parse(&text)?;
        let image = manifest.described().read(path, &text, keys)?;
        Self::new(manifest, image, PoolSource::File(path.to_owned()))
    }

    /// Reads an object without a manifest, for development. Its parameters have no ranges, so they cannot be set.
    ///
    /// # Errors
    /// The error names what is wrong with the object.
    pub fn without_manifest(path: &Path) -> Result<Self, String> {
        let image = file::bytes(path, OBJECT_MAX_BYTES).map_err(|error| error.to_string())?;
        let object = GraftObject::open(&image).map_err(|error| error.to_string())?;
        let defaults = object.parameters().iter().map(|it| (it.name.clone(), it.default)).collect();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let manifest = GraftManifest {
            abi: millrace_graft_kernel::ABI,
            object: name.clone(),
            name,
            sha256: None,
            signature: None,
            about: String::new(),
            // Only congestion controls can be loaded without a manifest.
            hooks: vec![ManifestHook::Cc],
            services: Vec::new(),
            paths: Vec::new(),
            kernel: String::new(),
            fairness: String::new(),
            state_version: 0,
            parameters: BTreeMap::new(),
        };
        let identity = ObjectIdentity::from_image(&image);
        let congestion = object.name().to_owned();
        Ok(Self {
            manifest,
            identity,
            source: PoolSource::File(path.to_owned()),
            congestion,
            defaults,
            image,
        })
    }

    fn new(manifest: GraftManifest, image: Vec<u8>, source: PoolSource) -> Result<Self, String> {
        let object = GraftObject::open(&image).map_err(|error| format!("{}: {error}", manifest.object))?;
        let compiled: BTreeMap<_, _> =
            object.parameters().iter().map(|parameter| (parameter.name.clone(), parameter.default)).collect();
        for name in manifest.parameters.keys() {
            let value =
                compiled.get(name).ok_or_else(|| format!("{} has no parameter {name}", manifest.object))?;
            manifest
                .described()
                .check_parameter(name, *value)
                .map_err(|error| format!("the value that is compiled in is wrong: {error}"))?;
        }
        let defaults =
            compiled.into_iter().filter(|(name, _)| manifest.parameters.contains_key(name)).collect();
        let congestion = object.name().to_owned();
        Ok(Self {
            identity: ObjectIdentity::from_image(&image),
            manifest,
            source,
            congestion,
            defaults,
            image,
        })
    }

    /// Writes the object and the manifest of a compiled-in graft to a directory.
    pub fn export(&self, directory: &Path) -> Result<(), Error> {
        let known = SHIPPED.iter().find(|it| it.name == self.manifest.name);
        let text = match (&self.source, known) {
            (PoolSource::Shipped, Some(ShippedObject { manifest: text, .. })) => {
                // The manifest of a compiled-in graft has no hash of the object file, so a line with the hash is added.
                let line = format!("object = \"{}\"\n", self.manifest.object);
                text.replacen(&line, &format!("{line}sha256 = \"{}\"\n", self.identity), 1)
            }
            _ => return Err(self.error("the graft is in a pool directory already")),
        };
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.join(name);
            fs::write(&path, bytes).map_err(|error| file_error(&path, error))
        };
        write(&self.manifest.object, &self.image)?;
        write(&format!("{}.toml", self.manifest.name), text.as_bytes())
    }

    /// Checks the values that settings request for parameters, and returns them as a list.
    pub(crate) fn values(&self, wanted: &BTreeMap<String, u64>) -> Result<Vec<(String, u64)>, Error> {
        let checked = wanted.iter().map(|(name, value)| {
            self.manifest.described().check_parameter(name, *value).map_err(|error| self.error(error))?;
            Ok((name.clone(), *value))
        });
        checked.collect()
    }

    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        Error::Graft { name: self.manifest.name.clone(), message: message.into() }
    }
}

/// Returns the manifests of a directory, sorted, so that errors name the same file each time, and always the same one
/// of two grafts with one name is usable.
pub(crate) fn manifests(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |error: std::io::Error| file_error(directory, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            found.push(path);
        }
    }
    // The number of manifests is compared with the limit before any file is read.
    if found.len() > GRAFTS_MAX {
        return Err(file_error(directory, format!("more than {GRAFTS_MAX} manifests")));
    }
    found.sort();
    Ok(found)
}

fn file_error(path: &Path, message: impl ToString) -> Error {
    Error::File { path: path.display().to_string(), message: message.to_string() }
}
