//! A client for a daemon's HTTP server.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::Context as _;

/// Sends a GET request over HTTP/1.0, so that the answer ends with the connection. Returns status code and body.
///
/// # Errors
/// Fails if nothing answers at the address, or the answer is not HTTP.
pub fn fetch(addr: SocketAddr, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    const TIMEOUT: Duration = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&addr, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {addr}\r\n{token}\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("not an HTTP answer")?;
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("not an HTTP answer")?;
    Ok((code, body.to_owned()))
}
