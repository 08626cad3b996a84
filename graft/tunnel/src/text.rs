//! Text that the commands print about tunnelled connections.

use millrace_daemon::render::{
    Fit::{self, Name, Text, Whole},
    bytes, line, span, table,
};
use millrace_graft::status::{CarrierStatus, CarryStatus};

/// Writes the status of the tunnel broker to `out`, in lines of at most `width` columns.
pub fn status(out: &mut String, carry: &CarryStatus, width: usize) {
    const CARRIERS: [(&str, Fit); 8] = [
        ("CARRIER TO", Name),
        ("BY", Text),
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
            if it.way.is_empty() { "-".to_owned() } else { it.way.clone() },
            it.state.clone(),
            span(it.age_s),
            if it.way.is_empty() { "-".to_owned() } else { format!("{:.1}", it.rtt_us as f64 / 1e3) },
            if it.sent_packets == 0 { "-".to_owned() } else { format!("{:.2}", loss_percent(it)) },
            it.connections.to_string(),
            bytes(it.sent_bytes + it.received_bytes),
        ]
    });
    table(out, width, &CARRIERS, rows);
    for carrier in carry.carriers.iter().filter(|carrier| !carrier.detail.is_empty()) {
        line(out, width, &format!("{}: {}", carrier.peer, carrier.detail));
    }
    for it in carry.carriers.iter().filter(|it| it.pool_idle + it.pool_busy > 0) {
        let peer = &it.peer;
        let way = &it.way;
        line(out, width, &format!("pool of {peer}, {way}: {} wait, {} carry", it.pool_idle, it.pool_busy));
    }
    let now = carry.connections;
    let most = carry.connections_max;
    let sent = bytes(carry.sent_bytes);
    let received = bytes(carry.received_bytes);
    let kept = bytes(carry.kept_bytes);
    line(out, width, &format!("carried: {now} of at most {most} connections, {} resumed", carry.resumed));
    line(out, width, &format!("carried: {sent} sent, {received} received, {kept} not confirmed"));
    let behind = carry.gateway.iter();
    for it in behind.clone() {
        let interfaces = it.interfaces.join(", ");
        let networks = it.networks.join(", ");
        line(out, width, &format!("gateway of {networks} behind {interfaces}: {} wait", it.waiting));
    }
    for rule in carry.firewall.iter().flat_map(|firewall| &firewall.rules) {
        line(out, width, &format!("plain TCP, for the firewall's rule {rule}"));
    }
    let asked = carry.firewall.iter().filter(|firewall| firewall.is_there);
    let asked = asked.flat_map(|firewall| &firewall.openings).map(|it| ("firewall", it));
    let packets = behind.flat_map(|it| &it.verdicts).map(|it| ("gateway", it));
    let counts =
        carry.verdicts.iter().map(|it| ("begun", it)).chain(carry.ended.iter().map(|it| ("ended", it)));
    let counts = counts.chain(asked).chain(packets);
    let counts = counts.filter(|(_, (_, count))| **count > 0);
    let rows: Vec<_> =
        counts.map(|(what, (name, count))| vec![what.to_owned(), name.clone(), count.to_string()]).collect();
    if !rows.is_empty() {
        table(out, width, &[("CARRIED", Whole), ("HOW", Text), ("COUNT", Whole)], rows.into_iter());
    }
}

/// Describes which carrier the connections with a peer use.
pub fn tier(carrier: &CarrierStatus) -> String {
    let name = &carrier.peer;
    let ms = carrier.rtt_us as f64 / 1e3;
    match carrier.state.as_str() {
        "warm" => format!(
            "carried by {name}, {}, for {}: {ms:.1} ms, {}, {} connections now",
            carrier.way,
            span(carrier.age_s),
            health(carrier),
            carrier.connections
        ),
        state => format!("in place, since the carrier {name} is {state}: {}", carrier.detail),
    }
}

/// Describes a carrier: the number of a pool's idle connections, or the packet loss of a QUIC connection.
fn health(carrier: &CarrierStatus) -> String {
    match carrier.sent_packets {
        0 => format!("{} wait in its pool", carrier.pool_idle),
        _ => format!("{:.2} % lost", loss_percent(carrier)),
    }
}

fn loss_percent(carrier: &CarrierStatus) -> f64 {
    100.0 * carrier.lost_packets as f64 / carrier.sent_packets.max(1) as f64
}
