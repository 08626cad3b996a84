//! Finds filters whose process has ended without removing them.

use std::fs;
use std::io;

use super::KernelHook;
use crate::netlink::{attribute, dump};

/// A filter with a BPF program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StaleFilter {
    pub handle: u32,
    pub priority: u32,
    pub program: u32,
}

/// Returns filters on a hook with a program of this name, if no process has a descriptor of the program. The process
/// that attached such a filter has ended.
pub(super) fn find(ifindex: i32, hook: KernelHook, name: &str) -> io::Result<Vec<StaleFilter>> {
    let mut found = list(ifindex, hook, name)?;
    if !found.is_empty() {
        let open = open_programs();
        found.retain(|filter| !open.contains(&filter.program));
    }
    Ok(found)
}

// Constants from linux/rtnetlink.h and linux/pkt_cls.h.
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;
/// Length of `struct tcmsg` in bytes.
const TCMSG: usize = 20;

/// Returns the filters on a hook with a program of this name, as `tc filter show` lists them.
fn list(ifindex: i32, hook: KernelHook, name: &str) -> io::Result<Vec<StaleFilter>> {
    let parent: u32 = match hook {
        KernelHook::Ingress => 0xffff_fff2,
        KernelHook::Egress => 0xffff_fff3,
    };
    let mut request = Vec::with_capacity(TCMSG);
    request.extend([0; 4]);
    request.extend(ifindex.to_ne_bytes());
    request.extend([0; 4]);
    request.extend(parent.to_ne_bytes());
    request.extend([0; 4]);
    let mut found = Vec::new();
    dump(RTM_GETTFILTER, &request, RTM_NEWTFILTER, |body| found.extend(parse(body, name)))?;
    Ok(found)
}

/// Parses an entry of the kernel's list of filters. Returns `None` if its program has another name, or if it has no
/// program: the kernel also lists each priority as an entry of its own.
fn parse(body: &[u8], name: &str) -> Option<StaleFilter> {
    let word = |at: usize| Some(u32::from_ne_bytes(*body.get(at..)?.first_chunk()?));
    let handle = word(8)?;
    let info = word(16)?;
    let options = attribute(body.get(TCMSG..)?, TCA_OPTIONS)?;
    // libbpf gives filters the name NAME:[ID].
    let full = std::str::from_utf8(attribute(options, TCA_BPF_NAME)?).ok()?;
    full.strip_prefix(name)?.strip_prefix(":[")?;
    let program = u32::from_ne_bytes(*attribute(options, TCA_BPF_ID)?.first_chunk()?);
    Some(StaleFilter { handle, priority: info >> 16, program })
}

/// Returns the IDs of all programs that processes have descriptors of. Processes whose descriptors cannot be read are
/// skipped: they belong to other users.
fn open_programs() -> Vec<u32> {
    let entries = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
    let processes = entries("/proc").filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let files = processes.flat_map(|process| entries(&format!("/proc/{process}/fdinfo")));
    let id = |text: String| text.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok());
    files.filter_map(|file| fs::read_to_string(file.path()).ok()).filter_map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute_of;

    fn filter(name: &[u8]) -> Vec<u8> {
        let options = [attribute_of(TCA_BPF_NAME, name), attribute_of(TCA_BPF_ID, &7_u32.to_ne_bytes())];
        let mut body = vec![0; TCMSG];
        body[8..12].copy_from_slice(&3_u32.to_ne_bytes());
        body[16..20].copy_from_slice(&0xc000_0300_u32.to_ne_bytes());
        body.extend(attribute_of(1, b"bpf\0"));
        body.extend(attribute_of(TCA_OPTIONS | 0x8000, &options.concat()));
        body
    }

    #[test]
    fn stale_tc_filter_is_found_by_its_name() {
        let found = Some(StaleFilter { handle: 3, priority: 0xc000, program: 7 });
        for (name, want) in [
            (&b"relay_in:[7]\0"[..], &found),
            (b"relay_ingress:[7]\0", &None),
            (b"", &None),
            (b"\xff", &None),
        ] {
            assert_eq!(parse(&filter(name), "relay_in"), *want);
        }
        let whole = filter(b"relay_in:[7]\0");
        for len in 0..whole.len() {
            assert_eq!(parse(&whole[..len], "relay_in"), None, "cut at {len}");
        }
    }
}
