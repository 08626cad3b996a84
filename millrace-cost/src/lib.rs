//! What the kernel's networking costs, live: which share of each CPU, which part of the stack, for whom.
//!
//! The figures are [`report::Report`]s. How they are made: `docs/design/0005-cost.md`.

pub mod report;
