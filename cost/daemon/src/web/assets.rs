//! The dashboard's static files.

use millrace_daemon::http::asset::{Asset, asset};

pub(super) const PAGE: Asset = asset!("text/html; charset=utf-8", "index.html");
pub(super) const SCRIPT: Asset = asset!("text/javascript; charset=utf-8", "app.js");
pub(super) const STYLE: Asset = asset!("text/css; charset=utf-8", "app.css");
pub(super) const ICON: Asset = asset!("image/svg+xml", "icon.svg");
