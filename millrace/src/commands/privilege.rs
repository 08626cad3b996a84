//! What is said to those who may not do what they have asked for.

use super::Command;

/// Rights that a command wants: by words of the error, what would help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs(pub &'static [(&'static str, &'static str)]);

/// What `command` needs when it is refused something.
pub fn needs(command: &Command) -> Option<Needs> {
    const TOKEN: &str = "ask as who runs the relay, as root, or with --http-token-file";
    Some(Needs(match command {
        Command::Relay(_) => &[
            ("cannot listen", "ports below 1024 need root or CAP_NET_BIND_SERVICE"),
            ("the token in", "say where it may be with --http-token-file, or --http off"),
        ],
        Command::Gate(_) | Command::Graft(_) | Command::Fanout(_) => {
            &[("", "it needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")]
        }
        Command::Cost(_) => {
            &[("", "observing the kernel needs root, or CAP_BPF, CAP_PERFMON and CAP_SYSLOG")]
        }
        Command::Status(_) | Command::Trace(_) => &[("the token", TOKEN)],
        _ => return None,
    }))
}

/// An error, with what would have helped if it came of a lack of rights.
pub fn explained(error: String, needs: Option<Needs>) -> String {
    match needs.filter(|_| !nix::unistd::geteuid().is_root()) {
        Some(needs) => with(&error, needs),
        None => error,
    }
}

fn with(error: &str, Needs(needs): Needs) -> String {
    let is_refused = ["Operation not permitted", "Permission denied"].iter().any(|what| error.contains(what));
    if !is_refused {
        return error.to_owned();
    }
    // What libbpf supposes is something else, and the kernel has nothing to say.
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
    fn who_is_refused_is_told_why() {
        let needs = Needs(&[("file", "it is another's"), ("", "it needs root")]);
        let said = with("no gate.bpf.o: Operation not permitted (os error 1)\nlibbpf: Make sure\n", needs);
        assert_eq!(said, "no gate.bpf.o: Operation not permitted (os error 1); it needs root");
        assert_eq!(with("Permission denied; you need CAP_BPF", needs), "Permission denied; you need CAP_BPF");
        assert_eq!(with("file: Permission denied", needs), "file: Permission denied; it is another's");
        assert_eq!(with("no such file", needs), "no such file");
    }
}
