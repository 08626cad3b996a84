//! What functions may take, by the times that the kernel's side has measured.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use millrace_graft_kernel::joint::{Ends, Joint, Joints, List, Protocol, Session, Times};

use crate::Error;

/// Of a list that is tried, at each joint.
const TRIES: usize = 65;
const PAYLOAD: usize = 1000;

/// How long each joint takes for a datagram of 1000 bytes: medians of test runs, without a network. From one end to another,
/// both in this host's memory, by addresses that RFC 5737 sets aside.
pub fn measure(joints: &mut Joints, list: &List) -> Result<[Duration; 3], Error> {
    let address = |host| SocketAddr::from((Ipv4Addr::new(192, 0, 2, host), 9));
    let ends = Ends { local: address(1), remote: address(2) };
    let other = Ends { local: ends.remote, remote: ends.local };
    for ends in [ends, other] {
        let (key, list) = ([0; 16], list.clone());
        joints.open(Session { ends, key, list, budget_ns: 0, protocol: Protocol::Udp })?;
    }
    let tried = (0..TRIES).map(|_| {
        // Nothing comes back that would make room in a window.
        [ends, other].iter().try_for_each(|ends| joints.replace(ends, list, 0))?;
        try_once(joints)
    });
    let tried = tried.collect::<Result<Vec<_>, Error>>();
    for ends in [ends, other] {
        joints.close(&ends)?;
    }
    let tried = tried?;
    let median = |joint: usize| {
        let mut times: Vec<_> = tried.iter().map(|times| times[joint]).collect();
        times.sort_unstable();
        times[TRIES / 2]
    };
    Ok([median(0), median(1), median(2)])
}

/// What one end sends, the other gets.
fn try_once(joints: &Joints) -> Result<[Duration; 3], Error> {
    let sent = joints.run(Joint::Tx, &datagram())?;
    let [rx, repair] = [Joint::Rx, Joint::Repair].map(|joint| joints.run(joint, &sent.frame));
    Ok([sent.time, rx?.time, repair?.time])
}

/// Without a checksum of UDP.
fn datagram() -> Vec<u8> {
    let udp = (8 + PAYLOAD as u16).to_be_bytes();
    let all = (28 + PAYLOAD as u16).to_be_bytes();
    let mut frame = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0].to_vec();
    frame.extend(all);
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 0, 9, 0, 9]);
    frame.extend(udp);
    frame.resize(frame.len() + 2 + PAYLOAD, 0);
    frame
}

/// The mean over fewer samples says nothing.
const SAMPLES_MIN: u64 = 8;

/// A session's times, from one look to the next.
#[derive(Debug, Default)]
pub struct Meter {
    last: [Times; 3],
    /// ns a packet, of the latest interval in which there were enough.
    pub mean: [Option<u64>; 3],
    pub over: u64,
}

impl Meter {
    /// What each joint says now. Returns the joint that took longer than the budget in the mean, if one did.
    pub fn look(&mut self, now: [Times; 3], budget_ns: u32) -> Option<(Joint, u64)> {
        let mut worst = None;
        self.over = now.iter().map(|times| times.over).sum();
        for ((joint, now), (last, mean)) in
            Joint::ALL.into_iter().zip(now).zip(self.last.iter_mut().zip(&mut self.mean))
        {
            let samples = now.samples.saturating_sub(last.samples);
            if samples < SAMPLES_MIN {
                continue;
            }
            let ns = now.total_ns.saturating_sub(last.total_ns) / samples;
            (*mean, *last) = (Some(ns), now);
            if budget_ns > 0 && ns > budget_ns.into() && worst.is_none_or(|(_, most)| ns > most) {
                worst = Some((joint, ns));
            }
        }
        worst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(samples: u64, total_ns: u64) -> Times {
        Times { packets: samples * 64, samples, total_ns, ..Times::default() }
    }

    #[test]
    fn the_mean_of_the_latest_interval_counts() {
        let mut meter = Meter::default();
        let idle = Times::default();
        assert_eq!(meter.look([times(100, 100_000), idle, idle], 1500), None);
        // A few slow ones are not the mean.
        assert_eq!(meter.look([times(103, 200_000), idle, idle], 1500), None);
        let slow = [times(120, 300_000), times(10, 90_000), idle];
        assert_eq!(meter.look(slow, 1500), Some((Joint::Tx, 10_000)));
        assert_eq!(meter.mean, [Some(10_000), Some(9000), None]);
        assert_eq!(meter.look(slow, 1500), None, "nothing came since");
        assert_eq!(meter.look([times(200, 9_000_000), times(10, 90_000), idle], 0), None, "no budget");
    }
}
