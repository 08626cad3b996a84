//! Files that applications need and that are made once for all labs: a program in Go, and a film in segments.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::video::Film;

/// Source in `lab/examples`. The copy in this binary makes an installed program able to build it.
const GO: [(&str, &str); 2] = [
    ("go.mod", include_str!("../../../../examples/go-pair/go.mod")),
    ("main.go", include_str!("../../../../examples/go-pair/main.go")),
];
/// The program's name where files are served from.
pub const PAIR: &str = "go-pair";

pub struct AppMaterial {
    directory: tempfile::TempDir,
    pub film: Option<Film>,
}

impl AppMaterial {
    /// Builds the program, if it is wanted, and encodes a film of this rate (Mbit/s) and length (s).
    pub fn new(has_go: bool, film: Option<(u32, u32)>) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        if has_go {
            build(directory.path()).context("the client and server in Go")?;
        }
        let film = film.map(|(mbit, seconds)| Film::make(directory.path(), mbit, seconds)).transpose()?;
        Ok(Self { directory, film })
    }

    /// Links the files into the directory that servers serve.
    pub fn place(&self, served: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(self.directory.path())? {
            let entry = entry?;
            symlink(entry.path(), served.join(entry.file_name()))?;
        }
        Ok(())
    }
}

/// Builds a static program, whose system calls do not go through a library.
fn build(into: &Path) -> anyhow::Result<()> {
    let source = tempfile::tempdir()?;
    for (name, text) in GO {
        fs::write(source.path().join(name), text)?;
    }
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-ldflags=-s", "-o"]).arg(into.join(PAIR)).arg(".");
    // The program needs the standard library only.
    command.envs([("CGO_ENABLED", "0"), ("GOPROXY", "off"), ("GOFLAGS", ""), ("GOTOOLCHAIN", "local")]);
    let output = command.current_dir(source.path()).output().context("no Go: Debian golang-go")?;
    ensure!(output.status.success(), "go build: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
