//! Reads files that users specify, with a limit on their length.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

/// Reads a file of at most `most` bytes. The limit is checked while reading, because a device or pipe reports no
/// length.
///
/// # Errors
/// Fails if the file is longer, or cannot be read.
pub fn bytes(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than the limit is read: if this byte exists, the file is too long.
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
    fn file_longer_than_the_byte_limit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "a\u{e9}").unwrap();
        assert_eq!(text(&path, 3).unwrap(), "a\u{e9}");
        // The limit falls within a UTF-8 character: the error is still that the file is too long.
        assert_eq!(text(&path, 2).unwrap_err().to_string(), "the file has more than 2 bytes");
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(text(&path, 3).unwrap_err().to_string(), "the file is not UTF-8");
        assert!(bytes(Path::new("/dev/zero"), 1000).unwrap_err().to_string().contains("more than 1000"));
    }
}
