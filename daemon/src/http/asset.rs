//! Files of web pages, built by `make web`.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

/// Includes a file of `web/dist` as an [`Asset`], with its media type.
#[macro_export]
macro_rules! asset {
    ($kind:literal, $name:literal) => {
        $crate::http::asset::Asset(
            $kind,
            include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../web/dist/", $name)),
        )
    };
}
pub use crate::asset;

/// The media type and the contents of a file.
#[derive(Clone, Copy)]
pub struct Asset(pub &'static str, pub &'static [u8]);

impl IntoResponse for Asset {
    fn into_response(self) -> Response {
        // A file keeps its name in all versions, so browsers must ask each time whether it has changed.
        ([(header::CONTENT_TYPE, self.0), (header::CACHE_CONTROL, "no-cache")], self.1).into_response()
    }
}
