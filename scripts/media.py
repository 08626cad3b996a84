#!/usr/bin/env python3
"""Makes fragmented MP4 as various muxers write it: codecs crossed with ffmpeg's flags, boxes in unusual places, and other packagers if they are installed.

    scripts/media.py DIR [--only REGEX]

A file that cannot be made here is reported by a line "SKIP: why". Each file takes some seconds of 160x90 video at most.
"""

import argparse
import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CMAF = "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame"
VIDEO = {
    "h264": "-c:v libx264 -preset ultrafast -bf 2 -g 25 -keyint_min 25 -sc_threshold 0 -pix_fmt yuv420p",
    "h264base": "-c:v libx264 -preset ultrafast -profile:v baseline -bf 0 -g 25 -pix_fmt yuv420p",
    "opengop": "-c:v libx264 -preset veryfast -bf 2 -g 25 -x264-params open-gop=1:scenecut=0 -pix_fmt yuv420p",
    "refresh": "-c:v libx264 -preset veryfast -bf 0 -g 25 -x264-params intra-refresh=1 -pix_fmt yuv420p",
    "avc3": "-c:v libx264 -preset ultrafast -bf 0 -g 25 -pix_fmt yuv420p -x264-params repeat-headers=1",
    "hevc": "-c:v libx265 -preset ultrafast -g 25 -x265-params log-level=error:scenecut=0 -pix_fmt yuv420p -tag:v hvc1",
    "hev1": "-c:v libx265 -preset ultrafast -g 25 -x265-params log-level=error:scenecut=0 -pix_fmt yuv420p -tag:v hev1",
    "av1": "-c:v libsvtav1 -preset 12 -g 25 -pix_fmt yuv420p",
    "vp9": "-c:v libvpx-vp9 -deadline realtime -cpu-used 8 -g 25 -pix_fmt yuv420p",
    "mpeg4": "-c:v mpeg4 -g 25",
    "mpeg2": "-c:v mpeg2video -g 25",
    "mjpeg": "-c:v mjpeg -pix_fmt yuvj420p",
}
SOUND = {
    "aac": "-c:a aac -b:a 64k",
    "opus": "-c:a libopus -b:a 48k",
    "ac3": "-c:a ac3 -b:a 96k",
    "eac3": "-c:a eac3 -b:a 96k",
    "flac": "-c:a flac -strict -2",
    "alac": "-c:a alac",
    "mp3": "-c:a libmp3lame -b:a 64k",
    "mp2": "-c:a mp2 -b:a 96k",
}
# Flags for how ffmpeg cuts and addresses fragments.
MUX = {
    "every": f"-movflags {CMAF}",
    "separate": "-movflags frag_keyframe+empty_moov+separate_moof",
    "muxed": "-movflags frag_keyframe+empty_moov+default_base_moof",
    "muxednodbm": "-movflags frag_keyframe+empty_moov",
    "hybrid": "-movflags frag_keyframe",
    "dashdur": "-movflags dash+separate_moof+empty_moov -frag_duration 700000",
    "size": "-movflags empty_moov+default_base_moof -frag_size 6000",
    "omit": "-movflags frag_keyframe+empty_moov+omit_tfhd_offset+separate_moof",
    "prft": "-movflags cmaf+separate_moof+delay_moov -frag_duration 500000 -write_prft wallclock",
    "noedit": "-movflags frag_keyframe+empty_moov+default_base_moof -use_editlist 0",
    "ctts": "-movflags frag_keyframe+empty_moov+default_base_moof+negative_cts_offsets",
    "epoch": f"-movflags {CMAF} -output_ts_offset 1700000000",
}


def say(text):
    print(text, flush=True)


def run(*arguments, **options):
    return subprocess.run([str(it) for it in arguments], capture_output=True, check=False, **options)


def ffmpeg(*arguments):
    done = run("ffmpeg", "-nostdin", "-v", "error", "-y", *arguments)
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip().splitlines()[-1:]


class Maker:
    def __init__(self, folder, only):
        self.folder, self.only = folder, re.compile(only)
        self.sources = folder / "sources"
        self.sources.mkdir(parents=True, exist_ok=True)
        self.made = 0

    def source(self, kind, name):
        """An encoded stream, once."""
        path = self.sources / f"{name}.mkv"
        if not path.exists():
            if kind == "video":
                made = ["-f", "lavfi", "-i", "testsrc2=size=160x90:rate=25:duration=4", *VIDEO[name].split()]
            else:
                made = ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=48000:duration=4", "-ac", "2", *SOUND[name].split()]
            if problem := ffmpeg(*made, path):
                say(f"SKIP: {name} cannot be encoded here: {problem}")
                path.write_bytes(b"")
        return path if path.stat().st_size else None

    def wants(self, name):
        return bool(self.only.search(name))

    def keep(self, name, data=None):
        path = self.folder / f"{name}.mp4"
        if data is not None:
            path.write_bytes(data)
        self.made += 1
        return path

    def mux(self, name, streams, flags, extra=()):
        if not self.wants(name):
            return
        inputs = []
        tags = []
        for kind, codec in streams:
            path = self.source(kind, codec)
            if path is None:
                return say(f"SKIP: {name}: no {codec}")
            inputs += ["-i", path]
            tags += {"hevc": ["-tag:v", "hvc1"], "hev1": ["-tag:v", "hev1"], "avc3": ["-tag:v", "avc3"]}.get(codec, [])
        maps = [it for at in range(len(streams)) for it in ("-map", at)]
        target = self.folder / f"{name}.mp4"
        kind = [] if "-f " in f"{flags} " else ["-f", "mp4"]
        if problem := ffmpeg(*inputs, *maps, "-c", "copy", "-strict", "-2", *tags, *extra, *kind, *flags.split(), target):
            target.unlink(missing_ok=True)
            return say(f"SKIP: {name}: ffmpeg does not write it: {problem}")
        self.made += 1


def crossed(maker):
    for video, sound, flags in [
        ("h264", "aac", MUX),
        ("hevc", "ac3", ["every", "separate", "muxed", "muxednodbm", "hybrid", "dashdur", "omit"]),
        ("av1", "opus", ["every", "separate", "muxed", "hybrid", "dashdur", "size"]),
        ("vp9", "flac", ["every", "separate", "muxed", "hybrid", "dashdur"]),
        ("h264base", "eac3", ["every", "muxednodbm", "dashdur"]),
        ("h264base", "alac", ["every", "muxed", "hybrid"]),
        ("h264base", "mp3", ["every", "muxed", "separate"]),
        ("hev1", "aac", ["every", "dashdur"]),
        ("avc3", "opus", ["every", "muxed"]),
        ("opengop", "aac", ["every", "muxed"]),
        ("refresh", "aac", ["every", "muxed"]),
        ("mpeg4", "mp2", ["every", "muxed"]),
        ("mpeg2", "mp3", ["muxed"]),
        ("mjpeg", "aac", ["muxed"]),
    ]:
        for mux in flags:
            maker.mux(f"{video}_{sound}_{mux}", [("video", video), ("sound", sound)], MUX[mux])
    for sound in ["aac", "opus", "flac", "mp3"]:
        for mux in ["every", "muxed"]:
            maker.mux(f"only_{sound}_{mux}", [("sound", sound)], MUX[mux] if mux == "every" else f"{MUX[mux]} -frag_duration 500000")
    maker.mux("only_h264_separate", [("video", "h264")], MUX["separate"])
    maker.mux("smooth", [("video", "h264base"), ("sound", "aac")], "-f ismv")
    maker.mux("pcm_mov", [("video", "h264base"), ("sound", "pcm")], "-f mov -movflags frag_keyframe+empty_moov+default_base_moof")
    two = [("video", "h264"), ("sound", "aac"), ("sound", "opus")]
    named = "-metadata:s:a:0 language=deu -metadata:s:a:1 language=eng -metadata:s:a:1 title=Commentary".split()
    maker.mux("two_languages", two, MUX["muxed"], named)
    maker.mux("two_videos", [("video", "h264"), ("video", "h264base"), ("sound", "aac")], MUX["muxed"])
    key = "-encryption_scheme cenc-aes-ctr -encryption_key 76a6c65c5ea762046bd749a2e632ccbb -encryption_kid a7e61c373e219033c21091fa607bf3b8"
    for mux in ["every", "muxed", "dashdur"]:
        maker.mux(f"cenc_{mux}", [("video", "h264base"), ("sound", "aac")], MUX[mux], key.split())


def boxes(data):
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if size == 1:
            size = struct.unpack(">Q", data[at + 8 : at + 16])[0]
        size = size or len(data) - at
        yield kind, data[at : at + size]
        at += size


def box(kind, body):
    return struct.pack(">I4s", len(body) + 8, kind) + body


def find(data, *path):
    """Returns the range of the body of a nested box."""
    at, end = 0, len(data)
    for kind in path:
        while at < end:
            size, found = struct.unpack(">I4s", data[at : at + 8])
            if found == kind:
                at, end = at + 8, at + size
                break
            at += size
        else:
            return None
    return at


def marked(data, video, key, delta):
    """Changes the flags of a track's samples; each fragment has one."""
    out = []
    for kind, whole in boxes(data):
        if kind == b"moof":
            whole = bytearray(whole)
            body = find(whole, b"moof", b"traf", b"tfhd")
            if struct.unpack(">I", whole[body + 4 : body + 8])[0] == video:
                at = body + 8
                flags = struct.unpack(">I", whole[body : body + 4])[0]
                at += 8 * (flags & 1) + 4 * (flags >> 1 & 1) + 4 * (flags >> 3 & 1) + 4 * (flags >> 4 & 1)
                assert flags & 0x20, "default_sample_flags"
                was = struct.unpack(">I", whole[at : at + 4])[0]
                whole[at : at + 4] = struct.pack(">I", delta if was & 0x10000 else key)
                run = find(whole, b"moof", b"traf", b"trun")
                flags = struct.unpack(">I", whole[run : run + 4])[0]
                if flags & 4:
                    at = run + 8 + 4 * (flags & 1)
                    whole[at : at + 4] = struct.pack(">I", key)
            whole = bytes(whole)
        out.append(whole)
    return b"".join(out)


def surgery(maker):
    """Adds boxes in places that the standard allows and few muxers use."""
    names = "x_first_emsg x_first_sidx x_first_prft x_moov64 x_mdat64 x_mdat_open x_no_ftyp x_free_between x_empty_moof x_styp_emsg x_early_mdat \
x_all_sync x_unknown_depends x_none_marked x_truncated x_uuid".split()
    if not any(maker.wants(name) for name in names):
        return
    base = maker.folder / "x_base.mp4"
    video, sound = maker.source("video", "h264base"), maker.source("sound", "aac")
    if not video or not sound or ffmpeg("-i", video, "-i", sound, "-c", "copy", "-f", "mp4", "-movflags", CMAF, base):
        return say("SKIP: x_*: ffmpeg with libx264 and aac is not here")
    data = base.read_bytes()
    base.unlink()
    parts = list(boxes(data))
    emsg = box(b"emsg", struct.pack(">I", 1 << 24) + struct.pack(">IQII", 1000, 500, 100, 7) + b"urn:scte:scte35:2013:bin\0\0payload")
    prft = box(b"prft", struct.pack(">IIQI", 0, 1, (1795824000 + 2208988800) << 32, 0))
    sidx = box(b"sidx", struct.pack(">IIIIIHH", 0, 1, 1000, 0, 0, 0, 0))

    def long(whole):
        return struct.pack(">I4sQ", 1, whole[4:8], len(whole) + 8) + whole[8:]

    def changed(change):
        return b"".join(change(kind, whole) for kind, whole in parts)

    # A longer header of the mdat moves the samples.
    def moved(kind, whole, by):
        whole = bytearray(whole)
        at = find(whole, b"moof", b"traf", b"trun") + 8
        whole[at : at + 4] = struct.pack(">i", struct.unpack(">i", whole[at : at + 4])[0] + by)
        return bytes(whole)

    empty = box(b"moof", box(b"mfhd", bytes(8)) + box(b"traf", box(b"tfhd", struct.pack(">III", 0x020000, 1, 0)[:8])))
    between = box(b"free", bytes(20))
    last = len(parts) - 1
    first = next(at for at, (kind, _) in enumerate(parts) if kind == b"moof")
    init = b"".join(whole for _, whole in parts[:first])
    fragments = parts[first:]
    early = []
    for (_, moof), (_, mdat) in zip(fragments[::2], fragments[1::2]):
        early.append(mdat + moved(b"moof", moof, -len(moof) - len(mdat)))
    table = {
        "x_first_emsg": emsg + data,
        "x_first_sidx": sidx + data,
        "x_first_prft": prft + data,
        "x_moov64": changed(lambda kind, whole: long(whole) if kind == b"moov" else whole),
        "x_mdat64": changed(lambda kind, whole: moved(kind, whole, 8) if kind == b"moof" else long(whole) if kind == b"mdat" else whole),
        "x_mdat_open": b"".join(
            bytes(4) + whole[4:] if at == last and kind == b"mdat" else whole for at, (kind, whole) in enumerate(parts)
        ),
        "x_no_ftyp": changed(lambda kind, whole: b"" if kind == b"ftyp" else whole),
        "x_free_between": changed(lambda kind, whole: moved(kind, whole, 28) + between if kind == b"moof" else whole),
        "x_empty_moof": init + empty + data[len(init) :] + empty,
        "x_styp_emsg": changed(lambda kind, whole: box(b"styp", b"msdh\0\0\0\0msdh") + emsg + whole if kind == b"moof" else whole),
        "x_early_mdat": init + b"".join(early),
        "x_all_sync": marked(data, 1, 0, 0),
        "x_unknown_depends": marked(data, 1, 0, 0x10000),
        "x_none_marked": marked(data, 1, 0x1010000, 0x1010000),
        "x_truncated": data[:-20],
        "x_uuid": changed(lambda kind, whole: box(b"uuid", bytes(16) + b"what") + whole if kind == b"moof" else whole),
    }
    for name, made in table.items():
        if maker.wants(name):
            maker.keep(name, made)


def joined(maker):
    """Joins segments as players of HLS and DASH get them."""
    video, sound = maker.source("video", "h264"), maker.source("sound", "aac")
    if not maker.wants("hls_joined") or not video or not sound:
        return
    folder = maker.sources / "hls"
    folder.mkdir(exist_ok=True)
    options = ["-f", "hls", "-hls_time", "1", "-hls_list_size", "0", "-hls_segment_type", "fmp4", "-hls_segment_filename", folder / "s%d.m4s"]
    if problem := ffmpeg("-i", video, "-i", sound, "-c", "copy", *options, folder / "list.m3u8"):
        return say(f"SKIP: hls_joined: {problem}")
    segments = sorted(folder.glob("s*.m4s"), key=lambda path: int(path.stem[1:]))
    maker.keep("hls_joined", (folder / "init.mp4").read_bytes() + b"".join(path.read_bytes() for path in segments))


def several_truns(maker):
    """Lists the samples of each fragment in two boxes, each with an offset of its own."""
    if not maker.wants("x_two_truns"):
        return
    video, sound = maker.source("video", "h264base"), maker.source("sound", "aac")
    if not video or not sound:
        return say("SKIP: x_two_truns: ffmpeg with libx264 and aac is not here")
    base = maker.sources / "truns.mp4"
    if problem := ffmpeg("-i", video, "-i", sound, "-c", "copy", "-f", "mp4", "-movflags", "frag_keyframe+empty_moov+separate_moof+default_base_moof", base):
        return say(f"SKIP: x_two_truns: {problem}")
    split = (halved(whole) if kind == b"moof" else whole for kind, whole in boxes(base.read_bytes()))
    maker.keep("x_two_truns", b"".join(split))


def halved(moof):
    """Splits the trun of a moof, which has sizes, into two."""
    at = find(moof, b"moof", b"traf", b"trun") - 8
    size = struct.unpack(">I", moof[at : at + 4])[0]
    flags, count, offset = struct.unpack(">IIi", moof[at + 8 : at + 20])
    if count < 2 or flags & 0x201 != 0x201:
        return moof
    fixed = at + 20 + 4 * (flags >> 2 & 1)
    width = 4 * sum(flags >> bit & 1 for bit in (8, 9, 10, 11))
    size_at = 4 * (flags >> 8 & 1)
    entries = [moof[fixed + width * n : fixed + width * (n + 1)] for n in range(count)]
    half = count // 2
    first_bytes = sum(struct.unpack(">I", entry[size_at : size_at + 4])[0] for entry in entries[:half])
    # The second box has a header, a count and an offset, but no flags for a first sample.
    more = 20
    first = struct.pack(">IIi", flags, half, offset + more) + moof[at + 20 : fixed] + b"".join(entries[:half])
    second = struct.pack(">IIi", flags & ~4, count - half, offset + more + first_bytes) + b"".join(entries[half:])
    truns = box(b"trun", first) + box(b"trun", second)
    out = bytearray(moof[:at] + truns + moof[at + size :])
    for head in (0, find(moof, b"moof", b"traf") - 8):
        out[head : head + 4] = struct.pack(">I", struct.unpack(">I", out[head : head + 4])[0] + more)
    return bytes(out)


UTC = "urn:mpeg:dash:utc:http-xsdate:2014=https://time.example"
LIVE = "--segment_duration 1 --fragment_duration 0.25"
RAW_KEY = "--enable_raw_key_encryption --keys label=:key_id=a7e61c373e219033c21091fa607bf3b8:key=76a6c65c5ea762046bd749a2e632ccbb"
# Kind, codec, further arguments for shaka-packager's stream, and its options.
SHAKA = {
    "h264": ("video", "h264", "", LIVE),
    "h264_no_sidx": ("video", "h264", "", f"{LIVE} --generate_sidx_in_media_segments=false"),
    "h264_one_file": ("video", "h264", "file", LIVE),
    "h264_low_latency": ("video", "h264base", "", f"--segment_duration 1 --low_latency_dash_mode=true --utc_timings {UTC}"),
    "hevc": ("video", "hevc", "", LIVE),
    "hev1": ("video", "hev1", "", LIVE),
    "av1": ("video", "av1", "", LIVE),
    "vp9": ("video", "vp9", "", LIVE),
    "aac": ("audio", "aac", "lang=de", LIVE),
    "aac_one_file": ("audio", "aac", "file", LIVE),
    "ac3": ("audio", "ac3", "", LIVE),
    "eac3": ("audio", "eac3", "", LIVE),
    "opus": ("audio", "opus", "", LIVE),
    "flac": ("audio", "flac", "", LIVE),
    "alac": ("audio", "alac", "", LIVE),
    "wvtt": ("text", "vtt", "lang=de", LIVE),
    "stpp": ("text", "vtt", "lang=de,format=ttml+mp4", LIVE),
    "cenc_h264": ("video", "h264", "", f"{LIVE} {RAW_KEY} --protection_scheme cenc --clear_lead 0"),
    "cenc_lead": ("video", "h264", "", f"{LIVE} {RAW_KEY} --protection_scheme cenc --clear_lead 2"),
    "cbcs_hevc": ("video", "hevc", "", f"{LIVE} {RAW_KEY} --protection_scheme cbcs --clear_lead 0"),
    "cbcs_aac": ("audio", "aac", "", f"{LIVE} {RAW_KEY} --protection_scheme cbcs --clear_lead 0"),
    "cens_av1": ("video", "av1", "", f"{LIVE} {RAW_KEY} --protection_scheme cens --clear_lead 0"),
    "cbc1_h264": ("video", "h264", "", f"{LIVE} {RAW_KEY} --protection_scheme cbc1 --clear_lead 0"),
}
CUES = "WEBVTT\n\n" + "".join(f"00:00:0{n}.000 --> 00:00:0{n}.800\nCue {n}\n\n" for n in range(4))


def shaka(maker):
    """Returns shaka-packager's output: its init segment and segments, or its file."""
    wanted = [name for name in SHAKA if maker.wants(f"shaka_{name}")]
    if not wanted:
        return
    program = shaka_program()
    if program is None:
        return say("SKIP: shaka_*: shaka-packager is not here (scripts/setup.sh test)")
    for name in wanted:
        kind, codec, more, options = SHAKA[name]
        source = shaka_source(maker, kind, codec)
        if source is None:
            say(f"SKIP: shaka_{name}: no {codec} in MP4")
            continue
        folder = maker.sources / f"shaka_{name}"
        folder.mkdir()
        whole = folder / "whole.mp4"
        described = ["output=" + str(whole)] if more == "file" else [f"init_segment={folder}/init.mp4", f"segment_template={folder}/$Number$.m4s"]
        described += [more] if more not in ("", "file") else []
        done = run(program, ",".join([f"in={source}", f"stream={kind}", *described]), *options.split(), "--mpd_output", folder / "list.mpd")
        segments = sorted(folder.glob("*.m4s"), key=lambda path: int(path.stem))
        if done.returncode != 0:
            say(f"SKIP: shaka_{name}: {done.stderr.decode(errors='replace').strip()[-200:]}")
        elif more == "file":
            maker.keep(f"shaka_{name}", whole.read_bytes())
        else:
            maker.keep(f"shaka_{name}", b"".join(path.read_bytes() for path in [folder / "init.mp4", *segments]))


def shaka_program():
    installed = ROOT / "target/packagers/node_modules/shaka-packager/bin"
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "")
    found = [*map(shutil.which, ["packager", "shaka-packager"]), installed / f"packager-linux-{machine}"]
    return next((path for path in found if path and Path(path).is_file()), None)


def shaka_source(maker, kind, codec):
    """Makes an input file for it: unfragmented MP4, or WebVTT."""
    path = maker.sources / f"{codec}.{'vtt' if kind == 'text' else 'mp4'}"
    if path.exists():
        return path
    if kind == "text":
        path.write_text(CUES)
        return path
    source = maker.source("sound" if kind == "audio" else kind, codec)
    tags = {"hevc": ["-tag:v", "hvc1"], "hev1": ["-tag:v", "hev1"]}.get(codec, [])
    if source is None or ffmpeg("-i", source, "-c", "copy", "-strict", "-2", *tags, path):
        return None
    return path


def gpac(maker):
    """Makes a file with MP4Box, if it is installed."""
    if not maker.wants("gpac_video"):
        return
    video = maker.source("video", "h264")
    if not shutil.which("MP4Box") or video is None:
        return say("SKIP: gpac_video: MP4Box or libx264 is not here")
    source, target = maker.sources / "gpac.mp4", maker.folder / "gpac_video.mp4"
    problem = ffmpeg("-i", video, "-c", "copy", source)
    done = run("MP4Box", "-frag", "1000", "-out", target, source)
    if problem or done.returncode != 0:
        return say(f"SKIP: gpac_video: {problem or done.stderr.decode(errors='replace').strip()[-200:]}")
    maker.made += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", default="", metavar="REGEX", help="names to make")
    arguments = parser.parse_args()
    if not shutil.which("ffmpeg"):
        say("SKIP: ffmpeg is not here")
        return 0
    SOUND["pcm"] = "-c:a pcm_s16le"
    maker = Maker(arguments.dir, arguments.only)
    crossed(maker)
    surgery(maker)
    joined(maker)
    several_truns(maker)
    shaka(maker)
    gpac(maker)
    shutil.rmtree(maker.sources)
    say(f"{maker.made} files in {arguments.dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
