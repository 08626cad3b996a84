//! What stands beside an object file: what it is, what it is for, and within which bounds. `docs/graft.md` has all keys.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::identity::{Identity, Key, Signature};

/// Of a graft's name.
const NAME_MAX: usize = 32;

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Manifest {
    /// Of `graft.h`.
    pub abi: u32,
    pub name: String,
    /// File name of the object, beside the manifest.
    pub object: String,
    /// Not in what is compiled in.
    pub sha256: Option<String>,
    pub signature: Option<String>,
    pub about: String,
    pub joints: Vec<Joint>,
    pub services: Vec<Service>,
    /// Names of classes of paths that it is for.
    #[serde(default)]
    pub paths: Vec<String>,
    /// The oldest kernel that it was tried on, such as "6.1".
    pub kernel: String,
    /// How it shares a bottleneck, and how that is known.
    pub fairness: String,
    /// Grafts of one name that have the same can take each other's place with their state.
    pub state_version: u32,
    #[serde(default)]
    pub parameters: BTreeMap<String, Parameter>,
}

/// Where it is called from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Joint {
    /// TCP's congestion control.
    Cc,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    CongestionControl,
    Pacing,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Parameter {
    pub about: String,
    pub min: u64,
    pub max: u64,
    /// Of a function on packets: both ends need the same value, which is part of what they agree on.
    #[serde(default)]
    pub shared: bool,
}

impl Service {
    /// As a manifest has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::CongestionControl => "congestion-control",
            Self::Pacing => "pacing",
        }
    }
}

impl Manifest {
    /// # Errors
    /// What is wrong, with its line where there is one.
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
                "abi {} is not {}, which is known here",
                self.abi,
                millrace_graft_kernel::ABI
            ));
        }
        if self.name.is_empty() || self.name.len() > NAME_MAX || !plain(&self.name) {
            return Err(format!("name is at most {NAME_MAX} small letters, digits, - and _"));
        }
        if self.object.contains('/') || self.object.is_empty() {
            return Err("object is the name of a file beside the manifest".to_owned());
        }
        if self.joints != [Joint::Cc] {
            return Err("joints is [\"cc\"]".to_owned());
        }
        match self.parameters.iter().find(|(_, it)| it.min > it.max) {
            Some((name, _)) => Err(format!("parameters.{name}: min is more than max")),
            None => Ok(()),
        }
    }

    /// # Errors
    /// The object is not what the manifest was written for.
    pub fn check_identity(&self, identity: Identity) -> Result<(), String> {
        let stated = self.sha256.as_deref().ok_or("sha256 is missing: `sha256sum` of the object")?;
        let stated: Identity = stated.parse().map_err(|error| format!("sha256 {error}"))?;
        if stated != identity {
            return Err(format!("{} is {identity}, and sha256 says {stated}", self.object));
        }
        Ok(())
    }

    /// # Errors
    /// None of the keys has signed the text.
    pub fn check_signature(&self, text: &str, keys: &[Key]) -> Result<(), String> {
        if keys.is_empty() {
            return Ok(());
        }
        let signature = self.signature.as_deref().ok_or("it is not signed, and `trusted-keys` wants that")?;
        let signature: Signature = signature.parse().map_err(|error| format!("signature {error}"))?;
        let signed = signed_text(text);
        match keys.iter().any(|key| key.verifies(signed.as_bytes(), &signature)) {
            true => Ok(()),
            false => Err("its signature is of none of `trusted-keys`, or of another text".to_owned()),
        }
    }

    /// # Errors
    /// It has no such parameter, or another range for it.
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

/// What a signature is of: the manifest without the line of its signature. Only one line goes: others that begin like it, as
/// in a text of several lines, are signed.
pub fn signed_text(text: &str) -> String {
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
joints = ["cc"]
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
    fn what_is_wrong_is_said() {
        assert!(Manifest::parse(TEXT).is_ok());
        let table = [
            ("abi = 1", "abi = 2", "abi 2 is not 1"),
            ("\"hybla\"", "\"Hybla\"", "small letters"),
            ("\"hybla.bpf.o\"", "\"../hybla.bpf.o\"", "beside the manifest"),
            ("[\"cc\"]", "[]", "joints is"),
            ("[\"cc\"]", "[\"rx\"]", "unknown variant `rx`"),
            ("min = 1000", "min = 1000000", "min is more than max"),
            ("kernel", "colonel", "unknown field `colonel`"),
        ];
        for (from, to, wanted) in table {
            let error = Manifest::parse(&TEXT.replacen(from, to, 1)).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn parameters_have_ranges() {
        let manifest = Manifest::parse(TEXT).expect("a manifest");
        assert_eq!(manifest.check_parameter("rtt0_us", 1000), Ok(()));
        for (name, value) in [("rtt0_us", 999), ("rtt0_us", 100_001), ("rtt", 1000)] {
            assert!(manifest.check_parameter(name, value).is_err(), "{name} {value}");
        }
    }

    #[test]
    fn only_trusted_signatures_count() {
        let pair = |seed: u8| Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("a key");
        let key = |pair: &Ed25519KeyPair| -> Key {
            crate::identity::hex(pair.public_key().as_ref()).parse().expect("a key")
        };
        let (ours, other) = (pair(1), pair(2));
        let line = format!("signature = \"{}\"\n", crate::identity::hex(ours.sign(TEXT.as_bytes()).as_ref()));
        let signed = TEXT.replacen('\n', &format!("\n{line}"), 1);
        let manifest = Manifest::parse(&signed).expect("a manifest");
        assert_eq!(manifest.check_signature(&signed, &[]), Ok(()));
        assert_eq!(manifest.check_signature(&signed, &[key(&other), key(&ours)]), Ok(()));
        assert!(manifest.check_signature(&signed, &[key(&other)]).is_err());
        let changed = signed.replace("max = 100000", "max = 200000");
        assert!(manifest.check_signature(&changed, &[key(&ours)]).is_err());
        // Only the line of the signature is not signed.
        let more = format!("{signed}about = \"\"\"\nsignature = \"\n\"\"\"\n");
        assert!(manifest.check_signature(&more, &[key(&ours)]).is_err());
        let unsigned = Manifest::parse(TEXT).expect("a manifest");
        assert!(unsigned.check_signature(TEXT, &[key(&ours)]).is_err());
    }
}
