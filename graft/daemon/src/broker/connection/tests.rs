//! Tests of the connection between the daemons of two hosts, which are network namespaces with keys and BPF programs of
//! their own. They need root.

use std::{
    net::UdpSocket,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path as File,
    process::Command,
    sync::mpsc::{Receiver, sync_channel},
};

use millrace_graft::{
    packet::{
        PacketRuntime as PacketHooks,
        keys::{KeyMessage, NoncePair},
    },
    settings::DaemonSettings,
};
use millrace_graft_tls::make_key;
use millrace_testkit::wait_for;
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket},
};
use ring::{
    aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey},
    digest::{SHA256, digest},
    hkdf,
};
use rustls::pki_types::{PrivateKeyDer, pem::PemObject as _};

use super::*;

const TEXT: &[u8] = b"what nobody is to read who gets the key tomorrow";
const PORT: u16 = 7000;
const DAEMONS: u16 = 40_000;

/// Two network namespaces that a veth pair connects.
struct CableSite {
    namespaces: [String; 2],
    directory: tempfile::TempDir,
}

impl CableSite {
    fn new(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {test}: needs root");
            return None;
        }
        let namespaces = ["a", "b"].map(|side| format!("mk-{}-{test}-{side}", std::process::id()));
        let site = Self { namespaces, directory: tempfile::tempdir().unwrap() };
        site.namespaces.iter().for_each(|name| ip(&format!("netns add {name}")));
        let [a, b] = &site.namespaces;
        ip(&format!("-n {a} link add eth type veth peer name eth netns {b}"));
        for (side, name) in site.namespaces.iter().enumerate() {
            ip(&format!("-n {name} addr add {}/24 dev eth", address(side)));
            ip(&format!("-n {name} link set eth up"));
        }
        Some(site)
    }

    fn inside<T: Send>(&self, side: usize, work: impl FnOnce() -> T + Send) -> T {
        thread_in(&format!("/run/netns/{}", self.namespaces[side]), work)
    }

    fn key(&self, name: &str) -> String {
        make_key(&self.directory.path().join(name)).unwrap().to_string()
    }

    fn host(&self, side: usize, [own, peer]: [&str; 2]) -> SteppedHost {
        let local = address(side);
        let remote = address(1 - side);
        let text = format!(
            "[sessions]\ninterface = [\"eth\"]\n[[graft]]\nname = \"once\"\nfunctions = [\"number\"]\n\
             [agreement]\nkey = \"{own}\"\n\
             [[peer]]\nname = \"far\"\nkey = \"{peer}\"\n[peer.sessions]\nlocal = \"{local}\"\nremote = \"{remote}\"\nports = \"{DAEMONS}\"\n\
             [[session]]\nname = \"s\"\nlocal = \"{local}:{PORT}\"\nremote = \"{remote}:{PORT}\"\npeer = \"far\"\ngraft = \"once\"\n"
        );
        let settings = DaemonSettings::parse(&text, self.directory.path()).unwrap().into_sessions().unwrap();
        let (heard, events) = sync_channel(64);
        self.inside(side, || {
            // A process that has just ended may keep the UDP port in use for a moment longer.
            let started = || PeerLinks::start(&settings, &heard).map_err(|error| format!("{error:#}"));
            let links = wait_for("the port", started);
            let hooks = PacketHooks::start(settings).unwrap();
            SteppedHost { links, hooks, events, exported: Vec::new(), pairs: Vec::new() }
        })
    }

    fn socket(&self, side: usize) -> UdpSocket {
        let socket = self.inside(side, || UdpSocket::bind((address(side), PORT)).unwrap());
        socket.connect((address(1 - side), PORT)).unwrap();
        socket.set_read_timeout(Some(millrace_testkit::BOUND)).unwrap();
        socket
    }
}

impl Drop for CableSite {
    fn drop(&mut self) {
        for name in &self.namespaces {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn thread_in<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = || {
            setns(std::fs::File::open(namespace).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        scope.spawn(inside).join().unwrap()
    })
}

fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().unwrap().success(), "ip {arguments}");
}

fn address(side: usize) -> &'static str {
    ["10.94.0.1", "10.94.0.2"][side]
}

/// A daemon's BPF programs and its connections to peers. The test calls their methods itself instead of running the
/// daemon.
struct SteppedHost {
    links: PeerLinks,
    hooks: PacketHooks,
    events: Receiver<(usize, PeerEvent)>,
    /// Secrets that the host has derived from its QUIC connections with the TLS exporter.
    exported: Vec<[u8; 32]>,
    /// Nonces for session keys that the host has received from its peer.
    pairs: Vec<NoncePair>,
}

impl SteppedHost {
    fn step(&mut self) {
        while let Ok((_, heard)) = self.events.try_recv() {
            match heard {
                PeerEvent::Connected(exported) => {
                    self.exported.push(exported.0);
                    self.hooks.connected("far", &exported).unwrap();
                }
                PeerEvent::Said(PeerMessage::Keys { message }) => {
                    if let KeyMessage::Offer(pair) | KeyMessage::Take(pair, _) = message.message {
                        self.pairs.push(pair);
                    }
                    self.hooks.receive_key_message("far", &message).unwrap();
                }
                PeerEvent::Said(_) => {}
            }
        }
        for (_, message) in self.hooks.take_key_messages() {
            self.links.daemons[0].say(&PeerMessage::Keys { message });
        }
        self.hooks.step(Duration::from_millis(5)).unwrap();
    }
}

fn until(
    site: &CableSite,
    hosts: &mut [SteppedHost; 2],
    what: &str,
    is_so: impl Fn(&[SteppedHost; 2]) -> bool,
) {
    wait_for(what, || {
        for (side, host) in hosts.iter_mut().enumerate() {
            site.inside(side, || host.step());
        }
        is_so(hosts)
    });
}

/// A recording of all packets that leave a host.
struct HostRecording(OwnedFd);

impl HostRecording {
    fn begin(site: &CableSite, side: usize) -> Self {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let open = || socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap();
        Self(site.inside(side, open))
    }

    /// Returns the payloads of UDP packets from the session's port.
    fn sealed(&self) -> Vec<Vec<u8>> {
        let mut buffer = [0; 4096];
        let mut sealed = Vec::new();
        while let Ok(bytes) = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            let frame = &buffer[..bytes];
            if bytes > 42 && frame[23] == 17 && frame[29] == 1 && frame[34..36] == PORT.to_be_bytes() {
                sealed.push(frame[42..].to_vec());
            }
        }
        sealed
    }
}

/// Opens a datagram of the first host as docs/notes/design/0039-session-keys.md describes it, without using the code
/// that seals.
fn open(sealed: &[u8], secret: &[u8], pair: &NoncePair) -> Option<Vec<u8>> {
    let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, &[pair.first, pair.second].concat());
    let root = salt.extract(secret);
    let derive = |what: &str, bytes: &mut [u8]| {
        let near = address(0);
        let far = address(1);
        let info = format!("millrace graft chacha20-poly1305 {what} out {near} {PORT} {far} {PORT}");
        root.expand(&[info.as_bytes()], Length(bytes.len())).unwrap().fill(bytes).unwrap();
    };
    let mut key = [0; 32];
    let mut nonce = [0; 12];
    derive("key", &mut key);
    derive("iv", &mut nonce);
    let (text, tail) = sealed.split_at(sealed.len().checked_sub(8)?);
    nonce[6..].iter_mut().zip(&tail[2..]).for_each(|(byte, number)| *byte ^= number);
    let key = LessSafeKey::new(UnboundKey::new(&CHACHA20_POLY1305, &key).unwrap());
    let mut text = text.to_vec();
    let opened = key.open_in_place(Nonce::assume_unique_for_key(nonce), Aad::from(tail), &mut text);
    opened.ok().map(|text| text.to_vec())
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// Returns all values that an attacker with a host's key file could try as the secret: the file, its digest, and each
/// run of 32 consecutive bytes of it.
fn guesses(key: &File) -> Vec<Vec<u8>> {
    let pem = std::fs::read(key).unwrap();
    let der = PrivateKeyDer::from_pem_slice(&pem).unwrap().secret_der().to_vec();
    let windows = der.windows(32).map(<[u8]>::to_vec);
    let digests = [&pem, &der].map(|bytes| digest(&SHA256, bytes).as_ref().to_vec());
    windows.chain(digests).chain([pem.clone(), der.clone()]).collect()
}

/// An attacker records a session, gets the keys of both hosts later, and cannot open the recording: neither with
/// anything derived from the keys nor by impersonating a host. With the secret of the session's own connection every
/// datagram opens, which proves that the right packets were recorded.
#[test]
fn recorded_session_cannot_be_decrypted_with_host_keys() {
    let Some(site) = CableSite::new("recorded") else { return };
    let identities = ["near.key", "far.key"].map(|name| site.key(name));
    let start = |side: usize| site.host(side, [["near.key", "far.key"][side], &identities[1 - side]]);
    let recording = HostRecording::begin(&site, 0);
    let mut hosts = [0, 1].map(start);
    until(&site, &mut hosts, "keys", |hosts| hosts.iter().all(|host| host.hooks.is_open()));
    let near = site.socket(0);
    let far = site.socket(1);
    let mut buffer = [0; 2048];
    for _ in 0..20 {
        near.send(TEXT).unwrap();
        let bytes = far.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..bytes], TEXT);
    }
    let sealed = recording.sealed();
    assert!(sealed.len() >= 20, "{}", sealed.len());
    let exported = hosts[0].exported.clone();
    let pairs = [&hosts[0].pairs[..], &hosts[1].pairs].concat();
    assert_eq!(exported[0], hosts[1].exported[0], "both have the same");
    let opens = |secret: &[u8]| {
        let opened = |sealed: &&Vec<u8>| pairs.iter().any(|pair| open(sealed, secret, pair).is_some());
        sealed.iter().filter(opened).count()
    };
    assert_eq!(exported.iter().map(|secret| opens(secret)).sum::<usize>(), sealed.len());
    let each = |secret| pairs.iter().map(move |pair| (secret, pair));
    let known: Vec<(&[u8; 32], &NoncePair)> = exported.iter().flat_map(each).collect();
    let text = |sealed: &Vec<u8>| known.iter().find_map(|(secret, pair)| open(sealed, *secret, pair));
    let texts = sealed.iter().filter_map(text).filter(|text| text.starts_with(TEXT)).count();
    assert_eq!(texts, 20);

    // The daemons have ended, so no process has the secret any more.
    drop(hosts);
    for key in ["near.key", "far.key"] {
        let guesses = guesses(&site.directory.path().join(key));
        assert!(guesses.len() > 50);
        assert_eq!(guesses.iter().map(|secret| opens(secret)).sum::<usize>(), 0, "{key}");
    }
    let mut thieves = [0, 1].map(start);
    until(&site, &mut thieves, "keys", |hosts| hosts.iter().all(|host| host.hooks.is_open()));
    for secret in &thieves[0].exported {
        assert_eq!(opens(secret), 0, "another connection of the same keys");
    }
}

/// Messages that an unknown host sends to the daemons' port are ignored, and do not keep the peer from connecting.
#[test]
fn unknown_host_does_not_keep_the_peer_daemon_from_connecting() {
    let Some(site) = CableSite::new("passed") else { return };
    let identities = ["near.key", "far.key"].map(|name| site.key(name));
    site.key("stranger.key");
    let mut answers = site.host(1, ["far.key", &identities[0]]);
    ip(&format!("-n {} addr add 10.94.0.3/24 dev eth", site.namespaces[0]));
    // One intruder uses the peer's address and port, but an unknown key. Another uses the peer's key, but another port.
    let mut stranger = site.host(0, ["stranger.key", &identities[1]]);
    wait_for("refusals", || {
        site.inside(0, || stranger.step());
        let says = |host: &SteppedHost, words: &str| {
            host.links.daemons[0].trouble().is_some_and(|it| it.contains(words))
        };
        says(&stranger, "refuses this host") && says(&answers, "/udp was refused")
    });
    drop(stranger);
    let noise = site.inside(0, || UdpSocket::bind("10.94.0.3:0").unwrap());
    for length in 0..1400 {
        noise.send_to(&vec![0xc3; length], (address(1), DAEMONS)).unwrap();
    }
    let mut hosts = [site.host(0, ["near.key", &identities[1]]), {
        site.inside(1, || answers.step());
        answers
    }];
    until(&site, &mut hosts, "keys", |hosts| hosts.iter().all(|host| host.hooks.is_open()));
    assert_eq!(hosts[0].exported[0], hosts[1].exported[0]);
    assert_eq!(hosts.each_ref().map(|host| host.links.daemons[0].trouble()), [None, None]);
}
