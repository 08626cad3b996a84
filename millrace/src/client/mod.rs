//! MoQ clients: publisher and subscriber.

pub mod publish;
pub mod subscribe;
