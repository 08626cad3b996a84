//! A test of the example `files`, which is compiled unchanged.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "its main is not called here")]
#[path = "../examples/files.rs"]
mod files;

use std::{net::Ipv4Addr, time::Duration};

/// Longest time that a download may take before the test fails.
const PATIENCE: Duration = millrace_testkit::BOUND;

#[tokio::test(flavor = "multi_thread")]
async fn files_are_downloaded_from_the_data_plane() {
    let directory = tempfile::tempdir().unwrap();
    let file: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    std::fs::write(directory.path().join("large"), &file).unwrap();
    std::fs::write(directory.path().join("empty"), []).unwrap();

    let server = files::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let addr = server.local_addr();
    let get = |name| tokio::time::timeout(PATIENCE, files::get(addr, name));
    tokio::select! {
        () = files::serve(&server, directory.path()) => panic!("the server has ended"),
        () = async {
            assert!(get("large").await.unwrap().unwrap() == file);
            assert!(get("empty").await.unwrap().unwrap().is_empty());
            assert!(get("../large").await.unwrap().is_err(), "a name with a path is refused");
        } => {}
    }
    assert!(server.sent().bytes > file.len() as u64, "the data plane has sent the files");
}
