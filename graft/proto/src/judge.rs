//! Decides whether a host accepts the peer's [`Statement`], and on which terms. Both hosts call the same function, each
//! with its own requirements.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::message::{AgreementRefusal, Hash, NatReport, RefusalReason, RuleOffer, Statement};

/// Requirements that a host has of its peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Fewest CPUs that the peer may have.
    pub cpus: u32,
    /// Least memory that the peer may have, MiB.
    pub memory_mib: u64,
    /// Oldest kernel version that the peer may run, such as `6.1`; `None`: any.
    pub kernel: Option<[u32; 2]>,
}

/// The terms of an agreement, as one host sees them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JudgeTerms {
    /// The newest version of the agreement protocol that both hosts support.
    pub version: u32,
    /// Indices of this host's rules that match a rule of the peer, each with the graft (loadable congestion control)
    /// that the peer uses for it.
    pub rules: Vec<(usize, Option<Hash>)>,
    /// Address translation (NAT) on the path, as this host sees it.
    pub nat: NatReport,
}

/// Compares the statements that both hosts sent on one connection. Returns the terms on which they agree.
///
/// # Errors
/// The hosts cannot agree; the refusal names the reason and is sent to the peer.
pub fn judge(own: &Statement, wants: &Wants, theirs: &Statement) -> Result<JudgeTerms, AgreementRefusal> {
    let version = version(own, theirs)?;
    // Hosts exchange object files of congestion controls (grafts), so both need the same ABI.
    if own.host.abi != theirs.host.abi {
        let detail = format!("grafts of ABI {} and of ABI {}", own.host.abi, theirs.host.abi);
        return Err(AgreementRefusal::new(RefusalReason::Abi, detail));
    }
    check_host(wants, theirs)?;
    // Each host reports its local address and the peer's address as it sees it. If a host's own address differs from
    // what the peer sees, it is translated (NAT).
    let nat = nat(own, theirs);
    if nat == NatReport::Both {
        let detail = format!(
            "both ends are behind a translation of addresses: {} is seen as {}, {} as {}",
            own.local.ip(),
            theirs.remote.ip(),
            theirs.local.ip(),
            own.remote.ip()
        );
        return Err(AgreementRefusal::new(RefusalReason::Nat, detail));
    }
    Ok(JudgeTerms { version, rules: meeting(own, theirs)?, nat })
}

fn version(own: &Statement, theirs: &Statement) -> Result<u32, AgreementRefusal> {
    let common = own.versions.iter().filter(|version| theirs.versions.contains(version)).max();
    common.copied().ok_or_else(|| {
        AgreementRefusal::new(
            RefusalReason::Version,
            format!("versions {:?} and {:?}", own.versions, theirs.versions),
        )
    })
}

fn check_host(wants: &Wants, theirs: &Statement) -> Result<(), AgreementRefusal> {
    let host = &theirs.host;
    if host.cpus < wants.cpus || host.memory_mib < wants.memory_mib {
        let detail = format!(
            "the host has {} CPUs and {} MiB of memory, and {} CPUs and {} MiB are required",
            host.cpus, host.memory_mib, wants.cpus, wants.memory_mib
        );
        return Err(AgreementRefusal::new(RefusalReason::Resources, detail));
    }
    let Some(least) = wants.kernel else { return Ok(()) };
    match kernel(&host.kernel) {
        Some(has) if has >= least => Ok(()),
        _ => {
            let detail =
                format!("kernel {} is older than the required {}.{}", host.kernel, least[0], least[1]);
            Err(AgreementRefusal::new(RefusalReason::Kernel, detail))
        }
    }
}

/// Returns major and minor number of a kernel release: 6 and 12 of `6.12.48-cloud-amd64`.
pub fn kernel(release: &str) -> Option<[u32; 2]> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some([numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?])
}

fn nat(own: &Statement, theirs: &Statement) -> NatReport {
    let same = |one: IpAddr, other: IpAddr| one.to_canonical() == other.to_canonical();
    match (same(own.local.ip(), theirs.remote.ip()), same(theirs.local.ip(), own.remote.ip())) {
        (true, true) => NatReport::None,
        (false, true) => NatReport::Ours,
        (true, false) => NatReport::Theirs,
        (false, false) => NatReport::Both,
    }
}

/// Returns this host's rules that match a rule of the peer: one host is client and the other server, port ranges
/// overlap, and each host uses the congestion control (graft) that the other requires.
fn meeting(own: &Statement, theirs: &Statement) -> Result<Vec<(usize, Option<Hash>)>, AgreementRefusal> {
    let mut met = Vec::new();
    let mut unmet = None;
    for (index, rule) in own.rules.iter().enumerate() {
        for other in theirs.rules.iter().filter(|other| meets(rule, other)) {
            match missing(rule, other, theirs).or_else(|| missing(other, rule, own)) {
                Some(detail) => unmet = Some(detail),
                None => {
                    met.push((index, other.graft));
                    // A rule of this host needs only one matching rule of the peer.
                    break;
                }
            }
        }
    }
    // If a rule fails only because one host lacks a congestion control (graft), the refusal names it, which helps the
    // operator more than "no rule matches".
    match (met.is_empty(), unmet) {
        (false, _) => Ok(met),
        (true, Some(detail)) => Err(AgreementRefusal::new(RefusalReason::UnknownFunction, detail)),
        (true, None) => Err(AgreementRefusal::new(
            RefusalReason::NoRule,
            "no rule of one end matches a rule of the other",
        )),
    }
}

fn meets(one: &RuleOffer, other: &RuleOffer) -> bool {
    one.side != other.side && one.first_port <= other.last_port && other.first_port <= one.last_port
}

/// Returns a description of the required congestion control (graft) if the peer's rule does not use it; `None` if it
/// does.
fn missing(rule: &RuleOffer, other: &RuleOffer, has: &Statement) -> Option<String> {
    let wanted = rule.wants.filter(|wanted| other.graft != Some(*wanted))?;
    Some(match has.functions.iter().find(|it| it.identity == wanted) {
        Some(known) => {
            format!("graft {} ({wanted}) is required, but the rule of the other end uses another", known.name)
        }
        None => format!("graft {wanted} is required, but the other end does not have it"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{OfferSide, tests::statement};

    /// Returns the client's and the server's statement on the same connection.
    fn both() -> (Statement, Statement) {
        let caller = statement();
        let mut called = statement();
        (called.local, called.remote) = (caller.remote, caller.local);
        called.rules[0].side = OfferSide::Server;
        called.rules[0].graft = Some(Hash([3; 32]));
        (caller, called)
    }

    #[test]
    fn both_hosts_reach_the_same_verdict_on_an_offer_of_grafts() {
        let (caller, called) = both();
        let wants = Wants { cpus: 2, memory_mib: 4096, kernel: Some([6, 18]) };
        let terms = judge(&caller, &wants, &called).unwrap();
        assert_eq!(
            terms,
            JudgeTerms { version: 1, rules: vec![(0, Some(Hash([3; 32])))], nat: NatReport::None }
        );
        let terms = judge(&called, &wants, &caller).unwrap();
        assert_eq!(terms, JudgeTerms { version: 1, rules: vec![(0, None)], nat: NatReport::None });
    }

    #[test]
    fn refused_agreement_names_its_reason() {
        type Change = fn(&mut Statement, &mut Statement, &mut Wants);
        let table: [(Change, RefusalReason, &str); 11] = [
            (|_, it, _| it.versions = vec![2, 3], RefusalReason::Version, "[1] and [2, 3]"),
            (|_, it, _| it.host.abi = 2, RefusalReason::Abi, "ABI 1 and of ABI 2"),
            (
                |_, _, wants| wants.cpus = 3,
                RefusalReason::Resources,
                "2 CPUs and 4096 MiB of memory, and 3 CPUs",
            ),
            (|_, _, wants| wants.memory_mib = 5000, RefusalReason::Resources, "5000 MiB are required"),
            (
                |_, _, wants| wants.kernel = Some([6, 19]),
                RefusalReason::Kernel,
                "6.18.5 is older than the required 6.19",
            ),
            (
                |_, it, wants| {
                    it.host.kernel = "new".into();
                    wants.kernel = Some([6, 1]);
                },
                RefusalReason::Kernel,
                "kernel new",
            ),
            (|_, it, _| it.rules[0].side = OfferSide::Client, RefusalReason::NoRule, "no rule"),
            (|_, it, _| it.rules[0].first_port = 91, RefusalReason::NoRule, "no rule"),
            (
                |own, _, _| own.rules[0].wants = Some(Hash([9; 32])),
                RefusalReason::UnknownFunction,
                "does not have it",
            ),
            (
                |_, it, _| it.rules[0].wants = Some(Hash([3; 32])),
                RefusalReason::UnknownFunction,
                "uses another",
            ),
            (
                |_, it, _| {
                    it.remote = "192.0.2.1:4000".parse().unwrap();
                    it.local = "192.168.0.2:9187".parse().unwrap();
                },
                RefusalReason::Nat,
                "10.0.0.1 is seen as 192.0.2.1, 192.168.0.2 as 10.0.0.2",
            ),
        ];
        for (change, reason, detail) in table {
            let (mut own, mut theirs) = both();
            theirs.rules[0].last_port = 99;
            let mut wants = Wants::default();
            change(&mut own, &mut theirs, &mut wants);
            let refusal = judge(&own, &wants, &theirs).expect_err(detail);
            assert_eq!(refusal.reason, reason, "{refusal:?}");
            assert!(refusal.detail.contains(detail), "{refusal:?}");
        }
    }

    #[test]
    fn one_address_translation_does_not_prevent_an_agreement() {
        let (caller, mut called) = both();
        called.remote = "192.0.2.1:5000".parse().unwrap();
        assert_eq!(judge(&caller, &Wants::default(), &called).unwrap().nat, NatReport::Ours);
        assert_eq!(judge(&called, &Wants::default(), &caller).unwrap().nat, NatReport::Theirs);
        // An IPv6 socket shows an IPv4 address in mapped form, which counts as the same address.
        called.remote = "[::ffff:10.0.0.1]:4000".parse().unwrap();
        assert_eq!(judge(&called, &Wants::default(), &caller).unwrap().nat, NatReport::None);
    }

    #[test]
    fn kernel_release_is_parsed_to_two_numbers() {
        let table = [("6.12.48-cloud-amd64", Some([6, 12])), ("7.0", Some([7, 0])), ("7", None), ("", None)];
        for (text, wanted) in table {
            assert_eq!(kernel(text), wanted, "{text}");
        }
    }
}
