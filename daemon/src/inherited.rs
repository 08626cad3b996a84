//! The connection between a part (child process) of a daemon and its supervisor process, as the part sees it, and the
//! messages on it.

use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    thread,
};

use millrace_base::control::{ControlEnd, ControlReceived};
use nix::{
    sys::{prctl, signal::Signal},
    unistd::dup2_stdin,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{closer::Closer, socket::Conversations};

/// A request that each part (child process) of a daemon answers at once, so that the supervisor knows that the process
/// still runs.
pub(crate) const PING: &[u8] = b"ping\n";
/// Longest error text that a part (child process) reports to its supervisor, in bytes.
const ERROR_MAX: usize = 3000;

/// A message from the supervisor to a part (child process), with descriptors.
#[derive(Serialize, Deserialize)]
pub(crate) enum PartConnection {
    /// The first message. The descriptors are those that the daemon keeps for its parts: see
    /// [`KeptDescriptors`](crate::part::KeptDescriptors).
    Kept,
    /// The descriptor is one end of a connection. The part answers the requests that come on it.
    Requests,
    /// The descriptor is one end of a connection. The other end belongs to the part of this name: see
    /// [`SupervisedPart::link`](crate::part::SupervisedPart::link).
    Partner(String),
}

/// A message from a part (child process) to its supervisor.
#[derive(Serialize, Deserialize)]
pub(crate) enum PartMessage {
    Ready,
    /// The part (child process) cannot start. The text is the reason.
    Failed(String),
    /// The daemon keeps the descriptors that come with this message, instead of those that it has kept before.
    Keep,
}

/// The end of the connection to the supervisor process, in a part (child process) of a daemon.
pub(crate) struct Inherited {
    control: ControlEnd,
    kept: Mutex<Vec<OwnedFd>>,
}

impl Inherited {
    /// Takes the connection to the supervisor from standard input. Call it once, before other threads and processes are
    /// started.
    pub(crate) fn take() -> io::Result<Self> {
        // The kernel kills this process when its supervisor ends.
        prctl::set_pdeathsig(Some(Signal::SIGKILL))?;
        let control = ControlEnd::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Child processes of this process must not keep the connection to the supervisor open.
        dup2_stdin(File::open("/dev/null")?)?;
        loop {
            control.wait();
            match control.receive() {
                ControlReceived::Record(PartConnection::Kept, kept) => {
                    return Ok(Self { control, kept: Mutex::new(kept) });
                }
                ControlReceived::Nothing => {}
                _ => return Err(io::Error::other("the supervisor has not sent its first message")),
            }
        }
    }

    /// Returns the descriptors that the daemon keeps for this part. A second call returns none.
    pub(crate) fn take_kept(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.kept.lock())
    }

    pub(crate) fn keep(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.control.send(&PartMessage::Keep, descriptors)
    }

    pub(crate) fn ready(&self) -> anyhow::Result<()> {
        Ok(self.control.send(&PartMessage::Ready, &[])?)
    }

    pub(crate) fn failed(&self, error: &anyhow::Error) {
        let mut text = format!("{error:#}");
        let end = (0..=ERROR_MAX).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        let _ = self.control.send(&PartMessage::Failed(text), &[]);
    }

    /// Serves the connections that the supervisor passes, until the supervisor dies or closes its connection to this
    /// process. Connections to partners of the part are passed to `linked`, with the partner's name.
    pub(crate) async fn serve<A, F>(
        &self,
        answerer: impl Fn() -> F,
        linked: impl Fn(&str, OwnedFd),
    ) -> anyhow::Result<()>
    where
        A: Serialize,
        F: FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    {
        let closer = Closer::start()?;
        let mut conversations = Conversations::new(&closer);
        let (passed, mut streams) = mpsc::unbounded_channel::<(PartConnection, OwnedFd)>();
        let control = self.control.try_clone()?;
        thread::Builder::new().name("supervisor".into()).spawn(move || {
            loop {
                control.wait();
                match control.receive::<PartConnection>() {
                    ControlReceived::Record(kind, all) => {
                        // The send fails only if this process is ending, which drops the receiver.
                        all.into_iter().next().map(|stream| passed.send((kind, stream)));
                    }
                    ControlReceived::Malformed(_) | ControlReceived::Nothing => {}
                    ControlReceived::End => return,
                }
            }
        })?;
        while let Some((kind, stream)) = streams.recv().await {
            match kind {
                PartConnection::Partner(name) => {
                    linked(&name, stream);
                    continue;
                }
                PartConnection::Kept => continue,
                PartConnection::Requests => {}
            }
            let mut answer = answerer();
            conversations
                .begin(stream.into(), move |line: &[u8]| if line == PING { Ok(None) } else { answer(line) });
        }
        Ok(())
    }
}
