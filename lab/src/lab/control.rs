//! Threads of a running lab: one applies the timeline's events, one serves the socket for `millrace-lab lab set` and
//! `status`.
//!
//! Each connection to the socket carries one request and one answer, each a line of JSON.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::impair::Settings;
use super::shape::FrameCounters;
use super::topology::{Directions, LinkDirection, LinkEvent, NodeInterface};
use super::{Error, LabLink, LabNetwork, Result, registry};

/// Longest wait for a client's request, since clients are served one after the other.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LabRequest {
    Status,
    Set { link: String, direction: Directions, settings: Settings },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Status {
    pub id: String,
    pub owner: u32,
    pub nodes: Vec<NodeStatus>,
    pub links: Vec<LinkStatus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct NodeStatus {
    pub name: String,
    pub netns: String,
    pub interfaces: Vec<NodeInterface>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LinkStatus {
    pub name: String,
    pub ends: [String; 2],
    pub forward: Option<WireStatus>,
    pub backward: Option<WireStatus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireStatus {
    pub settings: String,
    pub counters: FrameCounters,
}

impl Status {
    pub(super) fn from_net(net: &LabNetwork) -> Self {
        let nodes = net.nodes.iter().map(|node| NodeStatus {
            name: node.name.clone(),
            netns: node.netns.name().to_owned(),
            interfaces: node.interfaces.clone(),
        });
        let links = net.links.iter().map(|link| LinkStatus {
            name: link.name.clone(),
            ends: link.ends.clone(),
            forward: WireStatus::from_link(link, LinkDirection::Forward),
            backward: WireStatus::from_link(link, LinkDirection::Backward),
        });
        Self {
            id: net.claim.id().to_owned(),
            owner: std::process::id(),
            nodes: nodes.collect(),
            links: links.collect(),
        }
    }
}

impl WireStatus {
    fn from_link(link: &LabLink, direction: LinkDirection) -> Option<Self> {
        let counters = link.counters(direction)?;
        Some(Self { settings: link.impairment(direction).to_string(), counters })
    }
}

/// Sends a request to a running lab. Returns its status.
pub(super) fn ask(id: &str, request: &LabRequest) -> Result<Status> {
    let io = |source| Error::Io { what: format!("talk to lab {id}"), source };
    let mut stream = UnixStream::connect(registry::control_socket(id)).map_err(io)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
    write_line(&mut stream, request).map_err(io)?;
    let answer: std::result::Result<Status, String> = read_line(&stream).map_err(io)?;
    answer.map_err(Error::Invalid)
}

/// The threads of a lab. They end when this is dropped.
pub(super) struct Background {
    socket: PathBuf,
    stop: Option<Sender<()>>,
    timeline: Option<JoinHandle<()>>,
    server: Option<JoinHandle<()>>,
}

impl Background {
    pub(super) fn start(net: Arc<LabNetwork>, events: Vec<LinkEvent>) -> Result<Self> {
        let socket = net.claim.control_socket();
        let io = |source| Error::Io { what: format!("serve {}", socket.display()), source };
        let listener = UnixListener::bind(&socket).map_err(io)?;
        let (stop, stopped) = channel();
        let served = net.clone();
        let timeline = std::thread::Builder::new().name("lab timeline".into());
        let timeline = timeline.spawn(move || play(&net, events, &stopped)).map_err(io)?;
        let server = std::thread::Builder::new().name("lab control".into());
        let server = server.spawn(move || serve(&served, &listener)).map_err(io)?;
        Ok(Self { socket, stop: Some(stop), timeline: Some(timeline), server: Some(server) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.stop.take());
        // An empty request ends the server; see `serve`.
        let asked = UnixStream::connect(&self.socket).and_then(|mut stream| stream.write_all(b"\n"));
        if asked.is_err() {
            self.server = None;
        }
        for thread in [self.timeline.take(), self.server.take()].into_iter().flatten() {
            let _ = thread.join();
        }
    }
}

fn play(net: &LabNetwork, mut events: Vec<LinkEvent>, stopped: &Receiver<()>) {
    let start = Instant::now();
    events.sort_by_key(|event| event.at);
    for event in events {
        let wait = (start + event.at).saturating_duration_since(Instant::now());
        if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let done = net.link(&event.link).and_then(|link| link.change(event.direction, &event.settings));
        if let Err(error) = done {
            tracing::error!(
                %error,
                link = event.link,
                "lab: a scheduled event of the topology file could not be applied to its link"
            );
        }
    }
}

/// Answers requests until one is an empty line. The lab's owner sends that to end the thread.
fn serve(net: &LabNetwork, listener: &UnixListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let mut line = String::new();
        match BufReader::new(&stream).read_line(&mut line) {
            Ok(1) => return,
            Ok(_) => {}
            Err(_) => continue,
        }
        let answer = serde_json::from_str(&line)
            .map_err(|error| error.to_string())
            .and_then(|request| handle(net, request).map_err(|error| error.to_string()));
        // A write error is ignored: the client may be gone.
        let _ = write_line(&mut stream, &answer);
    }
}

fn handle(net: &LabNetwork, request: LabRequest) -> Result<Status> {
    if let LabRequest::Set { link, direction, settings } = request {
        net.link(&link)?.change(direction, &settings)?;
    }
    Ok(Status::from_net(net))
}

fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn read_line<T: serde::de::DeserializeOwned>(stream: &UnixStream) -> std::io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
