//! Texts of errors, with their causes.

/// Formats an error and its causes without repetition: errors of our libraries already include the text of their
/// causes, because log lines do not print the chain.
pub fn chain(error: &anyhow::Error) -> String {
    let mut said = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push_str(": ");
            said.push_str(&cause);
        }
    }
    // The error of a `millrace` process that this command started begins with the program's name.
    said.replace(": millrace: ", ": ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{path}: {source}")]
    struct FileError {
        path: &'static str,
        source: io::Error,
    }

    #[test]
    fn error_causes_are_printed_once() {
        let whole = FileError { path: "/file", source: io::Error::other("full") };
        assert_eq!(chain(&anyhow::Error::from(whole).context("cannot log")), "cannot log: /file: full");
        assert_eq!(chain(&anyhow::Error::from(io::Error::other("full")).context("/file")), "/file: full");
    }
}
