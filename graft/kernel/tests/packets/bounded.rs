//! Tests partial reliability on a path that loses more packets than the receiver may abandon. The receiver abandons no
//! more packets than permitted, and all other packets arrive.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use millrace_graft_kernel::packet::{PacketReason, TalkMessage};
use millrace_testkit::wait_until;
use nix::sys::socket::{setsockopt, sockopt};

use crate::net::{inside, root};
use crate::traffic::{AtEnd, DatagramFate, PARTIAL, PacketHook, get_to_know, number_of, send_into_window};
use crate::{count, other_side};

#[test]
fn partial_reliability_loses_no_more_than_its_bound() {
    const SENT: u32 = 1500;
    const PERMILLE: u64 = 30;
    if !root("partial_reliability_loses_no_more_than_its_bound") {
        return;
    }
    for family in [4, 6] {
        let site = PacketHook::new("bound", family);
        let (near, far) = site.sockets();
        match family {
            4 => setsockopt(&near, sockopt::Ipv4RecvErr, &true).expect("errors"),
            _ => setsockopt(&near, sockopt::Ipv6RecvErr, &true).expect("errors"),
        }
        let parameters = [
            ("window", "packets", 64),
            ("partial", "retry_us", 20_000),
            ("partial", "deadline_ms", 1),
            ("partial", "give_up_permille", PERMILLE),
        ];
        let [sender, mut receiver] = site.hooks_of(PARTIAL, &parameters);
        let stop = AtomicBool::new(false);
        let is_over = AtomicBool::new(false);
        let ends = site.ends;
        let wire = site.wire();
        let mut got = thread::scope(|scope| {
            let _end = (AtEnd(&stop, true), AtEnd(&is_over, true));
            scope.spawn(|| {
                wire.run(&stop, |count| if count % 13 == 5 { DatagramFate::Lose } else { DatagramFate::Pass })
            });
            get_to_know(&site, &sender, &mut receiver);
            let receiving = scope.spawn(|| {
                let mut got = Vec::new();
                let mut buffer = [0; 2048];
                loop {
                    match far.recv(&mut buffer) {
                        Ok(bytes) => got.push(number_of(&buffer[..bytes])),
                        Err(_) if is_over.load(Ordering::Relaxed) => return got,
                        Err(_) => {}
                    }
                }
            });
            let sending = scope.spawn(|| send_into_window(&near, 0..SENT));
            // Polls until the receiver has received or abandoned every packet.
            let known = || {
                let known = sender.progress(&ends).expect("progress");
                inside(&site.network.publisher, || {
                    sender.say(&ends, TalkMessage::Last(known.next)).expect("said")
                });
                known
            };
            wait_until("all", known, |known| sending.is_finished() && known.acked == SENT);
            stop.store(true, Ordering::Relaxed);
            is_over.store(true, Ordering::Relaxed);
            receiving.join().expect("messages")
        });
        let come = got.len();
        got.sort_unstable();
        got.dedup();
        assert_eq!(got.len(), come, "some came twice");
        let lost = u64::from(SENT) - come as u64;
        // The path has lost some 115 packets at first, which is more than the receiver may abandon.
        assert!(lost > 0 && lost * 1000 <= u64::from(SENT) * PERMILLE, "{family}: {lost}");
        for reason in [PacketReason::Forged, PacketReason::Malformed, PacketReason::NoFunction] {
            assert_eq!(count(&mut receiver, &other_side(&ends), reason), 0, "{reason:?}");
        }
    }
}
