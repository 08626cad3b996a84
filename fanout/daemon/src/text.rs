//! A fan-out's status as text.

use millrace_daemon::render::{
    self,
    Fit::{Name, Text, Whole},
    line, table,
};

use super::status::{CounterStatus, ReceiverStatus, Status};

/// Largest number of receivers that are shown of a stream: those with the most copies that were not sent.
const RECEIVERS_SHOWN: usize = 20;

/// Returns the status as text, at most `width` columns wide.
pub fn status(status: &Status, width: usize) -> String {
    let mut out = String::new();
    let interfaces = status.interfaces.iter().map(|it| match it.attached {
        true => format!("{} ({})", it.name, it.mechanism),
        false => format!("{} (NOT ATTACHED)", it.name),
    });
    let interfaces: Vec<_> = interfaces.collect();
    let uptime = render::span(status.uptime_s.floor());
    line(&mut out, width, &format!("fans out packets that arrive on {}; up {uptime}", interfaces.join(", ")));
    for trouble in &status.trouble {
        line(&mut out, width, &format!("TROUBLE: {trouble}"));
    }
    for stream in &status.streams {
        let idle = match stream.idle_s {
            None => "nothing yet".to_owned(),
            Some(idle) if idle < 1.0 => "now".to_owned(),
            Some(idle) => format!("latest {} ago", render::span(idle.floor())),
        };
        let head = format!(
            "{}: {} -> {}, {} packets, {}, {idle}; {} receivers",
            stream.name,
            stream.sender,
            stream.listen,
            stream.packets,
            render::bytes(stream.bytes),
            stream.receivers.len(),
        );
        line(&mut out, width, &head);
        receivers(&mut out, width, &stream.receivers);
        for paused in &stream.paused {
            let said = format!("  {} was cut off and has to wait for {} s", paused.address, paused.seconds);
            line(&mut out, width, &said);
        }
        line(&mut out, width, &format!("  {}", counts_text(&stream.events)));
    }
    line(&mut out, width, &format!("packets: {}", counts_text(&status.packets)));
    line(&mut out, width, &format!("copies: {}", counts_text(&status.copies)));
    out
}

fn receivers(out: &mut String, width: usize, all: &[ReceiverStatus]) {
    if all.is_empty() {
        return;
    }
    let mut shown: Vec<_> = all.iter().collect();
    shown.sort_by_key(|receiver| std::cmp::Reverse(receiver.dropped.values().sum::<u64>()));
    shown.truncate(RECEIVERS_SHOWN);
    let rows = shown.iter().map(|receiver| {
        vec![
            receiver.address.to_string(),
            if receiver.pinned { "named".to_owned() } else { "asked".to_owned() },
            receiver.packets.to_string(),
            render::bytes(receiver.bytes),
            receiver.lost_percent.map_or_else(|| "-".to_owned(), |lost| format!("{lost:.1} %")),
            receiver.round_trip_ms.map_or_else(|| "-".to_owned(), |trip| format!("{trip:.1} ms")),
            counts_text(&receiver.dropped),
        ]
    });
    let head = [
        ("RECEIVER", Name),
        ("BY", Text),
        ("PACKETS", Whole),
        ("BYTES", Whole),
        ("LOSS", Whole),
        ("ROUND TRIP", Whole),
        ("NOT SENT", Text),
    ];
    table(out, width, &head, rows);
    if all.len() > RECEIVERS_SHOWN {
        line(out, width, &format!("  and {} others", all.len() - RECEIVERS_SHOWN));
    }
}

/// Returns the counters that are not 0.
fn counts_text(counts: &CounterStatus) -> String {
    let all = counts.iter().filter(|(_, count)| **count > 0);
    let all: Vec<_> = all.map(|(name, count)| format!("{name} {count}")).collect();
    if all.is_empty() { "-".to_owned() } else { all.join(", ") }
}
