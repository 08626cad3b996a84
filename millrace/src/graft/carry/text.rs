//! What the commands print of it.

use millrace_graft::status::{Carrier, Carry};

use crate::render::{
    Fit::{self, Name, Text, Whole},
    bytes, line, span, table,
};

pub fn status(out: &mut String, carry: &Carry, width: usize) {
    const CARRIERS: [(&str, Fit); 7] = [
        ("CARRIER TO", Name),
        ("STATE", Whole),
        ("FOR", Whole),
        ("RTT ms", Whole),
        ("LOSS %", Whole),
        ("CONNS", Whole),
        ("COST", Whole),
    ];
    let rows = carry.carriers.iter().map(|it| {
        vec![
            it.peer.clone(),
            it.state.clone(),
            span(it.age_s),
            if it.sent_packets == 0 { "-".to_owned() } else { format!("{:.1}", it.rtt_us as f64 / 1e3) },
            format!("{:.2}", loss_percent(it)),
            it.connections.to_string(),
            bytes(it.sent_bytes + it.received_bytes),
        ]
    });
    table(out, width, &CARRIERS, rows);
    for carrier in carry.carriers.iter().filter(|carrier| !carrier.detail.is_empty()) {
        line(out, width, &format!("{}: {}", carrier.peer, carrier.detail));
    }
    let (now, most) = (carry.connections, carry.connections_max);
    let (sent, received, kept) =
        (bytes(carry.sent_bytes), bytes(carry.received_bytes), bytes(carry.kept_bytes));
    line(out, width, &format!("carried: {now} of at most {most} connections, {} resumed", carry.resumed));
    line(out, width, &format!("carried: {sent} sent, {received} received, {kept} not confirmed"));
    let counts =
        carry.verdicts.iter().map(|it| ("begun", it)).chain(carry.ended.iter().map(|it| ("ended", it)));
    let counts = counts.filter(|(_, (_, count))| **count > 0);
    let rows: Vec<_> =
        counts.map(|(what, (name, count))| vec![what.to_owned(), name.clone(), count.to_string()]).collect();
    if !rows.is_empty() {
        table(out, width, &[("CARRIED", Whole), ("HOW", Text), ("COUNT", Whole)], rows.into_iter());
    }
}

/// How connections with a peer go.
pub fn tier(carrier: &Carrier) -> String {
    let (name, ms) = (&carrier.peer, carrier.rtt_us as f64 / 1e3);
    match carrier.state.as_str() {
        "warm" => format!(
            "carried by {name}, for {}: {ms:.1} ms, {:.2} % lost, {} connections now",
            span(carrier.age_s),
            loss_percent(carrier),
            carrier.connections
        ),
        state => format!("in place, since the carrier {name} is {state}: {}", carrier.detail),
    }
}

fn loss_percent(carrier: &Carrier) -> f64 {
    100.0 * carrier.lost_packets as f64 / carrier.sent_packets.max(1) as f64
}
