//! Remedies for errors that a missing privilege caused.

use super::ProgramCommand;

/// The privileges (root or Linux capabilities) that a command needs, as pairs: a text that the command's error must
/// contain, and the remedy to print then. An empty text fits any error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandNeeds(pub &'static [(&'static str, &'static str)]);

/// Returns the privileges that `command` needs.
pub fn needs(command: &ProgramCommand) -> Option<CommandNeeds> {
    const TOKEN: &str = "ask as the relay's user or as root, or give its token with --http-token-file";
    Some(CommandNeeds(match command {
        ProgramCommand::Relay(_) => &[
            ("cannot listen", "ports below 1024 need root or CAP_NET_BIND_SERVICE"),
            ("the token in", "name a writable place with --http-token-file, or use --http off"),
        ],
        ProgramCommand::Gate(_) | ProgramCommand::Graft(_) | ProgramCommand::Fanout(_) => {
            &[("", "it needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")]
        }
        ProgramCommand::Cost(_) => {
            &[("", "observing the kernel needs root, or CAP_BPF, CAP_PERFMON and CAP_SYSLOG")]
        }
        ProgramCommand::Status(_) | ProgramCommand::Trace(_) => &[("the token", TOKEN)],
        _ => return None,
    }))
}

/// Returns the error, with a remedy appended if this user's missing privileges caused it.
pub fn explained(error: String, needs: Option<CommandNeeds>) -> String {
    match needs.filter(|_| !nix::unistd::geteuid().is_root()) {
        Some(needs) => with(&error, needs),
        None => error,
    }
}

fn with(error: &str, CommandNeeds(needs): CommandNeeds) -> String {
    let is_refused = ["Operation not permitted", "Permission denied"].iter().any(|what| error.contains(what));
    if !is_refused {
        return error.to_owned();
    }
    // Lines that libbpf printed are removed from the error: they suggest another cause than missing privileges, and
    // their verifier log is empty.
    let lines: Vec<&str> =
        error.lines().filter(|line| !line.starts_with("libbpf: ") && !line.is_empty()).collect();
    let error = lines.join("\n");
    let helps = needs.iter().find(|(words, _)| error.contains(words));
    match helps.filter(|_| !error.contains("root") && !error.contains("CAP_")) {
        Some((_, needs)) => format!("{error}; {needs}"),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permission_error_gets_the_remedy_of_its_command() {
        let needs = CommandNeeds(&[("file", "it is another's"), ("", "it needs root")]);
        let said = with("no gate.bpf.o: Operation not permitted (os error 1)\nlibbpf: Make sure\n", needs);
        assert_eq!(said, "no gate.bpf.o: Operation not permitted (os error 1); it needs root");
        assert_eq!(with("Permission denied; you need CAP_BPF", needs), "Permission denied; you need CAP_BPF");
        assert_eq!(with("file: Permission denied", needs), "file: Permission denied; it is another's");
        assert_eq!(with("no such file", needs), "no such file");
    }
}
