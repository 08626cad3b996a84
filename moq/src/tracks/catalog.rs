//! Keeps the parsed form of a track's catalog (MSF).

use std::sync::Arc;

use parking_lot::Mutex;

use crate::msf::MsfCatalog;

/// The newest catalog version that was read, parsed once for all sessions. `None` in place of the catalog means that
/// this version is invalid.
#[derive(Default)]
pub struct ParsedCatalog(Mutex<Option<(u64, Option<Arc<MsfCatalog>>)>>);

impl ParsedCatalog {
    /// Returns the catalog of this version. `read` returns its JSON, and is called only if this version was not parsed
    /// before. Returns `None` if `read` does not have the whole object yet, and `Some(None)` if the object is not a
    /// valid catalog.
    pub fn get(
        &self,
        version: u64,
        read: impl FnOnce() -> Option<Vec<u8>>,
    ) -> Option<Option<Arc<MsfCatalog>>> {
        let mut newest = self.0.lock();
        if let Some((known, catalog)) = newest.as_ref()
            && *known == version
        {
            return Some(catalog.clone());
        }
        // For an incomplete object, `read` returns `None`. This result is not stored, so the next caller reads again.
        let catalog = MsfCatalog::parse(&read()?).ok().map(Arc::new);
        *newest = Some((version, catalog.clone()));
        Some(catalog)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_catalog_version_is_parsed_once() {
        let parsed = ParsedCatalog::default();
        let mut reads = 0;
        let mut get = |version, json: Option<&str>| {
            parsed.get(version, || {
                reads += 1;
                json.map(|json| json.as_bytes().to_vec())
            })
        };
        assert_eq!(get(1, None), None, "not all of it is there");
        let catalog = get(1, Some(r#"{"version":1,"tracks":[]}"#)).flatten().expect("a catalog");
        for _ in 0..3 {
            assert!(get(1, None).flatten().is_some_and(|again| Arc::ptr_eq(&catalog, &again)));
        }
        assert_eq!((get(2, Some("no catalog")), get(2, None)), (Some(None), Some(None)));
        let third = get(3, Some(r#"{"version":1,"tracks":[]}"#)).flatten();
        assert!(third.is_some_and(|third| !Arc::ptr_eq(&catalog, &third)));
        assert_eq!(reads, 4);
    }
}
