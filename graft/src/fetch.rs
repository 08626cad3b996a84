//! Grafts that two hosts with an agreement send to each other, as files. Loading them is not the task of this module.

use std::fs;

use millrace_graft_proto::message::{Hash, Statement};

use crate::{
    Error, GraftManifest, GraftPool, ObjectIdentity, PoolSource, Settings, replace::replace,
    settings::GraftFetch,
};

impl Settings {
    /// Returns a graft that the settings want to fetch, that is missing in the pool, and that this peer offers.
    pub fn wanted_from(&self, theirs: &Statement) -> Option<GraftFetch> {
        let fetch = self.agreement.as_ref().map(|it| &it.fetch).filter(|fetch| !fetch.is_empty())?;
        let pool = GraftPool::read(&self.pool, &self.trusted_keys).ok()?;
        let given = |identity: ObjectIdentity| {
            theirs.functions.iter().any(|it| it.given && it.identity == Hash(identity.bytes()))
        };
        fetch.iter().find(|it| pool.find(&it.graft).is_err() && given(it.identity)).cloned()
    }

    /// Returns the manifest and the object of a graft for a peer, if the settings allow that.
    pub fn give(&self, identity: Hash) -> Option<(String, Vec<u8>)> {
        self.agreement.as_ref().filter(|agreement| agreement.give)?;
        let pool = GraftPool::read(&self.pool, &self.trusted_keys).ok()?;
        // Only grafts from files can be sent, because compiled-in grafts have no manifest file. The graft is found by
        // its hash, since the peer may use another name for it.
        let files = pool.iter().filter_map(|graft| match &graft.source {
            PoolSource::File(path) => Some((graft, path)),
            PoolSource::Shipped => None,
        });
        let mut fitting = files.filter(|(graft, _)| graft.identity.bytes() == identity.0);
        let (graft, path) = fitting.next()?;
        Some((fs::read_to_string(path).ok()?, graft.image.clone()))
    }

    /// Checks that a graft which a peer has sent is the requested one, and is signed by a trusted key.
    pub fn check_fetched(
        &self,
        wanted: &GraftFetch,
        manifest: &str,
        image: &[u8],
    ) -> Result<GraftManifest, Error> {
        let refused = |message: String| Error::Graft { name: wanted.graft.clone(), message };
        // The hash of the received object file is computed here, so a wrong statement of the peer has no effect.
        if ObjectIdentity::from_image(image) != wanted.identity {
            return Err(refused(format!(
                "a peer sent the graft {}, which was not requested",
                ObjectIdentity::from_image(image)
            )));
        }
        let parsed = GraftManifest::parse(manifest).map_err(refused)?;
        if self.trusted_keys.is_empty() || parsed.name != wanted.graft {
            return Err(refused(format!("a peer sent the graft {}, which was not requested", parsed.name)));
        }
        parsed.described().check_signature(manifest, &self.trusted_keys).map_err(refused)?;
        parsed.described().check_identity(wanted.identity).map_err(refused)?;
        Ok(parsed)
    }

    /// Stores a graft that a peer has sent, if [`Self::check_fetched`] accepts it.
    pub fn keep(&self, wanted: &GraftFetch, manifest: &str, image: &[u8]) -> Result<(), Error> {
        let parsed = self.check_fetched(wanted, manifest, image)?;
        let Some(directory) = self.agreement.as_ref().and_then(|it| it.fetch_to.clone()) else {
            return Err(Error::Settings("[agreement] has no fetch-to".to_owned()));
        };
        let write = |name: &str, bytes: &[u8]| {
            let path = directory.join(name);
            let failed = |error: std::io::Error| Error::File {
                path: path.display().to_string(),
                message: error.to_string(),
            };
            replace(&path, bytes, 0o666).map_err(failed)
        };
        write(&parsed.object, image)?;
        write(&format!("{}.toml", parsed.name), manifest.as_bytes())
    }
}
