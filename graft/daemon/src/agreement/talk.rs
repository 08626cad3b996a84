//! The exchange: offer, accept, confirm. Each end judges what the other says, and binds its own side.

use std::{net::SocketAddr, time::Instant};

use millrace_daemon::daemon::Daemon as _;
use millrace_graft::{Own, Session, agreements::State, settings::Fetch, status::Negotiated};
use millrace_graft_proto::{
    evidence::Downgrade,
    judge::Terms,
    message::{Hash, Message, Reason, Refusal, Statement},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::{info, warn};

use super::{
    Context,
    wire::{Broken, PATIENCE, Wire},
};

/// Why a conversation ends.
pub struct End(pub State);

impl From<Broken> for End {
    fn from(broken: Broken) -> Self {
        Self(broken.into())
    }
}

impl From<millrace_graft::Error> for End {
    fn from(error: millrace_graft::Error) -> Self {
        Self(State::Ended(format!("this host's own trouble: {error}")))
    }
}

fn refused_by_peer(refusal: Refusal) -> End {
    End(State::Refused { by_peer: true, reason: refusal.reason, detail: refusal.detail })
}

/// One end of a conversation.
pub struct Talk<'a, S> {
    pub context: &'a Context,
    pub peer: &'a str,
    pub wire: Wire<S>,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub session: Option<Session>,
    /// Whether this end has called.
    pub calls: bool,
    /// Of the settings, when this end spoke last.
    pub revision: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Talk<'_, S> {
    /// Of the caller: offers, and binds by the answer.
    pub async fn offer(&mut self, timing: Negotiated) -> Result<(), End> {
        loop {
            let start = Instant::now();
            let own = self.speak()?;
            self.wire.send(&Message::Offer(Box::new(own.statement.clone()))).await?;
            let theirs = self.accepted().await?;
            let terms = self.consider(&own, &theirs).await?;
            if self.fetch(&theirs).await? {
                continue;
            }
            let answered = Instant::now();
            self.wire.send(&Message::Confirm).await?;
            let offer_us = micros(answered - start);
            let hold_s = own.statement.hold_s;
            let timing = Negotiated { offer_us, ..timing.clone() };
            if self.bind(&own, &theirs, (&terms, hold_s), (timing, answered))? {
                return Ok(());
            }
        }
    }

    /// What the other says of itself; what it asks for meanwhile it gets.
    async fn accepted(&mut self) -> Result<Statement, End> {
        loop {
            match self.wire.receive(PATIENCE).await? {
                Message::Accept(theirs) => return Ok(*theirs),
                Message::Refuse(refusal) => return Err(refused_by_peer(refusal)),
                Message::Fetch { identity } => self.give(identity).await?,
                other => return Err(unexpected(&other, "accept")),
            }
        }
    }

    /// Of who is called: an offer has come.
    pub async fn answer(&mut self, theirs: &Statement) -> Result<(), End> {
        let mut changed = self.answer_once(theirs).await?;
        while let Some(theirs) = changed {
            changed = self.answer_once(&theirs).await?;
        }
        Ok(())
    }

    /// Returns what the caller offers instead, if it changes its mind before it confirms.
    async fn answer_once(&mut self, theirs: &Statement) -> Result<Option<Statement>, End> {
        let own = self.speak()?;
        let terms = self.consider(&own, theirs).await?;
        let called = |peer| self.context.daemon.with(|runtime| runtime.has_called(peer, theirs.epoch));
        if self.session.is_none() && called(self.peer) {
            return Err(self
                .refuse(Refusal::new(Reason::Busy, "another connection has the agreement"))
                .await);
        }
        let (own, terms) = match self.fetch(theirs).await? {
            true => {
                let own = self.speak()?;
                let terms = self.consider(&own, theirs).await?;
                (own, terms)
            }
            false => (own, terms),
        };
        self.wire.send(&Message::Accept(Box::new(own.statement.clone()))).await?;
        loop {
            match self.wire.receive(PATIENCE).await? {
                Message::Confirm => break,
                Message::Refuse(refusal) => return Err(refused_by_peer(refusal)),
                Message::Fetch { identity } => self.give(identity).await?,
                Message::Offer(theirs) => return Ok(Some(*theirs)),
                other => return Err(unexpected(&other, "confirm")),
            }
        }
        match self.bind(&own, theirs, (&terms, theirs.hold_s), (Negotiated::default(), Instant::now()))? {
            true => Ok(None),
            // The caller is told by the end of the connection, and calls again.
            false => Err(End(State::Ended("this host's settings have changed".to_owned()))),
        }
    }

    fn speak(&mut self) -> Result<Own, End> {
        let (local, remote, peer) = (self.local, self.remote, self.peer);
        let (own, revision) = self.context.daemon.with(|runtime| {
            let own = runtime.statement(local, remote, peer)?;
            Ok::<_, millrace_graft::Error>((own, runtime.revision()))
        })?;
        self.revision = revision;
        Ok(own)
    }

    async fn consider(&mut self, own: &Own, theirs: &Statement) -> Result<Terms, End> {
        let (terms, found) = self.context.daemon.with(|runtime| runtime.consider(self.peer, own, theirs));
        report(self.peer, &found);
        match terms {
            Ok(terms) => Ok(terms),
            Err(refusal) => Err(self.refuse(refusal).await),
        }
    }

    /// Says so, and ends.
    pub async fn refuse(&mut self, refusal: Refusal) -> End {
        // Whether it hears it or not, this is the end.
        let _ = self.wire.send(&Message::Refuse(refusal.clone())).await;
        End(State::Refused { by_peer: false, reason: refusal.reason, detail: refusal.detail })
    }

    fn bind(
        &mut self,
        own: &Own,
        theirs: &Statement,
        terms: (&Terms, u32),
        (timing, start): (Negotiated, Instant),
    ) -> Result<bool, End> {
        let session = self.session;
        let bound = self.context.daemon.with(|runtime| {
            let timing = Negotiated { bind_us: micros(start.elapsed()), ..timing };
            runtime.bind((self.peer, self.calls), session, (own, theirs), terms, timing)
        })?;
        if let (None, Some(_)) = (session, bound) {
            info!(peer = self.peer, rules = terms.0.rules.len(), "agreed");
        }
        self.session = bound.or(session);
        Ok(bound.is_some())
    }

    /// A graft that the settings want, from who has it. Returns whether it came.
    async fn fetch(&mut self, theirs: &Statement) -> Result<bool, End> {
        let daemon = &self.context.daemon;
        let wanted = daemon.with(|runtime| runtime.wanted_from(theirs));
        let Some(wanted) = wanted.filter(|it| daemon.may_fetch(it.identity)) else { return Ok(false) };
        match self.take(&wanted).await? {
            Ok(()) => {
                info!(peer = self.peer, graft = wanted.graft, "taken from the peer");
                Ok(true)
            }
            Err(error) => {
                warn!(peer = self.peer, graft = wanted.graft, "not taken from the peer: {error}");
                daemon.cannot_fetch(wanted.identity);
                Ok(false)
            }
        }
    }

    async fn take(&mut self, wanted: &Fetch) -> Result<Result<(), String>, End> {
        self.wire.send(&Message::Fetch { identity: Hash(wanted.identity.bytes()) }).await?;
        let (manifest, bytes) = match self.wire.receive(PATIENCE).await? {
            Message::Object { manifest, bytes } => (manifest, bytes),
            Message::Refuse(refusal) => return Err(refused_by_peer(refusal)),
            other => return Err(unexpected(&other, "object")),
        };
        let image = self.wire.receive_bytes(bytes as usize).await?;
        let daemon = &self.context.daemon;
        let kept = daemon.with(|runtime| runtime.keep(wanted, &manifest, &image));
        Ok(kept
            .map_err(|error| error.to_string())
            .and_then(|()| daemon.reload().map_err(|error| format!("{error:#}"))))
    }

    async fn give(&mut self, identity: Hash) -> Result<(), End> {
        let given = self.context.daemon.with(|runtime| runtime.give(identity));
        let Some((manifest, image)) = given else {
            return Err(self
                .refuse(Refusal::new(Reason::NotGiven, format!("{identity} is not given")))
                .await);
        };
        info!(peer = self.peer, %identity, "given to the peer");
        let bytes = u32::try_from(image.len()).unwrap_or(u32::MAX);
        self.wire.send(&Message::Object { manifest, bytes }).await?;
        Ok(self.wire.send_bytes(&image).await?)
    }
}

pub fn unexpected(said: &Message, wanted: &'static str) -> End {
    Broken::Unexpected { said: said.name(), wanted }.into()
}

fn report(peer: &str, found: &[(Downgrade, u16)]) {
    for (downgrade, port) in found {
        let kind = downgrade.name();
        warn!(peer, port, kind, "a TCP option was changed on the way");
    }
}

pub fn micros(time: std::time::Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}
