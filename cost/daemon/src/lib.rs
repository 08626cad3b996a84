//! What the kernel's networking costs, shown: the live view, files, text, the dashboard. The figures are made in
//! `millrace-cost`.

pub(crate) mod live;
pub(crate) mod losses;
pub(crate) mod outputs;
pub(crate) mod queue;
pub(crate) mod signals;
pub mod sink;
mod table;
mod text;
mod trend;
pub mod web;
