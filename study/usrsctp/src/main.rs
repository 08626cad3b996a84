//! The confined process. Its standard input is a socket to its owner, the daemon.

fn main() -> anyhow::Result<()> {
    millrace_study_usrsctp::process::run()
}
