//! What runs beside a lab: its timeline, and the socket that `millrace-lab lab set` and `status` talk to.
//!
//! One connection carries one request and one answer, each a line of JSON.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::impair::Settings;
use super::shape::Counters;
use super::topology::{Direction, Directions, Event, Interface};
use super::{Error, Link, Net, Result, registry};

/// A client that does not speak must not hold up the others.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Request {
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
    pub interfaces: Vec<Interface>,
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
    pub counters: Counters,
}

impl Status {
    pub(super) fn of(net: &Net) -> Self {
        let nodes = net.nodes.iter().map(|node| NodeStatus {
            name: node.name.clone(),
            netns: node.netns.name().to_owned(),
            interfaces: node.interfaces.clone(),
        });
        let links = net.links.iter().map(|link| LinkStatus {
            name: link.name.clone(),
            ends: link.ends.clone(),
            forward: WireStatus::of(link, Direction::Forward),
            backward: WireStatus::of(link, Direction::Backward),
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
    fn of(link: &Link, direction: Direction) -> Option<Self> {
        let counters = link.counters(direction)?;
        Some(Self { settings: link.impairment(direction).to_string(), counters })
    }
}

/// Asks a live lab.
pub(super) fn ask(id: &str, request: &Request) -> Result<Status> {
    let io = |source| Error::Io { what: format!("talk to lab {id}"), source };
    let mut stream = UnixStream::connect(registry::control_socket(id)).map_err(io)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(io)?;
    write_line(&mut stream, request).map_err(io)?;
    let answer: std::result::Result<Status, String> = read_line(&stream).map_err(io)?;
    answer.map_err(Error::Invalid)
}

/// The threads of a lab; dropping it ends them.
pub(super) struct Background {
    socket: PathBuf,
    stop: Option<Sender<()>>,
    timeline: Option<JoinHandle<()>>,
    server: Option<JoinHandle<()>>,
}

impl Background {
    pub(super) fn start(net: Arc<Net>, events: Vec<Event>) -> Result<Self> {
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
        // An empty request ends the server: see `serve`.
        let asked = UnixStream::connect(&self.socket).and_then(|mut stream| stream.write_all(b"\n"));
        if asked.is_err() {
            self.server = None;
        }
        for thread in [self.timeline.take(), self.server.take()].into_iter().flatten() {
            let _ = thread.join();
        }
    }
}

fn play(net: &Net, mut events: Vec<Event>, stopped: &Receiver<()>) {
    let start = Instant::now();
    events.sort_by_key(|event| event.at);
    for event in events {
        let wait = (start + event.at).saturating_duration_since(Instant::now());
        if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let done = net.link(&event.link).and_then(|link| link.change(event.direction, &event.settings));
        if let Err(error) = done {
            tracing::error!(%error, link = event.link, "lab: event failed");
        }
    }
}

/// Answers until a client sends an empty line, which the owner does to end the thread.
fn serve(net: &Net, listener: &UnixListener) {
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
        // The client may be gone.
        let _ = write_line(&mut stream, &answer);
    }
}

fn handle(net: &Net, request: Request) -> Result<Status> {
    if let Request::Set { link, direction, settings } = request {
        net.link(&link)?.change(direction, &settings)?;
    }
    Ok(Status::of(net))
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
