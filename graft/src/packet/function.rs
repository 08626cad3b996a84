//! The pool of packet functions: those that are compiled in, and directories of object files with their manifests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use millrace_base::file;
use millrace_graft_kernel::{FUNCTIONS, PACKET_ABI, ShippedObject, packet};
use serde::Deserialize;

use super::versions::FunctionVersion;
use crate::identity::{ObjectIdentity, SignatureKey};
use crate::manifest::{DescribedObject, ManifestParameter};
use crate::pool::{MANIFEST_MAX_BYTES, manifests};
use crate::{Error, LoadRefusal};

/// Number of hex digits of the object's hash in the name of a function's version in the kernel.
const IDENTITY_DIGITS: usize = 16;

/// A function that can be loaded: its manifest is valid, and its object has the manifest's hash.
#[derive(Clone, Debug)]
pub struct PacketFunction {
    /// The function's manifest.
    pub manifest: FunctionManifest,
    /// SHA-256 of the object file.
    pub identity: ObjectIdentity,
    image: Vec<u8>,
}

/// The manifest of a packet function's object file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct FunctionManifest {
    /// Version of the interface in `graft_packet.h`.
    pub abi: u32,
    /// Name of the function. The names of its BPF programs begin with it.
    pub name: String,
    /// File name of the object, in the directory of the manifest.
    #[serde(default)]
    pub object: String,
    /// SHA-256 of the object file. Functions that are compiled in have none.
    pub sha256: Option<String>,
    /// Signature of the manifest by one of the operator's trusted keys (ed25519).
    pub signature: Option<String>,
    /// Description of the function in one sentence.
    pub about: String,
    /// Services that the function adds to a session.
    #[serde(default)]
    pub services: Vec<FunctionService>,
    /// Functions that have to run before this one.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Functions that have to run after this one.
    #[serde(default)]
    pub wants: Vec<String>,
    /// True if the function's program at TC ingress only handles packets that other functions have recovered. Lists
    /// without a function that recovers packets leave the program out.
    #[serde(default)]
    pub only_recovered: bool,
    /// Oldest kernel on which the function was tried.
    pub kernel: String,
    /// Version of the layout of the state that the function keeps for each session.
    pub state_version: u32,
    /// Earlier versions of the state layout that the function's program `NAME_migrate` can convert to this version.
    #[serde(default)]
    pub migrates: Vec<u32>,
    /// Note on fairness, for a function that can fill a path: how it shares a bottleneck, and how this was tested.
    pub fairness: Option<String>,
    /// Parameters of the function, by name.
    #[serde(default)]
    pub parameters: BTreeMap<String, ManifestParameter>,
}

/// A service that functions provide. Applications request services by name.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum FunctionService {
    /// Drops duplicates of packets.
    Once,
    /// Drops packets that arrive after a packet that was sent later.
    PartialOrder,
    /// Delivers packets in order and without gaps.
    Order,
    /// Retransmits lost packets.
    Reliability,
    /// Retransmits lost packets, except for a bounded share that the receiver abandons.
    PartialReliability,
    /// Recovers lost packets from parity packets.
    Recovery,
    /// Limits the packets in flight to those that fit in the receiver's buffer.
    FlowControl,
    /// Limits the packets in flight to those that the path can carry.
    CongestionControl,
    /// Paces packets, with time stamps that the interface's queueing discipline obeys.
    Pacing,
}

impl FunctionService {
    /// All services, in the order in which reports list them.
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

    /// Returns the name of the service in manifests.
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

    /// Returns the service of this name.
    pub fn find_by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|service| service.name() == name)
    }
}

/// The known packet functions, by name.
#[derive(Clone, Debug, Default)]
pub struct FunctionPool(BTreeMap<String, PacketFunction>);

impl FunctionPool {
    /// Reads the functions that are compiled in, and those in the directories.
    ///
    /// # Errors
    /// A file is not usable, or two functions have the same name.
    pub fn read(directories: &[PathBuf], keys: &[SignatureKey]) -> Result<Self, Error> {
        let mut functions = Self::default();
        for ShippedObject { name, image, manifest } in FUNCTIONS {
            let made = FunctionManifest::parse(manifest)
                .and_then(|manifest| PacketFunction::new(manifest, image.to_vec()));
            functions.add(name, made)?;
        }
        for directory in directories {
            for path in manifests(directory)? {
                functions.add(&path.display().to_string(), PacketFunction::read(&path, keys))?;
            }
        }
        Ok(functions)
    }

    /// Returns the function of this name.
    ///
    /// # Errors
    /// There is no such function. The error names those that exist.
    pub fn find(&self, name: &str) -> Result<&PacketFunction, Error> {
        let known = || self.0.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.0.get(name).ok_or_else(|| Error::NoFunction { name: name.to_owned(), known: known() })
    }

    /// Returns the known packet functions, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &PacketFunction> {
        self.0.values()
    }

    fn add(&mut self, place: &str, made: Result<PacketFunction, String>) -> Result<(), Error> {
        let error = |message| Error::File { path: place.to_owned(), message };
        let function = made.map_err(error)?;
        let name = function.manifest.name.clone();
        match self.0.insert(name.clone(), function) {
            None => Ok(()),
            Some(_) => Err(error(format!("there is a function {name} already"))),
        }
    }
}

impl PacketFunction {
    fn read(path: &Path, keys: &[SignatureKey]) -> Result<Self, String> {
        let text = file::text(path, MANIFEST_MAX_BYTES).map_err(|error| error.to_string())?;
        let manifest = FunctionManifest::parse(&text)?;
        let image = manifest.described().read(path, &text, keys)?;
        Self::new(manifest, image)
    }

    fn new(manifest: FunctionManifest, image: Vec<u8>) -> Result<Self, String> {
        let object =
            packet::OpenedFunction::open(&image).map_err(|error| format!("{}: {error}", manifest.object))?;
        if object.name() != manifest.name {
            return Err(format!("{} is function {}, not {}", manifest.object, object.name(), manifest.name));
        }
        // If a manifest names earlier versions to migrate from, the object must have the program that converts their
        // state. An object with such a program must name at least one earlier version.
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
        Ok(Self { identity: ObjectIdentity::from_image(&image), manifest, image })
    }

    fn check_value(&self, parameter: &str, value: u64) -> Result<(), Error> {
        let failed = |message| Error::Graft { name: self.manifest.name.clone(), message };
        self.manifest.described().check_parameter(parameter, value).map_err(failed)
    }

    /// Returns the version of the function. The name of the version in the kernel contains the object file's hash, so
    /// that several versions can be loaded at once.
    pub(super) fn version(&self) -> FunctionVersion {
        let FunctionManifest { name, state_version, migrates, .. } = &self.manifest;
        // The first `IDENTITY_DIGITS` hex digits of the hash are enough to tell the versions of one function apart.
        let identity: String = self.identity.to_string().chars().take(IDENTITY_DIGITS).collect();
        FunctionVersion {
            key: format!("{name}@{identity}"),
            name: name.clone(),
            state: *state_version,
            takes: migrates.clone(),
        }
    }

    /// Returns the value of a parameter that is compiled into the object.
    pub(super) fn default_of(&self, parameter: &str) -> Option<u64> {
        let object = packet::OpenedFunction::open(&self.image).ok()?;
        object.parameters().iter().find(|it| it.name == parameter).map(|it| it.default)
    }

    /// Returns the values of the parameters on which both ends need to agree, as text. Both ends compare hashes of
    /// their function lists, and the hash covers this text.
    pub(super) fn shared_values(&self, values: Option<&BTreeMap<String, u64>>) -> String {
        let shared = self.manifest.parameters.iter().filter(|(_, parameter)| parameter.shared);
        let value = |name: &String| {
            values.and_then(|values| values.get(name).copied()).or_else(|| self.default_of(name))
        };
        shared.map(|(name, _)| format!(" {name}={}", value(name).unwrap_or_default())).collect()
    }

    /// Opens the object for loading, with these parameter values instead of the compiled ones.
    pub(super) fn open(&self, values: &BTreeMap<String, u64>) -> Result<packet::OpenedFunction, Error> {
        let name = &self.manifest.name;
        let failed = |message| Error::Graft { name: name.clone(), message };
        let mut object =
            packet::OpenedFunction::open(&self.image).map_err(|error| failed(error.to_string()))?;
        for (parameter, value) in values {
            self.check_value(parameter, *value)?;
            object.set(parameter, *value).map_err(|error| failed(error.to_string()))?;
        }
        object.set_only_recovered(self.manifest.only_recovered);
        Ok(object)
    }

    pub(super) fn refused(&self, error: millrace_graft_kernel::Error) -> Error {
        let name = self.manifest.name.clone();
        match error.log() {
            Some(log) if !log.is_empty() => Error::Refused { name, refusal: LoadRefusal::parse(log) },
            _ => Error::Graft { name, message: error.to_string() },
        }
    }
}

impl FunctionManifest {
    fn parse(text: &str) -> Result<Self, String> {
        let manifest: Self = crate::left::manifest(text)?;
        if manifest.abi != PACKET_ABI {
            return Err(format!("abi {} is not supported: the supported one is {PACKET_ABI}", manifest.abi));
        }
        manifest.described().check()?;
        Ok(manifest)
    }

    fn described(&self) -> DescribedObject<'_> {
        DescribedObject {
            object: &self.object,
            sha256: self.sha256.as_deref(),
            signature: self.signature.as_deref(),
            parameters: &self.parameters,
        }
    }
}
