//! `millrace bench`: measurements, which are in `millrace-lab`, and the dashboard whose cost is one of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use millrace_cost::report::Report;
use millrace_lab::bench;

use crate::{
    cost::{sink::Sink, web},
    http::access::Access,
};

pub use millrace_lab::bench::Args;

const MEMORY_BYTES: usize = 64 << 20;

pub fn run(args: Args) -> anyhow::Result<()> {
    bench::run(args, loopback_dashboard)
}

fn loopback_dashboard() -> anyhow::Result<Box<dyn bench::Dashboard>> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (access, losses) = (Access::default(), Arc::default());
    let config = web::Config { addr, memory_bytes: MEMORY_BYTES, live: true, access, losses };
    Ok(Box::new(web::Dashboard::start(&config)?))
}

impl bench::Dashboard for web::Dashboard {
    fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    fn show(&mut self, report: Arc<Report>) -> anyhow::Result<()> {
        self.report(&report)
    }
}
