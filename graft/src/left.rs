//! Settings that left the product, and the error for files that still name them.

use serde::de::DeserializeOwned;

/// The parser's words for a key that is gone, and the advice that replaces it.
const LEFT: [(&str, &str); 4] = [
    (
        "unknown field `classify`",
        "[classify] left Millrace: say what connections are for with [[profile]] (nDPI is in study/ndpi)",
    ),
    (
        "unknown field `loopback`",
        "loopback left Millrace: remove it, applications and the broker speak by TCP (sockmap is in study/sockmap)",
    ),
    (
        "unknown field `rings`",
        "rings left Millrace: remove it, messages come by their sockets (docs/design/0027-rings.md)",
    ),
    (
        "unknown field `kind`",
        "functions that are processes left Millrace: use a list such as window, number, repair, acknowledge (SCTP is in study/usrsctp)",
    ),
];

/// Reads TOML.
///
/// # Errors
/// Where it is wrong; of what left the product, what replaces it.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let error = error.to_string();
        let left = LEFT.iter().find(|(said, _)| error.contains(said));
        left.map_or_else(
            || error.trim_end().to_owned(),
            |(_, instead)| format!("{}\n{instead}", error.trim_end()),
        )
    })
}
