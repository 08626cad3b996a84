//! What the kernel's networking costs, live: which share of each CPU, which part of the stack, for whom.
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
//! The figures are [`report::Report`]s. How they are made: `docs/design/0005-cost.md`.

pub mod arguments;
mod cgroups;
mod choice;
mod energy;
pub mod export;
mod flame;
mod fold;
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

pub use choice::Budget;
pub use observer::{Config, Error, MAX_FREQUENCY_HZ, Observer, POLL_INTERVAL};
pub use symbols::plain as function_name;
