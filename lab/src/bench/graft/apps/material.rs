//! What applications want that is made once for all labs: a program in Go, and a film in segments.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::video::Film;

/// Of `lab/examples`: it is built from here, so that a program that was installed has it, too.
const GO: [(&str, &str); 2] = [
    ("go.mod", include_str!("../../../../examples/go-pair/go.mod")),
    ("main.go", include_str!("../../../../examples/go-pair/main.go")),
];
/// The program's name where files are served from.
pub const PAIR: &str = "go-pair";

pub struct Material {
    directory: tempfile::TempDir,
    pub film: Option<Film>,
}

impl Material {
    /// The program, if it is wanted, and a film of so many Mbit/s and seconds.
    pub fn new(has_go: bool, film: Option<(u32, u32)>) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        if has_go {
            build(directory.path()).context("the client and server in Go")?;
        }
        let film = film.map(|(mbit, seconds)| Film::make(directory.path(), mbit, seconds)).transpose()?;
        Ok(Self { directory, film })
    }

    /// Where servers find it.
    pub fn place(&self, served: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(self.directory.path())? {
            let entry = entry?;
            symlink(entry.path(), served.join(entry.file_name()))?;
        }
        Ok(())
    }
}

/// A static one: nothing of its system calls goes by a library.
fn build(into: &Path) -> anyhow::Result<()> {
    let source = tempfile::tempdir()?;
    for (name, text) in GO {
        fs::write(source.path().join(name), text)?;
    }
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-ldflags=-s", "-o"]).arg(into.join(PAIR)).arg(".");
    // It needs nothing but the standard library.
    command.envs([("CGO_ENABLED", "0"), ("GOPROXY", "off"), ("GOFLAGS", ""), ("GOTOOLCHAIN", "local")]);
    let output = command.current_dir(source.path()).output().context("no Go: Debian golang-go")?;
    ensure!(output.status.success(), "go build: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
