//! Functions in the kernel, in the versions that settings and sessions use.

use millrace_graft_kernel::joint::Joints;

use super::super::settings::Settings;
use super::super::versions::{Version, alike};
use super::Runtime;
use crate::Error;

/// Functions that a graft names, and that are not there yet.
pub(super) fn load(joints: &mut Joints, loaded: &mut Vec<Version>, settings: &Settings) -> Result<(), Error> {
    for version in settings.grafts.values().flat_map(|graft| &graft.functions) {
        if joints.has(&version.key) {
            continue;
        }
        let function = settings.functions.find(&version.name)?;
        let values = settings.parameters.get(&version.name).cloned().unwrap_or_default();
        let added = joints.add_version(version.key.clone(), function.open(&values)?, alike(loaded, version));
        added.map_err(|error| function.refused(error))?;
        loaded.push(version.clone());
    }
    Ok(())
}

/// Parameters are constants to the verifier: others come with another version.
pub(super) fn check_parameters(old: &Settings, new: &Settings) -> Result<(), Error> {
    let of = |settings: &Settings, name: &str| settings.parameters.get(name).cloned().unwrap_or_default();
    for function in new.functions.iter() {
        let name = &function.manifest.name;
        let is_same = old.functions.find(name).is_ok_and(|before| before.identity == function.identity);
        if is_same && of(old, name) != of(new, name) {
            return Err(Error::Settings(format!(
                "parameters.{name}: parameters do not change while it runs, but with another version of the function"
            )));
        }
    }
    Ok(())
}

impl Runtime {
    /// Of settings that have been replaced, as soon as no session uses them.
    pub(super) fn unload_unused(&mut self) {
        let of_sessions = self.live.values().flat_map(|live| live.grafts());
        let used: Vec<_> =
            self.settings.grafts.values().chain(of_sessions).flat_map(|graft| &graft.functions).collect();
        let joints = &mut self.joints;
        self.loaded.retain(|version| {
            let is_used = used.iter().any(|used| used.key == version.key);
            // It is there, as nobody else removes it.
            is_used || joints.remove(&version.key).is_err()
        });
    }
}
