//! Filters that nobody may ask for.

use millrace_moq::{Parameters, code, message::RequestError};

/// Range filters are refused: SETUP says nothing of MAX_FILTER_RANGES, so that nobody may send any.
///
/// # Errors
/// There is one.
pub fn without_range_filters(parameters: &Parameters) -> Result<(), RequestError> {
    if !parameters.has_range_filters() {
        return Ok(());
    }
    let reason = "this relay takes no range filters: MAX_FILTER_RANGES is 0";
    Err(RequestError::new(code::Request::INVALID_FILTER, reason))
}
