//! The negotiation of an agreement between two hosts: offer, accept, confirm. Each host checks the statement of
//! settings that the other host sends, and then puts the agreement into force on its own side.

use std::time::Instant;

use millrace_daemon::socket::another_answer;
use millrace_graft::{
    AgreementSession, NegotiationEnds, agreements::NegotiationState, settings::GraftFetch, status::Negotiated,
};
use millrace_graft_proto::{
    evidence::Downgrade,
    judge::JudgeTerms,
    message::{AgreementMessage, AgreementRefusal, Hash, RefusalReason, Statement},
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::block_in_place;
use tracing::{info, warn};

use super::{
    AgreementContext,
    wire::{AgreementWire, PATIENCE, WireError},
};
use crate::link::{LinkAnswer, LinkRequest};

/// The state of the agreement when its negotiation ends.
pub struct ConversationEnd(pub NegotiationState);

impl From<WireError> for ConversationEnd {
    fn from(broken: WireError) -> Self {
        Self(broken.into())
    }
}

impl From<anyhow::Error> for ConversationEnd {
    fn from(error: anyhow::Error) -> Self {
        Self(NegotiationState::Ended(format!("this host has failed: {error:#}")))
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
    pub wire: AgreementWire<S>,
    pub ends: NegotiationEnds,
    pub session: Option<AgreementSession>,
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
            self.wire.send(&AgreementMessage::Offer(Box::new(own))).await?;
            let theirs = self.accepted().await?;
            let terms = self.consider(&theirs).await?;
            // After a graft was fetched from the peer, this host has more to offer, so it sends another offer.
            if self.fetch(&theirs).await? {
                continue;
            }
            let answered = Instant::now();
            let offer_us = micros(answered - start);
            let timing = Negotiated { offer_us, ..timing.clone() };
            // The peer's negotiation may have taken effect meanwhile. Then this one is not confirmed.
            if self.bind(&theirs, &terms, timing, answered)? {
                return Ok(self.wire.send(&AgreementMessage::Confirm).await?);
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
        let mut own = self.speak()?;
        let mut terms = self.consider(theirs).await?;
        // If both hosts connected at the same time, only one of the two negotiations takes effect.
        let link = &self.context.host.link;
        if self.session.is_none() && link.is_agreed(&self.ends.peer, Some(theirs.epoch)) {
            return Err(self
                .refuse(AgreementRefusal::new(
                    RefusalReason::Busy,
                    "another connection already maintains the agreement with this peer",
                ))
                .await);
        }
        if self.fetch(theirs).await? {
            own = self.speak()?;
            terms = self.consider(theirs).await?;
        }
        self.wire.send(&AgreementMessage::Accept(Box::new(own))).await?;
        loop {
            match self.wire.receive(PATIENCE).await? {
                AgreementMessage::Confirm => break,
                AgreementMessage::Refuse(refusal) => return Err(refused_by_peer(refusal)),
                AgreementMessage::Fetch { identity } => self.give(identity).await?,
                AgreementMessage::Offer(theirs) => return Ok(Some(*theirs)),
                other => return Err(unexpected(&other, "confirm")),
            }
        }
        match self.bind(theirs, &terms, Negotiated::default(), Instant::now())? {
            true => Ok(None),
            // This host ends the connection. The connecting host notices that, and connects again.
            false => {
                Err(ConversationEnd(NegotiationState::Ended("this host's settings have changed".to_owned())))
            }
        }
    }

    fn speak(&mut self) -> Result<Statement, ConversationEnd> {
        let (own, revision) = self.context.host.link.statement(&self.ends)?;
        self.revision = revision;
        Ok(own)
    }

    async fn consider(&mut self, theirs: &Statement) -> Result<JudgeTerms, ConversationEnd> {
        let request = LinkRequest::Consider { ends: self.ends.clone(), theirs: Box::new(theirs.clone()) };
        let Some(LinkAnswer::Considered(compared)) = self.context.host.link.ask(&request)? else {
            return Err(another_answer().into());
        };
        report(&self.ends.peer, &compared.downgrades);
        match compared.terms {
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
        theirs: &Statement,
        terms: &JudgeTerms,
        timing: Negotiated,
        start: Instant,
    ) -> Result<bool, ConversationEnd> {
        let request = LinkRequest::Bind {
            ends: self.ends.clone(),
            session: self.session,
            revision: self.revision,
            theirs: Box::new(theirs.clone()),
            timing: Negotiated { bind_us: micros(start.elapsed()), ..timing },
        };
        let Some(LinkAnswer::Bound(bound)) = self.context.host.link.ask(&request)? else {
            return Err(another_answer().into());
        };
        if let (None, Some(_)) = (self.session, bound) {
            info!(
                peer = self.ends.peer,
                rules = terms.rules.len(),
                "an agreement on grafts with the peer is in force"
            );
        }
        self.session = bound.or(self.session);
        Ok(bound.is_some())
    }

    /// Fetches a graft that this host's settings want from a peer that has it. Returns whether the graft was received.
    async fn fetch(&mut self, theirs: &Statement) -> Result<bool, ConversationEnd> {
        let host = &self.context.host;
        let wanted = block_in_place(|| host.settings().wanted_from(theirs));
        let Some(wanted) = wanted.filter(|it| host.may_fetch(it.identity)) else { return Ok(false) };
        match self.take(&wanted).await? {
            Ok(()) => {
                info!(peer = self.ends.peer, graft = wanted.graft, "a graft was fetched from the peer");
                Ok(true)
            }
            Err(error) => {
                warn!(
                    peer = self.ends.peer,
                    graft = wanted.graft,
                    "a graft cannot be fetched from the peer: {error}"
                );
                host.cannot_fetch(wanted.identity);
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
        let kept = self.context.host.keep(wanted, manifest, &image);
        Ok(kept.map_err(|error| format!("{error:#}")))
    }

    async fn give(&mut self, identity: Hash) -> Result<(), ConversationEnd> {
        let given = block_in_place(|| self.context.host.settings().give(identity));
        let Some((manifest, image)) = given else {
            return Err(self
                .refuse(AgreementRefusal::new(
                    RefusalReason::NotGiven,
                    format!("the graft {identity} may not be fetched from this host"),
                ))
                .await);
        };
        info!(peer = self.ends.peer, %identity, "a graft was sent to the peer");
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
