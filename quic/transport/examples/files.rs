//! A file server whose files are sent by Millrace's data plane, the second sender on quinn's connections. A client
//! sends a file's name on a bidirectional stream of the QUIC stack, and gets the file on a unidirectional stream of the
//! data plane. The client only needs unmodified quinn.
//!
//! ```text
//! cargo run --example files -- serve DIRECTORY            says where it listens
//! cargo run --example files -- get ADDRESS NAME >FILE
//! ```

use std::{
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use millrace_quic::plane::{
    downstream::{AskedRange, Label, NewStream, Priority},
    source::{Source, SourceEnd, SourceExtent},
};
use millrace_transport::{Config, Connection, Endpoint, tls::ServerTrust};
use rustls::{pki_types::PrivatePkcs8KeyDer, sign::CertifiedKey};

const ALPN: &[u8] = b"files";

/// Longest name of a file, bytes.
const NAME_MAX: usize = 1024;

/// Largest file that a client accepts, bytes.
const FILE_MAX: usize = 1 << 30;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["serve", directory] => {
            let server = listen((Ipv4Addr::LOCALHOST, 0).into())?;
            println!("{}", server.local_addr());
            serve(&server, Path::new(directory)).await;
            Ok(())
        }
        ["get", address, name] => {
            let file = get(address.parse()?, name).await?;
            Ok(std::io::stdout().write_all(&file)?)
        }
        _ => bail!("usage: files serve DIRECTORY | files get ADDRESS NAME"),
    }
}

/// Creates a server endpoint with a new self-signed certificate.
pub fn listen(addr: SocketAddr) -> anyhow::Result<Endpoint> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = rustls::crypto::ring::default_provider();
    let certificate = CertifiedKey::from_der(vec![made.cert.der().clone()], key.into(), &provider)?;
    let config = Config {
        certificate: Some(Arc::new(certificate)),
        alpn: vec![ALPN.to_vec()],
        // quinn opens no unidirectional streams: all of them are the data plane's.
        control_streams: 0,
        ..Config::default()
    };
    Ok(Endpoint::bind(addr, config)?)
}

/// Serves `directory` to every client until the endpoint is closed.
pub async fn serve(endpoint: &Endpoint, directory: &Path) {
    while let Some(incoming) = endpoint.accept().await {
        let directory = directory.to_owned();
        tokio::spawn(async move {
            if let Ok(connection) = incoming.accept().await {
                connection.start();
                let error = answer(&connection, &directory).await;
                eprintln!("{}: {error}", connection.quic.remote_address());
            }
        });
    }
}

/// Answers requests one after the other, and returns the error that ends the connection.
async fn answer(connection: &Connection, directory: &Path) -> anyhow::Error {
    loop {
        let request = async {
            let (_, mut request) = connection.quic.accept_bi().await?;
            let name = String::from_utf8(request.read_to_end(NAME_MAX).await?)?;
            let path = path_of(directory, &name)?;
            let bytes = tokio::fs::read(&path).await.with_context(|| name.clone())?;
            anyhow::Ok(Bytes::from(bytes))
        };
        match request.await {
            Ok(bytes) => send(connection, bytes),
            Err(error) => return error,
        }
    }
}

/// Returns the path of a file in the directory. A name with more than one path component is refused.
fn path_of(directory: &Path, name: &str) -> anyhow::Result<PathBuf> {
    match Path::new(name).file_name() {
        Some(file) if file == name => Ok(directory.join(file)),
        _ => bail!("{name:?} is not the name of a file"),
    }
}

/// Queues a stream with these bytes for the peer. The data plane sends lost bytes again.
fn send(connection: &Connection, bytes: Bytes) {
    connection.downstream().open(NewStream {
        source: Arc::new(WholeStream { bytes, read_at: Instant::now() }),
        priority: Priority::default(),
        owner: 0,
        object_timeout: None,
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: Label::default(),
    });
    connection.transmit_now();
}

/// The source of a stream whose bytes are all in memory.
struct WholeStream {
    bytes: Bytes,
    read_at: Instant,
}

impl Source for WholeStream {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: self.bytes.len() as u64, end: SourceEnd::Fin { at: self.read_at } }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        let rest =
            usize::try_from(offset).ok().and_then(|offset| self.bytes.get(offset..)).unwrap_or_default();
        let len = rest.len().min(buf.len());
        buf[..len].copy_from_slice(&rest[..len]);
        len
    }

    fn received_at(&self, _: u64) -> Option<Instant> {
        Some(self.read_at)
    }
}

/// Downloads a file from a server, without checking the server's certificate.
pub async fn get(addr: SocketAddr, name: &str) -> anyhow::Result<Vec<u8>> {
    let config = Config { trust: ServerTrust::Anyone, alpn: vec![ALPN.to_vec()], ..Config::default() };
    let endpoint = Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config)?;
    let connection = endpoint.connect(addr, "localhost").await?;
    let (mut request, _answer) = connection.quic.open_bi().await?;
    request.write_all(name.as_bytes()).await?;
    request.finish()?;
    let file = connection.quic.accept_uni().await?.read_to_end(FILE_MAX).await?;
    endpoint.close(0u32.into(), b"");
    endpoint.wait_idle().await;
    Ok(file)
}
