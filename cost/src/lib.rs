//! Measures the CPU time of the kernel's networking on a running machine: its share of each CPU, by part of the network
//! stack and by process.
//!
//! ```no_run
//! use std::time::Duration;
//! use millrace_cost::{Config, Observer};
//!
//! let mut observer = Observer::start(Config::new()?)?;
//! let report = observer.next(Duration::from_secs(1))?;
//! for cpu in &report.cpus {
//!     println!("CPU {}: {:.1} %", cpu.cpu, cpu.networking_share * 100.0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Each period's figures are a [`report::Report`]. `docs/notes/design/0005-cost.md` says how they are measured.
#![deny(missing_docs)]

pub mod ahead;
pub mod arguments;
mod cgroups;
mod choice;
mod energy;
pub mod export;
mod flame;
mod fold;
pub mod interval;
pub mod kernel;
pub mod log;
pub mod merge;
mod observer;
mod procstat;
pub mod report;
#[cfg(test)]
mod samples;
mod share;
mod symbols;
pub mod taxonomy;
mod users;

pub use choice::TimingBudget;
pub use observer::{Config, Error, MAX_FREQUENCY_HZ, Observer, POLL_INTERVAL};
pub use symbols::plain as function_name;
