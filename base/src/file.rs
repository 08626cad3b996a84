//! Reads files that users name, within bounds.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

/// Reads a file that has at most `most` bytes. The length of a device or a pipe is known only by reading it.
///
/// # Errors
/// Fails if the file is longer, or cannot be read.
pub fn bytes(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than allowed shows that the file is too long.
    File::open(path)?.take(most as u64 + 1).read_to_end(&mut bytes)?;
    match bytes.len() > most {
        true => Err(io::Error::other(format!("the file has more than {most} bytes"))),
        false => Ok(bytes),
    }
}

/// Reads a file of UTF-8 that has at most `most` bytes.
///
/// # Errors
/// Fails if the file is longer, is not UTF-8, or cannot be read.
pub fn text(path: &Path, most: usize) -> io::Result<String> {
    String::from_utf8(bytes(path, most)?).map_err(|_| io::Error::other("the file is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "a\u{e9}").unwrap();
        assert_eq!(text(&path, 3).unwrap(), "a\u{e9}");
        // The bound cuts a character: the file is too long all the same.
        assert_eq!(text(&path, 2).unwrap_err().to_string(), "the file has more than 2 bytes");
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(text(&path, 3).unwrap_err().to_string(), "the file is not UTF-8");
        assert!(bytes(Path::new("/dev/zero"), 1000).unwrap_err().to_string().contains("more than 1000"));
    }
}
