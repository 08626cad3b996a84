//! Renders the results as Markdown tables: one table per pair of transports, with a row for each publisher and a column
//! for each player.

use std::fmt::Write as _;

use super::ends::{ClientTransport, MatrixProgram};
use super::{MatrixCell, MatrixOutcome};
use crate::transport::LabTransport;

impl ClientTransport {
    pub fn label(self) -> String {
        format!("{}, draft {}", name(self.transport), self.draft)
    }
}

fn name(transport: LabTransport) -> &'static str {
    match transport {
        LabTransport::Raw => "QUIC",
        LabTransport::Webtransport => "WebTransport",
    }
}

/// Renders the tables, each followed by notes on the pairs that were not measured.
pub fn markdown(cells: &[MatrixCell]) -> String {
    let transports = |cell: &MatrixCell| (cell.publisher.way.transport, cell.player.way.transport);
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

fn table(cells: &[&MatrixCell]) -> String {
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

/// Returns the table's entry for a publisher and a player, over all drafts and relays. A result that is the same with
/// every draft and relay is given once.
fn entry(
    cells: &[&MatrixCell],
    publisher: MatrixProgram,
    player: MatrixProgram,
    notes: &mut Vec<String>,
) -> String {
    let of_these = |cell: &&&MatrixCell| cell.publisher.program == publisher && cell.player.program == player;
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

fn drafts(cell: &MatrixCell) -> String {
    match (cell.publisher.way.draft, cell.player.way.draft) {
        (both, other) if both == other => both.to_string(),
        (publishing, playing) => format!("{publishing}→{playing}"),
    }
}

fn word(outcome: Option<&MatrixOutcome>, notes: &mut Vec<String>) -> String {
    let (word, why) = match outcome {
        Some(MatrixOutcome::Played(played)) if played.identical => return "identical".to_owned(),
        Some(MatrixOutcome::Played(_)) => return "every frame".to_owned(),
        Some(MatrixOutcome::CannotMeet(why)) => ("—", why.as_str()),
        Some(MatrixOutcome::NotHere(why)) => ("not here", why.as_str()),
        Some(MatrixOutcome::Failed(why)) => ("**failed**", why.as_str()),
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

/// Returns the values of `all` without duplicates, in the order of their first occurrence.
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
    use super::super::ends::MatrixEnd;
    use super::super::media::FrameMatch;
    use super::*;

    #[test]
    fn matrix_cell_lists_each_outcome_and_each_reason_once() {
        let way = |draft| ClientTransport { transport: LabTransport::Raw, draft };
        let cell = |publisher, player, relay, draft, outcome| MatrixCell {
            relay,
            publisher: MatrixEnd { program: publisher, way: way(draft) },
            player: MatrixEnd { program: player, way: way(draft) },
            outcome: Some(outcome),
        };
        let played = |identical| MatrixOutcome::Played(FrameMatch { frames: 90, identical });
        let cannot = |why: &str| MatrixOutcome::CannotMeet(why.to_owned());
        let mut cells = Vec::new();
        for (relay, moq_sub) in [
            (Contender::Kernel, played(false)),
            (Contender::User, MatrixOutcome::Failed("it ended".to_owned())),
        ] {
            for draft in [18, 19] {
                cells.push(cell(
                    MatrixProgram::Millrace,
                    MatrixProgram::Millrace,
                    relay,
                    draft,
                    played(true),
                ));
                let first = draft == 18;
                let no_quic = cannot("a browser has no raw QUIC");
                let moq_sub = if first { moq_sub.clone() } else { cannot("moq-sub speaks draft 18 only") };
                cells.push(cell(MatrixProgram::Millrace, MatrixProgram::MoqSub, relay, draft, moq_sub));
                cells.push(cell(MatrixProgram::Millrace, MatrixProgram::Chromium, relay, draft, no_quic));
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
