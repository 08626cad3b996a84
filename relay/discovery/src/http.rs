//! Requests over HTTP/1.1, each on a connection of its own.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, Response, StatusCode, body::Incoming, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinHandle,
    time,
};
use tokio_rustls::TlsConnector;
use url::{Position, Url};

/// Longest time for connecting to the store, and for the beginning of its answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Largest number of bytes of an answer that are read.
const MAX_ANSWER: usize = 8 << 20;
/// Largest number of bytes of an answer's text that an error message shows.
const SHOWN: usize = 200;

/// The reason why a store gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The connection failed, or the answer could not be read.
    #[error("{place}: {problem}")]
    Failed {
        /// Host and port of the store, or the path of a file.
        place: String,
        /// Description of what went wrong, as the error message shows it.
        problem: String,
    },
    /// The store with this host and port did not answer in time.
    #[error("{0} did not answer within {s} s", s = TIMEOUT.as_secs())]
    Late(String),
    /// The store answered with an HTTP status that is no success.
    #[error("{host} answers {status}: {text}")]
    Status {
        /// Host and port of the store.
        host: String,
        /// The HTTP status code.
        status: StatusCode,
        /// The beginning of the answer's text.
        text: String,
    },
    /// The lease of this relay's record ended while the store did not answer, so the record was removed.
    #[error("the lease of this relay's record is over: a new one is asked for")]
    LeaseOver,
    /// The store has this relay's record from another run of the relay, which started later.
    #[error(
        "another run of this relay has written its record: this one is not used; give each relay a url of its own"
    )]
    Superseded,
}

impl StoreError {
    pub(crate) fn failed(place: &str, problem: impl ToString) -> Self {
        Self::Failed { place: place.to_owned(), problem: problem.to_string() }
    }
}

/// A client for `http://` and `https://` URLs.
#[derive(Clone)]
pub struct HttpClient {
    tls: TlsConnector,
}

impl std::fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HttpClient(..)")
    }
}

/// An HTTP answer whose body may still be arriving. Dropping this value ends the connection.
pub struct StreamedAnswer {
    host: String,
    response: Response<Incoming>,
    _connection: OpenConnection,
}

struct OpenConnection(JoinHandle<()>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

impl HttpClient {
    /// Creates a client that verifies `https://` servers by `tls`.
    pub fn new(tls: Arc<rustls::ClientConfig>) -> Self {
        Self { tls: TlsConnector::from(tls) }
    }

    /// Sends a request: GET without a body, POST of JSON with one. Returns the answer once it begins.
    pub async fn send(&self, url: &Url, body: Option<Vec<u8>>) -> Result<StreamedAnswer, StoreError> {
        self.send_as(url, body, None).await
    }

    /// Does the same with a value of the header `Authorization`.
    pub async fn send_as(
        &self,
        url: &Url,
        body: Option<Vec<u8>>,
        authorization: Option<&str>,
    ) -> Result<StreamedAnswer, StoreError> {
        let host = url.authority().to_owned();
        let late = |_| StoreError::Late(host.clone());
        let answer =
            time::timeout(TIMEOUT, self.exchange(url, &host, body, authorization)).await.map_err(late)??;
        let status = answer.response.status();
        if status.is_success() {
            return Ok(answer);
        }
        let text = answer.text().await.unwrap_or_default();
        // The text of the answer goes into logs, so control characters are removed and its length is limited.
        let text = text.chars().filter(|c| !c.is_control()).take(SHOWN).collect();
        Err(StoreError::Status { host, status, text })
    }

    async fn exchange(
        &self,
        url: &Url,
        host: &str,
        body: Option<Vec<u8>>,
        authorization: Option<&str>,
    ) -> Result<StreamedAnswer, StoreError> {
        let io = |error: std::io::Error| StoreError::failed(host, error);
        let http = |error: hyper::Error| StoreError::failed(host, error);
        // A URL has an IPv6 address in brackets, which neither name lookup nor TLS accepts.
        let name = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let port = url.port_or_known_default().unwrap_or(443);
        let tcp = TcpStream::connect((name, port)).await.map_err(io)?;
        let _ = tcp.set_nodelay(true); // an error is ignored: TCP_NODELAY only shortens the delay
        let stream: Box<dyn ByteStream> = match url.scheme() {
            "https" => {
                let server =
                    ServerName::try_from(name.to_owned()).map_err(|error| StoreError::failed(host, error))?;
                Box::new(self.tls.connect(server, tcp).await.map_err(io)?)
            }
            _ => Box::new(tcp),
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(http)?;
        let connection = OpenConnection(tokio::spawn(async move {
            let _ = connection.await; // an error is ignored: the caller gets it when it reads the answer's body
        }));
        let request = Request::builder()
            .method(if body.is_some() { "POST" } else { "GET" })
            .uri(&url[Position::BeforePath..Position::AfterQuery])
            .header(header::HOST, host)
            .header(header::CONTENT_TYPE, "application/json");
        let request = authorization
            .iter()
            .fold(request, |request, value| request.header(header::AUTHORIZATION, *value));
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())));
        let request = request.map_err(|error| StoreError::failed(host, error))?;
        let response = sender.send_request(request).await.map_err(http)?;
        Ok(StreamedAnswer { host: host.to_owned(), response, _connection: connection })
    }
}

impl StreamedAnswer {
    /// Reads the rest of the answer.
    pub async fn text(self) -> Result<String, StoreError> {
        // The limit bounds the memory that the answer of a faulty store can take.
        let body = Limited::new(self.response.into_body(), MAX_ANSWER).collect();
        let body = time::timeout(TIMEOUT, body).await.map_err(|_| StoreError::Late(self.host.clone()))?;
        let body = body.map_err(|error| StoreError::failed(&self.host, error))?;
        String::from_utf8(body.to_bytes().into()).map_err(|error| StoreError::failed(&self.host, error))
    }

    /// Reads the rest of the answer, which is JSON.
    pub async fn json<T: DeserializeOwned>(self) -> Result<T, StoreError> {
        let host = self.host.clone();
        let text = self.text().await?;
        serde_json::from_str(&text)
            .map_err(|error| StoreError::failed(&host, format_args!("not the JSON of an answer: {error}")))
    }

    /// Waits for the next piece of the answer's body. Returns `None` at its end. A piece may have several lines, or a
    /// part of one.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, StoreError> {
        loop {
            match self.response.body_mut().frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(StoreError::failed(&self.host, error)),
            }
        }
    }

    /// Returns the host and port that the answer comes from.
    pub fn host(&self) -> &str {
        &self.host
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    fn client() -> HttpClient {
        let builder =
            rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into());
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let config = builder.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
        HttpClient::new(Arc::new(config))
    }

    /// Sends a request to a server that answers with these bytes, and returns the answer's text.
    async fn answered(answer: Vec<u8>) -> Result<String, StoreError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/list", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await; // reads the request
            let _ = stream.write_all(&answer).await; // an error is ignored: the client may have closed the connection
        });
        client().send(&url, None).await?.text().await
    }

    #[tokio::test]
    async fn http_answers_are_read_within_bounds() {
        let ok = |length: usize| {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            [head.into_bytes(), vec![b'a'; length]].concat()
        };
        assert_eq!(answered(ok(3)).await.unwrap(), "aaa");
        let long = answered(ok(MAX_ANSWER + 1)).await.unwrap_err();
        assert!(long.to_string().contains("limit"), "{long}");
        let text = "no\x1b[31m such thing".repeat(100);
        let refused = format!("HTTP/1.1 404 Not Found\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        let refused = answered(refused.into_bytes()).await.unwrap_err().to_string();
        assert!(refused.contains("404 Not Found") && refused.len() < 300, "{refused}");
        assert!(!refused.contains('\x1b'), "control characters do not reach the log");
        let wrong = answered(b"hello\r\n\r\n".to_vec()).await.unwrap_err().to_string();
        assert!(wrong.contains("invalid HTTP"), "{wrong}");
    }
}
