//! Catalogs as they were read.

use std::sync::Arc;

use millrace_moq::msf::Catalog;
use parking_lot::Mutex;

/// The newest version of a catalog that was read, so that it is parsed once for all who ask; `None` in it if it is no catalog.
#[derive(Default)]
pub struct Parsed(Mutex<Option<(u64, Option<Arc<Catalog>>)>>);

impl Parsed {
    /// What this version says; `read` gives its JSON if it has not been read yet, or not all of it is there. `None` where it does not.
    pub fn get(&self, version: u64, read: impl FnOnce() -> Option<Vec<u8>>) -> Option<Option<Arc<Catalog>>> {
        let mut newest = self.0.lock();
        if let Some((known, catalog)) = newest.as_ref()
            && *known == version
        {
            return Some(catalog.clone());
        }
        let catalog = Catalog::parse(&read()?).ok().map(Arc::new);
        *newest = Some((version, catalog.clone()));
        Some(catalog)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_is_read_once() {
        let parsed = Parsed::default();
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
