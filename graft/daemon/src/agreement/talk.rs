//! The negotiation of an agreement between two hosts: offer, accept, confirm. Each host checks the statement of
//! settings that the other host sends, and then puts the agreement into force on its own side.

use std::{net::SocketAddr, time::Instant};

use millrace_daemon::daemon::Daemon as _;
use millrace_graft::{
    AgreedStatements, AgreementSession, OwnStatement, agreements::NegotiationState, settings::GraftFetch,
    status::Negotiated,
};
use millrace_graft_proto::{
    evidence::Downgrade,
    judge::JudgeTerms,
    message::{AgreementMessage, AgreementRefusal, Hash, RefusalReason, Statement},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::{info, warn};

use super::{
    AgreementContext,
    wire::{AgreementWire, PATIENCE, WireError},
};

/// The state of the agreement when its negotiation ends.
pub struct ConversationEnd(pub NegotiationState);

impl From<WireError> for ConversationEnd {
    fn from(broken: WireError) -> Self {
        Self(broken.into())
    }
}

impl From<millrace_graft::Error> for ConversationEnd {
    fn from(error: millrace_graft::Error) -> Self {
        Self(NegotiationState::Ended(format!("this host has failed: {error}")))
    }
}

fn refused_by_peer(refusal: AgreementRefusal) -> ConversationEnd {
    ConversationEnd(NegotiationState::Refused {
        by_peer: true,
        reason: refusal.reason,
        detail: refusal.detail,
    })
}

/// One host's side of the negotiation of an agreement.
pub struct AgreementTalk<'a, S> {
    pub context: &'a AgreementContext,
    pub peer: &'a str,
    pub wire: AgreementWire<S>,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub session: Option<AgreementSession>,
    /// True if this host opened the connection to the peer.
    pub calls: bool,
    /// Revision of this host's settings that its latest offer or acceptance was based on.
    pub revision: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin> AgreementTalk<'_, S> {
    /// Sends offers to the peer as the connecting host, until an answer of the peer leads to an agreement, which is put
    /// into force.
    pub async fn offer(&mut self, timing: Negotiated) -> Result<(), ConversationEnd> {
        loop {
            let start = Instant::now();
            let own = self.speak()?;
            self.wire.send(&AgreementMessage::Offer(Box::new(own.statement.clone()))).await?;
            let theirs = self.accepted().await?;
            let terms = self.consider(&own, &theirs).await?;
            // After a graft was fetched from the peer, this host has more to offer, so it sends another offer.
            if self.fetch(&theirs).await? {
                continue;
            }
            let answered = Instant::now();
            self.wire.send(&AgreementMessage::Confirm).await?;
            let offer_us = micros(answered - start);
            let hold_s = own.statement.hold_s;
            let timing = Negotiated { offer_us, ..timing.clone() };
            let agreed = AgreedStatements { own: &own, theirs: &theirs, terms: &terms, hold_s };
            if self.bind(&agreed, timing, answered)? {
                return Ok(());
            }
        }
    }

    /// Receives the peer's acceptance of an offer. If the peer requests grafts before it accepts, this host sends it
    /// their files.
    async fn accepted(&mut self) -> Result<Statement, ConversationEnd> {
        loop {
            match self.wire.receive(PATIENCE).await? {
                AgreementMessage::Accept(theirs) => return Ok(*theirs),
                AgreementMessage::Refuse(refusal) => return Err(refused_by_peer(refusal)),
                AgreementMessage::Fetch { identity } => self.give(identity).await?,
                other => return Err(unexpected(&other, "accept")),
            }
        }
    }

    /// Answers an offer as the listening host, and further offers that the peer sends before it confirms.
    pub async fn answer(&mut self, theirs: &Statement) -> Result<(), ConversationEnd> {
        let mut changed = self.answer_once(theirs).await?;
        while let Some(theirs) = changed {
            changed = self.answer_once(&theirs).await?;
        }
        Ok(())
    }

    /// Answers one offer. Returns the next offer, if the connecting host sends another one before it confirms this one.
    async fn answer_once(&mut self, theirs: &Statement) -> Result<Option<Statement>, ConversationEnd> {
        let own = self.speak()?;
        let terms = self.consider(&own, theirs).await?;
        let called = |peer| self.context.daemon.with(|runtime| runtime.has_called(peer, theirs.epoch));
        // If both hosts connected at the same time, only one of the two negotiations takes effect.
        if self.session.is_none() && called(self.peer) {
            return Err(self
                .refuse(AgreementRefusal::new(
                    RefusalReason::Busy,
                    "another connection already maintains the agreement with this peer",
                ))
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
        self.wire.send(&AgreementMessage::Accept(Box::new(own.statement.clone()))).await?;
        loop {
            match self.wire.receive(PATIENCE).await? {
                AgreementMessage::Confirm => break,
                AgreementMessage::Refuse(refusal) => return Err(refused_by_peer(refusal)),
                AgreementMessage::Fetch { identity } => self.give(identity).await?,
                AgreementMessage::Offer(theirs) => return Ok(Some(*theirs)),
                other => return Err(unexpected(&other, "confirm")),
            }
        }
        let agreed = AgreedStatements { own: &own, theirs, terms: &terms, hold_s: theirs.hold_s };
        match self.bind(&agreed, Negotiated::default(), Instant::now())? {
            true => Ok(None),
            // This host ends the connection. The connecting host notices that, and connects again.
            false => {
                Err(ConversationEnd(NegotiationState::Ended("this host's settings have changed".to_owned())))
            }
        }
    }

    fn speak(&mut self) -> Result<OwnStatement, ConversationEnd> {
        let local = self.local;
        let remote = self.remote;
        let peer = self.peer;
        let (own, revision) = self.context.daemon.with(|runtime| {
            let own = runtime.statement(local, remote, peer)?;
            Ok::<_, millrace_graft::Error>((own, runtime.revision()))
        })?;
        self.revision = revision;
        Ok(own)
    }

    async fn consider(
        &mut self,
        own: &OwnStatement,
        theirs: &Statement,
    ) -> Result<JudgeTerms, ConversationEnd> {
        let (terms, found) = self.context.daemon.with(|runtime| runtime.consider(self.peer, own, theirs));
        report(self.peer, &found);
        match terms {
            Ok(terms) => Ok(terms),
            Err(refusal) => Err(self.refuse(refusal).await),
        }
    }

    /// Sends the refusal, and ends the negotiation with it.
    pub async fn refuse(&mut self, refusal: AgreementRefusal) -> ConversationEnd {
        // The negotiation ends even if the peer does not receive the refusal.
        let _ = self.wire.send(&AgreementMessage::Refuse(refusal.clone())).await;
        ConversationEnd(NegotiationState::Refused {
            by_peer: false,
            reason: refusal.reason,
            detail: refusal.detail,
        })
    }

    fn bind(
        &mut self,
        agreed: &AgreedStatements<'_>,
        timing: Negotiated,
        start: Instant,
    ) -> Result<bool, ConversationEnd> {
        let session = self.session;
        let bound = self.context.daemon.with(|runtime| {
            let timing = Negotiated { bind_us: micros(start.elapsed()), ..timing };
            runtime.bind(self.peer, self.calls, session, agreed, timing)
        })?;
        if let (None, Some(_)) = (session, bound) {
            info!(
                peer = self.peer,
                rules = agreed.terms.rules.len(),
                "an agreement on grafts with the peer is in force"
            );
        }
        self.session = bound.or(session);
        Ok(bound.is_some())
    }

    /// Fetches a graft that this host's settings want from a peer that has it. Returns whether the graft was received.
    async fn fetch(&mut self, theirs: &Statement) -> Result<bool, ConversationEnd> {
        let daemon = &self.context.daemon;
        let wanted = daemon.with(|runtime| runtime.wanted_from(theirs));
        let Some(wanted) = wanted.filter(|it| daemon.may_fetch(it.identity)) else { return Ok(false) };
        match self.take(&wanted).await? {
            Ok(()) => {
                info!(peer = self.peer, graft = wanted.graft, "a graft was fetched from the peer");
                Ok(true)
            }
            Err(error) => {
                warn!(
                    peer = self.peer,
                    graft = wanted.graft,
                    "a graft cannot be fetched from the peer: {error}"
                );
                daemon.cannot_fetch(wanted.identity);
                Ok(false)
            }
        }
    }

    async fn take(&mut self, wanted: &GraftFetch) -> Result<Result<(), String>, ConversationEnd> {
        self.wire.send(&AgreementMessage::Fetch { identity: Hash(wanted.identity.bytes()) }).await?;
        let (manifest, bytes) = match self.wire.receive(PATIENCE).await? {
            AgreementMessage::Object { manifest, bytes } => (manifest, bytes),
            AgreementMessage::Refuse(refusal) => return Err(refused_by_peer(refusal)),
            other => return Err(unexpected(&other, "object")),
        };
        let image = self.wire.receive_bytes(bytes as usize).await?;
        let daemon = &self.context.daemon;
        let kept = daemon.with(|runtime| runtime.keep(wanted, &manifest, &image));
        Ok(kept
            .map_err(|error| error.to_string())
            .and_then(|()| daemon.reload().map_err(|error| format!("{error:#}"))))
    }

    async fn give(&mut self, identity: Hash) -> Result<(), ConversationEnd> {
        let given = self.context.daemon.with(|runtime| runtime.give(identity));
        let Some((manifest, image)) = given else {
            return Err(self
                .refuse(AgreementRefusal::new(
                    RefusalReason::NotGiven,
                    format!("the graft {identity} may not be fetched from this host"),
                ))
                .await);
        };
        info!(peer = self.peer, %identity, "a graft was sent to the peer");
        let bytes = u32::try_from(image.len()).unwrap_or(u32::MAX);
        self.wire.send(&AgreementMessage::Object { manifest, bytes }).await?;
        Ok(self.wire.send_bytes(&image).await?)
    }
}

pub fn unexpected(said: &AgreementMessage, wanted: &'static str) -> ConversationEnd {
    WireError::Unexpected { said: said.name(), wanted }.into()
}

fn report(peer: &str, found: &[(Downgrade, u16)]) {
    for (downgrade, port) in found {
        let kind = downgrade.name();
        warn!(peer, port, kind, "the TCP option that negotiates grafts was changed on the path");
    }
}

pub fn micros(time: std::time::Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}
