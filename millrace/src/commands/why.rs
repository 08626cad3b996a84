//! `millrace graft why`.

use std::{net::IpAddr, path::PathBuf};

use anyhow::Context as _;
use millrace_proto::graft::select::{
    cases,
    features::Features,
    model::{self, Decision, Model},
};
use serde::Serialize;

use super::train;
use crate::{
    graft::{
        control::{self, DEFAULT_SOCKET, Request},
        text,
    },
    render::{print, width},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Optional with --what-if
    #[arg(required_unless_present = "what_if")]
    peer: Option<IpAddr>,
    /// What a model would choose if this were so: rtt (ms), rate (Mbit/s), loss (%), burstiness, reordering (%), queue
    /// (ms/s), paths, size (KiB), profile, offer, warmth; with PEER, what is not said is as the daemon has measured it
    #[arg(long, value_name = "NAME=VALUE,...", requires = "model")]
    what_if: Option<Features>,
    /// That `millrace graft train` has made
    #[arg(long, value_name = "FILE", requires = "what_if")]
    model: Option<PathBuf>,
    /// Socket of the running daemon
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    #[arg(long)]
    json: bool,
}

/// What a model says, as data.
#[derive(Debug, Serialize)]
struct WhatIf<'a> {
    known: String,
    way: &'a [String],
    leaf: u32,
    examples: f64,
    arm: Option<&'a str>,
    right: Option<f64>,
    utility: Option<f64>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let why = args.peer.map(|peer| control::ask(&args.socket, &Request::Why { peer })).transpose()?;
    let why = why.map(|answer| answer.why.unwrap_or_default());
    let (Some(features), Some(path)) = (&args.what_if, &args.model) else {
        let why = why.unwrap_or_default();
        return print(&if args.json {
            serde_json::to_string_pretty(&why)? + "\n"
        } else {
            text::why(&why, width())
        });
    };
    let read = train::read(path, model::BYTES_MAX)?;
    let model = Model::parse(&read).with_context(|| path.display().to_string())?;
    let measured = why.and_then(|why| why.path).map_or_else(Features::default, |path| path.features());
    let features = measured.or(features);
    let can = |arm: &str| cases::can_be_had_by(arm, &features);
    let decision = model.decide(&features, can);
    print(&if args.json {
        serde_json::to_string_pretty(&data(&features, &decision))? + "\n"
    } else {
        text::what_if(&features, &decision, width())
    })
}

fn data<'a>(features: &Features, decision: &'a Decision<'a>) -> WhatIf<'a> {
    WhatIf {
        known: features.to_string(),
        way: &decision.words,
        leaf: decision.leaf.number,
        examples: decision.leaf.examples,
        arm: decision.rank.map(|rank| rank.arm.as_str()),
        right: decision.rank.map(|rank| rank.right),
        utility: decision.rank.map(|rank| rank.utility),
    }
}
