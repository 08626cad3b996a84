//! Unmodified third-party programs: a server on each of two ports, and a client that uses one of the ports.

use std::fs;
use std::io::Read as _;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::Instant;

use anyhow::ensure;

use super::material::PAIR;
pub use super::server::AppServer;
use super::video::{self, ViewerFigures};
use crate::bench::graft::host::GraftHost;

/// Exit code with which `timeout` reports that it ended a command.
const TIMED_OUT: i32 = 124;
/// Time that the video player may take beyond the time limit of a run, seconds.
const PLAYER_ENDS: u64 = 30;
/// Number of requests that redis-benchmark sends one after the other.
const REQUESTS: u32 = 20;
/// Load of [`Application::RedisMany`]: requests of each command, connections, requests in flight on each connection,
/// and bytes of a value.
const MANY: u32 = 1000;
const CONNECTIONS: u32 = 10;
const PIPELINED: u32 = 10;
const VALUE_BYTES: u32 = 1024;
/// Number of connections that the Go client makes at once.
const DIALED: u32 = 8;
/// Number of files that rsync copies.
const FILES: usize = 100;
const FILE_BYTES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Application {
    /// nginx and curl: one file of this size on a new connection.
    Web { kib: usize },
    /// redis and redis-benchmark: requests on one connection, each sent after the answer to the one before.
    Redis,
    /// redis and redis-benchmark: SET and GET on several connections, with several requests in flight on each.
    RedisMany,
    /// rsync, daemon and client: a directory of small files.
    Rsync,
    /// iperf3: this much data from the server to the client.
    Iperf { kib: usize },
    /// A client and a server in Go, linked statically: several connections at once, each with this many KiB.
    Go { kib: usize },
    /// A film in HLS segments from nginx. The measured time is the time for which the film's viewer waits.
    Film,
}

/// Result of one run of an application.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunResult {
    /// Duration of the run, seconds. For a run that was stopped it is the time limit.
    pub seconds: f64,
    pub is_over: bool,
    /// Waiting time and stalls of the film's viewer; `None` for other applications.
    pub watched: Option<ViewerFigures>,
}

impl FromStr for Application {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kib = |kib: &str| kib.parse().map_err(|_| format!("{kib:?} is not a number of KiB"));
        match text.split_once(':') {
            None if text == "redis" => Ok(Self::Redis),
            None if text == "redis-many" => Ok(Self::RedisMany),
            None if text == "rsync" => Ok(Self::Rsync),
            None if text == "film" => Ok(Self::Film),
            Some(("go", size)) => Ok(Self::Go { kib: kib(size)? }),
            Some(("web", size)) => Ok(Self::Web { kib: kib(size)? }),
            Some(("iperf3", size)) => Ok(Self::Iperf { kib: kib(size)? }),
            _ => Err("must be web:KIB, iperf3:KIB, go:KIB, redis, redis-many, rsync or film".into()),
        }
    }
}

impl Application {
    pub fn label(self) -> String {
        match self {
            Self::Web { kib } => format!("curl and nginx, {kib} KiB"),
            Self::Redis => format!("redis, {REQUESTS} requests"),
            Self::RedisMany => format!("redis, 2 x {MANY} requests, {CONNECTIONS} x {PIPELINED} at once"),
            Self::Rsync => format!("rsync, {FILES} files of {} KiB", FILE_BYTES >> 10),
            Self::Iperf { kib } => format!("iperf3, {kib} KiB"),
            Self::Go { kib } => format!("Go, {DIALED} x {kib} KiB at once"),
            Self::Film => "film, waited".to_owned(),
        }
    }

    pub fn server(self) -> AppServer {
        match self {
            Self::Web { .. } => AppServer::Nginx,
            Self::Redis | Self::RedisMany => AppServer::Redis,
            Self::Go { .. } => AppServer::Go,
            Self::Film => AppServer::Film,
            Self::Rsync => AppServer::Rsync,
            Self::Iperf { .. } => AppServer::Iperf,
        }
    }

    /// Creates the files that the server serves.
    pub fn prepare(self, directory: &Path) -> anyhow::Result<()> {
        let noise = |path: &Path, bytes: usize| {
            let mut data = vec![0; bytes];
            fs::File::open("/dev/urandom")?.read_exact(&mut data)?;
            anyhow::Ok(fs::write(path, data)?)
        };
        match self {
            Self::Web { kib } => noise(&directory.join(kib.to_string()), kib << 10),
            Self::Rsync => {
                let files = directory.join("files");
                fs::create_dir_all(&files)?;
                (0..FILES).try_for_each(|number| noise(&files.join(number.to_string()), FILE_BYTES))
            }
            Self::Redis | Self::RedisMany | Self::Iperf { .. } | Self::Go { .. } | Self::Film => Ok(()),
        }
    }

    /// Runs the client, and checks that the received files equal the served ones.
    pub fn run(
        self,
        client: &GraftHost<'_>,
        at: (Ipv4Addr, u16),
        served: &Path,
        limit: u64,
    ) -> anyhow::Result<RunResult> {
        let got = client.directory.join("got");
        remove(&got)?;
        let command = self.command(client, at.0, at.1, served, &got, limit)?;
        let start = Instant::now();
        let done = client.cgroup.command(&command).output()?;
        let wall = start.elapsed().as_secs_f64();
        if done.status.code() == Some(TIMED_OUT) {
            return Ok(RunResult { seconds: limit as f64, is_over: true, watched: None });
        }
        let errors = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{} ended with {}: {}", self.label(), done.status, errors.trim());
        let said = String::from_utf8_lossy(&done.stdout);
        if self == Self::Film {
            let watched: ViewerFigures = serde_json::from_str(said.trim())?;
            ensure!(watched.is_over || same_film(served, &got)?, "the film's segments arrived altered");
            let seconds = watched.waited_s();
            let is_over = watched.is_over;
            return Ok(RunResult { seconds, is_over, watched: Some(watched) });
        }
        self.compare(served, &got)?;
        // curl's own measurement does not include the time to start the program.
        let seconds = match self {
            Self::Web { .. } => said.trim().parse()?,
            _ => wall,
        };
        Ok(RunResult { seconds, is_over: false, watched: None })
    }

    fn command(
        self,
        client: &GraftHost<'_>,
        server: Ipv4Addr,
        port: u16,
        served: &Path,
        got: &Path,
        limit: u64,
    ) -> anyhow::Result<Command> {
        let mut command = client.node.command("timeout");
        // The video player stops by itself at the time limit, and then has to report waiting time and stalls.
        let most = if self == Self::Film { limit + PLAYER_ENDS } else { limit };
        command.arg(most.to_string());
        match self {
            Self::Web { kib } => {
                command.args(["curl", "-fsS", "-w", "%{time_total}", "-o"]).arg(got);
                command.arg(format!("http://{server}:{port}/{kib}"));
            }
            Self::Redis | Self::RedisMany => {
                command.args(["redis-benchmark", "-h", &server.to_string(), "-p", &port.to_string(), "-q"]);
                match self {
                    Self::Redis => command.args(["-t", "get", "-c", "1", "-n", &REQUESTS.to_string()]),
                    _ => command
                        .args(["-t", "set,get", "-n", &MANY.to_string(), "-c", &CONNECTIONS.to_string()])
                        .args(["-P", &PIPELINED.to_string(), "-d", &VALUE_BYTES.to_string()]),
                };
            }
            Self::Rsync => {
                command.args(["rsync", "-a"]).arg(format!("rsync://{server}:{port}/files/")).arg(got);
            }
            Self::Iperf { kib } => {
                command.args(["iperf3", "-R", "-c", &server.to_string(), "-p", &port.to_string()]);
                command.args(["-n", &format!("{kib}K")]);
            }
            Self::Go { kib } => {
                command.arg(served.join(PAIR)).args(["client", &format!("{server}:{port}")]);
                command.args([DIALED.to_string(), (kib << 10).to_string()]);
            }
            Self::Film => {
                fs::create_dir(got)?;
                command.arg(std::env::current_exe()?).args(["bench", "graft", "play", "--from"]);
                command.arg(format!("{server}:{port}")).arg("--path");
                command.arg(format!("/{}/{}", video::FILM, video::PLAYLIST)).arg("--into").arg(got);
                command.args(["--limit", &limit.to_string()]);
            }
        }
        Ok(command)
    }

    fn compare(self, served: &Path, got: &Path) -> anyhow::Result<()> {
        let is_same = match self {
            Self::Web { kib } => same(&served.join(kib.to_string()), got)?,
            Self::Rsync => {
                let name = |number: usize| number.to_string();
                let mut files =
                    (0..FILES).map(|it| same(&served.join("files").join(name(it)), &got.join(name(it))));
                files.try_fold(true, |all, one| one.map(|one| all && one))?
            }
            // The Go client compares the bytes itself. The other programs do not expose what they received.
            Self::Redis | Self::RedisMany | Self::Iperf { .. } | Self::Go { .. } | Self::Film => true,
        };
        ensure!(is_same, "{}: the received data differs from the sent data", self.label());
        Ok(())
    }
}

fn same(one: &Path, other: &Path) -> anyhow::Result<bool> {
    Ok(fs::read(one)? == fs::read(other)?)
}

/// Reports whether all segments have arrived unchanged.
fn same_film(served: &Path, got: &Path) -> anyhow::Result<bool> {
    let film = served.join(video::FILM);
    for entry in fs::read_dir(&film)? {
        let name = entry?.file_name();
        if name != video::PLAYLIST && !same(&film.join(&name), &got.join(&name))? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(it) if it.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn application_names_are_parsed() {
        assert_eq!("web:64".parse(), Ok(Application::Web { kib: 64 }));
        assert_eq!("redis".parse(), Ok(Application::Redis));
        assert_eq!("go:256".parse(), Ok(Application::Go { kib: 256 }));
        assert_eq!("redis-many".parse(), Ok(Application::RedisMany));
        assert_eq!("film".parse(), Ok(Application::Film));
        for bad in ["", "web", "web:x", "redis:1", "ftp:1", "go", "film:3"] {
            assert!(bad.parse::<Application>().is_err(), "{bad}");
        }
    }
}
