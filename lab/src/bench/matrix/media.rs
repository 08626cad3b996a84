//! Compares the media that a player received with the published media: frame by frame, and byte by byte where both are
//! fragments.

use anyhow::Context as _;
use bytes::Bytes;
use millrace_client::media::Boxes;

/// Frames that were published, or that a player received, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MediaFrames {
    pub frames: Vec<MediaFrame>,
}

/// Content of one mdat box: a frame, or several frames that a player has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaFrame {
    /// Payload of the mdat box, without the box header.
    pub data: Bytes,
    /// The moof and mdat boxes as they were written; empty without a moof.
    pub fragment: Vec<u8>,
}

/// Consecutive frames that a player received as they were published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameMatch {
    pub frames: usize,
    /// Whether the fragments that contain the frames are identical to the published fragments too.
    pub identical: bool,
}

impl MediaFrames {
    /// Reads all complete boxes. The output of a running program may end in the middle of a box.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are no MP4.
    pub fn read(bytes: &[u8]) -> anyhow::Result<Self> {
        let mut boxes = Boxes::default();
        boxes.push(bytes);
        let mut frames = Vec::new();
        let mut moof = Bytes::new();
        while let Some((kind, bytes)) = boxes.pop().context("the program's output")? {
            match kind.as_ref() {
                b"moof" => moof = bytes,
                b"mdat" => frames.push(MediaFrame::from_fragment(&std::mem::take(&mut moof), &bytes)),
                _ => {}
            }
        }
        Ok(Self { frames })
    }

    /// Checks that these frames are consecutive frames of `published`.
    ///
    /// # Errors
    ///
    /// Fails if they are not. The error describes the first difference.
    pub fn follows(&self, published: &Self) -> Result<FrameMatch, String> {
        let has = self.frames.iter().map(|frame| &frame.data[..]).collect::<Vec<_>>().concat();
        if has.is_empty() {
            return Err("it received no frame".to_owned());
        }
        let starts =
            (0..published.frames.len()).map(|at| (at, Common::from_published(&published.frames[at..], &has)));
        let (at, common) = starts.max_by_key(|(_, common)| common.bytes).unwrap_or_default();
        if common.frames == 0 {
            return Err("its first frame was never published".to_owned());
        }
        if common.bytes < has.len() {
            return Err(format!(
                "after {} matching frames, from number {at} on, the content differs from the published media",
                common.frames
            ));
        }
        let sent = published.frames[at..].iter().map(|frame| &frame.fragment);
        let identical = self
            .frames
            .iter()
            .map(|frame| &frame.fragment)
            .zip(sent)
            .all(|(ours, sent)| !sent.is_empty() && ours == sent);
        Ok(FrameMatch { frames: common.frames, identical })
    }
}

/// How much of a player's output equals the published media from a given published frame on: consecutive frames, and
/// their bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Common {
    frames: usize,
    bytes: usize,
}

impl Common {
    fn from_published(published: &[MediaFrame], bytes: &[u8]) -> Self {
        let mut common = Self::default();
        for frame in published {
            let rest = &bytes[common.bytes..];
            if rest.is_empty() || !rest.starts_with(&frame.data) {
                break;
            }
            common = Self { frames: common.frames + 1, bytes: common.bytes + frame.data.len() };
        }
        common
    }
}

impl MediaFrame {
    fn from_fragment(moof: &[u8], mdat: &Bytes) -> Self {
        // The box header is longer if the size needs 64 bits (size field 1).
        let header = if mdat.starts_with(&[0, 0, 0, 1]) { 16 } else { 8 };
        let fragment = if moof.is_empty() { Vec::new() } else { [moof, mdat].concat() };
        Self { data: mdat.slice(header..), fragment }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mp4_box(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
        let size = u32::try_from(data.len() + 8).unwrap();
        [&size.to_be_bytes(), &kind[..], data].concat()
    }

    /// Wraps each frame in a fragment. `moof` is the content of each moof box.
    fn fragments(frames: &[&[u8]], moof: u8) -> Vec<u8> {
        let one = |data: &&[u8]| [mp4_box(b"moof", &[moof]), mp4_box(b"mdat", data)].concat();
        [mp4_box(b"ftyp", b"iso6")].into_iter().chain(frames.iter().map(one)).flatten().collect()
    }

    fn media(bytes: &[u8]) -> MediaFrames {
        MediaFrames::read(bytes).unwrap()
    }

    #[test]
    fn played_frames_match_a_sequence_of_the_published_frames() {
        let sent = media(&fragments(&[b"key", b"one", b"two", b"key", b"three", b"four"], 0));
        assert_eq!(sent.frames.len(), 6);
        let table = [
            (fragments(&[b"key", b"one", b"two"], 0), Ok((3, true))),
            // The frame `key` was published twice. The frame `three` follows only the second one, so only the second
            // one matches.
            (fragments(&[b"key", b"three"], 0), Ok((2, true))),
            (fragments(&[b"key", b"three"], 1), Ok((2, false))),
            // The player may join a group's frames into one fragment, or write an mdat box without a moof box.
            (fragments(&[b"keyonetwo", b"keythree"], 0), Ok((5, false))),
            (mp4_box(b"mdat", b"two"), Ok((1, false))),
            (fragments(&[b"key", b"two"], 0), Err("after 1 matching frames, from number")),
            (fragments(&[b"five"], 0), Err("was never published")),
            (fragments(&[], 0), Err("no frame")),
        ];
        for (bytes, expected) in table {
            match (media(&bytes).follows(&sent), expected) {
                (Ok(found), Ok((frames, identical))) => assert_eq!(found, FrameMatch { frames, identical }),
                (Err(said), Err(words)) => assert!(said.contains(words), "{said}"),
                (found, expected) => panic!("{found:?} is not {expected:?}"),
            }
        }
        // The player's output has one more frame than was published.
        let more = media(&fragments(&[b"three", b"four", b"five"], 0));
        assert!(more.follows(&sent).is_err());
    }

    #[test]
    fn unfinished_output_is_read_up_to_last_complete_box() {
        let bytes = fragments(&[b"key", b"one"], 0);
        for len in 0..bytes.len() {
            assert!(media(&bytes[..len]).frames.len() < 2, "{len}");
        }
        assert_eq!(media(&bytes).frames.len(), 2);
        assert!(MediaFrames::read(b"<!doctype html>").is_err());
    }
}
