//! Reads or derives the secret of stateless resets, by which clients notice that the relay was restarted (RFC 9000,
//! section 10.3).

use std::path::Path;

use anyhow::Context;
use millrace_daemon::{
    http::token::{Error, TokenFile},
    pem,
};
use millrace_transport::LastingSecret;
use tracing::info;

use super::config::{Config, IdentityConfig};

/// The file with a Linux machine's ID (machine-id(5)).
const MACHINE_ID: &str = "/etc/machine-id";
const HOSTNAME: &str = "/proc/sys/kernel/hostname";

/// Reads the secret that the settings name, or derives it from the private key. Returns `None` if no secret is certain
/// to be unique to this machine, or the file does not exist yet.
///
/// # Errors
/// Fails if a file cannot be read or has the wrong form.
pub fn read(config: &Config) -> anyhow::Result<Option<LastingSecret>> {
    let Some(path) = &config.reset_key_file else { return derive_from_private_key(&config.identity) };
    match TokenFile::At(path.clone()).read() {
        Ok(token) => Ok(token.map(|token| LastingSecret::new(token.text().as_bytes(), b"file"))),
        // The file with the secret does not exist yet. The relay creates it when it starts.
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("reset-key-file"),
    }
}

/// Reads the secret like [`read`], and creates the file that the settings name if it does not exist.
///
/// # Errors
/// Fails like [`read`], or if the file cannot be written.
pub fn read_or_make(config: &Config) -> anyhow::Result<Option<LastingSecret>> {
    if let Some(path) = &config.reset_key_file {
        TokenFile::At(path.clone()).read_or_make().context("reset-key-file")?;
    }
    // The secret is read from the file even if it was just created, so this start and later ones use the same bytes.
    let secret = read(config)?;
    if secret.is_none() {
        info!(
            "clients will not notice a restart of this relay before their idle time-out, since the certificate is self-signed or the \
             machine has no ID: name a file for the secret with --reset-key-file"
        );
    }
    Ok(secret)
}

fn derive_from_private_key(identity: &IdentityConfig) -> anyhow::Result<Option<LastingSecret>> {
    // A self-signed key is new at each start, so clients would not recognise stateless resets that are derived from it.
    let IdentityConfig::Files { key, .. } = identity else { return Ok(None) };
    let Some(machine) = machine(Path::new(MACHINE_ID), Path::new(HOSTNAME)) else { return Ok(None) };
    let (key, _) = pem::private_key(key).context("tls-key")?;
    Ok(Some(LastingSecret::new(key.secret_der(), machine.as_bytes())))
}

/// Returns a text that identifies this machine among others with the same private key: its machine ID and host name.
/// The host name is included because cloned machines may have the same ID. Returns `None` without a machine ID, as in
/// most containers.
fn machine(id: &Path, hostname: &Path) -> Option<String> {
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let id = read(id);
    // The file may be empty or contain "uninitialized" early in the first boot (machine-id(5)).
    let is_id = id.len() >= 32 && id.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_id.then(|| format!("{id} {}", read(hostname)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_identity_has_machine_id_and_host_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let id = at("id", "0123456789abcdef0123456789abcdef\n");
        let name = at("name", "relay1\n");
        assert_eq!(machine(&id, &name).unwrap(), "0123456789abcdef0123456789abcdef relay1");
        assert_ne!(machine(&id, &at("other", "relay2\n")), machine(&id, &name));
        assert_eq!(machine(&at("uninitialized", "uninitialized\n"), &name), None);
        assert_eq!(machine(&at("empty", ""), &name), None);
        assert_eq!(machine(&dir.path().join("none"), &name), None);
    }
}
