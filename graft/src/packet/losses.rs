//! Counts the application's datagrams that were lost when a session restarted. The code does no I/O, and gets the time
//! as an argument.
//!
//! ```text
//! one end                          the other, which has begun anew, too
//!   Sent(before it began anew) ------> counts what has come, and will come no more
//!   knows what it has lost <---------- Lost
//! ```
//!
//! Each end counts the losses of its own datagrams. Earlier losses on the path are counted as well, unless functions
//! repair them.

use std::time::Duration;

use super::agree::{LINGER, ListMessage};

/// Pause before this end repeats its question about losses.
const AGAIN: Duration = Duration::from_millis(50);
/// Time limit for the other end's answer about losses, after which the next change of the session may begin. Without an
/// answer the losses stay unknown.
const PATIENCE: Duration = LINGER;

/// Counters of this end's datagrams at the time of the restart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    pub sent: u64,
    pub delivered: u64,
}

/// The numbers of lost datagrams in both directions, each `None` if it is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketLosses {
    /// Number of this end's datagrams that were lost when the session restarted.
    pub sent: Option<u64>,
    /// Number of the other end's datagrams that were lost when the session restarted.
    pub received: Option<u64>,
}

/// The state of counting the datagrams that one restart has lost. Counting has ended when [`LossCount::tick`] returns
/// an error.
#[derive(Debug, Clone, Copy)]
pub struct LossCount {
    before: Before,
    next: Duration,
    until: Duration,
    known: PacketLosses,
}

impl LossCount {
    pub fn new(now: Duration, before: Before) -> Self {
        Self { before, next: now, until: now + PATIENCE, known: PacketLosses::default() }
    }

    /// Handles a message of the other end. Returns the answer if the message asks about losses.
    pub fn on_message(&mut self, message: ListMessage) -> Option<ListMessage> {
        match message {
            ListMessage::Sent(sent) => {
                // Counts in messages have 32 bits, and wrap around.
                let lost = lost(sent, self.before.delivered as u32);
                self.known.received = Some(lost.into());
                Some(ListMessage::Lost(lost))
            }
            ListMessage::Lost(lost) => {
                // The other end's count is limited to the number of datagrams that were sent.
                self.known.sent = Some(u64::from(lost).min(self.before.sent));
                None
            }
            _ => None,
        }
    }

    /// Returns the next message to send, or the losses (as an error) when counting has ended. An end that knows the
    /// losses of both directions keeps answering until the time limit, since the other end may ask again.
    pub fn tick(&mut self, now: Duration) -> Result<Option<ListMessage>, PacketLosses> {
        if now >= self.until {
            return Err(self.known);
        }
        if now < self.next {
            return Ok(None);
        }
        self.next = now + AGAIN;
        match self.known {
            PacketLosses { sent: None, .. } => Ok(Some(ListMessage::Sent(self.before.sent as u32))),
            _ => Ok(None),
        }
    }

    pub fn total_losses(&self) -> PacketLosses {
        self.known
    }

    pub fn is_known(&self) -> bool {
        self.known.sent.is_some() && self.known.received.is_some()
    }

    pub fn next(&self) -> Duration {
        self.next.min(self.until)
    }
}

/// Returns how many of the `sent` datagrams were not delivered. The result is 0 if more have arrived than were sent:
/// duplicates may arrive if no function drops them.
fn lost(sent: u32, delivered: u32) -> u32 {
    // Both counters wrap around, so a very large difference stands for a negative one.
    let lost = sent.wrapping_sub(delivered);
    if lost > u32::MAX / 2 { 0 } else { lost }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn hosts_of_a_session_learn_packet_losses_in_both_directions() {
        let table = [
            ([(100, 40), (50, 97)], [(3, 10), (10, 3)]),
            ([(0, 0), (0, 0)], [(0, 0), (0, 0)]),
            // No function of the session numbers packets, so a duplicate was delivered, too: 11 datagrams arrive, of 10
            // that were sent.
            ([(10, 0), (0, 11)], [(0, 0), (0, 0)]),
            // The counters wrap around.
            ([((1 << 32) + 5, 0), (0, (1 << 32) - 2)], [(7, 0), (0, 7)]),
        ];
        for (before, want) in table {
            for lost_words in 0..4 {
                let mut ends = before
                    .map(|(sent, delivered)| LossCount::new(Duration::ZERO, Before { sent, delivered }));
                let mut said = 0;
                for at in 0..1000 {
                    for from in 0..2 {
                        let Ok(Some(message)) = ends[from].tick(at * MS) else { continue };
                        said += 1;
                        if said <= lost_words {
                            continue;
                        }
                        let answer = ends[1 - from].on_message(message);
                        said += 1;
                        answer.filter(|_| said > lost_words).map(|answer| ends[from].on_message(answer));
                    }
                }
                assert!(ends.iter().all(LossCount::is_known));
                for (end, (sent, received)) in ends.iter().zip(want) {
                    assert_eq!(
                        end.total_losses(),
                        PacketLosses { sent: Some(sent), received: Some(received) }
                    );
                }
            }
        }
    }

    #[test]
    fn packet_losses_are_unknown_if_the_other_end_does_not_answer() {
        let mut end = LossCount::new(MS, Before { sent: 7, delivered: 3 });
        let mut asked = 0;
        let ended = (0..).find_map(|at| match end.tick(at * MS) {
            Ok(message) => {
                asked += u32::from(message.is_some());
                None
            }
            Err(known) => Some(known),
        });
        assert_eq!(ended, Some(PacketLosses::default()));
        assert_eq!(asked, (PATIENCE.as_millis() / AGAIN.as_millis()) as u32);
    }

    #[test]
    fn reported_losses_are_bounded_by_the_number_of_packets_sent() {
        let mut end = LossCount::new(MS, Before { sent: 7, delivered: 3 });
        assert_eq!(end.on_message(ListMessage::Lost(u32::MAX)), None);
        assert_eq!(end.total_losses().sent, Some(7));
    }
}
