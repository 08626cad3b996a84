//! The dashboard's files, as `make web` built them.

use axum::http::header;
use axum::response::{IntoResponse, Response};

macro_rules! asset {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../web/dist/", $name))
    };
}

pub(super) const PAGE: Asset = Asset("text/html; charset=utf-8", asset!("index.html"));
pub(super) const SCRIPT: Asset = Asset("text/javascript; charset=utf-8", asset!("app.js"));
pub(super) const STYLE: Asset = Asset("text/css; charset=utf-8", asset!("app.css"));
pub(super) const ICON: Asset = Asset("image/svg+xml", asset!("icon.svg"));

/// Media type and content.
#[derive(Clone, Copy)]
pub(super) struct Asset(&'static str, &'static [u8]);

impl IntoResponse for Asset {
    fn into_response(self) -> Response {
        // Names stay the same from one version to the next.
        ([(header::CONTENT_TYPE, self.0), (header::CACHE_CONTROL, "no-cache")], self.1).into_response()
    }
}
