//! Certificates and clients for tests of endpoints.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use millrace_transport::{Config, Connection, Endpoint, tls::ServerTrust};
use rustls::{crypto::ring::sign::any_supported_type, sign::CertifiedKey};

/// Makes a self-signed certificate for `localhost`.
pub fn certificate() -> Arc<CertifiedKey> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = any_supported_type(&made.signing_key.serialize_der().try_into().unwrap()).unwrap();
    Arc::new(CertifiedKey::new(vec![made.cert.der().clone()], key))
}

/// Connects to a server, by an endpoint that sends no keep-alives.
pub async fn connect(server: SocketAddr, alpn: &[u8], idle_timeout: Duration) -> (Endpoint, Arc<Connection>) {
    let config = Config {
        trust: ServerTrust::Anyone,
        alpn: vec![alpn.to_vec()],
        idle_timeout,
        keep_alive: false,
        ..Config::default()
    };
    let endpoint = Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap();
    let connection = endpoint.connect(server, "localhost").await.unwrap();
    connection.start();
    (endpoint, connection)
}
