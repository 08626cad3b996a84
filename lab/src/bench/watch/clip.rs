//! Video whose frames carry their number, and a camera that feeds it to a publisher in real time.

use std::io::Write as _;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, ensure};
use bytes::Bytes;
use millrace_client::media::Boxes;

/// Frames per second, as a fraction: nearly 30, but not in step with a browser's 60 pictures a second. In step, the
/// time between a frame and the next picture would be a constant by chance.
const FPS: (u64, u64) = (599, 20);
/// Frames from one key frame to the next.
const GROUP: u64 = 30;
/// Rate of the video, bits per second.
pub const BITRATE: u64 = 800_000;
/// Bits of the number in a frame.
const BITS: u32 = 16;
/// Side of the square of one bit, in pixels: a macroblock of the encoder.
const SIDE: u32 = 16;
/// Longest video whose frames all have a number.
pub const MOST_SECONDS: u64 = (1 << BITS) * FPS.1 / FPS.0;

/// Returns the number of frames in a time.
const fn frames_in(seconds: u64) -> u64 {
    seconds * FPS.0 / FPS.1
}

/// Returns when a frame is due, counted from frame 0.
pub fn due(frame: u64) -> Duration {
    Duration::from_nanos(frame * FPS.1 * 1_000_000_000 / FPS.0)
}

/// An encoded video.
pub struct EncodedClip {
    /// The boxes before the first frame.
    head: Vec<Bytes>,
    /// Frames, each as moof and mdat.
    frames: Vec<[Bytes; 2]>,
}

impl EncodedClip {
    /// Encodes a video with ffmpeg: 360p, a key frame each second.
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
            .context("cannot start ffmpeg, which makes the video (scripts/setup.sh)")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ffmpeg makes no video: {}", said.trim());
        let clip = Self::cut(&output.stdout)?;
        let has = clip.frames.len() as u64;
        ensure!(has == frames, "ffmpeg has made {has} frames where {frames} were asked for");
        Ok(clip)
    }

    /// Returns the video as a file.
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

/// Returns the filters that draw a frame's number into its upper left corner. Each bit is a square, white if it is set,
/// the lowest at the left. The square below it shows the opposite, so that no other picture is taken for a number.
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

/// A camera, which writes each frame when it is due.
pub struct ClipCamera {
    /// Time when frame 0 was due, by the host's real-time clock since its epoch.
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

    /// Ends the camera, and returns the number of frames.
    pub fn finish(mut self) -> anyhow::Result<u64> {
        let frames = self.end().context("the camera has ended already")?;
        frames.map_err(|_| anyhow!("the camera has panicked"))?.context("the publisher takes no more video")
    }

    fn end(&mut self) -> Option<std::thread::Result<std::io::Result<u64>>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join)
    }
}

impl Drop for ClipCamera {
    fn drop(&mut self) {
        // An error of the camera does not matter any more.
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

    /// Reads the number in a picture of 640 by 360 grey bytes.
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
            eprintln!("SKIP frames_carry_their_number_through_the_encoder: ffmpeg with libx264 is not here");
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
        assert_eq!(read(&vec![0; 640 * 360]), None, "black is no number");
    }
}
