//! Whether what carries one connection of a pool still does. Both ends ask, each for itself: who has heard nothing for a while says so, and the other end answers.
//! Who has heard something and has nothing to say, says that: so one whose bytes take long to arrive behind each other is not left for dead.

use std::time::Duration;

use millrace_graft_proto::carry::frame::Frame;
use tokio::time::Instant;

/// Of silence, after the last news; each answer that is nothing more makes it longer.
const QUIET_MOST: Duration = Duration::from_secs(16);
/// Who has heard something says something.
const TELL: Duration = Duration::from_millis(250);

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    Nothing,
    /// The other end is asked.
    Ask,
    /// The other end is told that something has come.
    Tell,
    /// It was asked, and nothing has come.
    Lost,
}

/// What has come since it was noted last.
#[derive(Debug, Default)]
pub struct Came {
    has_talk: bool,
    has_more: bool,
}

impl Came {
    pub fn hear(&mut self, frame: &Frame) {
        match frame {
            Frame::Ask | Frame::Answer => self.has_talk = true,
            _ => self.has_more = true,
        }
    }

    /// Whether it was more than an answer: what is no frame yet is a part of something long.
    fn is_news(&self) -> bool {
        self.has_more || !self.has_talk
    }
}

#[derive(Debug)]
pub struct Silence {
    /// For an answer.
    patience: Duration,
    /// Times that something has come, as far as they were noted.
    heard: u64,
    heard_at: Instant,
    quiet: Duration,
    asked_at: Option<Instant>,
    /// Since something has come that nothing was said after.
    owes_since: Option<Instant>,
}

impl Silence {
    pub fn new(patience: Duration, heard: u64, now: Instant) -> Self {
        let quiet = patience / 2;
        Self { patience, heard, heard_at: now, quiet, asked_at: None, owes_since: None }
    }

    /// So many times has something come.
    pub fn note(&mut self, heard: u64, came: &Came, now: Instant) {
        if self.heard == heard {
            return;
        }
        (self.heard, self.heard_at, self.asked_at) = (heard, now, None);
        if came.is_news() {
            self.quiet = self.patience / 2;
            self.owes_since = self.owes_since.or(Some(now));
        } else {
            self.quiet = (2 * self.quiet).min(QUIET_MOST.max(self.patience));
        }
    }

    /// Also for an answer that is waited for.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub fn is_asked(&self) -> bool {
        self.asked_at.is_some()
    }

    pub fn said(&mut self) {
        self.owes_since = None;
    }

    /// When something is due.
    pub fn at(&self) -> Instant {
        let by_silence = match self.asked_at {
            Some(asked_at) => asked_at + self.patience,
            None => self.heard_at + self.quiet,
        };
        self.owes_since.map_or(by_silence, |since| by_silence.min(since + TELL))
    }

    /// What is, if nothing more has come than was noted.
    pub fn due(&mut self, now: Instant) -> Due {
        match self.asked_at {
            Some(asked_at) if now >= asked_at + self.patience => return Due::Lost,
            None if now >= self.heard_at + self.quiet => {
                (self.asked_at, self.owes_since) = (Some(now), None);
                return Due::Ask;
            }
            _ => {}
        }
        if self.owes_since.is_some_and(|since| now >= since + TELL) {
            self.owes_since = None;
            return Due::Tell;
        }
        Due::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);
    const TALK: Came = Came { has_talk: true, has_more: false };
    const MORE: Came = Came { has_talk: false, has_more: true };

    fn at(millis: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_millis(millis)
    }

    #[test]
    fn who_does_not_answer_is_lost_and_who_does_is_asked_less_often() {
        let mut silence = Silence::new(PATIENCE, 0, at(0));
        assert_eq!((silence.due(at(499)), silence.at()), (Due::Nothing, at(500)));
        assert_eq!((silence.due(at(500)), silence.due(at(1499))), (Due::Ask, Due::Nothing));
        // An answer, and no more: the next question comes later, and the one after that later still.
        silence.note(1, &TALK, at(1499));
        assert_eq!((silence.due(at(2498)), silence.due(at(2499))), (Due::Nothing, Due::Ask));
        silence.note(2, &TALK, at(2600));
        assert_eq!(silence.at(), at(4600));
        (3..20).for_each(|heard| silence.note(heard, &TALK, at(3000)));
        assert_eq!(silence.at(), at(3000) + QUIET_MOST);
        // News: it is asked as soon as before.
        silence.note(20, &MORE, at(4000));
        silence.said();
        assert_eq!((silence.at(), silence.due(at(4500))), (at(4500), Due::Ask));
        // The same count is nothing new.
        silence.note(20, &MORE, at(5000));
        assert_eq!(
            (silence.at(), silence.due(at(5499)), silence.due(at(5500))),
            (at(5500), Due::Nothing, Due::Lost)
        );
    }

    #[test]
    fn who_hears_much_and_says_nothing_says_that() {
        let mut silence = Silence::new(PATIENCE, 0, at(0));
        silence.note(1, &MORE, at(100));
        silence.note(2, &MORE, at(300));
        assert_eq!(
            (silence.at(), silence.due(at(349)), silence.due(at(350))),
            (at(350), Due::Nothing, Due::Tell)
        );
        assert_eq!((silence.at(), silence.due(at(351))), (at(800), Due::Nothing));
        // What is said anyway is enough, and answers are not answered.
        silence.note(3, &MORE, at(400));
        silence.said();
        silence.note(4, &TALK, at(500));
        assert_eq!(silence.due(at(700)), Due::Nothing);
    }

    #[test]
    fn who_is_asked_may_get_more_time() {
        let mut silence = Silence::new(PATIENCE / 4, 0, at(0));
        assert_eq!((silence.due(at(125)), silence.is_asked(), silence.at()), (Due::Ask, true, at(375)));
        silence.set_patience(PATIENCE);
        assert_eq!((silence.due(at(375)), silence.at()), (Due::Nothing, at(1125)));
        assert_eq!(silence.due(at(1125)), Due::Lost);
        silence.note(1, &TALK, at(1126));
        assert!(!silence.is_asked());
    }

    /// Packets of something long come one after the other, and most of them end no frame.
    #[test]
    fn a_part_of_a_frame_is_news_and_an_answer_is_none() {
        let mut silence = Silence::new(PATIENCE, 0, at(0));
        (1..20).for_each(|heard| silence.note(heard, &Came::default(), at(heard)));
        assert_eq!(silence.at(), at(1 + 250), "it is told that something comes");
        silence.said();
        assert_eq!(silence.at(), at(19 + 500));
        let of = |frames: &[Frame]| {
            let mut came = Came::default();
            frames.iter().for_each(|frame| came.hear(frame));
            came.is_news()
        };
        assert!(!of(&[Frame::Ask]) && !of(&[Frame::Answer, Frame::Answer]));
        assert!(of(&[Frame::End]) && of(&[Frame::Ask, Frame::Confirm { delivered: 1 }]));
    }
}
