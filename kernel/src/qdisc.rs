//! Queueing disciplines of interfaces: finds out whether packets are sent at the time in their time stamps.

use std::io;

use crate::netlink::{attribute, dump};

// Constants from linux/rtnetlink.h and linux/pkt_sched.h.
const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
const TCA_KIND: u16 = 1;
const ROOT: u32 = 0xffff_ffff;
const INGRESS: u32 = 0xffff_fff1;
const TCMSG: usize = 20;

/// The queueing discipline that sends packets at the time in their time stamps (monotonic clock).
const FQ: &str = "fq";
/// Queueing disciplines with a child discipline for each queue of the interface.
const OF_QUEUES: [&str; 2] = ["mq", "mqprio"];

#[derive(Debug, Clone, PartialEq, Eq)]
struct InterfaceQdisc {
    parent: u32,
    kind: String,
}

/// Returns the name of a queueing discipline of the interface that ignores packets' time stamps. Returns `None` if all
/// disciplines that send packets are `fq`. The interface must be in the calling thread's network namespace.
pub fn other_than_fq(ifindex: i32) -> io::Result<Option<String>> {
    let mut found = Vec::new();
    let mut request = [0; TCMSG];
    request[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    dump(RTM_GETQDISC, &request, RTM_NEWQDISC, |body| found.extend(parse(body, ifindex)))?;
    Ok(judge(&found))
}

/// Parses the kernel's answer about one queueing discipline. Returns `None` if it belongs to another interface than
/// `wanted`, because older kernels list those of all interfaces.
fn parse(body: &[u8], wanted: i32) -> Option<InterfaceQdisc> {
    let word = |at: usize| body.get(at..)?.first_chunk().copied();
    let ifindex = i32::from_ne_bytes(word(4)?);
    let parent = u32::from_ne_bytes(word(12)?);
    let kind = attribute(body.get(TCMSG..)?, TCA_KIND)?;
    let kind = String::from_utf8_lossy(kind).trim_end_matches('\0').to_owned();
    (ifindex == wanted && parent != INGRESS).then_some(InterfaceQdisc { parent, kind })
}

fn judge(all: &[InterfaceQdisc]) -> Option<String> {
    let Some(root) = all.iter().find(|it| it.parent == ROOT) else { return Some("none".to_owned()) };
    if !OF_QUEUES.contains(&root.kind.as_str()) {
        return (root.kind != FQ).then(|| root.kind.clone());
    }
    let mut leaves = all.iter().filter(|it| it.parent != ROOT).peekable();
    if leaves.peek().is_none() {
        return Some(root.kind.clone());
    }
    leaves.find(|it| it.kind != FQ).map(|it| it.kind.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute_of;

    fn qdisc(parent: u32, kind: &str) -> InterfaceQdisc {
        InterfaceQdisc { parent, kind: kind.to_owned() }
    }

    #[test]
    fn only_fq_queueing_sends_at_the_requested_time() {
        /// Parent and kind of each queueing discipline, and the expected result: the discipline that ignores time
        /// stamps.
        type Case = (&'static [(u32, &'static str)], Option<&'static str>);
        let table: [Case; 8] = [
            (&[], Some("none")),
            (&[(ROOT, "noqueue")], Some("noqueue")),
            (&[(ROOT, "fq")], None),
            (&[(ROOT, "fq_codel")], Some("fq_codel")),
            (&[(ROOT, "mq")], Some("mq")),
            (&[(ROOT, "mq"), (0x8001_0001, "fq"), (0x8001_0002, "fq")], None),
            (&[(ROOT, "mq"), (0x8001_0001, "fq"), (0x8001_0002, "pfifo_fast")], Some("pfifo_fast")),
            // Since the root discipline ignores time stamps, packets are sent without regard to them, although its
            // child is fq.
            (&[(ROOT, "htb"), (0x0001_0001, "fq")], Some("htb")),
        ];
        for (all, want) in table {
            let all: Vec<_> = all.iter().map(|(parent, kind)| qdisc(*parent, kind)).collect();
            assert_eq!(judge(&all).as_deref(), want, "{all:?}");
        }
    }

    #[test]
    fn netlink_answer_is_parsed() {
        let answer = |ifindex: i32, parent: u32| {
            let mut body = vec![0; TCMSG];
            body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
            body[12..16].copy_from_slice(&parent.to_ne_bytes());
            body.extend(attribute_of(TCA_KIND, b"fq\0"));
            body
        };
        assert_eq!(parse(&answer(3, ROOT), 3), Some(qdisc(ROOT, "fq")));
        assert_eq!(parse(&answer(4, ROOT), 3), None, "another interface's");
        assert_eq!(parse(&answer(3, INGRESS), 3), None, "nothing waits there");
        let whole = answer(3, ROOT);
        for cut in 0..whole.len() - 1 {
            assert_eq!(parse(&whole[..cut], 3), None, "{cut}");
        }
    }
}
