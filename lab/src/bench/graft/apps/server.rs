//! The servers of the applications. Each listens on two ports: one for plain TCP and one for tunnelled connections.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::bail;

use super::material::PAIR;
use crate::bench::graft::host::{GraftHost, LIMIT};
use crate::bench::process::BenchProcess;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppServer {
    Nginx,
    Redis,
    Rsync,
    Iperf,
    Go,
    /// nginx with its own ports, which serves the film.
    Film,
}

impl AppServer {
    pub const ALL: [Self; 6] = [Self::Nginx, Self::Redis, Self::Rsync, Self::Iperf, Self::Go, Self::Film];

    /// Returns the port for plain TCP and the port for tunnelled connections.
    pub fn ports(self) -> [u16; 2] {
        match self {
            Self::Nginx => [8080, 8081],
            Self::Redis => [6379, 6380],
            Self::Rsync => [8730, 8731],
            Self::Iperf => [5201, 5202],
            Self::Go => [7001, 7002],
            Self::Film => [8090, 8091],
        }
    }

    /// Returns the programs that server and client need.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Nginx => &["nginx", "curl"],
            Self::Redis => &["redis-server", "redis-benchmark"],
            Self::Rsync => &["rsync"],
            Self::Iperf => &["iperf3"],
            Self::Go => &["go"],
            Self::Film => &["nginx", "ffmpeg"],
        }
    }

    /// Returns a program that is not installed, if there is one.
    pub fn lacks(self) -> Option<&'static str> {
        // A program counts as installed if it can be started, whatever its exit status.
        let is_not_there = |program: &&&str| Command::new(program).arg("-v").output().is_err();
        self.programs().iter().find(is_not_there).copied()
    }

    /// Starts the server on both ports, and waits until it answers. The server's configuration and data are in a
    /// directory of the host.
    pub fn start(self, host: &GraftHost<'_>, served: &Path) -> anyhow::Result<Vec<BenchProcess>> {
        let own = host.directory.join(format!("{self:?}"));
        fs::create_dir_all(&own)?;
        let commands: Vec<Command> = match self {
            Self::Nginx | Self::Film => vec![self.nginx(host, &own, served)?],
            _ => self
                .ports()
                .into_iter()
                .map(|port| self.command(host, &own, served, port))
                .collect::<Result<_, _>>()?,
        };
        let mut processes = Vec::new();
        for command in commands {
            processes.push(BenchProcess::start("server", host.cgroup.command(&command), &own)?);
        }
        let answers = |port| {
            TcpStream::connect_timeout(&(host.node.addr_v4(), port).into(), Duration::from_secs(1)).is_ok()
        };
        let all = || host.node.enter(|| self.ports().into_iter().all(answers)).unwrap_or(false);
        match processes.first_mut() {
            Some(first) => first.wait_until("its port", LIMIT, all)?,
            None => bail!("no server process was started"),
        }
        Ok(processes)
    }

    fn nginx(self, host: &GraftHost<'_>, own: &Path, served: &Path) -> anyhow::Result<Command> {
        let [one, other] = self.ports();
        let path = own.join("nginx.conf");
        let own = own.display();
        let served = served.display();
        let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|it| format!("{it}_temp_path {own}; "))
            .concat();
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

    fn command(self, host: &GraftHost<'_>, own: &Path, served: &Path, port: u16) -> anyhow::Result<Command> {
        let program = match self {
            Self::Go => served.join(PAIR),
            _ => self.programs().first().copied().unwrap_or_default().into(),
        };
        let mut command = host.node.command(program);
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
            Self::Go => drop(command.args(["server", &format!("0.0.0.0:{port}")])),
            Self::Nginx | Self::Film | Self::Iperf => drop(command.args(["-s", "-p", &number])),
        }
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_benchmark_servers_use_the_same_port() {
        let mut ports: Vec<_> = AppServer::ALL.iter().flat_map(|server| server.ports()).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 2 * AppServer::ALL.len());
    }
}
