//! The echo server for many connections. It is a process of its own, so that client and server may each use all
//! descriptors of a process.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::net::TcpListener;

#[derive(Debug, clap::Args)]
pub struct EchoArgs {
    /// Address to listen on
    #[arg(long)]
    at: SocketAddr,
}

/// Echoes all data until the process is killed.
pub fn run(args: &EchoArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(args.at).await.with_context(|| args.at.to_string())?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    })
}
