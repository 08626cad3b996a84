//! The confined process. Its standard input is a socket of its owner's.

fn main() -> anyhow::Result<()> {
    millrace_study_usrsctp::process::run()
}
