//! Access rules of HTTP servers: which requests are answered.
//!
//! Any web page can make a browser send requests to a server on this machine, by the server's address or by a host name
//! of the page's own that resolves to it. Every local user can send requests, too. Hence a request has to name this
//! server (`Host`), must not come from another site's page (`Sec-Fetch-Site`, `Origin`), and has to show a token.
//! `/healthz` needs no token, because its answer contains nothing secret.

use std::{fmt::Display, net::IpAddr, sync::Arc};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{AppendHeaders, IntoResponse as _, Response},
};
use url::form_urlencoded;

use super::token::{DerivedSecret, Error, HttpToken, TokenFile};

/// Prefix of the cookie's name. The port is appended, because browsers send a cookie to all ports of a host.
const COOKIE: &str = "millrace-";

/// Command-line flags of HTTP servers.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct HttpFlags {
    /// File with the token that HTTP requests must show, created if it does not exist, or "off" [default:
    /// /run/millrace/http.token for
    /// root, millrace/http.token in XDG_RUNTIME_DIR for others]
    #[arg(long, value_name = "FILE")]
    pub http_token_file: Option<TokenFile>,
    /// Host name that HTTP requests may use in addition to addresses and localhost, repeatable
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub http_name: Vec<String>,
}

impl HttpFlags {
    /// Returns the access rules that the command-line flags describe.
    ///
    /// # Errors
    /// Fails if there is no token file, and none can be created.
    pub fn access(&self) -> Result<HttpAccess, Error> {
        HttpAccess::new(&self.http_token_file.clone().unwrap_or_default(), self.http_name.clone())
    }
}

/// The rules that decide whether an HTTP request is answered.
#[derive(Clone, Debug, Default)]
pub struct HttpAccess {
    token: Option<HttpToken>,
    /// Name and value of the cookie that a browser may send in place of the token.
    cookie: Option<(String, DerivedSecret)>,
    names: Vec<String>,
    public: &'static [&'static str],
}

impl HttpAccess {
    /// Makes access rules. Requests may use the host names `names` in addition to addresses and localhost.
    ///
    /// # Errors
    /// Fails if there is no token, and none can be made.
    pub fn new(token: &TokenFile, names: Vec<String>) -> Result<Self, Error> {
        Ok(Self { token: token.read_or_make()?, names, ..Self::default() })
    }

    /// Returns the token, or `None` if requests need none.
    pub fn token(&self) -> Option<&HttpToken> {
        self.token.as_ref()
    }

    /// Sets the paths that need no token and that any web page may request, because the answers contain nothing secret.
    pub fn with_public(self, public: &'static [&'static str]) -> Self {
        Self { public, ..self }
    }

    /// Returns the rules with the cookie for a server on this port. Servers on other ports do not accept this cookie.
    pub(super) fn at(self, port: u16) -> Self {
        let cookie = self.token.as_ref().map(|token| (format!("{COOKIE}{port}"), token.cookie(port)));
        Self { cookie, ..self }
    }

    pub(super) fn guard(self: &Arc<Self>, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self.clone(), check))
    }

    /// Reports whether a request's headers contain the token or its cookie. It is always true if the server needs no
    /// token.
    pub(super) fn is_shown(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let bearer = text(headers, header::AUTHORIZATION).and_then(|it| it.strip_prefix("Bearer "));
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|it| it.to_str().ok());
        let mut cookies = cookies.flat_map(|it| it.split("; ")).filter_map(|it| it.split_once('='));
        let is_cookie = |(name, value): (&str, &str)| {
            self.cookie.as_ref().is_some_and(|(known, secret)| known == name && secret.is(value))
        };
        bearer.is_some_and(|it| token.is(it)) || cookies.any(is_cookie)
    }

    fn refusal(&self, uri: &Uri, headers: &HeaderMap) -> Option<Response> {
        let refuse = |code: StatusCode, why: &dyn Display| Some((code, format!("{why}\n")).into_response());
        let host = text(headers, header::HOST).unwrap_or_default();
        if !self.is_own(name_of(host)) {
            let why =
                format!("not a name of this server: use its address, or start it with --http-name {host}");
            return refuse(StatusCode::FORBIDDEN, &why);
        }
        let is_public = self.public.contains(&uri.path());
        if !is_public && is_of_another_site(headers, host) {
            return refuse(StatusCode::FORBIDDEN, &"requests from pages of other sites are refused");
        }
        let token = self.token.as_ref().filter(|_| uri.path() != "/healthz")?;
        if asked_by_link(uri).is_some_and(|it| token.is(&it)) {
            return Some(self.with_cookie(uri));
        }
        if is_public || self.is_shown(headers) {
            return None;
        }
        let why = format!("Authorization: Bearer is missing: the token is in {}", token.path().display());
        let code = StatusCode::UNAUTHORIZED;
        Some((code, [(header::WWW_AUTHENTICATE, "Bearer")], format!("{why}\n")).into_response())
    }

    /// Returns a redirect to the same URL without the token, so that the token does not stay in the browser's history.
    /// Other query parameters are kept.
    fn with_cookie(&self, uri: &Uri) -> Response {
        let query = uri.query().unwrap_or_default();
        let others: Vec<_> = query.split('&').filter(|pair| !pair.is_empty() && !is_token(pair)).collect();
        let location = match others.is_empty() {
            true => uri.path().to_owned(),
            false => format!("{}?{}", uri.path(), others.join("&")),
        };
        let cookie = self.cookie.as_ref().map(|(name, secret)| {
            let cookie = format!("{name}={}; HttpOnly; SameSite=Strict; Path=/", secret.text());
            AppendHeaders([(header::SET_COOKIE, cookie)])
        });
        let headers = [(header::LOCATION, location), (header::CACHE_CONTROL, "no-store".to_owned())];
        (StatusCode::SEE_OTHER, cookie, headers).into_response()
    }

    fn is_own(&self, name: &str) -> bool {
        let is = |own: &str| own.eq_ignore_ascii_case(name);
        is("localhost") || name.parse::<IpAddr>().is_ok() || self.names.iter().any(|own| is(own))
    }
}

async fn check(State(access): State<Arc<HttpAccess>>, request: Request, next: Next) -> Response {
    match access.refusal(request.uri(), request.headers()) {
        Some(refusal) => refusal,
        None => next.run(request).await,
    }
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Returns the host name in `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`.
fn name_of(host: &str) -> &str {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(address, _)| address),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    }
}

/// Reports whether a request comes from another site's page. Old browsers and programs send no `Sec-Fetch-Site`.
fn is_of_another_site(headers: &HeaderMap, host: &str) -> bool {
    let site = headers.get("sec-fetch-site").is_some_and(|it| it != "same-origin" && it != "none");
    let origin = headers.get(header::ORIGIN).is_some_and(|it| {
        let origin = it.to_str().unwrap_or_default();
        origin.split_once("://").is_none_or(|(_, of)| of != host)
    });
    site || origin
}

fn asked_by_link(uri: &Uri) -> Option<String> {
    let mut pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
    pairs.find(|(key, _)| key == "token").map(|(_, value)| value.into_owned())
}

fn is_token(pair: &str) -> bool {
    form_urlencoded::parse(pair.as_bytes()).any(|(key, _)| key == "token")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: [&str; 5] = ["host", "authorization", "cookie", "origin", "sec-fetch-site"];

    fn code(access: &HttpAccess, uri: &str, given: &[(&str, &str)]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            let name = HEADERS.iter().find(|known| *known == name).expect("a known header");
            headers.append(*name, value.parse().unwrap());
        }
        let answer = access.refusal(&uri.parse().unwrap(), &headers);
        // exact: the status code of a complete HTTP response does not change
        answer.map_or(200, |answer| answer.status().as_u16())
    }

    #[test]
    fn request_without_the_servers_host_name_is_refused() {
        let access = HttpAccess { names: vec!["relay.example.com".into()], ..HttpAccess::default() };
        for own in [
            "localhost",
            "localhost:80",
            "127.0.0.1",
            "127.0.0.1:9000",
            "[::1]:80",
            "[::1]",
            "10.1.2.3",
            "relay.example.com",
            "Relay.example.com:9184",
        ] {
            assert_eq!(code(&access, "/", &[("host", own)]), 200, "{own}");
        }
        for other in
            ["", "example.com", "example.com:80", "localhost.example.com", "127.0.0.1.example.com:80"]
        {
            assert_eq!(code(&access, "/", &[("host", other)]), 403, "{other}");
        }
        assert_eq!(code(&access, "/", &[]), 403);
    }

    #[test]
    fn request_from_another_origin_is_refused() {
        let access = HttpAccess::default().with_public(&["/anybodys"]);
        let host = ("host", "127.0.0.1:9184");
        for (other, want) in [
            (("sec-fetch-site", "none"), 200),
            (("sec-fetch-site", "same-origin"), 200),
            (("sec-fetch-site", "same-site"), 403),
            (("sec-fetch-site", "cross-site"), 403),
            (("origin", "http://127.0.0.1:9184"), 200),
            (("origin", "http://127.0.0.1:9185"), 403),
            (("origin", "https://example.com"), 403),
            (("origin", "null"), 403),
        ] {
            assert_eq!(code(&access, "/trace", &[host, other]), want, "{other:?}");
            assert_eq!(code(&access, "/anybodys", &[host, other]), 200, "{other:?}");
        }
    }

    #[test]
    fn request_without_the_token_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = TokenFile::At(directory.path().join("token"));
        let access = HttpAccess::new(&file, Vec::new()).unwrap().at(9184);
        let token = access.token().unwrap().text().to_owned();
        let cookie = access.token().unwrap().cookie(9184).text().to_owned();
        let others = access.token().unwrap().cookie(9185).text().to_owned();
        let wrong = token.replace(|it| it == token.chars().next().unwrap(), "x");
        let host = ("host", "localhost");
        for (uri, name, value, want) in [
            ("/status", "authorization", format!("Bearer {token}"), 200),
            ("/status", "authorization", format!("Bearer {wrong}"), 401),
            ("/status", "authorization", format!("Basic {token}"), 401),
            ("/status", "authorization", format!("Bearer {cookie}"), 401),
            ("/status", "cookie", format!("a=b; millrace-9184={cookie}"), 200),
            ("/status", "cookie", format!("millrace-9184={token}"), 401),
            ("/status", "cookie", format!("millrace-9184={others}"), 401),
            ("/status", "cookie", format!("millrace-9185={others}"), 401),
            ("/status", "cookie", format!("other={cookie}"), 401),
            ("/healthz", "cookie", String::new(), 200),
            ("/trace", "cookie", String::new(), 401),
        ] {
            assert_eq!(code(&access, uri, &[host, (name, &value)]), want, "{uri} {name}");
        }
        assert_eq!(code(&access, &format!("/?token={wrong}"), &[host]), 401);
        let uri: Uri = format!("/page?token={token}").parse().unwrap();
        let headers: HeaderMap = [(header::HOST, "localhost".parse().unwrap())].into_iter().collect();
        let answer = access.refusal(&uri, &headers).unwrap();
        // exact: the status code of a complete HTTP response does not change
        assert_eq!(answer.status(), StatusCode::SEE_OTHER);
        assert_eq!(answer.headers()[header::LOCATION], "/page");
        let uri: Uri = format!("/?jwt=a.b&token={token}&x").parse().unwrap();
        let answer = access.refusal(&uri, &headers).unwrap();
        assert_eq!(answer.headers()[header::LOCATION], "/?jwt=a.b&x", "the page's own parameters stay");
        let cookie = answer.headers()[header::SET_COOKIE].to_str().unwrap();
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        // A browser sends the cookie to every port of this host, so its name contains the port.
        assert!(cookie.starts_with("millrace-9184=") && !cookie.contains(&token), "{cookie}");
    }
}
