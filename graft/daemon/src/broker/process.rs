//! Functions of sessions that are processes: one for each session, and one more that waits, so that who opens a session does not wait.
//!
//! A process has one end of the application's socket, and the session's own socket, which the joints frame and seal. What it knows of the
//! session is gone with it, so a session whose process ends is over.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use millrace_base::control::{Control, Received};
use millrace_daemon::confine::{CPU_IDLE, Confined, Hello, hello};
use millrace_graft::packet::{Process, ProcessStatus, Settings};
use tracing::{info, warn};

use super::Broker;
use crate::process::{Serve, Tell};

/// Until one that could not be started, or has ended, is followed by another: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(60);

/// Of a datagram, what is around an application's: headers of SCTP, and some to spare.
pub const AROUND: usize = 40;

/// Of all programs that grafts of the settings name.
#[derive(Default)]
pub struct Processes {
    /// By grafts.
    functions: BTreeMap<String, Process>,
    /// By programs.
    waiting: BTreeMap<String, Waiting>,
    /// By sessions' lives.
    running: BTreeMap<u64, Running>,
}

struct Waiting {
    process: Option<(Confined, Control)>,
    is_ready: bool,
    trouble: Option<String>,
    next: Instant,
    pause: Duration,
    started: u64,
    ended: BTreeMap<&'static str, u64>,
}

struct Running {
    process: Confined,
    control: Control,
    program: String,
    is_ready: bool,
    /// When it last said that it goes on, or began.
    heard: Instant,
}

/// How a session's process has ended.
enum End {
    /// It has said so, and everything has come.
    Done,
    /// In words.
    Failed(String),
}

impl Processes {
    pub fn of(settings: &Settings) -> Self {
        let mut processes = Self::default();
        processes.apply(settings);
        processes
    }

    /// Sessions that are open keep theirs, which are listed as long as their program is named.
    pub fn apply(&mut self, settings: &Settings) {
        let each = settings.grafts.values();
        let functions = each.filter_map(|graft| Some((graft.name.clone(), graft.process.clone()?)));
        self.functions = functions.collect();
        let named: BTreeSet<_> = self.functions.values().map(|process| process.program.clone()).collect();
        self.waiting.retain(|program, _| named.contains(program));
        for program in named {
            self.waiting.entry(program).or_insert_with(Waiting::new);
        }
        self.tick(Instant::now());
    }

    pub fn is_process(&self, graft: &str) -> bool {
        self.functions.contains_key(graft)
    }

    /// Nothing can go on with what a process knows of a session.
    pub fn check_change(&self, from: &str, to: &str) -> Result<(), String> {
        match [to, from].into_iter().find(|graft| self.is_process(graft)) {
            Some(process) if from != to => Err(format!(
                "impossible: graft {process} is a process, and nothing can go on with what that knows: open another session"
            )),
            _ => Ok(()),
        }
    }

    /// Why a graft cannot be had now.
    pub fn trouble(&self, graft: &str) -> Option<&str> {
        self.waiting.get(&self.functions.get(graft)?.program)?.trouble.as_deref()
    }

    /// Has a process wait for a session that is about to begin, if the graft is one.
    ///
    /// # Errors
    /// Why there can be none.
    pub fn prepare(&mut self, graft: &str) -> Result<(), String> {
        let Some(function) = self.functions.get(graft) else { return Ok(()) };
        let gone = || format!("graft {graft} has no process now: try again");
        let waiting = self.waiting.get_mut(&function.program).ok_or_else(gone)?;
        if waiting.process.is_none() {
            waiting.tick(&function.program, Instant::now());
        }
        match &waiting.trouble {
            Some(why) => Err(format!("graft {graft} cannot be had: {why}")),
            None if waiting.process.is_none() => Err(gone()),
            None => Ok(()),
        }
    }

    /// Begins a session. Returns what the application gets: the other end of it is the process's.
    ///
    /// # Errors
    /// There is none that waits.
    pub fn start(
        &mut self,
        life: u64,
        graft: &str,
        wire: impl std::os::fd::AsFd,
        packet_bytes: usize,
    ) -> Result<OwnedFd, String> {
        let gone = || format!("graft {graft} has no process now: try again");
        let function = self.functions.get(graft).ok_or_else(gone)?;
        let waiting = self.waiting.get_mut(&function.program).ok_or_else(gone)?;
        let (process, control) = waiting.process.take().ok_or_else(gone)?;
        let is_ready = std::mem::take(&mut waiting.is_ready);
        let (own, theirs) = Control::pair().map_err(|error| error.to_string())?;
        let serve = Serve { packet_bytes, parameters: function.parameters.clone() };
        control
            .send(&serve, &[wire.as_fd(), theirs.as_fd()])
            .map_err(|error| format!("the process of graft {graft}: {error}"))?;
        info!(graft, pid = process.pid(), "a session has a process");
        let program = function.program.clone();
        self.running.insert(life, Running { process, control, program, is_ready, heard: Instant::now() });
        own.as_fd().try_clone_to_owned().map_err(|error| error.to_string())
    }

    pub fn has(&self, life: u64) -> bool {
        self.running.contains_key(&life)
    }

    /// Nobody has the session any more.
    pub fn stop(&mut self, life: u64) {
        if let Some(running) = self.running.remove(&life) {
            self.count(&running.program, "stopped");
        }
    }

    /// Those of sessions that have ended since the last call.
    fn ended(&mut self) -> Vec<(u64, End)> {
        let look = |(life, running): (&u64, &mut Running)| Some((*life, running.look()?));
        let ended: Vec<_> = self.running.iter_mut().filter_map(look).collect();
        for (life, end) in &ended {
            let Some(running) = self.running.remove(life) else { continue };
            let how = match end {
                End::Done => "done",
                End::Failed(why) => {
                    warn!(pid = running.process.pid(), "the process of a session: {why}");
                    "failed"
                }
            };
            self.count(&running.program, how);
        }
        ended
    }

    fn count(&mut self, program: &str, how: &'static str) {
        if let Some(waiting) = self.waiting.get_mut(program) {
            *waiting.ended.entry(how).or_default() += 1;
        }
    }

    /// Has one wait, of each program, as soon as that may be.
    pub fn tick(&mut self, now: Instant) {
        for (program, waiting) in &mut self.waiting {
            waiting.tick(program, now);
        }
    }

    pub fn status(&self) -> Vec<ProcessStatus> {
        let each = self.waiting.iter().map(|(program, waiting)| ProcessStatus {
            program: program.clone(),
            running: self.running.values().filter(|running| running.program == *program).count(),
            is_ready: waiting.is_ready,
            started: waiting.started,
            ended: waiting.ended.iter().map(|(how, count)| ((*how).to_owned(), *count)).collect(),
            trouble: waiting.trouble.clone(),
        });
        each.collect()
    }
}

impl Broker {
    /// A session has ended with its process, and grafts can be had as long as one waits for them.
    pub(super) fn look_at_processes(&mut self, now: Instant) {
        for (life, end) in self.processes.ended() {
            let open = self.leases.get(&life).filter(|lease| lease.is_open());
            if let (End::Failed(why), Some(lease)) = (end, open) {
                let reason = format!("graft {}: {why}", lease.graft);
                self.end(life, &reason, false);
            }
        }
        self.processes.tick(now);
        for offer in self.offers.iter_mut().filter(|offer| offer.is_process) {
            offer.trouble = self.processes.trouble(&offer.graft).map(str::to_owned);
        }
    }
}

impl Waiting {
    fn new() -> Self {
        Self {
            process: None,
            is_ready: false,
            trouble: None,
            next: Instant::now(),
            pause: PAUSE,
            started: 0,
            ended: BTreeMap::new(),
        }
    }

    fn tick(&mut self, program: &str, now: Instant) {
        match &self.process {
            None if now >= self.next => {
                match Confined::start(["graft", "packets", "process", program], CPU_IDLE) {
                    Ok(process) => {
                        self.started += 1;
                        (self.process, self.is_ready) = (Some(process), false);
                    }
                    Err(error) => self.failed(now, format!("a process cannot be started: {error}")),
                }
            }
            None => {}
            Some((process, control)) if self.is_ready => {
                if let Received::End = control.receive::<Tell>() {
                    let why = process.ended().unwrap_or("its socket is closed").to_owned();
                    self.failed(now, format!("the process that waited is gone: {why}"));
                }
            }
            Some((_, control)) => match hello(control) {
                Ok(None) => {}
                Ok(Some(Hello::Yes { without })) => {
                    if !without.is_empty() {
                        warn!(program, "a process is confined, but without {}", without.join(", "));
                    }
                    (self.is_ready, self.trouble, self.pause) = (true, None, PAUSE);
                }
                Ok(Some(Hello::No { why })) => self.failed(now, why),
                Err(error) => self.failed(now, error.to_string()),
            },
        }
    }

    fn failed(&mut self, now: Instant, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            warn!("{why}");
        }
        *self.ended.entry("failed").or_default() += 1;
        (self.process, self.is_ready, self.trouble) = (None, false, Some(why));
        self.next = now + self.pause;
        self.pause = (2 * self.pause).min(PAUSE_MOST);
    }
}

impl Running {
    fn look(&mut self) -> Option<End> {
        if !self.is_ready {
            match hello(&self.control) {
                Ok(None) => return None,
                Ok(Some(Hello::Yes { .. })) => self.is_ready = true,
                Ok(Some(Hello::No { why })) => return Some(End::Failed(why)),
                Err(error) => return Some(End::Failed(error.to_string())),
            }
        }
        match self.next_word() {
            Received::Record(Tell::Alive, _) | Received::Nothing => None,
            Received::Record(Tell::Done, _) => Some(End::Done),
            Received::Record(Tell::Failed { why }, _) => Some(End::Failed(why)),
            Received::Malformed(why) => Some(End::Failed(format!("it says {why}"))),
            // The end of the process and of its socket are some moments apart.
            Received::End => {
                let why = self.process.ended()?;
                Some(End::Failed(format!("its process is gone: {why}")))
            }
        }
    }

    /// Takes what the process says that is not just that it goes on: for that it may have all of one CPU, and some more.
    fn next_word(&mut self) -> Received<Tell> {
        loop {
            match self.control.receive() {
                Received::Record(Tell::Alive, _) => {
                    let now = Instant::now();
                    let passed = now - std::mem::replace(&mut self.heard, now);
                    self.process.earn(passed * 3 / 2);
                }
                word => return word,
            }
        }
    }
}
