//! The relay, without I/O: tracks and their cache, what each subscriber is owed, repair, loss, congestion.

pub mod cache;
pub mod fetch;
pub mod filter;
pub mod subgroup;
pub mod track;
pub mod view;

use crate::{moq::code, plane::downstream::ResetCodes};

/// The reset codes of draft-18 for streams that the data plane gives up by itself.
pub const RESET_CODES: ResetCodes =
    ResetCodes { late: code::Reset::DELIVERY_TIMEOUT.0, behind: code::Reset::TOO_FAR_BEHIND.0 };

#[cfg(test)]
mod tests;
