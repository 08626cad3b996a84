//! Command lines of processes.

use std::fs::File;
use std::io::Read as _;

use crate::report::ProcessCost;

/// Largest number of characters kept of a command line. A terminal's table shows fewer.
const MOST: usize = 512;
/// Largest number of processes of a report whose command lines are read.
const PROCESSES: usize = 200;

/// Adds the command line ([`ProcessCost::arguments`]) of the first `PROCESSES` processes of a report, which have the
/// most networking time. Command lines can contain secrets, and reading them waits for locks on the process's memory.
/// Call this only if the user asks for them.
pub fn read(processes: &mut [ProcessCost]) {
    for process in processes.iter_mut().take(PROCESSES).filter(|process| process.pid != 0) {
        process.arguments = read_arguments(process.pid, &process.name);
    }
}

/// Returns the command line of a process, or `None` if it cannot be read: the process has probably exited.
fn read_arguments(pid: u32, name: &str) -> Option<String> {
    let mut raw = Vec::new();
    let file = File::open(format!("/proc/{pid}/cmdline")).ok()?;
    // A UTF-8 character has at most four bytes.
    file.take(4 * (MOST as u64 + 1)).read_to_end(&mut raw).ok()?;
    Some(command_line(&raw, name))
}

/// Joins zero-terminated arguments with spaces. Kernel threads have no arguments: their name is returned in brackets,
/// as `ps` does.
fn command_line(raw: &[u8], name: &str) -> String {
    let text = String::from_utf8_lossy(raw).replace('\0', " ");
    let text = printable(text.trim_end());
    if text.is_empty() {
        return printable(&format!("[{name}]"));
    }
    match text.chars().count() > MOST {
        true => text.chars().take(MOST - 1).chain(['…']).collect(),
        false => text,
    }
}

/// Returns `text` with `?` in place of characters that control terminals, change the direction of text, are invisible,
/// or are not allowed in XML. Processes choose their names themselves, so names are not trusted.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_visible(c) { c } else { '?' }).collect()
}

fn is_visible(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{fffe}' | '\u{ffff}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::report;

    #[test]
    fn command_line_is_shown_as_one_line() {
        for (raw, want) in [
            (&b"nginx: worker process\0\0\0\0"[..], "nginx: worker process"),
            (b"cat\0a b\0\0c\0", "cat a b  c"),
            (b"", "[server]"),
            (b"\0", "[server]"),
            (b"x\0\x1b]0;title\x07\x1b[2J\0\n\r\x7f\xc2\x9b", "x ?]0;title??[2J ????"),
            ("\u{202e}exe.\u{feff}\u{2028}".as_bytes(), "?exe.?"),
            (b"\xff\xfe", "\u{fffd}\u{fffd}"),
            ("größer".as_bytes(), "größer"),
        ] {
            assert_eq!(command_line(raw, "server"), want, "{raw:?}");
        }
        assert_eq!(command_line(b"", "\x1b[2J"), "[?[2J]");
    }

    #[test]
    fn command_line_length_is_bounded() {
        let long = command_line(&[b'x'; 100_000], "");
        assert_eq!((long.chars().count(), long.ends_with("x…")), (MOST, true));
        assert_eq!(command_line(&[b'x'; MOST], "").chars().count(), MOST);

        let mut processes = vec![report(0).processes[0].clone(); PROCESSES + 1];
        processes.iter_mut().for_each(|process| process.pid = std::process::id());
        processes[1].pid = 0;
        processes[2].pid = u32::MAX;
        read(&mut processes);
        let own = std::env::args().next().expect("a name");
        assert!(processes[0].arguments.as_ref().is_some_and(|arguments| arguments.contains(&own)));
        assert_eq!(processes[1].arguments, None, "PID 0 stands for processes of other namespaces");
        assert_eq!(processes[2].arguments, None, "no process has this PID");
        assert!(processes[PROCESSES - 1].arguments.is_some() && processes[PROCESSES].arguments.is_none());
    }
}
