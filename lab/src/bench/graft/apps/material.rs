//! Files that applications need and that are made once for all labs: the Go program, and a film in segments.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::video::Film;

/// Source of the Go program, from `lab/examples`. It is compiled into this binary, so that an installed binary can
/// build it too.
const GO: [(&str, &str); 2] = [
    ("go.mod", include_str!("../../../../examples/go-pair/go.mod")),
    ("main.go", include_str!("../../../../examples/go-pair/main.go")),
];
/// Name of the Go program in the directory that servers serve.
pub const PAIR: &str = "go-pair";

pub struct AppMaterial {
    directory: tempfile::TempDir,
    pub film: Option<Film>,
}

impl AppMaterial {
    /// Builds the Go program if `has_go`, and encodes a film of the given rate (Mbit/s) and length (s).
    pub fn new(has_go: bool, film: Option<(u32, u32)>) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        if has_go {
            build(directory.path()).context("the client and server in Go")?;
        }
        let film = film.map(|(mbit, seconds)| Film::make(directory.path(), mbit, seconds)).transpose()?;
        Ok(Self { directory, film })
    }

    /// Links the files into the directory that the servers serve.
    pub fn place(&self, served: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(self.directory.path())? {
            let entry = entry?;
            symlink(entry.path(), served.join(entry.file_name()))?;
        }
        Ok(())
    }
}

/// Builds the Go program without libc, so that its system calls go through no library.
fn build(into: &Path) -> anyhow::Result<()> {
    let source = tempfile::tempdir()?;
    for (name, text) in GO {
        fs::write(source.path().join(name), text)?;
    }
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-ldflags=-s", "-o"]).arg(into.join(PAIR)).arg(".");
    // Offline settings: the program needs only the standard library, so nothing may be downloaded.
    command.envs([("CGO_ENABLED", "0"), ("GOPROXY", "off"), ("GOFLAGS", ""), ("GOTOOLCHAIN", "local")]);
    let output = command
        .current_dir(source.path())
        .output()
        .context("cannot run go (Debian: apt install golang-go)")?;
    ensure!(output.status.success(), "go build: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
