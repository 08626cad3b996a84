//! How many of the application's datagrams were lost since a session began anew, as values: no I/O, and time is an argument.
//!
//! ```text
//! one end                          the other, which has begun anew, too
//!   Sent(before it began anew) ------> counts what has come, and will come no more
//!   knows what it has lost <---------- Lost
//! ```
//!
//! Both ends do, each for what it has sent. What has been lost on the way before is among it, unless functions repair it.

use std::time::Duration;

use super::agree::{LINGER, Word};

/// Between two questions.
const AGAIN: Duration = Duration::from_millis(50);
/// For an answer: until the next change may begin. Nobody knows what was lost if there is none.
const PATIENCE: Duration = LINGER;

/// What this end had counted when it began anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    pub sent: u64,
    pub delivered: u64,
}

/// `None`: nobody knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    /// Of what this end has sent.
    pub sent: Option<u64>,
    /// Of what the other one has sent.
    pub received: Option<u64>,
}

/// Is over when [`Count::tick`] says so.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    before: Before,
    next: Duration,
    until: Duration,
    known: Losses,
}

impl Count {
    pub fn new(now: Duration, before: Before) -> Self {
        Self { before, next: now, until: now + PATIENCE, known: Losses::default() }
    }

    /// An answer, if it is a question.
    pub fn hear(&mut self, word: Word) -> Option<Word> {
        match word {
            Word::Sent(sent) => {
                let lost = lost(sent, self.before.delivered as u32);
                self.known.received = Some(lost.into());
                Some(Word::Lost(lost))
            }
            Word::Lost(lost) => {
                // No more than there were.
                self.known.sent = Some(u64::from(lost).min(self.before.sent));
                None
            }
            _ => None,
        }
    }

    /// What is to be said, or how it has ended. An end that knows everything ends a moment later: the other one may have to hear its
    /// answer again.
    pub fn tick(&mut self, now: Duration) -> Result<Option<Word>, Losses> {
        if now >= self.until {
            return Err(self.known);
        }
        if now < self.next {
            return Ok(None);
        }
        self.next = now + AGAIN;
        match self.known {
            Losses { sent: None, .. } => Ok(Some(Word::Sent(self.before.sent as u32))),
            _ => Ok(None),
        }
    }

    pub fn known(&self) -> Losses {
        self.known
    }

    pub fn is_known(&self) -> bool {
        self.known.sent.is_some() && self.known.received.is_some()
    }

    pub fn next(&self) -> Duration {
        self.next.min(self.until)
    }
}

/// Without functions that drop what comes twice, more may have come than was sent.
fn lost(sent: u32, delivered: u32) -> u32 {
    let lost = sent.wrapping_sub(delivered);
    if lost > u32::MAX / 2 { 0 } else { lost }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn both_ends_know_both_ways() {
        let table = [
            ([(100, 40), (50, 97)], [(3, 10), (10, 3)]),
            ([(0, 0), (0, 0)], [(0, 0), (0, 0)]),
            // Without numbers: a copy came, too.
            ([(10, 0), (0, 11)], [(0, 0), (0, 0)]),
            // Across the end of what words carry.
            ([((1 << 32) + 5, 0), (0, (1 << 32) - 2)], [(7, 0), (0, 7)]),
        ];
        for (before, want) in table {
            for lost_words in 0..4 {
                let mut ends =
                    before.map(|(sent, delivered)| Count::new(Duration::ZERO, Before { sent, delivered }));
                let mut said = 0;
                for at in 0..1000 {
                    for from in 0..2 {
                        let Ok(Some(word)) = ends[from].tick(at * MS) else { continue };
                        said += 1;
                        if said <= lost_words {
                            continue;
                        }
                        let answer = ends[1 - from].hear(word);
                        said += 1;
                        answer.filter(|_| said > lost_words).map(|answer| ends[from].hear(answer));
                    }
                }
                assert!(ends.iter().all(Count::is_known));
                for (end, (sent, received)) in ends.iter().zip(want) {
                    assert_eq!(end.known(), Losses { sent: Some(sent), received: Some(received) });
                }
            }
        }
    }

    #[test]
    fn without_an_answer_nobody_knows() {
        let mut end = Count::new(MS, Before { sent: 7, delivered: 3 });
        let mut asked = 0;
        let ended = (0..).find_map(|at| match end.tick(at * MS) {
            Ok(word) => {
                asked += u32::from(word.is_some());
                None
            }
            Err(known) => Some(known),
        });
        assert_eq!(ended, Some(Losses::default()));
        assert_eq!(asked, (PATIENCE.as_millis() / AGAIN.as_millis()) as u32);
    }

    #[test]
    fn what_is_made_up_is_bounded() {
        let mut end = Count::new(MS, Before { sent: 7, delivered: 3 });
        assert_eq!(end.hear(Word::Lost(u32::MAX)), None);
        assert_eq!(end.known().sent, Some(7));
    }
}
