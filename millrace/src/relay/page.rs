//! The relay's web page, which plays what is live, and what browsers have to know to connect.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
    routing::get,
};

use super::status::{StatusSource, Web};
use crate::http::asset::{Asset, asset};

/// Any page may ask for these, without a token: every client sees the certificate in its handshake, and the files are the
/// same for all.
pub const PUBLIC: &[&str] = &["/", "/watch.js", "/watch.css", "/no-libav.js", "/web.json", FINGERPRINT];

const FINGERPRINT: &str = "/certificate.sha256";

type Source = State<Arc<dyn StatusSource>>;

pub fn router() -> Router<Arc<dyn StatusSource>> {
    let file = |asset: Asset| get(move || async move { asset });
    Router::new()
        .route("/", file(asset!("text/html; charset=utf-8", "watch/index.html")))
        .route("/watch.js", file(asset!("text/javascript; charset=utf-8", "watch/watch.js")))
        .route("/watch.css", file(asset!("text/css; charset=utf-8", "watch/watch.css")))
        .route("/no-libav.js", file(asset!("text/javascript; charset=utf-8", "watch/no-libav.js")))
        .route("/web.json", get(web))
        .route(FINGERPRINT, get(fingerprint))
}

async fn web(State(source): Source) -> Json<Web> {
    Json(source.web())
}

/// For players that are given an http:// URL: they ask at the relay's own address and port, over TCP.
async fn fingerprint(State(source): Source) -> Response {
    let any = (header::ACCESS_CONTROL_ALLOW_ORIGIN, "*");
    ([any, (header::CACHE_CONTROL, "no-store")], source.fingerprint()).into_response()
}
