//! Test setup: a running gate.

use std::process::{Child, Command, Output};

use millrace_gate::status::Status;
use millrace_testkit::show_log_on_panic;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{GateSite, wait_for};

/// A running `millrace gate`; killed when dropped.
pub struct GateProcess<'a> {
    site: &'a GateSite,
    process: Child,
}

impl<'a> GateProcess<'a> {
    pub fn start(site: &'a GateSite, args: &[&str]) -> Self {
        let mut command = site.command(env!("CARGO_BIN_EXE_millrace"));
        command.args(["gate", "--interface=eth", "--socket=gate.sock", "--http-token-file=off"]).args(args);
        let process = command.stderr(std::fs::File::create(site.path("log")).unwrap()).spawn().unwrap();
        let mut gate = Self { site, process };
        wait_for("a gate that guards", || {
            let ended = gate.process.try_wait().unwrap();
            assert!(ended.is_none(), "{}", std::fs::read_to_string(site.path("log")).unwrap());
            gate.logged("guarding")
        });
        gate
    }

    /// Runs `millrace gate VERB`.
    pub fn verb(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.arg("gate").args(args).arg("--socket").arg(self.site.path("gate.sock"));
        command.output().unwrap()
    }

    pub fn succeed(&self, args: &[&str]) -> String {
        let output = self.verb(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn fail(&self, args: &[&str]) -> String {
        let output = self.verb(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    pub fn status(&self) -> Status {
        serde_json::from_str(&self.succeed(&["status", "--json"])).unwrap()
    }

    /// Returns the numbers of packets that a rule refused, and that it would have refused in mode `monitor`. The gate
    /// counts a packet before it drops it or lets it pass.
    pub fn counted(&self, rule: &str) -> (u64, u64) {
        // exact: callers repeat this read of packet counts, or have received an answer that passed the gate
        let status = self.status();
        let scope = status.scopes.iter().find(|scope| scope.name == "web").unwrap();
        let rule = scope.rules.iter().find(|count| count.rule == rule).unwrap();
        (rule.packets, rule.monitored)
    }

    pub fn connections(&self) -> u64 {
        // exact: callers reread the number of connections, or have received an answer that passed the gate
        self.status().scopes.iter().map(|scope| scope.connections).sum()
    }

    pub fn logged(&self, words: &str) -> bool {
        std::fs::read_to_string(self.site.path("log")).unwrap().contains(words)
    }

    pub fn end(mut self, signal: Signal) -> Option<i32> {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
        wait_for("end of the gate", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for GateProcess<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        show_log_on_panic("the gate", &self.site.path("log"));
    }
}
