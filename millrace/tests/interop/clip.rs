//! Fragmented MP4 to publish, and checks of a player's output with ffmpeg.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    sync::LazyLock,
};

/// Frame rate of the video, and length of the clips.
pub const FRAMES_PER_SECOND: usize = 25;
pub const SECONDS: usize = 4;
pub const FRAMES: usize = FRAMES_PER_SECOND * SECONDS;
/// Number of frames in a group: a key frame begins one each second.
pub const GROUP: usize = FRAMES_PER_SECOND;

pub const VIDEO_TRACK: &str = "1.m4s";
pub const SOUND_TRACK: &str = "2.m4s";

pub struct InteropClip {
    /// The start of the MP4 file: the boxes ftyp and moov.
    pub init: Vec<u8>,
    /// Pairs of moof and mdat boxes, one pair for each video frame. Each pair is published as one object.
    pub fragments: Vec<Vec<u8>>,
}

/// A clip without sound. moq-sub writes the objects of two tracks as they arrive, so only video can be compared byte
/// by byte.
pub static VIDEO: LazyLock<InteropClip> = LazyLock::new(|| InteropClip::make(&[]));
pub static VIDEO_AND_SOUND: LazyLock<InteropClip> = LazyLock::new(|| {
    InteropClip::make(&[
        "-f",
        "lavfi",
        "-i",
        "sine=frequency=440:sample_rate=48000",
        "-c:a",
        "aac",
        "-b:a",
        "64k",
    ])
});

/// Makes a video with `seconds` seconds and key frames `group` frames apart.
pub fn encoded(size: &str, kbit: u32, group: usize, seconds: usize) -> Vec<u8> {
    let picture = format!("testsrc2=size={size}:rate={FRAMES_PER_SECOND}");
    let group = group.to_string();
    let seconds = seconds.to_string();
    let rate = format!("{kbit}k");
    let args = [
        &["-f", "lavfi", "-i", picture.as_str(), "-t", &seconds, "-c:v", "libx264", "-preset", "ultrafast"][..],
        &["-tune", "zerolatency", "-pix_fmt", "yuv420p", "-g", &group, "-sc_threshold", "0", "-b:v", &rate],
        // Key frames repeat the decoder's parameter sets.
        &["-tag:v", "avc3", "-bsf:v", "dump_extra=freq=keyframe"],
        &["-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"],
    ];
    run("ffmpeg", &args.concat(), &[])
}

impl InteropClip {
    fn make(sound: &[&str]) -> Self {
        let picture = format!("testsrc2=size=320x240:rate={FRAMES_PER_SECOND}");
        let group = GROUP.to_string();
        let seconds = SECONDS.to_string();
        let (input, codec) = sound.split_at(sound.len().min(4));
        let args = [
            &["-f", "lavfi", "-i", picture.as_str()],
            input,
            codec,
            &["-t", &seconds, "-c:v", "libx264", "-preset", "ultrafast", "-tune", "zerolatency"],
            &["-pix_fmt", "yuv420p", "-g", &group, "-sc_threshold", "0", "-b:v", "1M"],
            &["-f", "mp4", "-movflags", "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "-"],
        ];
        let clip = Self::split(&run("ffmpeg", &args.concat(), &[]));
        assert!(clip.fragments.len() >= FRAMES);
        clip
    }

    pub fn split(mut media: &[u8]) -> Self {
        let mut clip = Self { init: Vec::new(), fragments: Vec::new() };
        while let Some(header) = media.first_chunk::<8>() {
            let (len, kind) = header.split_at(4);
            let (head, rest) = media.split_at(u32::from_be_bytes(len.try_into().unwrap()) as usize);
            media = rest;
            match kind {
                b"ftyp" | b"moov" => clip.init.extend_from_slice(head),
                b"moof" => clip.fragments.push(head.to_vec()),
                b"mdat" => clip.fragments.last_mut().unwrap().extend_from_slice(head),
                kind => panic!("a box that is not published: {}", kind.escape_ascii()),
            }
        }
        assert!(media.is_empty());
        clip
    }

    /// Returns the clip without the fragments before `first`: the output of a player that joins late.
    pub fn bytes_from(&self, first: usize) -> Vec<u8> {
        self.bytes_of(first..self.fragments.len())
    }

    pub fn bytes_of(&self, fragments: std::ops::Range<usize>) -> Vec<u8> {
        [&self.init, &self.fragments[fragments].concat()[..]].concat()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.bytes_from(0)
    }

    /// Returns the last fragment.
    pub fn end(&self) -> &[u8] {
        self.fragments.last().unwrap()
    }
}

/// Returns the number of video frames that can be decoded.
pub fn frames(media: &[u8]) -> usize {
    let args = ["-select_streams", "v:0", "-count_frames", "-show_entries", "stream=nb_read_frames"];
    let printed = run("ffprobe", &[&args[..], &["-of", "csv=p=0", "-"]].concat(), media);
    String::from_utf8(printed).unwrap().lines().next().unwrap().parse().unwrap()
}

/// Returns an MD5 of the packets of each stream, however these are interleaved.
pub fn hashes(media: &[u8]) -> Vec<String> {
    let args = ["-i", "-", "-map", "0", "-c", "copy", "-f", "streamhash", "-hash", "md5", "-"];
    String::from_utf8(run("ffmpeg", &args, media)).unwrap().lines().map(str::to_owned).collect()
}

/// Panics at the first byte that differs, and shows its position.
pub fn assert_same(got: &[u8], want: &[u8], what: &str) {
    let same = got.iter().zip(want).take_while(|(got, want)| got == want).count();
    assert!(got == want, "{what}: {} bytes, {} expected, equal up to {same}", got.len(), want.len());
}

/// Checks the output of a player that may write fragments of a group before it has written all of the previous group.
/// Each fragment from number `first` on must occur once, and the fragments of each group must be in order.
pub fn assert_same_groups(got: &[u8], clip: &InteropClip, first: usize, what: &str) {
    let played = InteropClip::split(got);
    assert_eq!(played.init, clip.init, "{what}");
    let place = |fragment: &Vec<u8>| clip.fragments.iter().position(|it| it == fragment);
    let places: Option<Vec<_>> = played.fragments.iter().map(place).collect();
    let places = places.unwrap_or_else(|| panic!("{what}: a fragment that is none of the clip's"));
    let mut by_group = places.clone();
    by_group.sort_by_key(|place| place / GROUP);
    assert_eq!(by_group, Vec::from_iter(first..clip.fragments.len()), "{what}: {places:?}");
}

fn run(program: &str, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(["-hide_banner", "-loglevel", "error"]).args(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || pipe.write_all(&input));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", output.status);
    writer.join().unwrap().unwrap();
    output.stdout
}
