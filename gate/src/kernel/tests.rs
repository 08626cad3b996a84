//! Tests that need access to the gate's maps. They need root.

use libbpf_rs::{MapCore as _, MapFlags};

use super::{Config, Event, FrameAction, LoadedGate, lock};

/// An Ethernet frame with an IPv4 UDP datagram without payload. The gate passes it if there are no rules.
const FRAME: [u8; 42] = {
    let mut frame = [0; 42];
    (frame[12], frame[14], frame[17], frame[23]) = (0x08, 0x45, 28, 17);
    frame[39] = 8;
    frame
};

fn gate(nests: bool) -> LoadedGate {
    let sizes =
        Config { max_ids: 64, max_clients: 64, max_handshakes: 64, max_rates: 64, ..Config::default() };
    LoadedGate::load(&Config { max_prefixes: 64, nests, ..sizes }).unwrap_or_else(|error| panic!("{error}"))
}

/// Sets the flag `busy` of every CPU's scratch memory. Reports whether the flag of any CPU was set before.
fn set_busy(gate: &LoadedGate, busy: u64) -> bool {
    let mut object = lock(&gate.object);
    let works = object.map("works").expect("a map");
    let key = 0u32.to_ne_bytes();
    let mut areas = works.lookup_percpu(&key, MapFlags::ANY).expect("read").expect("an area");
    let was = areas.iter().any(|area| area[..8] != [0; 8]);
    areas.iter_mut().for_each(|area| area[..8].copy_from_slice(&busy.to_ne_bytes()));
    works.update_percpu(&key, &areas, MapFlags::ANY).expect("written");
    was
}

#[test]
fn xdp_program_run_that_interrupts_another_passes_its_packet_unchecked() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP xdp_program_run_that_interrupts_another_passes_its_packet_unchecked: needs root");
        return;
    }
    for (nests, busy, unjudged) in [(true, 1, 1), (true, 0, 0), (false, 1, 0)] {
        let gate = gate(nests);
        set_busy(&gate, busy);
        let before = gate.statistics().expect("statistics");
        assert_eq!(gate.run(&FRAME).expect("a run"), FrameAction::Pass);
        let after = gate.statistics().expect("statistics");
        assert_eq!(after.event(Event::Busy), unjudged, "{nests} {busy}");
        assert_eq!(
            after.scopes == before.scopes,
            unjudged == 1,
            "{nests} {busy}: a checked packet is counted"
        );
        assert_eq!(set_busy(&gate, 0), busy == 1, "{nests} {busy}: a run clears only its own flag");
    }
}
