//! Serves the relay's web page, which plays and publishes live tracks. Also serves the data that browsers need to
//! connect.

use std::sync::Arc;

use axum::{
    Json, Router,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
    routing::get,
};
use millrace_daemon::http::asset::{Asset, asset};

use super::status::{StatusSource, Web};

/// Paths that need no token. They show the certificate's hash, which every client sees in its handshake, and the files
/// of the web page, which have no secrets.
pub const PUBLIC: &[&str] = &[
    "/",
    "/shell.css",
    "/shell.js",
    "/watch.js",
    "/publish.js",
    "/relay.js",
    "/figures.js",
    "/moq.js",
    "/no-libav.js",
    "/web.json",
    FINGERPRINT,
];

const FINGERPRINT: &str = "/certificate.sha256";

type Source = State<Arc<dyn StatusSource>>;

pub fn router() -> Router<Arc<dyn StatusSource>> {
    let file = |asset: Asset| get(move || async move { asset });
    macro_rules! script {
        ($name:literal) => {
            file(asset!("text/javascript; charset=utf-8", $name))
        };
    }
    Router::new()
        .route("/", file(asset!("text/html; charset=utf-8", "relay/index.html")))
        .route("/shell.css", file(asset!("text/css; charset=utf-8", "relay/shell.css")))
        .route("/shell.js", script!("relay/shell.js"))
        .route("/watch.js", script!("relay/watch.js"))
        .route("/publish.js", script!("relay/publish.js"))
        .route("/relay.js", script!("relay/relay.js"))
        .route("/figures.js", script!("relay/figures.js"))
        .route("/moq.js", script!("relay/moq.js"))
        .route("/no-libav.js", script!("relay/no-libav.js"))
        .route("/web.json", get(web))
        .route(FINGERPRINT, get(fingerprint))
}

async fn web(State(source): Source) -> Json<Web> {
    Json(source.web())
}

/// Returns the certificate's fingerprint, for players that were given an http:// URL. They request it over TCP at the
/// relay's own address and port.
async fn fingerprint(State(source): Source) -> Response {
    // Pages of all origins may read the fingerprint, since every client sees the certificate in its TLS handshake.
    let any = (header::ACCESS_CONTROL_ALLOW_ORIGIN, "*");
    ([any, (header::CACHE_CONTROL, "no-store")], source.fingerprint()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_web_page_is_served() {
        let built = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../web/dist/relay")).unwrap();
        for file in built {
            let name = file.unwrap().file_name().into_string().unwrap();
            let path = if name == "index.html" { "/".to_owned() } else { format!("/{name}") };
            assert!(PUBLIC.contains(&&path[..]), "{path} is built but not served");
        }
    }
}
