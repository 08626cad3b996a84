//! What came of all, as tables in Markdown: one for each way to come, publishers down and players across.

use std::fmt::Write as _;

use super::ends::{Program, Way};
use super::{Cell, Outcome};
use crate::transport::Transport;

impl Way {
    pub fn label(self) -> String {
        let transport = match self.transport {
            Transport::Raw => "QUIC",
            Transport::Webtransport => "WebTransport",
        };
        format!("{transport}, draft {}", self.draft)
    }
}

/// With notes below each table on what is not played.
pub fn markdown(cells: &[Cell]) -> String {
    let mut text = String::new();
    for (publishing, playing) in distinct(cells.iter().map(|cell| (cell.publisher.way, cell.player.way))) {
        let cells: Vec<_> = cells
            .iter()
            .filter(|cell| (cell.publisher.way, cell.player.way) == (publishing, playing))
            .collect();
        let title = match publishing == playing {
            true => publishing.label(),
            false => format!("Publishers: {}; players: {}", publishing.label(), playing.label()),
        };
        let _ = write!(text, "### {title}\n\n{}\n", table(&cells));
    }
    text
}

fn table(cells: &[&Cell]) -> String {
    let mut notes = Vec::new();
    let players = distinct(cells.iter().map(|cell| cell.player.program));
    let mut lines = vec![row("publisher \\ player", players.iter().map(|player| player.name().to_owned()))];
    lines.push("| --- ".repeat(players.len() + 1) + "|");
    for publisher in distinct(cells.iter().map(|cell| cell.publisher.program)) {
        let entries = players.iter().map(|player| entry(cells, publisher, *player, &mut notes));
        let line = row(publisher.name(), entries.collect::<Vec<_>>().into_iter());
        lines.push(line);
    }
    let mut text = lines.join("\n") + "\n";
    for (at, note) in notes.iter().enumerate() {
        let _ = write!(text, "\n{}. {note}", at + 1);
    }
    if notes.is_empty() { text } else { text + "\n" }
}

/// What came of two programs, with each relay; said once if that is the same.
fn entry(cells: &[&Cell], publisher: Program, player: Program, notes: &mut Vec<String>) -> String {
    let of_these = |cell: &&&Cell| cell.publisher.program == publisher && cell.player.program == player;
    let said = cells.iter().filter(of_these).map(|cell| (cell.relay, word(cell.outcome.as_ref(), notes)));
    let said: Vec<_> = said.collect();
    match distinct(said.iter().map(|(_, word)| word.clone())).as_slice() {
        [one] => one.clone(),
        _ => {
            let each =
                said.iter().map(|(relay, word)| format!("{}: {word}", relay.engine().unwrap_or_default()));
            each.collect::<Vec<_>>().join(", ")
        }
    }
}

fn word(outcome: Option<&Outcome>, notes: &mut Vec<String>) -> String {
    let (word, why) = match outcome {
        Some(Outcome::Played(played)) if played.identical => return "identical".to_owned(),
        Some(Outcome::Played(_)) => return "every frame".to_owned(),
        Some(Outcome::CannotMeet(why)) => ("—", why.as_str()),
        Some(Outcome::NotHere(why)) => ("not here", why.as_str()),
        Some(Outcome::Failed(why)) => ("**failed**", why.as_str()),
        None => ("**failed**", "was not tried"),
    };
    let known = notes.iter().position(|note| note == why);
    let number = known.unwrap_or_else(|| {
        notes.push(why.to_owned());
        notes.len() - 1
    });
    format!("{word} ({})", number + 1)
}

fn row(head: &str, entries: impl Iterator<Item = String>) -> String {
    let entries: String = entries.map(|entry| format!(" {entry} |")).collect();
    format!("| {head} |{entries}")
}

/// In the order in which they come first.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::super::super::contender::Contender;
    use super::super::ends::End;
    use super::super::media::Match;
    use super::*;

    #[test]
    fn outcomes_that_differ_are_told_apart_and_reasons_said_once() {
        let way = Way { transport: Transport::Raw, draft: 18 };
        let cell = |publisher, player, relay, outcome| Cell {
            relay,
            publisher: End { program: publisher, way },
            player: End { program: player, way },
            outcome: Some(outcome),
        };
        let played = |identical| Outcome::Played(Match { frames: 90, identical });
        let cannot = || Outcome::CannotMeet("a browser has no raw QUIC".to_owned());
        let cells = [
            cell(Program::Millrace, Program::MoqSub, Contender::Kernel, played(true)),
            cell(Program::Millrace, Program::MoqSub, Contender::User, played(true)),
            cell(Program::Millrace, Program::Chromium, Contender::Kernel, cannot()),
            cell(Program::Millrace, Program::Chromium, Contender::User, cannot()),
            cell(Program::MoqPub, Program::MoqSub, Contender::Kernel, played(false)),
            cell(Program::MoqPub, Program::MoqSub, Contender::User, Outcome::Failed("it ended".to_owned())),
            cell(Program::MoqPub, Program::Chromium, Contender::Kernel, cannot()),
            cell(Program::MoqPub, Program::Chromium, Contender::User, cannot()),
        ];
        let expected = "### QUIC, draft 18\n\n\
            | publisher \\ player | moq-sub | Chromium |\n\
            | --- | --- | --- |\n\
            | millrace | identical | — (1) |\n\
            | moq-pub | kernel: every frame, user: **failed** (2) | — (1) |\n\n\
            1. a browser has no raw QUIC\n\
            2. it ended\n\n";
        assert_eq!(markdown(&cells), expected);
    }
}
