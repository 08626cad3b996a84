//! The connection between a part (child process) of a daemon and its supervisor process, as the part sees it, and the
//! messages on it.

use std::{
    fs::File,
    io,
    os::{fd::AsFd as _, unix::net::UnixStream},
    thread,
};

use millrace_base::control::{ControlEnd, ControlReceived};
use nix::{
    sys::{prctl, signal::Signal},
    unistd::dup2_stdin,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{closer::Closer, socket::Conversations};

/// A request that each part (child process) of a daemon answers at once, so that the supervisor knows that the process
/// still runs.
pub(crate) const PING: &[u8] = b"ping\n";
/// Longest error text that a part (child process) reports to its supervisor, in bytes.
const ERROR_MAX: usize = 3000;

/// A message from the supervisor to a part (child process). Its descriptor is one end of a connection.
#[derive(Serialize, Deserialize)]
pub(crate) enum PartConnection {
    /// The part answers the requests that come on the connection.
    Requests,
    /// The other end belongs to the part's partner: see [`SupervisedPart::link`](crate::part::SupervisedPart::link).
    Partner,
}

/// A message from a part (child process) to its supervisor.
#[derive(Serialize, Deserialize)]
pub(crate) enum PartMessage {
    Ready,
    /// The part (child process) cannot start. The text is the reason.
    Failed(String),
}

/// The end of the connection to the supervisor process, in a part (child process) of a daemon.
pub(crate) struct Inherited(ControlEnd);

impl Inherited {
    /// Takes the connection to the supervisor from standard input. Call it once, before other threads and processes are
    /// started.
    pub(crate) fn take() -> io::Result<Self> {
        // The kernel kills this process when its supervisor ends.
        prctl::set_pdeathsig(Some(Signal::SIGKILL))?;
        let control = ControlEnd::from(io::stdin().as_fd().try_clone_to_owned()?);
        // Child processes of this process must not keep the connection to the supervisor open.
        dup2_stdin(File::open("/dev/null")?)?;
        Ok(Self(control))
    }

    pub(crate) fn ready(&self) -> anyhow::Result<()> {
        Ok(self.0.send(&PartMessage::Ready, &[])?)
    }

    pub(crate) fn failed(&self, error: &anyhow::Error) {
        let mut text = format!("{error:#}");
        let end = (0..=ERROR_MAX).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        let _ = self.0.send(&PartMessage::Failed(text), &[]);
    }

    /// Serves the connections that the supervisor passes, until the supervisor dies or closes its connection to this
    /// process. Connections to the part's partner are passed to `linked`.
    pub(crate) async fn serve<A, F>(
        &self,
        answerer: impl Fn() -> F,
        linked: impl Fn(UnixStream),
    ) -> anyhow::Result<()>
    where
        A: Serialize,
        F: FnMut(&[u8]) -> anyhow::Result<Option<A>> + Send + 'static,
    {
        let closer = Closer::start()?;
        let mut conversations = Conversations::new(&closer);
        let (passed, mut streams) = mpsc::unbounded_channel::<(PartConnection, UnixStream)>();
        let control = self.0.try_clone()?;
        thread::Builder::new().name("supervisor".into()).spawn(move || {
            loop {
                control.wait();
                match control.receive::<PartConnection>() {
                    ControlReceived::Record(kind, all) => {
                        // The send fails only if this process is ending, which drops the receiver.
                        all.into_iter().next().map(|stream| passed.send((kind, stream.into())));
                    }
                    ControlReceived::Malformed(_) | ControlReceived::Nothing => {}
                    ControlReceived::End => return,
                }
            }
        })?;
        while let Some((kind, stream)) = streams.recv().await {
            if matches!(kind, PartConnection::Partner) {
                linked(stream);
                continue;
            }
            let mut answer = answerer();
            conversations
                .begin(stream, move |line: &[u8]| if line == PING { Ok(None) } else { answer(line) });
        }
        Ok(())
    }
}
