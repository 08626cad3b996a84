//! MoQ clients on a stock QUIC stack: a publisher and a subscriber.

pub mod broadcast;
pub mod generate;
pub mod media;
pub mod object;
pub mod order;
pub mod payload;
pub mod publish;
pub mod receive;
pub mod serve;
pub mod session;
pub mod stats;
pub mod subscribe;
#[cfg(test)]
mod tests;
pub mod tls;

/// Logs to standard error, by RUST_LOG or from warnings up; standard output is for media and figures.
fn log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,millrace=info"));
    // Fails when a test or another command of this process has set up logging already.
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init();
}
