//! Functions on packets that there are: compiled in, and in directories with their manifests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use millrace_graft_kernel::{FUNCTIONS, PACKET_ABI, joint};
use serde::Deserialize;

use super::versions::Version;
use crate::identity::{Identity, Key, Signature};
use crate::manifest::{Parameter, signed_text};
use crate::{Error, Refusal};

/// Of a file's identity, in what the kernel's side calls a version.
const IDENTITY_DIGITS: usize = 16;
const OBJECT_MAX_BYTES: u64 = 4 << 20;
const MANIFEST_MAX_BYTES: u64 = 64 << 10;

macro_rules! manifests {
    ($($name:literal),* $(,)?) => {
        const MANIFESTS: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../functions/", $name, ".toml")))),*];
    };
}

manifests!(
    "number",
    "order",
    "window",
    "acknowledge",
    "repair",
    "partial",
    "gobackn",
    "fec",
    "congestion",
    "pace"
);

/// One that may be loaded: its manifest is usable and its object is what that says.
#[derive(Clone, Debug)]
pub struct Function {
    pub manifest: Manifest,
    pub identity: Identity,
    image: Vec<u8>,
}

/// What stands beside an object file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Manifest {
    /// Of `graft_packet.h`.
    pub abi: u32,
    /// What its programs' names begin with.
    pub name: String,
    #[serde(default)]
    pub object: String,
    pub sha256: Option<String>,
    pub signature: Option<String>,
    pub about: String,
    /// What a session has by it.
    #[serde(default)]
    pub services: Vec<Service>,
    /// Functions that have to run before it.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Functions that have to run behind it.
    #[serde(default)]
    pub wants: Vec<String>,
    /// Its program at TC ingress is for what other functions have recovered there; lists without such ones do without it.
    #[serde(default)]
    pub only_recovered: bool,
    /// The oldest kernel that it was tried on.
    pub kernel: String,
    /// Of what it keeps of a session.
    pub state_version: u32,
    /// Other versions of that, which its program `NAME_migrate` makes its own of.
    #[serde(default)]
    pub migrates: Vec<u32>,
    /// Of one that can fill a path: how it shares a bottleneck, and how that is known.
    pub fairness: Option<String>,
    #[serde(default)]
    pub parameters: BTreeMap<String, Parameter>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    /// Nothing comes twice.
    Once,
    /// Nothing comes behind what was sent later.
    PartialOrder,
    /// All that is delivered is in order, and without gaps.
    Order,
    /// What is lost is sent again.
    Reliability,
    /// What is lost is sent again, but for a bounded part of it.
    PartialReliability,
    /// What is lost may be made out of the rest.
    Recovery,
    /// No more is under way than there is room for.
    FlowControl,
    /// No more is under way than the path carries.
    CongestionControl,
    /// Packets leave one after another, by the queueing discipline of the interface.
    Pacing,
}

impl Service {
    pub const ALL: [Self; 9] = [
        Self::Once,
        Self::PartialOrder,
        Self::Order,
        Self::Reliability,
        Self::PartialReliability,
        Self::Recovery,
        Self::FlowControl,
        Self::CongestionControl,
        Self::Pacing,
    ];

    /// As manifests have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Once => "once",
            Self::PartialOrder => "partial-order",
            Self::Order => "order",
            Self::Reliability => "reliability",
            Self::PartialReliability => "partial-reliability",
            Self::Recovery => "recovery",
            Self::FlowControl => "flow-control",
            Self::CongestionControl => "congestion-control",
            Self::Pacing => "pacing",
        }
    }

    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|service| service.name() == name)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Functions(BTreeMap<String, Function>);

impl Functions {
    /// What is compiled in, and what lies in the directories.
    ///
    /// # Errors
    /// A file is not usable, or a name comes twice.
    pub fn read(directories: &[PathBuf], keys: &[Key]) -> Result<Self, Error> {
        let mut functions = Self::default();
        for &(name, text) in MANIFESTS {
            let image = FUNCTIONS.iter().find(|(known, _)| *known == name).map(|(_, image)| image.to_vec());
            let made = Manifest::parse(text)
                .and_then(|manifest| Function::new(manifest, image.ok_or("it has no object")?));
            functions.add(name, made)?;
        }
        for directory in directories {
            for path in manifests(directory)? {
                functions.add(&path.display().to_string(), Function::read(&path, keys))?;
            }
        }
        Ok(functions)
    }

    pub fn find(&self, name: &str) -> Result<&Function, Error> {
        let known = || self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.0.get(name).ok_or_else(|| Error::NoFunction { name: name.to_owned(), known: known() })
    }

    pub fn iter(&self) -> impl Iterator<Item = &Function> {
        self.0.values()
    }

    fn add(&mut self, place: &str, made: Result<Function, String>) -> Result<(), Error> {
        let error = |message| Error::File { path: place.to_owned(), message };
        let function = made.map_err(error)?;
        let name = function.manifest.name.clone();
        match self.0.insert(name.clone(), function) {
            None => Ok(()),
            Some(_) => Err(error(format!("there is a function {name} already"))),
        }
    }
}

impl Function {
    fn read(path: &Path, keys: &[Key]) -> Result<Self, String> {
        let text = String::from_utf8(read_bounded(path, MANIFEST_MAX_BYTES)?);
        let text = text.map_err(|_| "it is not UTF-8".to_owned())?;
        let manifest = Manifest::parse(&text)?;
        manifest.check_signature(&text, keys)?;
        let object = path.with_file_name(&manifest.object);
        let image = read_bounded(&object, OBJECT_MAX_BYTES)
            .map_err(|error| format!("{}: {error}", object.display()))?;
        let stated = manifest.sha256.as_deref().ok_or("sha256 is missing: `sha256sum` of the object")?;
        let stated: Identity = stated.parse().map_err(|error| format!("sha256 {error}"))?;
        let identity = Identity::of(&image);
        if stated != identity {
            return Err(format!("{} is {identity}, and sha256 says {stated}", manifest.object));
        }
        Self::new(manifest, image)
    }

    fn new(manifest: Manifest, image: Vec<u8>) -> Result<Self, String> {
        let object =
            joint::Function::open(&image).map_err(|error| format!("{}: {error}", manifest.object))?;
        if object.name() != manifest.name {
            return Err(format!("{} is function {}, not {}", manifest.object, object.name(), manifest.name));
        }
        match (manifest.migrates.is_empty(), object.migrates()) {
            (true, true) => {
                return Err("it has a program that migrates: `migrates` says from which state-version".into());
            }
            (false, false) => {
                return Err(format!("{} has no program {}_migrate", manifest.object, manifest.name));
            }
            _ => {}
        }
        for name in manifest.parameters.keys() {
            if !object.parameters().iter().any(|parameter| parameter.name == *name) {
                return Err(format!("{} has no parameter {name}", manifest.object));
            }
        }
        Ok(Self { identity: Identity::of(&image), manifest, image })
    }

    fn check_value(&self, parameter: &str, value: u64) -> Result<(), Error> {
        let failed = |message| Error::Graft { name: self.manifest.name.clone(), message };
        let range = self.manifest.parameters.get(parameter);
        let range = range.ok_or_else(|| failed(format!("there is no parameter {parameter}")))?;
        let (min, max) = (range.min, range.max);
        match (min..=max).contains(&value) {
            true => Ok(()),
            false => Err(failed(format!("parameter {parameter} is from {min} to {max}"))),
        }
    }

    /// Told from others by its file.
    pub(super) fn version(&self) -> Version {
        let Manifest { name, state_version, migrates, .. } = &self.manifest;
        let identity: String = self.identity.to_string().chars().take(IDENTITY_DIGITS).collect();
        Version {
            key: format!("{name}@{identity}"),
            name: name.clone(),
            state: *state_version,
            takes: migrates.clone(),
        }
    }

    /// What a parameter has been compiled with.
    pub(super) fn default_of(&self, parameter: &str) -> Option<u64> {
        let object = joint::Function::open(&self.image).ok()?;
        object.parameters().iter().find(|it| it.name == parameter).map(|it| it.default)
    }

    /// Of parameters of which both ends need the same: part of what they agree on.
    pub(super) fn shared_values(&self, values: Option<&BTreeMap<String, u64>>) -> String {
        let shared = self.manifest.parameters.iter().filter(|(_, parameter)| parameter.shared);
        let value = |name: &String| {
            values.and_then(|values| values.get(name).copied()).or_else(|| self.default_of(name))
        };
        shared.map(|(name, _)| format!(" {name}={}", value(name).unwrap_or_default())).collect()
    }

    /// Ready to be given to the kernel, with these values instead of those that it was compiled with.
    pub(super) fn open(&self, values: &BTreeMap<String, u64>) -> Result<joint::Function, Error> {
        let name = &self.manifest.name;
        let failed = |message| Error::Graft { name: name.clone(), message };
        let mut object = joint::Function::open(&self.image).map_err(|error| failed(error.to_string()))?;
        for (parameter, value) in values {
            self.check_value(parameter, *value)?;
            object.set(parameter, *value).map_err(|error| failed(error.to_string()))?;
        }
        object.only_recovered(self.manifest.only_recovered);
        Ok(object)
    }

    pub(super) fn refused(&self, error: millrace_graft_kernel::Error) -> Error {
        let name = self.manifest.name.clone();
        match error.log() {
            Some(log) if !log.is_empty() => Error::Refused { name, refusal: Refusal::parse(log) },
            _ => Error::Graft { name, message: error.to_string() },
        }
    }
}

impl Manifest {
    fn parse(text: &str) -> Result<Self, String> {
        let manifest: Self = crate::left::manifest(text)?;
        if manifest.abi != PACKET_ABI {
            return Err(format!("abi {} is not {PACKET_ABI}, which is known here", manifest.abi));
        }
        if manifest.object.contains('/') || manifest.object.is_empty() {
            return Err("object is the name of a file beside the manifest".to_owned());
        }
        match manifest.parameters.iter().find(|(_, it)| it.min > it.max) {
            Some((name, _)) => Err(format!("parameters.{name}: min is more than max")),
            None => Ok(manifest),
        }
    }

    fn check_signature(&self, text: &str, keys: &[Key]) -> Result<(), String> {
        if keys.is_empty() {
            return Ok(());
        }
        let signature = self.signature.as_deref().ok_or("it is not signed, and trusted-keys are set")?;
        let signature: Signature = signature.parse().map_err(|error| format!("signature {error}"))?;
        let signed = signed_text(text);
        match keys.iter().any(|key| key.verifies(signed.as_bytes(), &signature)) {
            true => Ok(()),
            false => Err("its signature is of none of the trusted keys".to_owned()),
        }
    }
}

fn manifests(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let failed = |error: std::io::Error| Error::File {
        path: directory.display().to_string(),
        message: error.to_string(),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn read_bounded(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let length = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > most {
        return Err(format!("{length} bytes are more than {most}"));
    }
    fs::read(path).map_err(|error| error.to_string())
}
