//! The ways in which a relay of a chain finds the relay that has the publisher, and the options of relays for each.

use std::net::SocketAddr;

use anyhow::bail;

use super::super::contender::Contender;

/// How a relay of a chain finds the relay that has the publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ChainBy {
    /// Each relay is a peer of the relay before it in a cluster, which tells it which namespaces there are
    Cluster,
    /// Each relay has the relay before it as its upstream relay, which it asks for every track
    Upstream,
}

impl ChainBy {
    pub fn name(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Upstream => "upstream",
        }
    }

    /// Returns the arguments of a relay that comes after the one at `before`; `None` is the first relay. Fails if this
    /// relay has no such chains.
    pub fn arguments(self, contender: Contender, before: Option<SocketAddr>) -> anyhow::Result<Vec<String>> {
        let url = before.map(|before| format!("moqt://{before}"));
        let is_ours = contender.engine().is_some();
        let words = match (contender, self, url) {
            (_, Self::Cluster, None) if is_ours => vec!["--cluster".to_owned()],
            (_, _, None) => Vec::new(),
            (_, by, Some(url)) if is_ours => {
                let flag = if by == Self::Cluster { "--cluster-peer" } else { "--upstream" };
                vec![format!("{flag}={url}"), "--upstream-tls-disable-verify".to_owned()]
            }
            (Contender::MoqRelay, Self::Cluster, Some(url)) => {
                vec![format!("--cluster-connect={url}"), "--connect-tls-insecure=true".to_owned()]
            }
            (Contender::MoqRelay, Self::Upstream, Some(_)) => {
                bail!("moq-relay has a cluster and no upstream relays: measure it with --chain-by cluster")
            }
            (other, ..) => bail!(
                "{} has no chains: its relays connect straight to the one that has the publisher, which a shared \
                 coordinator names",
                other.relay()
            ),
        };
        Ok(words)
    }
}
