//! Three renditions, which ffmpeg makes from a file, or which are read from three files.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, anyhow, ensure};
use millrace_client::publish::{Encoded, RUNGS};
use tokio::process::{Child, Command};

/// Largest heights of the video.
const HEIGHTS: [u32; RUNGS] = [1080, 540, 360];
/// Default bit rates of the video, in kbit/s.
pub const KBIT: [u64; RUNGS] = [5000, 2000, 800];

/// Encoders. Dropping this ends them.
pub struct Encoders(#[allow(dead_code, reason = "held for as long as they run")] Vec<Child>);

/// Returns the renditions' rates in bits per second.
pub fn bitrates(kbit: &[u64]) -> anyhow::Result<[u64; RUNGS]> {
    let kbit: [u64; RUNGS] = kbit.try_into().map_err(|_| anyhow!("--ladder-kbit must be {RUNGS} numbers"))?;
    ensure!(
        kbit.is_sorted_by(|better, next| better > next && *next > 0),
        "--ladder-kbit must descend, and be above 0"
    );
    ensure!(kbit.iter().all(|kbit| *kbit <= 10_000_000), "--ladder-kbit must be at most 10 Gbit/s each");
    Ok(kbit.map(|kbit| 1000 * kbit))
}

/// Opens files that are already encoded, the best first.
pub async fn open(files: [&PathBuf; RUNGS], bitrates: [u64; RUNGS]) -> anyhow::Result<[Encoded; RUNGS]> {
    let [best, middle, least] = files.map(|file| super::open(file));
    let (best, middle, least) = tokio::try_join!(best, middle, least)?;
    let encoded = |(reader, bitrate)| Encoded { reader: Box::new(reader) as _, bitrate };
    Ok([(best, bitrates[0]), (middle, bitrates[1]), (least, bitrates[2])].map(encoded))
}

/// Starts an encoder for each rendition of a file, the best first.
pub fn encode(file: &Path, bitrates: [u64; RUNGS]) -> anyhow::Result<(Encoders, [Encoded; RUNGS])> {
    let mut encoders = Vec::new();
    let mut start = |place: usize| -> anyhow::Result<Encoded> {
        let height = HEIGHTS[place];
        let bitrate = bitrates[place];
        let mut child = command(file, height, bitrate, place == 0).spawn().context("cannot start ffmpeg")?;
        let reader = child.stdout.take().context("ffmpeg has no output")?;
        encoders.push(child);
        Ok(Encoded { reader: Box::new(reader), bitrate })
    };
    let renditions = [start(0)?, start(1)?, start(2)?];
    Ok((Encoders(encoders), renditions))
}

/// Makes the encoder's command line. Key frames are at whole seconds in all renditions, and repeat their parameter
/// sets, so that a decoder can continue with another rendition at each.
fn command(file: &Path, height: u32, bitrate: u64, sound: bool) -> Command {
    let mut ffmpeg = Command::new("ffmpeg");
    ffmpeg.args(["-nostdin", "-v", "error", "-i"]).arg(file).args(["-map", "0:v:0"]);
    if sound {
        ffmpeg.args(["-map", "0:a:0?", "-c:a", "aac"]);
    }
    ffmpeg.args(["-vf", &format!("scale=-2:'min(ih,{height})'"), "-pix_fmt", "yuv420p"]);
    ffmpeg.args(["-c:v", "libx264", "-preset", "veryfast", "-bf", "0", "-sc_threshold", "0", "-g", "100000"]);
    ffmpeg.args(["-force_key_frames", "expr:gte(t,n_forced)"]);
    let rate = bitrate.to_string();
    let buffer = (bitrate / 2).to_string();
    ffmpeg.args(["-b:v", &rate, "-maxrate", &rate, "-bufsize", &buffer]);
    ffmpeg.args(["-tag:v", "avc3", "-bsf:v", "dump_extra=freq=keyframe", "-video_track_timescale", "90000"]);
    ffmpeg.args(["-f", "mp4", "-movflags"]);
    ffmpeg.args(["cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", "pipe:1"]);
    ffmpeg.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    ffmpeg
}
