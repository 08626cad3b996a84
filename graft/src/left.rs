//! Settings that were removed from Millrace, and the error texts for files that still contain them.

use millrace_base::settings::Problems;
use serde::de::DeserializeOwned;

/// Keys that were removed, with the text that names their replacement.
const LEFT: [(&str, &str); 5] = [
    (
        "classify",
        "[classify] left Millrace: say what connections are for with [[profile]] (nDPI is in study/ndpi)",
    ),
    (
        "loopback",
        "loopback left Millrace: remove it, applications and the broker speak by TCP (sockmap is in study/sockmap)",
    ),
    (
        "key-file",
        "key-file left Millrace: keys of sessions come from TLS between the daemons. Make a key with `millrace graft key --new host.key`. \
         Write `[agreement]` with `key = \"host.key\"`, and in [[peer]] `key = \"...\"`, which `millrace graft key` prints at the other \
         host. In [[session]], write `peer = \"...\"`, the name of its [[peer]]",
    ),
    (
        "protocol",
        "protocol left Millrace: remove it, sessions are UDP between hosts (IP protocol 253 is in study/protocol253)",
    ),
    (
        "rings",
        "rings left Millrace: remove it, messages come by their sockets (docs/notes/design/0027-rings.md)",
    ),
];

/// Keys of the former settings file of sessions, from the time when sessions had a daemon of their own.
const OF_SESSIONS: [&str; 4] = ["interface", "mode", "memory-mib", "parameters"];
/// Settings of sessions that were formerly in `[[peer]]` itself.
const OF_PEER: [&str; 10] = [
    "local",
    "remote",
    "ports",
    "users",
    "groups",
    "sessions-per-user",
    "datagram-bytes",
    "cipher",
    "clear",
    "paths",
];

/// Replaces the error about each key that was removed or moved by a text that names the key's replacement.
pub(crate) fn advise(mut problems: Problems) -> Problems {
    for problem in &mut problems.problems {
        let key = problem.key.rsplit('.').next().unwrap_or_default();
        let is_unknown = problem.message.starts_with("unknown key");
        let left = LEFT.iter().find(|(left, _)| is_unknown && *left == key);
        if let Some(advice) =
            left.map(|(_, advice)| (*advice).to_owned()).or_else(|| moved(&problem.key, is_unknown))
        {
            problem.message = advice;
        }
    }
    problems
}

/// Returns advice for a key of the former settings file of sessions: the line that replaces it.
fn moved(key: &str, is_unknown: bool) -> Option<String> {
    let in_peer = key.strip_prefix("peer[").and_then(|rest| rest.split_once("].")).map(|(_, key)| key);
    let line = match (key, in_peer) {
        ("sessions", _) if !is_unknown => "write `[sessions]`, and `max-sessions = ...` under it".to_owned(),
        _ if !is_unknown => return None,
        ("agreement.renew-s", _) => "write `renew-s = ...` under `[sessions]`".to_owned(),
        ("parameters", _) => "write `[sessions.parameters.NAME]` instead of `[parameters.NAME]`".to_owned(),
        (key, _) if OF_SESSIONS.contains(&key) => format!("write `[sessions]`, and `{key} = ...` under it"),
        (_, Some("path")) => "write `[[peer.sessions.path]]` instead of `[[peer.path]]`".to_owned(),
        (_, Some(key)) if OF_PEER.contains(&key) => {
            format!("write `[peer.sessions]` behind this peer's other keys, and `{key} = ...` under it")
        }
        _ => return None,
    };
    Some(format!("has moved, since sessions share the settings file of all grafts: {line}"))
}

/// Parses the manifest of a packet function.
///
/// # Errors
/// The error names the line in the manifest.
pub(crate) fn manifest<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let error = error.to_string();
        let is_process = error.contains("unknown field `kind`");
        let advice = match is_process {
            true => "\nfunctions that are processes left Millrace: use a list such as window, number, repair, acknowledge (SCTP is in study/usrsctp)",
            false => "",
        };
        format!("{}{advice}", error.trim_end())
    })
}
