//! Settings that left the product, and the error for files that still name them.

use millrace_base::settings::Problems;
use serde::de::DeserializeOwned;

/// Keys that are gone, and what to do instead.
const LEFT: [(&str, &str); 3] = [
    (
        "classify",
        "[classify] left Millrace: say what connections are for with [[profile]] (nDPI is in study/ndpi)",
    ),
    (
        "loopback",
        "loopback left Millrace: remove it, applications and the broker speak by TCP (sockmap is in study/sockmap)",
    ),
    ("rings", "rings left Millrace: remove it, messages come by their sockets (docs/design/0027-rings.md)"),
];

/// Says of unknown keys that are gone what to do instead.
pub(crate) fn advise(mut problems: Problems) -> Problems {
    for problem in problems.problems.iter_mut().filter(|problem| problem.message.starts_with("unknown key")) {
        let key = problem.key.rsplit('.').next().unwrap_or_default();
        if let Some((_, advice)) = LEFT.iter().find(|(left, _)| *left == key) {
            problem.message = (*advice).to_owned();
        }
    }
    problems
}

/// Reads the manifest of a function.
///
/// # Errors
/// Where it is wrong.
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
