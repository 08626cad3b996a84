//! Manifests of grafts (BPF programs that are loaded into the kernel). A manifest accompanies the object file of a
//! graft, and states its purpose and the bounds of its parameters. `docs/guide/graft.md` has all keys.

use std::{collections::BTreeMap, path::Path};

use millrace_base::file;
use serde::Deserialize;

use crate::identity::{ObjectIdentity, Signature, SignatureKey};

/// Longest name of a graft, in bytes.
const NAME_MAX: usize = 32;
/// Largest object file in bytes. The objects of this project have some 30 KB.
pub(crate) const OBJECT_MAX_BYTES: usize = 4 << 20;

/// The manifest of a graft: a description of the BPF object file that is loaded into the kernel.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GraftManifest {
    /// Version of the programming interface in `graft.h` that the object file was written for.
    pub abi: u32,
    /// Name of the graft, at most 32 bytes.
    pub name: String,
    /// File name of the object, in the directory of the manifest.
    pub object: String,
    /// SHA-256 of the object file. Object files that are compiled into this program have none.
    pub sha256: Option<String>,
    /// Signature of the manifest by one of the operator's trusted keys (ed25519).
    pub signature: Option<String>,
    /// Description of the graft in one sentence.
    pub about: String,
    /// Kernel hooks that call the programs of the object file.
    pub hooks: Vec<ManifestHook>,
    /// Services that the graft provides.
    pub services: Vec<ManifestService>,
    /// Names of the classes of paths that the graft is meant for.
    #[serde(default)]
    pub paths: Vec<String>,
    /// Oldest kernel on which the graft was tried, such as "6.1".
    pub kernel: String,
    /// Note on fairness: how the graft shares a bottleneck, and how that was tested.
    pub fairness: String,
    /// Version of the layout of the graft's state. Grafts of the same name and version can replace each other and keep
    /// the state.
    pub state_version: u32,
    /// Parameters of the object file, by name.
    #[serde(default)]
    pub parameters: BTreeMap<String, ManifestParameter>,
}

/// The keys of a manifest that describe the object file of a graft or a packet function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DescribedObject<'a> {
    pub(crate) object: &'a str,
    pub(crate) sha256: Option<&'a str>,
    pub(crate) signature: Option<&'a str>,
    pub(crate) parameters: &'a BTreeMap<String, ManifestParameter>,
}

/// A hook of the kernel that calls the programs of a graft's object file.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ManifestHook {
    /// Congestion control of TCP (`struct_ops`).
    Cc,
}

/// A service that a graft (a BPF program loaded into the kernel) provides to TCP.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum ManifestService {
    /// The graft is a congestion control.
    CongestionControl,
    /// The graft paces packets.
    Pacing,
}

/// A parameter of the object file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ManifestParameter {
    /// Description of the parameter in one sentence.
    pub about: String,
    /// Smallest valid value of the parameter.
    pub min: u64,
    /// Largest valid value of the parameter.
    pub max: u64,
    /// True for a parameter of a packet function on which both ends need to agree.
    #[serde(default)]
    pub shared: bool,
}

impl ManifestService {
    /// Returns the name of the service in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::CongestionControl => "congestion-control",
            Self::Pacing => "pacing",
        }
    }
}

impl GraftManifest {
    /// Parses a manifest.
    ///
    /// # Errors
    /// The error names what is wrong, with the line if it is known.
    pub fn parse(text: &str) -> Result<Self, String> {
        let manifest: Self = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        let plain = |text: &str| {
            text.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
        };
        if self.abi != millrace_graft_kernel::ABI {
            return Err(format!(
                "abi {} is not supported: the supported one is {}",
                self.abi,
                millrace_graft_kernel::ABI
            ));
        }
        if self.name.is_empty() || self.name.len() > NAME_MAX || !plain(&self.name) {
            return Err(format!("name is at most {NAME_MAX} small letters, digits, - and _"));
        }
        if self.hooks != [ManifestHook::Cc] {
            return Err("hooks is [\"cc\"]".to_owned());
        }
        self.described().check()
    }

    /// Returns what the manifest says about the object file.
    pub(crate) fn described(&self) -> DescribedObject<'_> {
        DescribedObject {
            object: &self.object,
            sha256: self.sha256.as_deref(),
            signature: self.signature.as_deref(),
            parameters: &self.parameters,
        }
    }
}

impl DescribedObject<'_> {
    /// Checks the object's name and the ranges of its parameters.
    pub(crate) fn check(&self) -> Result<(), String> {
        // A name with a path could refer to a file outside the manifest's directory.
        if self.object.contains('/') || self.object.is_empty() {
            return Err("object has to be the name of a file in the manifest's directory".to_owned());
        }
        match self.parameters.iter().find(|(_, it)| it.min > it.max) {
            Some((name, _)) => Err(format!("parameters.{name}: min is more than max")),
            None => Ok(()),
        }
    }

    /// Reads the object's file, which is in the directory of the manifest at `path` with this text. With trusted keys,
    /// the file is opened only if one of them has signed the manifest.
    ///
    /// # Errors
    /// The manifest is not signed as required, or its hash is not that of the object.
    pub(crate) fn read(&self, path: &Path, text: &str, keys: &[SignatureKey]) -> Result<Vec<u8>, String> {
        self.check_signature(text, keys)?;
        let object = path.with_file_name(self.object);
        let image = file::bytes(&object, OBJECT_MAX_BYTES)
            .map_err(|error| format!("{}: {error}", object.display()))?;
        self.check_identity(ObjectIdentity::from_image(&image))?;
        Ok(image)
    }

    /// Checks that the object is the one that the manifest was written for.
    ///
    /// # Errors
    /// The object's hash differs from the manifest's, or the manifest has no hash.
    pub fn check_identity(&self, identity: ObjectIdentity) -> Result<(), String> {
        let stated = self.sha256.ok_or("sha256 is missing: `sha256sum` of the object")?;
        let stated: ObjectIdentity = stated.parse().map_err(|error| format!("sha256 {error}"))?;
        if stated != identity {
            return Err(format!("{} is {identity}, and sha256 says {stated}", self.object));
        }
        Ok(())
    }

    /// Checks the signature of the manifest's text. Without trusted keys every text is accepted.
    ///
    /// # Errors
    /// None of the keys has signed the text.
    pub fn check_signature(&self, text: &str, keys: &[SignatureKey]) -> Result<(), String> {
        if keys.is_empty() {
            return Ok(());
        }
        let signature = self.signature.ok_or("it is not signed, and `trusted-keys` require that")?;
        let signature: Signature = signature.parse().map_err(|error| format!("signature {error}"))?;
        let signed = signed_text(text);
        match keys.iter().any(|key| key.verifies(signed.as_bytes(), &signature)) {
            true => Ok(()),
            false => Err("its signature was made by none of `trusted-keys`, or for another text".to_owned()),
        }
    }

    /// Checks the value of a parameter against its range.
    ///
    /// # Errors
    /// The graft has no such parameter, or the value is out of its range.
    pub fn check_parameter(&self, name: &str, value: u64) -> Result<(), String> {
        let known = || self.parameters.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let Some(parameter) = self.parameters.get(name) else {
            return Err(format!("it has no parameter {name}; it has: {}", known()));
        };
        match (parameter.min..=parameter.max).contains(&value) {
            true => Ok(()),
            false => Err(format!("parameter {name} is from {} to {}", parameter.min, parameter.max)),
        }
    }
}

/// Returns the text that a signature covers: the manifest without the line of its signature. Only the first line that
/// begins with `signature = ` is removed. Later ones, such as in a value of several lines, are signed.
fn signed_text(text: &str) -> String {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let own = lines.iter().position(|line| line.starts_with("signature = "));
    lines.iter().enumerate().filter(|(at, _)| Some(*at) != own).map(|(_, line)| *line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::signature::{Ed25519KeyPair, KeyPair as _};

    const TEXT: &str = r#"
abi = 1
name = "hybla"
object = "hybla.bpf.o"
about = "about"
hooks = ["cc"]
services = ["congestion-control"]
kernel = "6.1"
fairness = "not measured"
state-version = 1
[parameters.rtt0_us]
about = "reference round trip"
min = 1000
max = 100000
"#;

    #[test]
    fn invalid_manifests_are_refused() {
        assert!(GraftManifest::parse(TEXT).is_ok());
        let table = [
            ("abi = 1", "abi = 2", "abi 2 is not supported"),
            ("\"hybla\"", "\"Hybla\"", "small letters"),
            ("\"hybla.bpf.o\"", "\"../hybla.bpf.o\"", "in the manifest's directory"),
            ("[\"cc\"]", "[]", "hooks is"),
            ("[\"cc\"]", "[\"rx\"]", "unknown variant `rx`"),
            ("min = 1000", "min = 1000000", "min is more than max"),
            ("kernel", "colonel", "unknown field `colonel`"),
        ];
        for (from, to, wanted) in table {
            let error = GraftManifest::parse(&TEXT.replacen(from, to, 1)).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn graft_parameters_are_checked_against_their_range() {
        let manifest = GraftManifest::parse(TEXT).expect("a manifest");
        assert_eq!(manifest.described().check_parameter("rtt0_us", 1000), Ok(()));
        for (name, value) in [("rtt0_us", 999), ("rtt0_us", 100_001), ("rtt", 1000)] {
            assert!(manifest.described().check_parameter(name, value).is_err(), "{name} {value}");
        }
    }

    #[test]
    fn only_signatures_of_trusted_keys_are_accepted() {
        let pair = |seed: u8| Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("a key");
        let key = |pair: &Ed25519KeyPair| -> SignatureKey {
            crate::identity::hex(pair.public_key().as_ref()).parse().expect("a key")
        };
        let ours = pair(1);
        let other = pair(2);
        let line = format!("signature = \"{}\"\n", crate::identity::hex(ours.sign(TEXT.as_bytes()).as_ref()));
        let signed = TEXT.replacen('\n', &format!("\n{line}"), 1);
        let manifest = GraftManifest::parse(&signed).expect("a manifest");
        assert_eq!(manifest.described().check_signature(&signed, &[]), Ok(()));
        assert_eq!(manifest.described().check_signature(&signed, &[key(&other), key(&ours)]), Ok(()));
        assert!(manifest.described().check_signature(&signed, &[key(&other)]).is_err());
        let changed = signed.replace("max = 100000", "max = 200000");
        assert!(manifest.described().check_signature(&changed, &[key(&ours)]).is_err());
        // Only the line with the signature itself is not covered by the signature.
        let more = format!("{signed}about = \"\"\"\nsignature = \"\n\"\"\"\n");
        assert!(manifest.described().check_signature(&more, &[key(&ours)]).is_err());
        let unsigned = GraftManifest::parse(TEXT).expect("a manifest");
        assert!(unsigned.described().check_signature(TEXT, &[key(&ours)]).is_err());
    }
}
