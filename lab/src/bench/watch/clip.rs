//! A video whose frames show their own number, and a camera that feeds it to a publisher in real time.

use std::io::Write as _;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, ensure};
use bytes::Bytes;
use millrace_client::media::Boxes;

/// Frames per second as a fraction. It is close to 30, but not in step with a browser's 60 pictures per second. In
/// step, the wait of a frame for the next picture would be constant by chance.
const FPS: (u64, u64) = (599, 20);
/// Number of frames from one key frame to the next.
const GROUP: u64 = 30;
/// Bit rate of the video, bits per second.
pub const BITRATE: u64 = 800_000;
/// Number of bits of the frame number in the picture.
const BITS: u32 = 16;
/// Side length in pixels of the square that shows one bit of the frame number. It is the size of the encoder's
/// macroblock.
const SIDE: u32 = 16;
/// Length of the longest video whose frame numbers all fit into the picture's bits, seconds.
pub const MOST_SECONDS: u64 = (1 << BITS) * FPS.1 / FPS.0;

/// Returns the number of frames in a video of this length.
const fn frames_in(seconds: u64) -> u64 {
    seconds * FPS.0 / FPS.1
}

/// Returns the time when a frame is due, relative to frame 0.
pub fn due(frame: u64) -> Duration {
    Duration::from_nanos(frame * FPS.1 * 1_000_000_000 / FPS.0)
}

/// An encoded video in fragments.
pub struct EncodedClip {
    /// The MP4 boxes before the first frame.
    head: Vec<Bytes>,
    /// The frames, each as a moof and an mdat box.
    frames: Vec<[Bytes; 2]>,
}

impl EncodedClip {
    /// Encodes a video of this length with ffmpeg: 360p, with a key frame about every second.
    pub fn encode(seconds: u64) -> anyhow::Result<Self> {
        let frames = frames_in(seconds);
        let count = frames.to_string();
        let group = GROUP.to_string();
        let bitrate = BITRATE.to_string();
        let picture = format!("testsrc2=size=640x360:rate={}/{}", FPS.0, FPS.1);
        let output = Command::new("ffmpeg")
            .args([
                "-v",
                "error",
                "-nostdin",
                "-f",
                "lavfi",
                "-i",
                &picture,
                "-vf",
                &stamp(),
                "-frames:v",
                &count,
            ])
            .args(["-c:v", "libx264", "-profile:v", "baseline", "-preset", "ultrafast"])
            .args(["-tune", "zerolatency", "-pix_fmt", "yuv420p", "-g", &group, "-b:v", &bitrate])
            .args([
                "-f",
                "mp4",
                "-movflags",
                "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame",
                "-",
            ])
            .stdin(Stdio::null())
            .output()
            .context("cannot run ffmpeg to make the video (install it by scripts/setup.sh)")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ffmpeg cannot make the video: {}", said.trim());
        let clip = Self::cut(&output.stdout)?;
        let has = clip.frames.len() as u64;
        ensure!(has == frames, "ffmpeg made {has} frames instead of {frames}");
        Ok(clip)
    }

    /// Returns the bytes of the whole video as an MP4 file.
    pub fn bytes(&self) -> Vec<u8> {
        let media = self.head.iter().chain(self.frames.iter().flatten()).map(|bytes| &bytes[..]);
        media.collect::<Vec<_>>().concat()
    }

    fn cut(media: &[u8]) -> anyhow::Result<Self> {
        let mut boxes = Boxes::default();
        boxes.push(media);
        let mut clip = Self { head: Vec::new(), frames: Vec::new() };
        let mut fragment = None;
        while let Some((kind, bytes)) = boxes.pop()? {
            match kind.as_ref() {
                b"moof" => fragment = Some(bytes),
                b"mdat" => clip.frames.push([fragment.take().context("an mdat without a moof")?, bytes]),
                b"ftyp" | b"moov" => clip.head.push(bytes),
                _ => {}
            }
        }
        Ok(clip)
    }
}

/// Returns the ffmpeg filters that draw a frame's number into its upper left corner. Each bit is a square, white if it
/// is set, the lowest bit at the left. A second square below each one shows the inverted bit, so that no other picture
/// is mistaken for a number.
fn stamp() -> String {
    let white = |column: u32, row: u32, when: &str| {
        let x = column * SIDE;
        let y = row * SIDE;
        format!(",drawbox=x={x}:y={y}:w={SIDE}:h={SIDE}:color=white:t=fill:enable='{when}'")
    };
    let width = BITS * SIDE;
    let height = 2 * SIDE;
    let mut filters = format!("drawbox=x=0:y=0:w={width}:h={height}:color=black:t=fill");
    for bit in 0..BITS {
        let is_set = format!("bitand(trunc(n/{}),1)", 1_u32 << bit);
        filters += &white(bit, 0, &is_set);
        filters += &white(bit, 1, &format!("1-{is_set}"));
    }
    filters
}

/// A camera that writes each frame when it is due, in a thread of its own.
pub struct ClipCamera {
    /// Time when frame 0 was due, by the host's real-time clock, since its epoch.
    pub start: Duration,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::io::Result<u64>>>,
}

impl ClipCamera {
    pub fn start(clip: Arc<EncodedClip>, output: ChildStdin) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let began = Instant::now();
        let start = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let thread = std::thread::Builder::new()
            .name("camera".to_owned())
            .spawn(move || film(&clip, output, began, &stopped))?;
        Ok(Self { start, stop, thread: Some(thread) })
    }

    /// Stops the camera. Returns the number of frames that were written.
    pub fn finish(mut self) -> anyhow::Result<u64> {
        let frames = self.end().context("the camera was stopped already")?;
        frames.map_err(|_| anyhow!("the camera has panicked"))?.context("the publisher accepts no more video")
    }

    fn end(&mut self) -> Option<std::thread::Result<std::io::Result<u64>>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join)
    }
}

impl Drop for ClipCamera {
    fn drop(&mut self) {
        // An error of the camera is ignored: nobody waits for its result any more.
        let _ = self.end();
    }
}

fn film(
    clip: &EncodedClip,
    mut output: ChildStdin,
    began: Instant,
    stop: &AtomicBool,
) -> std::io::Result<u64> {
    for bytes in &clip.head {
        output.write_all(bytes)?;
    }
    let mut written = 0;
    for frame in &clip.frames {
        std::thread::sleep((began + due(written)).saturating_duration_since(Instant::now()));
        if stop.load(Ordering::Relaxed) {
            break;
        }
        for bytes in frame {
            output.write_all(bytes)?;
        }
        written += 1;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the frame number in a picture of 640 by 360 grey bytes.
    fn read(picture: &[u8]) -> Option<u32> {
        let light = |column: u32, row: u32| {
            let x = column * SIDE + SIDE / 2;
            let y = row * SIDE + SIDE / 2;
            picture[(y * 640 + x) as usize] > 128
        };
        (0..BITS).try_fold(0, |number, bit| {
            let is_set = light(bit, 0);
            (is_set != light(bit, 1)).then_some(number | u32::from(is_set) << bit)
        })
    }

    #[test]
    fn frames_carry_their_number_through_the_encoder() {
        let Ok(clip) = EncodedClip::encode(2) else {
            eprintln!("SKIP frames_carry_their_number_through_the_encoder: needs ffmpeg with libx264");
            return;
        };
        assert_eq!(clip.frames.len(), 59);
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("clip.mp4");
        std::fs::write(&file, clip.bytes()).expect("a file");
        let decoded = Command::new("ffmpeg")
            .args(["-v", "error", "-nostdin", "-i"])
            .arg(&file)
            .args(["-f", "rawvideo", "-pix_fmt", "gray", "-"])
            .output()
            .expect("ffmpeg runs");
        let numbers: Vec<_> = decoded.stdout.chunks(640 * 360).map(read).collect();
        assert_eq!(numbers, (0..59).map(Some).collect::<Vec<_>>());
        assert_eq!(read(&vec![0; 640 * 360]), None, "black is not a number");
    }
}
