//! A list of relays in a file or behind a URL, which is read periodically.

use std::{path::PathBuf, time::Duration};

use millrace_base::file;
use serde::Deserialize;
use tokio::{sync::watch, task, time};
use url::Url;

use crate::{
    http::{HttpClient, StoreError},
    record::RelayRecord,
    state::{DiscoveryState, note_found, note_unread},
};

/// Largest size of a list in a file, in bytes.
const MAX_LIST: usize = 1 << 20;

/// The location of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListPlace {
    /// The list is in this file.
    File(PathBuf),
    /// The list is behind this `http://` or `https://` URL.
    Url(Url),
}

/// A list of relays that is read once per `interval`.
#[derive(Debug)]
pub struct ListDiscovery {
    /// The location of the list.
    pub place: ListPlace,
    /// The time from one reading to the next.
    pub interval: Duration,
    /// The HTTP client that fetches the list, if it is behind a URL.
    pub client: HttpClient,
    /// This relay's own URL, which is ignored if the list has it.
    pub own: Option<Url>,
}

/// An entry of a JSON list.
#[derive(Deserialize)]
#[serde(untagged)]
enum ListEntry {
    Url(Url),
    Record(RelayRecord),
}

impl ListDiscovery {
    /// Keeps the discovered relays in `found` up to date until all receivers of `found` are dropped.
    pub async fn run(self, found: &watch::Sender<DiscoveryState>) {
        let mut looks = time::interval(self.interval);
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                () = found.closed() => return,
            }
            match self.read().await {
                Ok((mut relays, unusable)) => {
                    // All relays of a cluster may read the same list, which then has this relay's own URL as well.
                    relays.retain(|relay| Some(&relay.url) != self.own.as_ref());
                    note_found(found, relays, unusable);
                }
                Err(error) => note_unread(found, &error),
            }
        }
    }

    /// Returns the relays of the list, and the reasons why other entries cannot be used.
    async fn read(&self) -> Result<(Vec<RelayRecord>, Vec<String>), StoreError> {
        let (name, text) = match &self.place {
            ListPlace::Url(url) => {
                (url.authority().to_owned(), self.client.send(url, None).await?.text().await?)
            }
            ListPlace::File(path) => {
                let name = path.display().to_string();
                let path = path.clone();
                // Reading a file may block for long, for instance on a network file system, so it runs on a thread of
                // its own.
                let read = task::spawn_blocking(move || file::text(&path, MAX_LIST)).await;
                let text = read.unwrap_or_else(|error| Err(error.into()));
                let text = text.map_err(|error| StoreError::failed(&name, error))?;
                (name, text)
            }
        };
        parse(&text).map_err(|problem| StoreError::failed(&name, problem))
    }
}

/// Parses a list: a JSON array of URLs or records, or one URL per line with comments after `#`. Returns its relays, and
/// the reasons why other entries cannot be used.
fn parse(text: &str) -> Result<(Vec<RelayRecord>, Vec<String>), String> {
    let entries: Vec<ListEntry> = if text.trim_start().starts_with('[') {
        serde_json::from_str(text).map_err(|error| format!("not a list of relays: {error}"))?
    } else {
        let mut entries = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                let url = line.parse().map_err(|error| format!("line {number}, {line:?}: {error}"))?;
                entries.push(ListEntry::Url(url));
            }
        }
        entries
    };
    let mut relays = Vec::new();
    let mut unusable = Vec::new();
    for entry in entries {
        let record = match entry {
            ListEntry::Url(url) => RelayRecord::from_url(url),
            ListEntry::Record(record) => record.checked(),
        };
        match record {
            Ok(record) => relays.push(record),
            Err(error) => unusable.push(error.to_string()),
        }
    }
    Ok((relays, unusable))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Returns the result of the future. The test fails if the result takes longer than 30 s.
    async fn soon<T>(work: impl Future<Output = T>) -> T {
        time::timeout(Duration::from_secs(30), work).await.expect("within 30 s")
    }

    fn urls(relays: &[RelayRecord]) -> Vec<&str> {
        relays.iter().map(|relay| relay.url.as_str()).collect()
    }

    #[test]
    fn relay_lists_are_lines_or_json() {
        let lines = "# relays\nmoqt://a:1\n\n  https://b/live # the second\nhttp://c\n";
        let (relays, unusable) = parse(lines).unwrap();
        assert_eq!(urls(&relays), ["moqt://a:1", "https://b/live"]);
        assert!(matches!(&*unusable, [error] if error.contains("http://c")), "{unusable:?}");
        let json = r#"["moqt://a:1", {"url": "moqt://b:2", "region": "eu"}, "http://c"]"#;
        let (relays, unusable) = parse(json).unwrap();
        assert_eq!(unusable.len(), 1);
        assert_eq!(urls(&relays), ["moqt://a:1", "moqt://b:2"]);
        assert_eq!(relays[1].region.as_deref(), Some("eu"));
        assert_eq!(parse("").unwrap(), (Vec::new(), Vec::new()));
        assert!(parse("moqt://a:1\nrelay b").unwrap_err().starts_with("line 2, \"relay b\""));
        assert!(parse("[1]").unwrap_err().starts_with("not a list of relays"));
    }

    fn discovery(path: PathBuf) -> ListDiscovery {
        let config =
            rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into());
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
        ListDiscovery {
            place: ListPlace::File(path),
            interval: Duration::from_millis(20),
            client: HttpClient::new(Arc::new(config)),
            own: Some("moqt://own:1".parse().unwrap()),
        }
    }

    #[tokio::test]
    async fn endless_file_is_read_within_bounds() {
        let error = discovery("/dev/zero".into()).read().await.unwrap_err().to_string();
        assert_eq!(error, "/dev/zero: the file has more than 1048576 bytes");
    }

    #[tokio::test]
    async fn changed_list_is_read_and_missing_list_keeps_the_relays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("relays");
        std::fs::write(&path, "moqt://a:1\nmoqt://own:1\n").unwrap();
        let (sender, mut found) = watch::channel(DiscoveryState::default());
        let list = discovery(path.clone());
        let task = tokio::spawn(async move { list.run(&sender).await });
        soon(found.wait_for(|state| urls(&state.relays) == ["moqt://a:1"])).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let away = soon(found.wait_for(|state| state.read_error.is_some())).await.unwrap().clone();
        assert_eq!(urls(&away.relays), ["moqt://a:1"], "what was found stays");
        std::fs::write(&path, r#"["moqt://b:1"]"#).unwrap();
        soon(found.wait_for(|state| state.read_error.is_none() && urls(&state.relays) == ["moqt://b:1"]))
            .await
            .unwrap();
        drop(found);
        soon(task).await.unwrap();
    }
}
