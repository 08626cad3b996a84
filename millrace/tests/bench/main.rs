//! `millrace bench`, each comparison as small as it can be. Needs root, and what each of them says.
//! Tier: test-all, since what is measured is no feature of the product.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cost;
mod fanout;
mod gate;
mod graft;
mod relay;
mod thesis;
