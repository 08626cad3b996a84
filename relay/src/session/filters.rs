//! Checks for filters that this relay does not support.

use millrace_moq::{Parameters, code, message::RequestError};

/// Refuses range filters. Our SETUP omits MAX_FILTER_RANGES, so peers may not send any.
///
/// # Errors
/// Returns an error if the parameters contain a range filter.
pub fn without_range_filters(parameters: &Parameters) -> Result<(), RequestError> {
    if !parameters.has_range_filters() {
        return Ok(());
    }
    let reason = "this relay takes no range filters: MAX_FILTER_RANGES is 0";
    Err(RequestError::new(code::Request::INVALID_FILTER, reason))
}
