//! A stream with a copy of a subgroup that another publisher is sending. It waits, and continues the subgroup if the
//! other publisher breaks off.

use std::{sync::Arc, time::Duration};

use bytes::{Buf as _, Bytes};
use millrace_moq::tracks::subgroup::{SubgroupReceiver, SubgroupStream};
use millrace_webtransport::RecvStream;
use tokio::time;
use tracing::info;

use crate::live::{LiveTrack, copies::WaitingCopy};

/// The most bytes that are read from a stream at once.
pub const READ_SIZE: usize = 64 * 1024;
/// How often a waiting stream checks whether the other publisher is silent, or whether its copy still exists. A copy
/// that the kernel has forwarded and userspace has not read may end without a notification.
pub const STANDBY_LOOKS: Duration = Duration::from_millis(50);
/// The time without a packet from the publisher after which a waiting stream is read, and the time for which it must
/// then have more of the subgroup. Without the latter, copies would take turns whenever a quiet publisher's next object
/// comes.
const ATTENTION: Duration = Duration::from_millis(100);
/// The time without a packet from the publisher after which a copy that has more of the subgroup continues it. A
/// premature change costs nothing, since subscribers get the same bytes. A publisher from which the track moves away
/// counts as silent at once: its session may be busy with other groups while this one does not go on.
const PATIENCE: Duration = Duration::from_millis(250);

/// A stream that has a copy of a subgroup. Its bytes stay in QUIC's buffer until the other publisher falls silent. They
/// are then compared with those that subscribers already have.
pub struct StandbyCopy<'a> {
    recv: &'a mut RecvStream,
    /// Bytes that were read and not compared yet.
    ahead: Bytes,
    /// Number of bytes that were found to be the same.
    compared: u64,
    /// True once the stream is known to have other bytes than the subgroup, or to have ended before them.
    differs: bool,
    ended: bool,
    /// True once the silent publisher was asked to break off.
    has_asked: bool,
}

/// The reason why a stream that waited for a subgroup does so no longer.
pub enum StandbyEnd {
    /// The subgroup is the stream's now, and continues with these bytes. The flag is set if the other publisher was
    /// silent.
    Continues(SubgroupReceiver, Bytes, bool),
    /// The stream has other objects than the subgroup, which has ended.
    Differs,
    /// The subgroup has ended, or yet another stream continues it.
    Passed,
}

impl<'a> StandbyCopy<'a> {
    /// `front` contains the bytes behind the header that were read already.
    pub fn new(recv: &'a mut RecvStream, front: Bytes) -> Self {
        Self { recv, ahead: front, compared: 0, differs: false, ended: false, has_asked: false }
    }

    /// Reports whether bytes of the stream were consumed, so that it can only continue the subgroup and not begin it.
    pub fn is_read(&self) -> bool {
        self.compared > 0 || self.ended
    }

    /// Waits until the other publisher breaks off, or its connection is silent although this stream has more.
    pub async fn wait(
        &mut self,
        track: &LiveTrack,
        own: &SubgroupStream,
        waiting: WaitingCopy,
    ) -> StandbyEnd {
        let WaitingCopy { subgroup, holder, mut given } = waiting;
        let theirs = subgroup.header();
        let ours = own.header();
        self.differs |= (theirs.properties, theirs.end_of_group, theirs.first_object)
            != (ours.properties, ours.end_of_group, ours.first_object);
        let mut looks = time::interval(STANDBY_LOOKS);
        looks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut heard = holder.heard();
        // Ticks are counted, so that time in which this process was stopped does not count.
        let mut silent = Duration::ZERO;
        let mut ahead = Duration::ZERO;
        let orphan = loop {
            let is_leaving = holder.is_leaving();
            let is_read = (is_leaving || silent >= ATTENTION) && !self.differs;
            tokio::select! {
                biased;
                orphan = &mut given => match orphan {
                    Ok(orphan) => break orphan,
                    Err(_) => return StandbyEnd::Passed,
                },
                () = self.read(), if is_read && self.ahead.is_empty() && !self.ended => {
                    self.compare(&subgroup);
                }
                _ = looks.tick() => {
                    let now = holder.heard();
                    silent = if now == heard { silent + STANDBY_LOOKS } else { Duration::ZERO };
                    heard = now;
                    let has_more = is_read && self.compare(&subgroup);
                    ahead = if has_more { ahead + STANDBY_LOOKS } else { Duration::ZERO };
                    if (is_leaving || silent >= PATIENCE) && ahead >= ATTENTION && !self.has_asked {
                        info!(
                            track = %track.name().typed(), group = theirs.group, silent = holder.publisher,
                            "a publisher is silent or leaves: another one, which sends the same objects, continues its group"
                        );
                        self.has_asked = true;
                        track.copies.ask(&subgroup);
                    }
                }
            }
        };
        if !self.catch_up(&subgroup).await {
            return StandbyEnd::Differs;
        }
        match orphan.adopt() {
            Some(writer) => StandbyEnd::Continues(writer, std::mem::take(&mut self.ahead), self.has_asked),
            None => StandbyEnd::Differs,
        }
    }

    /// Reads the stream up to the end of the subgroup's bytes. Returns false if it has others.
    async fn catch_up(&mut self, subgroup: &Arc<SubgroupStream>) -> bool {
        loop {
            self.compare(subgroup);
            let is_behind = self.compared < subgroup.extent().len;
            if self.differs || !is_behind {
                return !self.differs;
            }
            self.differs |= self.ended;
            self.read().await;
        }
    }

    /// Compares the bytes that were read with the subgroup's. Returns whether this stream has more than the subgroup.
    fn compare(&mut self, subgroup: &SubgroupStream) -> bool {
        let known = subgroup.extent().len.saturating_sub(self.compared);
        let len = self.ahead.len().min(usize::try_from(known).unwrap_or(usize::MAX));
        let mut theirs = vec![0; len];
        // Fewer bytes are read if the cache has dropped the group.
        let read = subgroup.read(self.compared, &mut theirs);
        self.differs |= read < len || theirs != self.ahead[..len];
        self.ahead.advance(len);
        self.compared += len as u64;
        !self.differs && self.compared == subgroup.extent().len && (self.ended || !self.ahead.is_empty())
    }

    /// Reads the next bytes. It is cancel safe.
    async fn read(&mut self) {
        match self.recv.read_chunk(READ_SIZE, true).await {
            Ok(Some(chunk)) => self.ahead = chunk.bytes,
            Ok(None) => self.ended = true,
            Err(_) => self.differs = true,
        }
    }
}
