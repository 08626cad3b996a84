//! Programs of others, as they are: a server on each of two ports, and what its client does with one of them.

use std::fs;
use std::io::Read as _;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use crate::bench::graft::host::{Host, LIMIT};
use crate::bench::process::Process;

/// `timeout` says so when it has ended a command.
const TIMED_OUT: i32 = 124;
/// Requests of redis-benchmark, one after the other.
const REQUESTS: u32 = 20;
/// What rsync copies.
const FILES: usize = 100;
const FILE_BYTES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Application {
    /// nginx and curl: a file of so many KiB, by a connection of its own.
    Web { kib: usize },
    /// redis and redis-benchmark: requests by one connection, each after the answer to the one before.
    Redis,
    /// rsync, daemon and client: a directory of small files.
    Rsync,
    /// iperf3, from the server to the client.
    Iperf { kib: usize },
}

/// What came of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Came {
    /// The limit, of what was not done by then.
    pub seconds: f64,
    pub is_over: bool,
}

impl FromStr for Application {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kib = |kib: &str| kib.parse().map_err(|_| format!("{kib:?} is no number of KiB"));
        match text.split_once(':') {
            None if text == "redis" => Ok(Self::Redis),
            None if text == "rsync" => Ok(Self::Rsync),
            Some(("web", size)) => Ok(Self::Web { kib: kib(size)? }),
            Some(("iperf3", size)) => Ok(Self::Iperf { kib: kib(size)? }),
            _ => Err("is web:KIB, iperf3:KIB, redis or rsync".into()),
        }
    }
}

impl Application {
    pub fn label(self) -> String {
        match self {
            Self::Web { kib } => format!("curl and nginx, {kib} KiB"),
            Self::Redis => format!("redis, {REQUESTS} requests"),
            Self::Rsync => format!("rsync, {FILES} files of {} KiB", FILE_BYTES >> 10),
            Self::Iperf { kib } => format!("iperf3, {kib} KiB"),
        }
    }

    pub fn server(self) -> Server {
        match self {
            Self::Web { .. } => Server::Nginx,
            Self::Redis => Server::Redis,
            Self::Rsync => Server::Rsync,
            Self::Iperf { .. } => Server::Iperf,
        }
    }

    /// The files that it is to serve.
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
            Self::Redis | Self::Iperf { .. } => Ok(()),
        }
    }

    /// Runs the client, and compares what it got with what there is.
    pub fn run(
        self,
        client: &Host<'_>,
        (server, port): (Ipv4Addr, u16),
        served: &Path,
        limit: u64,
    ) -> anyhow::Result<Came> {
        let got = client.directory.join("got");
        remove(&got)?;
        let mut command = client.node.command("timeout");
        command.arg(limit.to_string());
        match self {
            Self::Web { kib } => {
                command.args(["curl", "-fsS", "-w", "%{time_total}", "-o"]).arg(&got);
                command.arg(format!("http://{server}:{port}/{kib}"));
            }
            Self::Redis => {
                command.args(["redis-benchmark", "-h", &server.to_string(), "-p", &port.to_string()]);
                command.args(["-t", "get", "-c", "1", "-q", "-n", &REQUESTS.to_string()]);
            }
            Self::Rsync => {
                command.args(["rsync", "-a"]).arg(format!("rsync://{server}:{port}/files/")).arg(&got);
            }
            Self::Iperf { kib } => {
                command.args(["iperf3", "-R", "-c", &server.to_string(), "-p", &port.to_string()]);
                command.args(["-n", &format!("{kib}K")]);
            }
        }
        let start = Instant::now();
        let done = client.cgroup.command(&command).output()?;
        let wall = start.elapsed().as_secs_f64();
        if done.status.code() == Some(TIMED_OUT) {
            return Ok(Came { seconds: limit as f64, is_over: true });
        }
        let errors = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{} ended with {}: {}", self.label(), done.status, errors.trim());
        self.compare(served, &got)?;
        // curl's own, without what it takes to start it.
        let seconds = match self {
            Self::Web { .. } => String::from_utf8_lossy(&done.stdout).trim().parse()?,
            _ => wall,
        };
        Ok(Came { seconds, is_over: false })
    }

    fn compare(self, served: &Path, got: &Path) -> anyhow::Result<()> {
        let same = |one: &Path, other: &Path| anyhow::Ok(fs::read(one)? == fs::read(other)?);
        let is_same = match self {
            Self::Web { kib } => same(&served.join(kib.to_string()), got)?,
            Self::Rsync => {
                let name = |number: usize| number.to_string();
                let mut files =
                    (0..FILES).map(|it| same(&served.join("files").join(name(it)), &got.join(name(it))));
                files.try_fold(true, |all, one| one.map(|one| all && one))?
            }
            Self::Redis | Self::Iperf { .. } => true,
        };
        ensure!(is_same, "{}: other bytes came than were sent", self.label());
        Ok(())
    }
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(it) if it.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    Nginx,
    Redis,
    Rsync,
    Iperf,
}

impl Server {
    pub const ALL: [Self; 4] = [Self::Nginx, Self::Redis, Self::Rsync, Self::Iperf];

    /// In place, and carried.
    pub fn ports(self) -> [u16; 2] {
        match self {
            Self::Nginx => [8080, 8081],
            Self::Redis => [6379, 6380],
            Self::Rsync => [8730, 8731],
            Self::Iperf => [5201, 5202],
        }
    }

    /// Programs of both ends.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Nginx => &["nginx", "curl"],
            Self::Redis => &["redis-server", "redis-benchmark"],
            Self::Rsync => &["rsync"],
            Self::Iperf => &["iperf3"],
        }
    }

    /// One that is not there.
    pub fn lacks(self) -> Option<&'static str> {
        let is_not_there = |program: &&&str| Command::new(program).arg("-v").output().is_err();
        self.programs().iter().find(is_not_there).copied()
    }

    /// On both ports, once they answer. What it serves and writes is in a directory of the host.
    pub fn start(self, host: &Host<'_>, served: &Path) -> anyhow::Result<Vec<Process>> {
        let own = host.directory.join(self.programs().first().copied().unwrap_or_default());
        fs::create_dir_all(&own)?;
        let commands: Vec<Command> = match self {
            Self::Nginx => vec![self.nginx(host, &own, served)?],
            _ => self
                .ports()
                .into_iter()
                .map(|port| self.command(host, &own, served, port))
                .collect::<Result<_, _>>()?,
        };
        let mut processes = Vec::new();
        for command in commands {
            processes.push(Process::start("server", host.cgroup.command(&command), &own)?);
        }
        let answers = |port| {
            TcpStream::connect_timeout(&(host.node.addr_v4(), port).into(), Duration::from_secs(1)).is_ok()
        };
        let all = || host.node.enter(|| self.ports().into_iter().all(answers)).unwrap_or(false);
        match processes.first_mut() {
            Some(first) => first.wait_until("its port", LIMIT, all)?,
            None => bail!("nothing was started"),
        }
        Ok(processes)
    }

    fn nginx(self, host: &Host<'_>, own: &Path, served: &Path) -> anyhow::Result<Command> {
        let [one, other] = self.ports();
        let (own, served) = (own.display(), served.display());
        let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|it| format!("{it}_temp_path {own}; "))
            .concat();
        let path = host.directory.join("nginx.conf");
        fs::write(
            &path,
            format!(
                "daemon off; master_process off; pid {own}/pid; error_log {own}/log; events {{}}\n\
                 http {{ access_log off; {paths} server {{ listen {one}; listen {other}; root {served}; }} }}\n"
            ),
        )?;
        let mut command = host.node.command("nginx");
        command.arg("-e").arg(format!("{own}/log")).arg("-c").arg(path);
        Ok(command)
    }

    fn command(self, host: &Host<'_>, own: &Path, served: &Path, port: u16) -> anyhow::Result<Command> {
        let mut command = host.node.command(self.programs().first().copied().unwrap_or_default());
        let number = port.to_string();
        match self {
            Self::Redis => {
                command.args([
                    "--port",
                    &number,
                    "--bind",
                    "0.0.0.0",
                    "--protected-mode",
                    "no",
                    "--save",
                    "",
                ]);
                command.arg("--dir").arg(own);
            }
            Self::Rsync => {
                let path = own.join(format!("{port}.conf"));
                let served = served.join("files");
                fs::write(
                    &path,
                    format!("use chroot = no\nuid = 0\ngid = 0\n[files]\npath = {}\n", served.display()),
                )?;
                command.args(["--daemon", "--no-detach", "--port", &number, "--config"]).arg(path);
            }
            Self::Nginx | Self::Iperf => drop(command.args(["-s", "-p", &number])),
        }
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applications_are_read() {
        assert_eq!("web:64".parse(), Ok(Application::Web { kib: 64 }));
        assert_eq!("redis".parse(), Ok(Application::Redis));
        for bad in ["", "web", "web:x", "redis:1", "ftp:1"] {
            assert!(bad.parse::<Application>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ports_are_of_one_server() {
        let mut ports: Vec<_> = Server::ALL.iter().flat_map(|server| server.ports()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 2 * Server::ALL.len());
    }
}
