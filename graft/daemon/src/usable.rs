//! The settings as each process of the daemon reads them.

use std::path::Path;

use millrace_graft::settings::DaemonSettings;
use millrace_graft_tls::Tls;

/// Reads the settings, and checks keys and certificates before any setting is applied.
pub fn usable(config: &Path, interfaces: &[String]) -> anyhow::Result<DaemonSettings> {
    let mut settings = DaemonSettings::read(config)?;
    settings.in_place.add_gateway_interfaces(interfaces)?;
    settings.in_place.agreement.as_ref().map(Tls::new).transpose()?;
    Ok(settings)
}
