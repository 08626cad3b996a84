//! Three renditions of a video: encoded by ffmpeg from one file, or read from three files.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, anyhow, ensure};
use millrace_client::publish::{Encoded, RUNGS};
use tokio::process::{Child, Command};

/// Largest height of each rendition's video, in pixels. A smaller video is not enlarged.
const HEIGHTS: [u32; RUNGS] = [1080, 540, 360];
/// Default bit rate of each rendition's video, in kbit/s.
pub const KBIT: [u64; RUNGS] = [5000, 2000, 800];

/// The running ffmpeg processes. Dropping this kills them.
pub struct Encoders(#[allow(dead_code, reason = "held only to be dropped")] Vec<Child>);

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

/// Opens the video files of renditions that are already encoded, the rendition with the best quality first.
pub async fn open(files: [&PathBuf; RUNGS], bitrates: [u64; RUNGS]) -> anyhow::Result<[Encoded; RUNGS]> {
    let [best, middle, least] = files.map(|file| super::open(file));
    let (best, middle, least) = tokio::try_join!(best, middle, least)?;
    let encoded = |(reader, bitrate)| Encoded { reader: Box::new(reader) as _, bitrate };
    Ok([(best, bitrates[0]), (middle, bitrates[1]), (least, bitrates[2])].map(encoded))
}

/// Starts an encoder for each rendition of a video file, the rendition with the best quality first.
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

/// Makes the encoder's command line. All renditions have key frames at whole seconds, each with its parameter sets
/// (SPS and PPS). A decoder can therefore switch to another rendition at each key frame.
fn command(file: &Path, height: u32, bitrate: u64, sound: bool) -> Command {
    let mut ffmpeg = Command::new("ffmpeg");
    ffmpeg.args(["-nostdin", "-v", "error", "-i"]).arg(file).args(["-map", "0:v:0"]);
    // `?` makes sound optional: a video without an audio track is no error.
    if sound {
        ffmpeg.args(["-map", "0:a:0?", "-c:a", "aac"]);
    }
    ffmpeg.args(["-vf", &format!("scale=-2:'min(ih,{height})'"), "-pix_fmt", "yuv420p"]);
    // Scene cuts and the group length must not add key frames in one rendition only, since a switch needs them at the
    // same times. B-frames are off because they delay live video.
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
