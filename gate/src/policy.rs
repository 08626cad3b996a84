//! Policy files in TOML. A file is read as a whole, and all its problems are reported at once. `docs/guide/gate.md`
//! lists all keys.

mod scope;
mod values;

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

pub use millrace_base::settings::{Problems, SettingsProblem};
use millrace_base::settings::{Section, SettingPlace, SettingsReader};
use millrace_kernel::prefix::Prefix;

use crate::kernel::{
    Config, GateRules, ListEntry, Modes, Rule, rules,
    token::{self, GateKey},
};

use self::values::{ListedPrefix, ProgramOrder};

/// The contents of a policy file.
///
/// ```
/// use millrace_gate::Policy;
///
/// let policy = Policy::parse("[[scope]]\nname = \"web\"\nport = 443\n")?;
/// assert_eq!(policy.rules.scopes[0].name, "web");
/// // All problems are reported at once, with their lines.
/// assert!(Policy::parse("[[scope]]\nprot = 443\n").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Policy {
    /// The gate's rules, from the rest of the file.
    pub rules: GateRules,
    /// Settings of section `[load]`, which cannot change while a gate runs.
    pub load: Config,
    /// Token keys that are shared with other gates; `None` if each gate has its own.
    pub token_keys: Option<TokenKeys>,
}

/// The two keys of Retry tokens. A token contains the index (0 or 1) of the key that authenticates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenKeys {
    /// Two keys for the tokens that clients show in Initial packets. Both check tokens, and one of them makes new ones.
    pub slots: [GateKey; 2],
    /// Index (0 or 1) of the key that new tokens are made with.
    pub current: usize,
}

impl TokenKeys {
    pub(crate) fn key(&self, slot: usize) -> &GateKey {
        let [first, second] = &self.slots;
        if slot == 0 { first } else { second }
    }
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum LoadError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, r#source: io::Error },
    #[error(transparent)]
    Policy(#[from] Problems),
}

impl Policy {
    /// Reads a policy file, and the files of lists and keys that it names. Their paths are relative to the policy file.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        Ok(Self::parse_file(&text, path)?)
    }

    /// Reads the policy in `text`, which came from the file `path`. Paths in the policy are relative to this file.
    pub fn parse_file(text: &str, path: &Path) -> Result<Self, Problems> {
        let directory = path.parent().unwrap_or(Path::new(""));
        Self::parse_in(text, &path.to_string_lossy(), directory)
    }

    /// Reads the policy in `text`. Paths in the policy are relative to the working directory.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        Self::parse_in(text, "policy", Path::new(""))
    }

    fn parse_in(text: &str, file: &str, directory: &Path) -> Result<Self, Problems> {
        let (mut reader, root) = SettingsReader::new(text);
        let (policy, places) = read_policy(&mut reader, root, directory);
        // The policy's rules are checked as a whole only if no single setting had a fault. Otherwise this check would
        // report the same fault in other words.
        if reader.problems.is_empty()
            && let Err(error) = policy.rules.check()
        {
            reader.problem(&culprit(&error, &places), error.to_string());
        }
        reader.end("the policy is", file, Some(policy))
    }

    /// Returns warnings about settings that are allowed, but probably not intended.
    pub fn warnings(&self) -> Vec<String> {
        let scopes = self.rules.scopes.iter();
        let every_port = scopes.filter(|scope| scope.places.iter().any(|place| place.port.is_none()));
        let warn = |scope: &rules::ScopeRules| {
            format!(
                "scope {} has no port: all UDP to its addresses is judged as QUIC for a server, including answers to \
                 this host's own queries (DNS, NTP), which are refused; add `port`",
                scope.name
            )
        };
        every_port.map(warn).collect()
    }

    /// Changes the mode of every enforced rule to monitor, so that its violations are counted but not refused.
    #[must_use]
    pub fn dry_run(self) -> Self {
        Self { rules: self.rules.dry_run(), ..self }
    }
}

/// Returns the line and key in the policy file where the scope begins that the error names.
fn culprit(error: &rules::Error, places: &[(String, SettingPlace)]) -> SettingPlace {
    use rules::Error;
    let name = match error {
        Error::Name(name) | Error::NoPlace(name) | Error::SamePlace(_, name) => name,
        Error::Unset { scope, .. } | Error::Value { scope, .. } => scope,
        Error::TooMany { .. } => return SettingPlace { line: 1, key: "scope".into() },
    };
    let place = places.iter().rev().find(|(scope, _)| scope == name).map(|(_, place)| place.clone());
    place.unwrap_or(SettingPlace { line: 1, key: "scope".into() })
}

fn read_policy(
    reader: &mut SettingsReader,
    mut root: Section<'_>,
    directory: &Path,
) -> (Policy, Vec<(String, SettingPlace)>) {
    let mut policy = Policy::default();
    if let Some(section) = reader.section(&mut root, "load") {
        policy.load = load(reader, section);
    }
    if let Some((place, path)) = reader.take_at::<PathBuf>(&mut root, "token_keys") {
        match token_keys(&directory.join(path)) {
            Ok(keys) => policy.token_keys = Some(keys),
            Err(message) => reader.problem(&place, message),
        }
    }
    if let Some(section) = reader.section(&mut root, "interface") {
        policy.rules.interface = interface(reader, section);
    }
    policy.rules.prefixes = prefixes(reader, &mut root, directory);
    let mut places = Vec::new();
    for section in reader.sections(&mut root, "scope") {
        let place = section.place.clone();
        let scope = scope::read(reader, section, directory);
        places.push((scope.name.clone(), place));
        policy.rules.scopes.push(scope);
    }
    let place = root.place.clone();
    reader.finish(root);
    if policy.rules.scopes.is_empty() && reader.problems.is_empty() {
        reader.problem(&place, "the policy has no scope: add `[[scope]]` with a port");
    }
    (policy, places)
}

/// Largest number of entries that a policy may set for a BPF map of the gate. Such a map takes some 2 GB of memory, and
/// is far from the kernel's limit.
const ENTRIES_MAX: u32 = 1 << 24;
const SAMPLES_MAX: u32 = 1_000_000;

fn load(reader: &mut SettingsReader, mut section: Section<'_>) -> Config {
    let mut config = Config::default();
    let mut bits = |reader: &mut SettingsReader, key, max, to: &mut Vec<u8>| {
        let Some((place, value)) = reader.take_at::<Vec<u8>>(&mut section, key) else { return };
        match Config::check_prefixes(&value, max) {
            Ok(()) => *to = value,
            Err(message) => reader.problem(&place, message),
        }
    };
    bits(reader, "client_prefix_v4", 32, &mut config.client_prefix_v4);
    bits(reader, "client_prefix_v6", 128, &mut config.client_prefix_v6);
    if let Some((place, times)) = reader.take_at::<Vec<u32>>(&mut section, "network_times") {
        let times: Option<[u32; 2]> = times.try_into().ok();
        let checked = times.map(|times| Config::check_times(times).map(|()| times));
        match checked.unwrap_or_else(|| Err("must be two numbers, such as [8, 64]".to_owned())) {
            Ok(times) => config.network_times = times,
            Err(message) => reader.problem(&place, message),
        }
    }
    for (key, range, to) in [
        ("max_ids", 1..=ENTRIES_MAX, &mut config.max_ids),
        ("max_clients", 1..=ENTRIES_MAX, &mut config.max_clients),
        ("max_handshakes", 1..=ENTRIES_MAX, &mut config.max_handshakes),
        ("max_rates", 1..=ENTRIES_MAX, &mut config.max_rates),
        ("max_prefixes", 1..=ENTRIES_MAX, &mut config.max_prefixes),
        ("samples_per_second", 0..=SAMPLES_MAX, &mut config.samples_per_second),
    ] {
        let Some((place, value)) = reader.take_at(&mut section, key) else { continue };
        *to = value;
        if !range.contains(to) {
            reader.problem(&place, format!("is {} to {}", range.start(), range.end()));
        }
    }
    if let Some(order) = reader.take::<ProgramOrder>(&mut section, "watch") {
        config.watch = order.into();
    }
    reader.finish(section);
    config
}

fn interface(reader: &mut SettingsReader, mut section: Section<'_>) -> Modes {
    let mut modes = Modes::default();
    for rule in [Rule::Fragment, Rule::Headers] {
        if let Some(mode) = reader.take(&mut section, rule.name()) {
            modes.set(rule, mode);
        }
    }
    reader.finish(section);
    modes
}

/// Reads `block`, `allow`, `block_file` and `allow_file` of a section.
fn prefixes(
    reader: &mut SettingsReader,
    from: &mut Section<'_>,
    directory: &Path,
) -> Vec<(Prefix, ListEntry)> {
    let mut all = Vec::new();
    for (key, file_key, entry) in
        [("block", "block_file", ListEntry::Block), ("allow", "allow_file", ListEntry::Allow)]
    {
        let listed: Vec<ListedPrefix> = reader.take(from, key).unwrap_or_default();
        all.extend(listed.into_iter().map(|ListedPrefix(prefix)| (prefix, entry)));
        if let Some((place, path)) = reader.take_at::<PathBuf>(from, file_key) {
            match prefix_file(&directory.join(path)) {
                Ok(listed) => all.extend(listed.into_iter().map(|prefix| (prefix, entry))),
                Err(message) => reader.problem(&place, message),
            }
        }
    }
    all
}

fn prefix_file(path: &Path) -> Result<Vec<Prefix>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    prefix_list(&text, &path.to_string_lossy())
}

/// Reads a list with a prefix per line; `#` begins a comment.
///
/// # Errors
/// Describes the first fault, with the list's `name` and the line number.
pub fn prefix_list(text: &str, name: &str) -> Result<Vec<Prefix>, String> {
    let lines = text.lines().map(content).enumerate().filter(|(_, line)| !line.is_empty());
    let parsed =
        lines.map(|(index, line)| line.parse().map_err(|error| format!("{name}:{}: {error}", index + 1)));
    parsed.collect()
}

/// Reads a file of token keys: two lines of 32 hexadecimal digits. New tokens are made with the key after `*`.
fn token_keys(path: &Path) -> Result<TokenKeys, String> {
    let error = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|source| error(&source))?;
    let lines: Vec<_> = text.lines().map(content).filter(|line| !line.is_empty()).collect();
    let current = lines.iter().position(|line| line.starts_with('*'));
    let keys: Option<Vec<GateKey>> =
        lines.iter().map(|line| key(line.trim_start_matches('*').trim())).collect();
    let slots = keys.and_then(|keys| <[GateKey; 2]>::try_from(keys).ok());
    match (slots, current) {
        (Some(slots), Some(current)) => Ok(TokenKeys { slots, current }),
        _ => Err(error(&"must have two lines of 32 hexadecimal digits each, one of them after a `*`")),
    }
}

fn key(hex: &str) -> Option<GateKey> {
    let bytes = crate::hex::decode(hex)?;
    <[u8; token::GateKey::LEN]>::try_from(bytes).ok().map(GateKey::new)
}

fn content(line: &str) -> &str {
    line.split('#').next().unwrap_or_default().trim()
}

#[cfg(test)]
mod tests;
