//! `millrace graft why`: explains which graft, congestion control or tunnel connections with a peer use, or what a
//! model would choose.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};

use anyhow::{Context as _, bail, ensure};
use millrace_daemon::{
    expect_answer, file,
    render::{print, width},
};
use millrace_graft_daemon::{
    control::{self, DEFAULT_SOCKET, GraftAnswer, GraftRequest},
    text,
};
use millrace_graft_proto::select::{
    candidates,
    features::Features,
    model::{self, Model, ModelDecision},
};
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub struct WhyArgs {
    /// Address of a peer, or a connection as LOCAL:PORT-REMOTE:PORT; optional with --what-if
    #[arg(required_unless_present = "what_if", value_name = "PEER|CONNECTION")]
    about: Option<About>,
    /// Remote end of the connection, if its two ends are given as separate arguments, as `ss` prints them
    #[arg(value_name = "REMOTE:PORT", conflicts_with = "what_if")]
    other: Option<SocketEnd>,
    /// Ask what a model would choose under these conditions: rtt (ms), rate (Mbit/s), loss (%), burstiness, reordering
    /// (%), queue (ms/s), paths, size (KiB), profile (of the traffic), offer (what the peer can use), warmth (of the
    /// tunnel); with PEER, conditions not given here are those that the daemon has measured
    #[arg(long, value_name = "NAME=VALUE,...", requires = "model")]
    what_if: Option<Features>,
    /// File with a model (by `millrace-lab train`) that chooses congestion controls and tunnels for connections
    #[arg(long, value_name = "FILE", requires = "what_if")]
    model: Option<PathBuf>,
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// The peer or connection to explain.
#[derive(Clone, Debug, PartialEq, Eq)]
enum About {
    Peer(IpAddr),
    /// The local end of a connection, whose remote end is the next argument.
    End(SocketAddr),
    Connection(SocketAddr, SocketAddr),
}

/// One end of a connection, as `ss` prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketEnd(SocketAddr);

impl FromStr for SocketEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no ADDRESS:PORT, such as 192.0.2.1:443 or [2001:db8::1]:443");
        let (address, port) = text.trim().rsplit_once(':').ok_or_else(wrong)?;
        let address = address.trim_start_matches('[');
        // `ss` prints an interface inside or after the brackets: [fe80::1]%eth0 or [fe80::2%eth0].
        let address = address.split(['%', ']']).next().unwrap_or(address);
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let port = port.parse().map_err(|_| wrong())?;
        // A dual-stack socket shows an IPv4 peer as ::ffff:192.0.2.1. The daemon knows it by its IPv4 address.
        Ok(Self(SocketAddr::new(address.to_canonical(), port)))
    }
}

impl FromStr for About {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(peer) = text.parse() {
            return Ok(Self::Peer(peer));
        }
        let mut ends = text.split(['-', ' ']).filter(|part| !part.is_empty());
        match (ends.next(), ends.next(), ends.next()) {
            (Some(one), Some(other), None) => {
                Ok(Self::Connection(one.parse::<SocketEnd>()?.0, other.parse::<SocketEnd>()?.0))
            }
            (Some(one), None, None) => Ok(Self::End(one.parse::<SocketEnd>()?.0)),
            _ => Err("must be a peer's address, or LOCAL:PORT-REMOTE:PORT".to_owned()),
        }
    }
}

impl WhyArgs {
    fn connection(&self) -> anyhow::Result<Option<(SocketAddr, SocketAddr)>> {
        match (&self.about, self.other) {
            (Some(About::Connection(local, remote)), None) => Ok(Some((*local, *remote))),
            (Some(About::End(local)), Some(SocketEnd(remote))) => Ok(Some((*local, remote))),
            (Some(About::End(local)), None) => {
                bail!("{local} is only one end of a connection: add the remote end as REMOTE:PORT")
            }
            (None | Some(About::Peer(_)), None) => Ok(None),
            (_, Some(SocketEnd(other))) => {
                bail!("{other} is an argument too many: name a peer, or the two ends of a connection")
            }
        }
    }

    fn peer(&self) -> Option<IpAddr> {
        match self.about {
            Some(About::Peer(peer)) => Some(peer),
            _ => None,
        }
    }
}

/// The decision of a model that chooses a congestion control, graft or tunnel, as JSON.
#[derive(Debug, Serialize)]
struct WhatIf<'a> {
    known: String,
    way: &'a [String],
    leaf: u32,
    examples: f64,
    candidate: Option<&'a str>,
    right: Option<f64>,
    utility: Option<f64>,
}

pub fn run(args: &WhyArgs) -> anyhow::Result<()> {
    if let Some((local, remote)) = args.connection()? {
        ensure!(args.what_if.is_none(), "--what-if needs a peer, not a connection: name its address");
        let asked = control::ask(&args.socket, &GraftRequest::WhyConnection { local, remote })?;
        let connection = expect_answer!(asked, GraftAnswer::Connection)?;
        return print(&if args.json {
            serde_json::to_string_pretty(&connection)? + "\n"
        } else {
            text::connection(&connection, width())
        });
    }
    let ask =
        |peer| expect_answer!(control::ask(&args.socket, &GraftRequest::Why { peer })?, GraftAnswer::Why);
    let why = args.peer().map(ask).transpose()?;
    let (Some(features), Some(path)) = (&args.what_if, &args.model) else {
        let why = why.unwrap_or_default();
        return print(&if args.json {
            serde_json::to_string_pretty(&why)? + "\n"
        } else {
            text::explanation_text(&why, width())
        });
    };
    let read = file::text(path, model::BYTES_MAX).with_context(|| path.display().to_string())?;
    let model = Model::parse(&read).with_context(|| path.display().to_string())?;
    let measured =
        why.and_then(|why| why.in_place.path).map_or_else(Features::default, |path| path.features());
    let features = measured.or(features);
    // A candidate (a congestion control, graft or tunnel) that this host or the peer cannot use is never chosen.
    let can = |candidate: &str| candidates::can_be_had_by(candidate, &features);
    let decision = model.decide(&features, can);
    print(&if args.json {
        serde_json::to_string_pretty(&data(&features, &decision))? + "\n"
    } else {
        text::what_if(&features, &decision, width())
    })
}

fn data<'a>(features: &Features, decision: &'a ModelDecision<'a>) -> WhatIf<'a> {
    WhatIf {
        known: features.to_string(),
        way: &decision.words,
        leaf: decision.leaf.number,
        examples: decision.leaf.examples,
        candidate: decision.rank.map(|rank| rank.candidate.as_str()),
        right: decision.rank.map(|rank| rank.right),
        utility: decision.rank.map(|rank| rank.utility),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_parsed_as_typed_and_as_ss_prints_them() {
        let connection =
            |one: &str, other: &str| About::Connection(one.parse().unwrap(), other.parse().unwrap());
        let table = [
            ("192.0.2.1", About::Peer("192.0.2.1".parse().unwrap())),
            ("2001:db8::1", About::Peer("2001:db8::1".parse().unwrap())),
            ("192.0.2.1:5000-192.0.2.2:443", connection("192.0.2.1:5000", "192.0.2.2:443")),
            ("192.0.2.1:5000   192.0.2.2:443", connection("192.0.2.1:5000", "192.0.2.2:443")),
            ("[2001:db8::1]:1-[2001:db8::2]:443", connection("[2001:db8::1]:1", "[2001:db8::2]:443")),
            ("[fe80::1]%eth0:1-[fe80::2%eth0]:443", connection("[fe80::1]:1", "[fe80::2]:443")),
            ("[::ffff:192.0.2.1]:1-[::ffff:192.0.2.2]:2", connection("192.0.2.1:1", "192.0.2.2:2")),
            ("192.0.2.1:5000", About::End("192.0.2.1:5000".parse().unwrap())),
        ];
        for (text, wanted) in table {
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
        for wrong in ["", "web", "192.0.2.1:70000-192.0.2.2:1", "192.0.2.1:1-2-3", "1:1-192.0.2.1:1"] {
            assert!(wrong.parse::<About>().is_err(), "{wrong}");
        }
    }
}
