//! A film in HLS segments (RFC 8216), and a player that counts stalls.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::bench::graft::host::GraftHost;

/// Directory of the film below the server's root directory.
pub const FILM: &str = "film";
pub const PLAYLIST: &str = "index.m3u8";
const SEGMENT_SECONDS: u32 = 2;
const FRAMES_SECOND: u32 = 25;
/// Seconds of film that the player fetches ahead of the shown picture.
const AHEAD: f64 = 10.0;
/// Largest HTTP header or playlist that is accepted, bytes.
const TEXT_MOST: usize = 64 << 10;
/// Largest segment that is accepted, bytes. It has room for a minute at 100 Mbit/s.
const SEGMENT_MOST: u64 = 750 << 20;

pub struct Film {
    seconds: u32,
}

impl Film {
    /// Encodes a film of the given bit rate and length with ffmpeg.
    pub fn make(directory: &Path, mbit: u32, seconds: u32) -> anyhow::Result<Self> {
        let directory = directory.join(FILM);
        fs::create_dir(&directory)?;
        let source = format!("testsrc2=size=640x360:rate={FRAMES_SECOND}");
        let rate = format!("{mbit}M");
        let group = (FRAMES_SECOND * SEGMENT_SECONDS).to_string();
        let mut command = Command::new("ffmpeg");
        command.args(["-v", "error", "-f", "lavfi", "-i", &source, "-t", &seconds.to_string()]);
        command.args(["-c:v", "libx264", "-preset", "ultrafast", "-threads", "1", "-pix_fmt", "yuv420p"]);
        command.args([
            "-g",
            &group,
            "-keyint_min",
            &group,
            "-sc_threshold",
            "0",
            "-x264-params",
            "nal-hrd=cbr",
        ]);
        command.args(["-b:v", &rate, "-minrate", &rate, "-maxrate", &rate, "-bufsize", &rate]);
        command.args(["-f", "hls", "-hls_time", &SEGMENT_SECONDS.to_string(), "-hls_playlist_type", "vod"]);
        command.arg("-hls_segment_filename").arg(directory.join("%03d.ts")).arg(directory.join(PLAYLIST));
        let output = command.output().context("cannot run ffmpeg (Debian: apt install ffmpeg)")?;
        ensure!(output.status.success(), "ffmpeg: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(Self { seconds })
    }

    /// Plays the film from a server with ffmpeg, as an independent player, and checks that no picture is missing.
    pub fn check(&self, client: &GraftHost<'_>, server: SocketAddr) -> anyhow::Result<()> {
        let mut command = client.node.command("ffmpeg");
        command.args(["-v", "error", "-xerror", "-progress", "-", "-i"]);
        command.arg(format!("http://{server}/{FILM}/{PLAYLIST}")).args(["-f", "null", "-"]);
        let output = client.cgroup.command(&command).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ffmpeg does not play the film: {}", errors.trim());
        let said = String::from_utf8_lossy(&output.stdout);
        let shown =
            said.lines().rev().find_map(|line| line.strip_prefix("frame=")?.trim().parse::<u32>().ok());
        let wanted = self.seconds * FRAMES_SECOND;
        ensure!(shown == Some(wanted), "ffmpeg shows {shown:?} pictures of the film's {wanted}");
        Ok(())
    }
}

/// State of the player: how much of the film has arrived and was shown, and the stalls so far. Times are seconds since
/// the viewer's request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Playback {
    came: f64,
    shown: f64,
    /// Time of the last change of `shown` or `is_playing`.
    since: f64,
    is_playing: bool,
    seen: ViewerFigures,
}

/// Waiting time and stalls that the viewer of a film experienced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ViewerFigures {
    /// Time until the first picture, seconds. If none was shown, it is the time limit at which the viewer gives up.
    pub start_s: f64,
    pub stalls: u32,
    pub stalled_s: f64,
    /// Whether the time limit ended the run before the film had been shown completely.
    pub is_over: bool,
}

impl ViewerFigures {
    pub fn waited_s(&self) -> f64 {
        self.start_s + self.stalled_s
    }
}

impl Playback {
    fn advance(&mut self, now: f64) {
        if !self.is_playing {
            return;
        }
        let dry = self.since + self.came - self.shown;
        if dry >= now {
            self.shown += now - self.since;
            self.since = now;
        } else {
            (self.shown, self.since, self.is_playing) = (self.came, dry, false);
            self.seen.stalls += 1;
        }
    }

    /// Adds a completely received segment, and starts or continues the film.
    fn arrived(&mut self, now: f64, seconds: f64) {
        self.advance(now);
        self.came += seconds;
        if !self.is_playing {
            self.wait_ends(now);
            self.is_playing = true;
        }
    }

    fn wait_ends(&mut self, now: f64) {
        let waited = now - self.since;
        match self.seen.stalls {
            0 => self.seen.start_s = waited,
            _ => self.seen.stalled_s += waited,
        }
        self.since = now;
    }

    /// Stops the film at the time limit, and returns the viewer's waiting time and stalls.
    fn left(&mut self, now: f64) -> ViewerFigures {
        self.advance(now);
        if !self.is_playing {
            self.wait_ends(now);
        }
        ViewerFigures { is_over: true, ..self.seen }
    }

    /// Returns how many seconds to wait before another segment fits into the buffer.
    fn pause(&self, now: f64) -> f64 {
        let ahead = self.came - self.shown - if self.is_playing { now - self.since } else { 0.0 };
        (ahead - AHEAD).max(0.0)
    }
}

/// Plays a film, whose segments are fetched one after the other on one connection
#[derive(Debug, clap::Args)]
pub struct VideoArgs {
    #[arg(long)]
    from: SocketAddr,
    /// Path of the playlist on the server
    #[arg(long)]
    path: String,
    /// Directory where the segments are stored
    #[arg(long)]
    into: PathBuf,
    #[arg(long)]
    limit: u64,
}

pub fn run(args: &VideoArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut playback = Playback::default();
    let limit = Duration::from_secs(args.limit);
    let watched = match args.play(start, &mut playback) {
        Ok(()) => playback.seen,
        Err(_) if start.elapsed() >= limit => playback.left(limit.as_secs_f64()),
        Err(error) => return Err(error),
    };
    println!("{}", serde_json::to_string(&watched)?);
    Ok(())
}

impl VideoArgs {
    fn play(&self, start: Instant, playback: &mut Playback) -> anyhow::Result<()> {
        let until = start + Duration::from_secs(self.limit);
        let mut server = VideoServer::new(self.from, until)?;
        let text = String::from_utf8(server.get(&self.path)?)?;
        let (directory, _) = self.path.rsplit_once('/').context("a path begins with /")?;
        for (name, seconds) in segments(&text)? {
            let pause = playback.pause(start.elapsed().as_secs_f64());
            std::thread::sleep(Duration::from_secs_f64(pause));
            let segment = server.get(&format!("{directory}/{name}"))?;
            playback.arrived(start.elapsed().as_secs_f64(), seconds);
            fs::write(self.into.join(name), segment)?;
        }
        Ok(())
    }
}

/// Returns the name and the length in seconds of each segment in a playlist.
fn segments(playlist: &str) -> anyhow::Result<Vec<(&str, f64)>> {
    ensure!(playlist.starts_with("#EXTM3U"), "the playlist does not begin with #EXTM3U");
    let mut found = Vec::new();
    let mut length = None;
    for line in playlist.lines().map(str::trim) {
        if let Some(info) = line.strip_prefix("#EXTINF:") {
            let seconds = info.split(',').next().unwrap_or_default();
            length = Some(seconds.parse().with_context(|| format!("a segment of {seconds:?} s"))?);
        } else if !line.is_empty() && !line.starts_with('#') {
            ensure!(!line.contains('/'), "segment {line:?} is in another directory, which is not supported");
            found.push((line, length.take().with_context(|| format!("segment {line} has no length"))?));
        }
    }
    ensure!(!found.is_empty(), "the playlist has no segments");
    Ok(found)
}

/// A server that is read over one persistent HTTP/1.1 connection.
struct VideoServer {
    stream: BufReader<TcpStream>,
    at: SocketAddr,
    until: Instant,
}

impl VideoServer {
    fn new(at: SocketAddr, until: Instant) -> anyhow::Result<Self> {
        let left = until.saturating_duration_since(Instant::now());
        let stream = TcpStream::connect_timeout(&at, left).with_context(|| at.to_string())?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::new(stream), at, until })
    }

    fn get(&mut self, path: &str) -> anyhow::Result<Vec<u8>> {
        write!(self.stream.get_mut(), "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.at)?;
        let head = self.head()?;
        let mut lines = head.lines();
        let status = lines.next().unwrap_or_default();
        ensure!(status.starts_with("HTTP/1.1 200 "), "{path}: {status}");
        let length = lines.filter_map(|line| line.split_once(':'));
        let length = length.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let length: Option<u64> = length.filter_map(|(_, value)| value.trim().parse().ok()).next();
        let length = length
            .filter(|length| *length <= SEGMENT_MOST)
            .context("no Content-Length, or a body larger than a segment may be")?;
        let mut body = vec![0; usize::try_from(length)?];
        let mut filled = 0;
        while let Some(rest) = body.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            self.bound()?;
            match self.stream.read(rest) {
                Ok(0) => bail!("{path} ended after {filled} bytes of {length}"),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).with_context(|| format!("{path}, after {filled} bytes")),
            }
        }
        Ok(body)
    }

    /// Reads the header of a response, up to the empty line.
    fn head(&mut self) -> anyhow::Result<String> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            self.bound()?;
            let left = (TEXT_MOST - head.len()) as u64;
            let read = self.stream.by_ref().take(left).read_line(&mut head)?;
            ensure!(read > 0, "the answer's head ended after {} bytes", head.len());
        }
        Ok(head)
    }

    /// Limits the next read to the time that is left until the deadline.
    fn bound(&self) -> anyhow::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "the time limit was reached");
        Ok(self.stream.get_ref().set_read_timeout(Some(left))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-9
    }

    #[test]
    fn punctual_segments_are_shown_without_a_stall() {
        let mut playback = Playback::default();
        for at in [0.5, 1.0, 1.5, 2.0, 2.5, 3.0] {
            playback.arrived(at, 2.0);
        }
        assert_eq!(playback.seen, ViewerFigures { start_s: 0.5, ..ViewerFigures::default() });
        // At 3 s, 2.5 s of the 12 s of film were shown, so 9.5 s of at most 10 s are buffered.
        assert!(near(playback.pause(3.0), 0.0) && near(playback.came - playback.shown, 9.5));
        playback.arrived(3.0, 2.0);
        assert!(near(playback.pause(3.0), 1.5) && near(playback.pause(4.0), 0.5));
    }

    #[test]
    fn late_video_segment_stalls_playback_until_it_arrives() {
        let mut playback = Playback::default();
        playback.arrived(1.0, 2.0);
        playback.arrived(3.5, 2.0);
        playback.arrived(7.0, 2.0);
        // The player's buffer is empty from 3 s to 3.5 s and from 5.5 s to 7 s.
        assert_eq!(playback.seen, ViewerFigures { start_s: 1.0, stalls: 2, stalled_s: 2.0, is_over: false });
        assert!(near(playback.seen.waited_s(), 3.0));
        // The player's buffer is empty at 9 s, and the viewer leaves at 10 s.
        let left = playback.left(10.0);
        assert_eq!(left, ViewerFigures { start_s: 1.0, stalls: 3, stalled_s: 3.0, is_over: true });
    }

    #[test]
    fn viewer_who_never_sees_a_picture_has_start_delay_until_leaving() {
        let left = Playback::default().left(60.0);
        assert_eq!(left, ViewerFigures { start_s: 60.0, stalls: 0, stalled_s: 0.0, is_over: true });
    }

    #[test]
    fn playlists_are_parsed() {
        let text = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.000000,\n000.ts\n#EXTINF:1.5,\n001.ts\n#EXT-X-ENDLIST\n";
        assert_eq!(segments(text).expect("segments"), [("000.ts", 2.0), ("001.ts", 1.5)]);
        for bad in [
            "",
            "#EXTM3U\n",
            "#EXTM3U\n000.ts\n",
            "#EXTM3U\n#EXTINF:x,\n000.ts",
            "#EXTM3U\n#EXTINF:2,\n../a.ts",
        ] {
            assert!(segments(bad).is_err(), "{bad}");
        }
    }

    /// The server sends two responses in pieces on one connection.
    #[test]
    fn http_responses_in_pieces_are_read_completely() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let at = listener.local_addr().expect("an address");
        let serving = std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            let mut stream = BufReader::new(stream);
            for body in ["first", "", "short"] {
                let mut line = String::new();
                while line != "\r\n" {
                    line.clear();
                    stream.read_line(&mut line).expect("a request");
                }
                let length = if body == "short" { 9 } else { body.len() };
                let head = format!("HTTP/1.1 200 OK\r\nServer: x\r\ncontent-length: {length}\r\n\r\n");
                for piece in [&head[..7], &head[7..], body] {
                    stream.get_mut().write_all(piece.as_bytes()).expect("a piece");
                }
            }
        });
        let mut server = VideoServer::new(at, Instant::now() + Duration::from_secs(60)).expect("connected");
        // exact: `get` returns after the HTTP response has ended
        assert_eq!(server.get("/a").expect("a body"), b"first");
        // exact: `get` returns after the HTTP response has ended
        assert_eq!(server.get("/b").expect("a body"), b"");
        // exact: `get` returns after the HTTP response has ended
        let error = server.get("/c").expect_err("it ended").to_string();
        assert!(error.contains("ended after 5 bytes of 9"), "{error}");
        serving.join().expect("served");
    }
}
