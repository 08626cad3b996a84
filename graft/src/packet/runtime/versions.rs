//! Loads and unloads packet functions in the kernel, in the versions that settings and sessions use.

use millrace_graft_kernel::packet::PacketHooks;

use super::super::settings::Settings;
use super::super::versions::{FunctionVersion, find_identical};
use super::PacketRuntime;
use crate::Error;

/// Loads into the kernel those packet functions of the grafts (function lists) in the settings that are not loaded yet.
pub(super) fn load(
    hooks: &mut PacketHooks,
    loaded: &mut Vec<FunctionVersion>,
    settings: &Settings,
) -> Result<(), Error> {
    for version in settings.grafts.values().flat_map(|graft| &graft.functions) {
        if hooks.has(&version.key) {
            continue;
        }
        let function = settings.functions.find(&version.name)?;
        let values = settings.parameters.get(&version.name).cloned().unwrap_or_default();
        // Versions of one function whose state has the same layout share their state in the kernel.
        let added =
            hooks.add_version(version.key.clone(), function.open(&values)?, find_identical(loaded, version));
        added.map_err(|error| function.refused(error))?;
        loaded.push(version.clone());
    }
    Ok(())
}

/// Checks that parameters of a function change only together with its version. The values are constants in the loaded
/// program, so they cannot change while it is loaded.
pub(super) fn check_parameters(old: &Settings, new: &Settings) -> Result<(), Error> {
    let of = |settings: &Settings, name: &str| settings.parameters.get(name).cloned().unwrap_or_default();
    for function in new.functions.iter() {
        let name = &function.manifest.name;
        let is_same = old.functions.find(name).is_ok_and(|before| before.identity == function.identity);
        if is_same && of(old, name) != of(new, name) {
            return Err(Error::Settings(format!(
                "parameters.{name}: parameters of a loaded function cannot change, except with another version of the function"
            )));
        }
    }
    Ok(())
}

impl PacketRuntime {
    /// Unloads functions of earlier settings once no session uses them.
    pub(super) fn unload_unused(&mut self) {
        let of_sessions = self.live.values().flat_map(|live| live.grafts());
        let used: Vec<_> =
            self.settings.grafts.values().chain(of_sessions).flat_map(|graft| &graft.functions).collect();
        let hooks = &mut self.hooks;
        self.loaded.retain(|version| {
            let is_used = used.iter().any(|used| used.key == version.key);
            // If the kernel refuses to remove a function, it is still loaded, so it stays in the list.
            is_used || hooks.remove(&version.key).is_err()
        });
    }
}
