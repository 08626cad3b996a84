//! Compares the time budgets of grafts (lists of packet functions) with the times that the BPF programs have measured.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use millrace_graft_kernel::packet::{
    FunctionHook, FunctionList, FunctionSession, FunctionTimes, PacketHooks, SessionEnds,
};

use crate::Error;

/// Number of test runs for measuring a list of functions, at each hook.
const TRIES: usize = 65;
const PAYLOAD: usize = 1000;

/// Returns the time that each hook takes for a datagram of 1000 bytes: the medians of test runs, without a network.
/// Both ends of the session exist only in this host's memory, with addresses that RFC 5737 reserves.
pub fn measure(hooks: &mut PacketHooks, list: &FunctionList) -> Result<[Duration; 3], Error> {
    let address = |host| SocketAddr::from((Ipv4Addr::new(192, 0, 2, host), 9));
    let ends = SessionEnds { local: address(1), remote: address(2) };
    let other = SessionEnds { local: ends.remote, remote: ends.local };
    for ends in [ends, other] {
        let key = [0; 16];
        let list = list.clone();
        hooks.open(FunctionSession { ends, key, list, budget_ns: 0 })?;
    }
    let tried = (0..TRIES).map(|_| {
        // No acknowledgement arrives that would let the sender's window continue, so the session's state is reset
        // before each run.
        [ends, other].iter().try_for_each(|ends| hooks.replace(ends, list, 0))?;
        try_once(hooks)
    });
    let tried = tried.collect::<Result<Vec<_>, Error>>();
    for ends in [ends, other] {
        hooks.close(&ends)?;
    }
    let tried = tried?;
    let median = |hook: usize| {
        let mut times: Vec<_> = tried.iter().map(|times| times[hook]).collect();
        times.sort_unstable();
        times[TRIES / 2]
    };
    Ok([median(0), median(1), median(2)])
}

/// Runs one datagram through the hooks of a session's sender and receiver. Returns the time that each hook took.
fn try_once(hooks: &PacketHooks) -> Result<[Duration; 3], Error> {
    let sent = hooks.run(FunctionHook::Tx, &datagram())?;
    // The frame that the sender's hook has produced is the input of the receiver's hooks.
    let [rx, repair] = [FunctionHook::Rx, FunctionHook::Repair].map(|hook| hooks.run(hook, &sent.frame));
    Ok([sent.time, rx?.time, repair?.time])
}

/// Returns an Ethernet frame with a datagram that has no UDP checksum.
fn datagram() -> Vec<u8> {
    // Length of the UDP datagram, and of the IPv4 packet around it.
    let udp = (8 + PAYLOAD as u16).to_be_bytes();
    let all = (28 + PAYLOAD as u16).to_be_bytes();
    let mut frame = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0].to_vec();
    frame.extend(all);
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 0, 9, 0, 9]);
    frame.extend(udp);
    frame.resize(frame.len() + 2 + PAYLOAD, 0);
    frame
}

/// Minimum number of timed packets for a significant mean time of a hook.
const SAMPLES_MIN: u64 = 8;

/// The times that a session's packet functions took at each hook, between two readings of the kernel's counters.
#[derive(Debug, Default)]
pub struct BudgetMeter {
    last: [FunctionTimes; 3],
    /// Mean time for a packet in ns at each hook, in the latest interval with enough samples.
    pub mean: [Option<u64>; 3],
    pub over: u64,
}

impl BudgetMeter {
    /// Computes the mean time of each hook from the kernel's counters. Returns the hook with the largest mean time
    /// above the budget, if one exceeds it.
    pub fn look(&mut self, now: [FunctionTimes; 3], budget_ns: u32) -> Option<(FunctionHook, u64)> {
        let mut worst = None;
        self.over = now.iter().map(|times| times.over).sum();
        for ((hook, now), (last, mean)) in
            FunctionHook::ALL.into_iter().zip(now).zip(self.last.iter_mut().zip(&mut self.mean))
        {
            let samples = now.samples.saturating_sub(last.samples);
            if samples < SAMPLES_MIN {
                // If an interval has too few timed packets, they are added to those of the next interval.
                continue;
            }
            let ns = now.total_ns.saturating_sub(last.total_ns) / samples;
            (*mean, *last) = (Some(ns), now);
            if budget_ns > 0 && ns > budget_ns.into() && worst.is_none_or(|(_, most)| ns > most) {
                worst = Some((hook, ns));
            }
        }
        worst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(samples: u64, total_ns: u64) -> FunctionTimes {
        FunctionTimes { packets: samples * 64, samples, total_ns, ..FunctionTimes::default() }
    }

    #[test]
    fn cpu_time_per_packet_is_averaged_over_the_latest_interval() {
        let mut meter = BudgetMeter::default();
        let idle = FunctionTimes::default();
        assert_eq!(meter.look([times(100, 100_000), idle, idle], 1500), None);
        // A few slow packets do not change the mean.
        assert_eq!(meter.look([times(103, 200_000), idle, idle], 1500), None);
        let slow = [times(120, 300_000), times(10, 90_000), idle];
        assert_eq!(meter.look(slow, 1500), Some((FunctionHook::Tx, 10_000)));
        assert_eq!(meter.mean, [Some(10_000), Some(9000), None]);
        assert_eq!(meter.look(slow, 1500), None, "nothing came since");
        assert_eq!(meter.look([times(200, 9_000_000), times(10, 90_000), idle], 0), None, "no budget");
    }
}
