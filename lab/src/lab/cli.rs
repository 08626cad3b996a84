//! `millrace-lab lab`: commands that create, change and remove labs.

use std::fmt;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Subcommand;
use millrace_daemon::columns::indented;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::accuracy;
use super::control::{self, LabRequest, LinkStatus, Status};
use super::impair::Settings;
use super::shape::FrameCounters;
use super::signals::{CaughtSignals, runtime};
use super::topology::{Directions, NodeInterface, Topology};
use super::{Lab, registry};

use crate::{hostile, receivers};

/// Time that a command may take to end after a signal, and that a lab may take to come up or go down.
const GRACE: Duration = Duration::from_secs(10);

/// The line that `lab up` prints once the lab is up.
const READY: &str = "ready";

#[derive(Debug, clap::Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabVerb,
}

#[derive(Debug, Subcommand)]
enum LabVerb {
    /// Bring a lab up, run a command, take the lab down
    Run(RunCommand),
    /// Bring a lab up and keep it until Ctrl-C, SIGTERM or `lab down`
    Up(Up),
    /// Take a lab down
    Down(Which),
    /// Run a command inside a node of a lab that is up
    Exec(Exec),
    /// Show nodes, addresses, links and counters of the labs that are up
    Status(ShowCommand),
    /// Change delay, loss, rate and other settings of a link while its lab is up
    Set(SetCommand),
    /// Remove the remains of labs whose owner died
    Clean,
    /// Measure how precisely the emulator impairs packets
    Accuracy(ShowCommand),
    /// Attack a relay as a hostile client
    Hostile(hostile::cli::HostileCommandArgs),
    /// Subscribe thousands of times in one process, from addresses that change
    Receivers(receivers::cli::ReceiversArgs),
}

#[derive(Debug, clap::Args)]
struct LabShapeArgs {
    /// TOML file with links, impairments and events
    #[arg(long, value_name = "FILE", conflicts_with_all = ["relays", "subscribers"])]
    topology: Option<PathBuf>,
    /// Number of relays, which form a chain: pub - relay - relay2 ...
    #[arg(long, default_value_t = 1)]
    relays: usize,
    /// Number of subscribers on the last relay: sub1, sub2, ...
    #[arg(long, default_value_t = 1)]
    subscribers: usize,
    /// Impair a link: `LINK[:forward|:backward] KEY=VALUE ...`; LINK may be `all`
    #[arg(long, value_name = "SETTINGS")]
    impair: Vec<String>,
    /// Use the emulator for every link, so that each can be changed while the lab is up
    #[arg(long)]
    emulate: bool,
    /// Seed of the emulator's random decisions; netem is not used then, since it has no seed
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Debug, clap::Args)]
struct RunCommand {
    #[command(flatten)]
    shape: LabShapeArgs,
    /// Run the command inside this node instead of outside of the lab
    #[arg(long, value_name = "NODE")]
    r#in: Option<String>,
    /// Command to run; it finds the lab in LAB_ID and its addresses in LAB_<NODE>_V4 and LAB_<NODE>_V6
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct Up {
    #[command(flatten)]
    shape: LabShapeArgs,
    /// Return once the lab is up
    #[arg(long)]
    detach: bool,
}

#[derive(Debug, clap::Args)]
struct Which {
    /// ID of the lab, if more than one is up; LAB_ID by default
    #[arg(long, value_name = "ID")]
    lab: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Exec {
    #[command(flatten)]
    which: Which,
    /// Node of the lab, such as pub, relay or sub1
    node: String,
    /// Command to run, with its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct ShowCommand {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct SetCommand {
    #[command(flatten)]
    which: Which,
    /// Link of the lab, such as pub-relay; see `lab status`
    link: String,
    /// Directions in which the settings change
    #[arg(long, value_enum, default_value_t = Directions::Both)]
    direction: Directions,
    /// Settings to change, such as `delay=10ms loss=1%`; see docs/notes/lab.md
    #[arg(required = true, value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

pub fn run(args: LabArgs) -> Result<()> {
    match args.command {
        LabVerb::Run(run) => run_in_lab(&run),
        LabVerb::Up(args) if args.detach => up_detached(),
        LabVerb::Up(args) => up(&args.shape),
        LabVerb::Down(which) => down(&which),
        LabVerb::Exec(exec) => exec_in_node(&exec),
        LabVerb::Status(show) => show_status(show.json),
        LabVerb::Set(set) => change(&set),
        LabVerb::Clean => clean(),
        LabVerb::Accuracy(show) => measure_accuracy(show.json),
        LabVerb::Hostile(args) => hostile::cli::run(&args),
        LabVerb::Receivers(args) => receivers::cli::run(&args),
    }
}

impl LabShapeArgs {
    fn build(&self) -> Result<Topology> {
        let mut topology = match &self.topology {
            Some(path) => Topology::load(path).with_context(|| path.display().to_string())?,
            None => Topology::standard(self.relays, self.subscribers),
        };
        for text in &self.impair {
            let (target, settings) = text
                .split_once(char::is_whitespace)
                .ok_or_else(|| anyhow!("--impair `{text}`: no settings"))?;
            let (link, directions) = match target.split_once(':') {
                None => (target, Directions::Both),
                Some((link, "forward")) => (link, Directions::Forward),
                Some((link, "backward")) => (link, Directions::Backward),
                Some((_, other)) => bail!("--impair `{text}`: `{other}` is not forward or backward"),
            };
            topology.impair(link, directions, settings)?;
        }
        topology.links.iter_mut().for_each(|link| link.emulate |= self.emulate);
        if let Some(seed) = self.seed {
            (topology.seed, topology.netem) = (seed, false);
        }
        Ok(topology)
    }
}

fn run_in_lab(run: &RunCommand) -> Result<()> {
    let topology = run.shape.build()?;
    let status = runtime()?.block_on(async {
        let mut signals = CaughtSignals::catch()?;
        let lab = Lab::new(&topology)?;
        let (program, arguments) = run.command.split_first().context("no command")?;
        let mut command = match &run.r#in {
            Some(node) => lab.node(node)?.command(program),
            None => Command::new(program),
        };
        command.args(arguments).envs(environment(&lab));
        let child = tokio::process::Command::from(command).spawn();
        let mut child = child.with_context(|| format!("cannot run {program}"))?;
        tokio::select! {
            status = child.wait() => anyhow::Ok(status?),
            signal = signals.recv() => end(&mut child, signal).await,
        }
    })?;
    // As in a shell, the exit status after a signal is 128 plus the signal's number.
    std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()));
}

/// Returns the environment variables that describe the lab to a command: `LAB_ID`, `LAB_RELAY_V4`, `LAB_RELAY_V6`,
/// `LAB_RELAY_NETNS`, and so on.
fn environment(lab: &Lab) -> Vec<(String, String)> {
    let mut list = vec![("LAB_ID".to_owned(), lab.id().to_owned())];
    for node in lab.nodes() {
        let name = node.name().to_uppercase().replace('-', "_");
        list.push((format!("LAB_{name}_V4"), node.addr_v4().to_string()));
        list.push((format!("LAB_{name}_V6"), node.addr_v6().to_string()));
        list.push((format!("LAB_{name}_NETNS"), node.netns().name().to_owned()));
    }
    list
}

/// Ends the command with the signal, and kills it if that does not help.
///
/// The terminal sends Ctrl-C to all foreground processes, so the command has received it already. A second SIGINT would
/// mean "end at once" to many programs. So the command gets time first, and then SIGTERM.
async fn end(child: &mut tokio::process::Child, mut signal: Signal) -> Result<ExitStatus> {
    if signal == Signal::SIGINT {
        if let Ok(status) = tokio::time::timeout(GRACE, child.wait()).await {
            return Ok(status?);
        }
        signal = Signal::SIGTERM;
    }
    if let Some(pid) = child.id() {
        kill(Pid::from_raw(pid.try_into()?), signal)?;
    }
    match tokio::time::timeout(GRACE, child.wait()).await {
        Ok(status) => Ok(status?),
        Err(_) => {
            child.kill().await?;
            Ok(child.wait().await?)
        }
    }
}

fn up(shape: &LabShapeArgs) -> Result<()> {
    let topology = shape.build()?;
    runtime()?.block_on(async {
        let mut signals = CaughtSignals::catch()?;
        let lab = Lab::new(&topology)?;
        let mut out = std::io::stdout().lock();
        write!(out, "{}", StatusText(&control::ask(lab.id(), &LabRequest::Status)?))?;
        writeln!(out, "{READY}: Ctrl-C or `millrace-lab lab down` removes it")?;
        out.flush()?;
        signals.recv().await;
        Ok(())
    })
}

/// Runs this `lab up` command again in the background, without `--detach`, and waits until the lab is ready.
fn up_detached() -> Result<()> {
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--detach");
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The background command gets a process group of its own, so that Ctrl-C in this terminal does not end the lab.
        .process_group(0)
        .spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    for line in lines {
        let line = line?;
        if line.starts_with(READY) {
            println!("{READY}: `millrace-lab lab down` removes it");
            return Ok(());
        }
        println!("{line}");
    }
    let output = child.wait_with_output()?;
    bail!("{}", String::from_utf8_lossy(&output.stderr).trim().trim_start_matches("Error: "))
}

fn down(which: &Which) -> Result<()> {
    let id = which.find()?;
    let owner = registry::owner(&id).with_context(|| format!("lab {id} has no owner process"))?;
    kill(Pid::from_raw(owner), Signal::SIGTERM)?;
    let start = Instant::now();
    while registry::live().contains(&id) {
        ensure!(start.elapsed() < GRACE * 2, "lab {id} is still up; its owner is process {owner}");
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("lab {id} is down");
    Ok(())
}

fn exec_in_node(exec: &Exec) -> Result<()> {
    let id = exec.which.find()?;
    let status = control::ask(&id, &LabRequest::Status)?;
    let known: Vec<&str> = status.nodes.iter().map(|node| node.name.as_str()).collect();
    ensure!(
        known.contains(&exec.node.as_str()),
        "lab {id} has no node `{}`; it has {}",
        exec.node,
        known.join(", ")
    );
    let (program, arguments) = exec.command.split_first().context("no command")?;
    let error = registry::netns_of(&id, &exec.node).command(program).args(arguments).exec();
    Err(error).context("cannot run nsenter")
}

fn show_status(json: bool) -> Result<()> {
    let ask = |id: String| match control::ask(&id, &LabRequest::Status) {
        Ok(status) => Some(status),
        Err(error) => {
            eprintln!("lab {id} does not answer; it may be coming up or going down: {error}");
            None
        }
    };
    let labs: Vec<Status> = registry::live().into_iter().filter_map(ask).collect();
    let dead = registry::dead();
    let left = format!(
        "left behind by processes that ended: {}; `millrace-lab lab clean` removes these labs",
        dead.join(", ")
    );
    let left = Some(indented(&left, WIDTH, "  ")).filter(|_| !dead.is_empty());
    if json {
        println!("{}", serde_json::to_string_pretty(&labs)?);
        left.iter().for_each(|left| eprintln!("{left}"));
        return Ok(());
    }
    if labs.is_empty() {
        println!("no lab is up");
    }
    labs.iter().for_each(|lab| print!("{}", StatusText(lab)));
    left.iter().for_each(|left| println!("{left}"));
    Ok(())
}

fn change(set: &SetCommand) -> Result<()> {
    let id = set.which.find()?;
    let settings = Settings::parse(&set.settings.join(" "))?;
    let request = LabRequest::Set { link: set.link.clone(), direction: set.direction, settings };
    let status = control::ask(&id, &request)?;
    if let Some(link) = status.links.iter().find(|link| link.name == set.link) {
        print!("{}", LinkText(link));
    }
    Ok(())
}

fn clean() -> Result<()> {
    let removed = registry::clean()?;
    match removed.as_slice() {
        [] => println!("nothing to remove"),
        ids => println!("removed {}", ids.join(", ")),
    }
    Ok(())
}

fn measure_accuracy(json: bool) -> Result<()> {
    super::remove_on_signal()?;
    let report = accuracy::measure()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

impl Which {
    fn find(&self) -> Result<String> {
        let live = registry::live();
        let asked = self.lab.clone().or_else(|| std::env::var("LAB_ID").ok());
        match (asked, live.as_slice()) {
            (Some(id), _) if live.contains(&id) => Ok(id),
            (Some(id), []) => bail!("lab {id} is not up, nor any other"),
            (Some(id), _) => bail!("lab {id} is not up; the labs that are up are {}", live.join(", ")),
            (None, [id]) => Ok(id.clone()),
            (None, []) => bail!("no lab is up"),
            (None, _) => bail!("more than one lab is up: choose one of {} with --lab", live.join(", ")),
        }
    }
}

struct StatusText<'a>(&'a Status);

/// Width of output lines, characters. Every terminal is at least that wide.
const WIDTH: usize = 80;

impl fmt::Display for StatusText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "lab {} (process {})", self.0.id, self.0.owner)?;
        for node in &self.0.nodes {
            writeln!(f, "  node {:<12} netns {}", node.name, node.netns)?;
            for NodeInterface { link, device, v4, v6, .. } in &node.interfaces {
                line(f, "    ", &format!("{device:<15} {v4}/24  {v6}/64  link {link}"))?;
            }
        }
        self.0.links.iter().try_for_each(|link| write!(f, "{}", LinkText(link)))
    }
}

struct LinkText<'a>(&'a LinkStatus);

impl fmt::Display for LinkText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LinkStatus { name, ends: [a, b], forward, backward } = self.0;
        let (Some(forward), Some(backward)) = (forward, backward) else {
            return line(f, "  ", &format!("link {name}: plain veth"));
        };
        line(f, "  ", &format!("link {name}"))?;
        for (from, to, wire) in [(a, b, forward), (b, a, backward)] {
            let FrameCounters { received, delivered, lost, queue_dropped, oversize, .. } = wire.counters;
            let FrameCounters { duplicated, reordered, overrun, queued, in_flight, .. } = wire.counters;
            line(f, "    ", &format!("{from} -> {to}: {}", wire.settings))?;
            let counts = format!(
                "{received} received, {delivered} delivered, {lost} lost, {queue_dropped} dropped by \
                 the queue, {oversize} oversize, {duplicated} duplicated, {reordered} reordered, {overrun} \
                 overrun, {queued} queued, {in_flight} in flight"
            );
            line(f, "      ", &counts)?;
        }
        Ok(())
    }
}

/// Writes a text in lines of at most [`WIDTH`] characters. All lines after the first are indented by two more spaces.
fn line(f: &mut fmt::Formatter<'_>, indent: &str, text: &str) -> fmt::Result {
    writeln!(
        f,
        "{indent}{}",
        indented(text, WIDTH - indent.len(), "  ").replace('\n', &format!("\n{indent}"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::control::{NodeStatus, WireStatus};

    #[test]
    fn lab_status_with_long_names_and_counters_fits_the_terminal_width() {
        let name = "a-link-of-sixty-characters-that-somebody-has-really-given-it";
        let many = 1_234_567_890;
        let counters = FrameCounters {
            received: many,
            delivered: many,
            lost: many,
            queue_dropped: many,
            oversize: many,
            ..FrameCounters::default()
        };
        let wire = || {
            let settings =
                "delay=100ms jitter=10ms loss=1% burst-start=1% burst-end=10% rate=100mbit reorder=1%";
            Some(WireStatus { settings: settings.into(), counters })
        };
        let interface = NodeInterface {
            link: name.into(),
            device: "to-twelve-chars".into(),
            v4: "10.77.255.254".parse().unwrap(),
            v6: "fd00:6d72:0:ffff::fffe".parse().unwrap(),
            mac: String::new(),
        };
        let status = Status {
            id: "mr-4194304.0".into(),
            owner: 4_194_304,
            nodes: vec![NodeStatus {
                name: "twelve-chars".into(),
                netns: "mr-4194304.0-twelve-chars".into(),
                interfaces: vec![interface],
            }],
            links: vec![
                LinkStatus {
                    name: name.into(),
                    ends: ["twelve-chars".into(), "a".into()],
                    forward: wire(),
                    backward: wire(),
                },
                LinkStatus {
                    name: name.into(),
                    ends: ["a".into(), "b".into()],
                    forward: None,
                    backward: None,
                },
            ],
        };
        let text = StatusText(&status).to_string();
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{} wide: {line}\n{text}", line.chars().count());
        }
        assert!(text.contains("1234567890 lost") && text.contains(name), "{text}");
    }
}
