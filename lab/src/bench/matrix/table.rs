//! What came of all, as tables in Markdown: one for each way to come, publishers down and players across.

use std::fmt::Write as _;

use super::ends::{Program, Way};
use super::{Cell, Outcome};
use crate::transport::Transport;

impl Way {
    pub fn label(self) -> String {
        format!("{}, draft {}", name(self.transport), self.draft)
    }
}

fn name(transport: Transport) -> &'static str {
    match transport {
        Transport::Raw => "QUIC",
        Transport::Webtransport => "WebTransport",
    }
}

/// With notes below each table on what is not played.
pub fn markdown(cells: &[Cell]) -> String {
    let transports = |cell: &Cell| (cell.publisher.way.transport, cell.player.way.transport);
    let mut text = String::new();
    for ways in distinct(cells.iter().map(transports)) {
        let title = match ways {
            (both, other) if both == other => name(both).to_owned(),
            (publishing, playing) => format!("{} to {}", name(publishing), name(playing)),
        };
        let cells: Vec<_> = cells.iter().filter(|cell| transports(cell) == ways).collect();
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

/// What came of two programs, with each draft and relay; said once if that is the same.
fn entry(cells: &[&Cell], publisher: Program, player: Program, notes: &mut Vec<String>) -> String {
    let of_these = |cell: &&&Cell| cell.publisher.program == publisher && cell.player.program == player;
    let cells: Vec<_> = cells.iter().filter(of_these).collect();
    let mut said = Vec::new();
    for drafts in distinct(cells.iter().map(|cell| drafts(cell))) {
        let cells = cells.iter().filter(|cell| drafts == self::drafts(cell));
        let words: Vec<_> = cells.map(|cell| (cell.relay, word(cell.outcome.as_ref(), notes))).collect();
        match distinct(words.iter().map(|(_, word)| word.clone())).as_slice() {
            [one] => said.push((drafts, one.clone())),
            _ => said.extend(
                words
                    .into_iter()
                    .map(|(relay, word)| (format!("{drafts} {}", relay.engine().unwrap_or_default()), word)),
            ),
        }
    }
    let words = distinct(said.iter().map(|(_, word)| word.clone()));
    if let [one] = words.as_slice() {
        return one.clone();
    }
    let each = words.iter().map(|word| {
        let when = said.iter().filter(|(_, said)| said == word).map(|(when, _)| &when[..]);
        format!("{}: {word}", when.collect::<Vec<_>>().join(", "))
    });
    each.collect::<Vec<_>>().join("; ")
}

fn drafts(cell: &Cell) -> String {
    match (cell.publisher.way.draft, cell.player.way.draft) {
        (both, other) if both == other => both.to_string(),
        (publishing, playing) => format!("{publishing}→{playing}"),
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
        let way = |draft| Way { transport: Transport::Raw, draft };
        let cell = |publisher, player, relay, draft, outcome| Cell {
            relay,
            publisher: End { program: publisher, way: way(draft) },
            player: End { program: player, way: way(draft) },
            outcome: Some(outcome),
        };
        let played = |identical| Outcome::Played(Match { frames: 90, identical });
        let cannot = |why: &str| Outcome::CannotMeet(why.to_owned());
        let mut cells = Vec::new();
        for (relay, moq_sub) in
            [(Contender::Kernel, played(false)), (Contender::User, Outcome::Failed("it ended".to_owned()))]
        {
            for draft in [18, 19] {
                cells.push(cell(Program::Millrace, Program::Millrace, relay, draft, played(true)));
                let (first, no_quic) = (draft == 18, cannot("a browser has no raw QUIC"));
                let moq_sub = if first { moq_sub.clone() } else { cannot("moq-sub speaks draft 18 only") };
                cells.push(cell(Program::Millrace, Program::MoqSub, relay, draft, moq_sub));
                cells.push(cell(Program::Millrace, Program::Chromium, relay, draft, no_quic));
            }
        }
        let expected = "### QUIC\n\n\
            | publisher \\ player | millrace | moq-sub | Chromium |\n\
            | --- | --- | --- | --- |\n\
            | millrace | identical | 18 kernel: every frame; 18 user: **failed** (1); 19: — (2) | — (3) |\n\n\
            1. it ended\n\
            2. moq-sub speaks draft 18 only\n\
            3. a browser has no raw QUIC\n\n";
        assert_eq!(markdown(&cells), expected);
    }
}
