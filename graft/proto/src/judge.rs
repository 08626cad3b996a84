//! Whether what the other says will do, and on which terms. Both ends judge the other's [`Statement`] by the same function, each
//! with its own wants.

use std::net::IpAddr;

use super::message::{Hash, Nat, Reason, Refusal, Rule, Statement};

/// What one end wants of the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    pub cpus: u32,
    pub memory_mib: u64,
    /// As `6.1`.
    pub kernel: Option<[u32; 2]>,
}

/// What both are bound by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub version: u32,
    /// Indexes of one's own rules that a rule of the other's meets, each with what that one's side uses.
    pub rules: Vec<(usize, Option<Hash>)>,
    /// As the one sees it whose terms these are.
    pub nat: Nat,
}

/// `own`: what this end says; `theirs`: what the other has said on the same connection.
///
/// # Errors
/// What stands in the way.
pub fn judge(own: &Statement, wants: &Wants, theirs: &Statement) -> Result<Terms, Refusal> {
    let version = version(own, theirs)?;
    if own.host.abi != theirs.host.abi {
        let detail = format!("grafts of ABI {} and of ABI {}", own.host.abi, theirs.host.abi);
        return Err(Refusal::new(Reason::Abi, detail));
    }
    check_host(wants, theirs)?;
    let nat = nat(own, theirs);
    if nat == Nat::Both {
        let detail = format!(
            "both ends are behind a translation of addresses: {} is seen as {}, {} as {}",
            own.local.ip(),
            theirs.remote.ip(),
            theirs.local.ip(),
            own.remote.ip()
        );
        return Err(Refusal::new(Reason::Nat, detail));
    }
    Ok(Terms { version, rules: meeting(own, theirs)?, nat })
}

fn version(own: &Statement, theirs: &Statement) -> Result<u32, Refusal> {
    let common = own.versions.iter().filter(|version| theirs.versions.contains(version)).max();
    common.copied().ok_or_else(|| {
        Refusal::new(Reason::Version, format!("versions {:?} and {:?}", own.versions, theirs.versions))
    })
}

fn check_host(wants: &Wants, theirs: &Statement) -> Result<(), Refusal> {
    let host = &theirs.host;
    if host.cpus < wants.cpus || host.memory_mib < wants.memory_mib {
        let detail = format!(
            "{} CPUs and {} MiB are less than the {} and {} that are wanted",
            host.cpus, host.memory_mib, wants.cpus, wants.memory_mib
        );
        return Err(Refusal::new(Reason::Resources, detail));
    }
    let Some(least) = wants.kernel else { return Ok(()) };
    match kernel(&host.kernel) {
        Some(has) if has >= least => Ok(()),
        _ => {
            let detail =
                format!("kernel {} is older than the {}.{} that is wanted", host.kernel, least[0], least[1]);
            Err(Refusal::new(Reason::Kernel, detail))
        }
    }
}

/// Of `6.12.48-cloud-amd64`, the 6 and the 12.
pub fn kernel(release: &str) -> Option<[u32; 2]> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some([numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?])
}

fn nat(own: &Statement, theirs: &Statement) -> Nat {
    let same = |one: IpAddr, other: IpAddr| one.to_canonical() == other.to_canonical();
    match (same(own.local.ip(), theirs.remote.ip()), same(theirs.local.ip(), own.remote.ip())) {
        (true, true) => Nat::None,
        (false, true) => Nat::Ours,
        (true, false) => Nat::Theirs,
        (false, false) => Nat::Both,
    }
}

/// Of opposite sides and with a port in common; and what each wants of the other is what that one uses.
fn meeting(own: &Statement, theirs: &Statement) -> Result<Vec<(usize, Option<Hash>)>, Refusal> {
    let mut met = Vec::new();
    let mut unmet = None;
    for (index, rule) in own.rules.iter().enumerate() {
        for other in theirs.rules.iter().filter(|other| meets(rule, other)) {
            match missing(rule, other, theirs).or_else(|| missing(other, rule, own)) {
                Some(detail) => unmet = Some(detail),
                None => {
                    met.push((index, other.graft));
                    break;
                }
            }
        }
    }
    match (met.is_empty(), unmet) {
        (false, _) => Ok(met),
        (true, Some(detail)) => Err(Refusal::new(Reason::UnknownFunction, detail)),
        (true, None) => Err(Refusal::new(Reason::NoRule, "no rule of the one meets one of the other")),
    }
}

fn meets(one: &Rule, other: &Rule) -> bool {
    one.side != other.side && one.first_port <= other.last_port && other.first_port <= one.last_port
}

/// What `rule` wants of the other side's.
fn missing(rule: &Rule, other: &Rule, has: &Statement) -> Option<String> {
    let wanted = rule.wants.filter(|wanted| other.graft != Some(*wanted))?;
    Some(match has.functions.iter().find(|it| it.identity == wanted) {
        Some(known) => format!("graft {} ({wanted}) is there, and the rule uses another", known.name),
        None => format!("graft {wanted} is wanted and not there"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{Side, tests::statement};

    /// Of one connection, client's and server's.
    fn both() -> (Statement, Statement) {
        let caller = statement();
        let mut called = statement();
        (called.local, called.remote) = (caller.remote, caller.local);
        called.rules[0].side = Side::Server;
        called.rules[0].graft = Some(Hash([3; 32]));
        (caller, called)
    }

    #[test]
    fn both_come_to_the_same() {
        let (caller, called) = both();
        let wants = Wants { cpus: 2, memory_mib: 4096, kernel: Some([6, 18]) };
        let terms = judge(&caller, &wants, &called).unwrap();
        assert_eq!(terms, Terms { version: 1, rules: vec![(0, Some(Hash([3; 32])))], nat: Nat::None });
        let terms = judge(&called, &wants, &caller).unwrap();
        assert_eq!(terms, Terms { version: 1, rules: vec![(0, None)], nat: Nat::None });
    }

    #[test]
    fn what_stands_in_the_way_is_said() {
        type Change = fn(&mut Statement, &mut Statement, &mut Wants);
        let table: [(Change, Reason, &str); 11] = [
            (|_, it, _| it.versions = vec![2, 3], Reason::Version, "[1] and [2, 3]"),
            (|_, it, _| it.host.abi = 2, Reason::Abi, "ABI 1 and of ABI 2"),
            (|_, _, wants| wants.cpus = 3, Reason::Resources, "2 CPUs and 4096 MiB are less than the 3"),
            (|_, _, wants| wants.memory_mib = 5000, Reason::Resources, "5000 that are wanted"),
            (|_, _, wants| wants.kernel = Some([6, 19]), Reason::Kernel, "6.18.5 is older than the 6.19"),
            (
                |_, it, wants| {
                    it.host.kernel = "new".into();
                    wants.kernel = Some([6, 1]);
                },
                Reason::Kernel,
                "kernel new",
            ),
            (|_, it, _| it.rules[0].side = Side::Client, Reason::NoRule, "no rule"),
            (|_, it, _| it.rules[0].first_port = 91, Reason::NoRule, "no rule"),
            (|own, _, _| own.rules[0].wants = Some(Hash([9; 32])), Reason::UnknownFunction, "not there"),
            (|_, it, _| it.rules[0].wants = Some(Hash([3; 32])), Reason::UnknownFunction, "uses another"),
            (
                |_, it, _| {
                    it.remote = "192.0.2.1:4000".parse().unwrap();
                    it.local = "192.168.0.2:9187".parse().unwrap();
                },
                Reason::Nat,
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
    fn one_translation_is_no_hindrance() {
        let (caller, mut called) = both();
        called.remote = "192.0.2.1:5000".parse().unwrap();
        assert_eq!(judge(&caller, &Wants::default(), &called).unwrap().nat, Nat::Ours);
        assert_eq!(judge(&called, &Wants::default(), &caller).unwrap().nat, Nat::Theirs);
        // The same address, as sockets of both families show it.
        called.remote = "[::ffff:10.0.0.1]:4000".parse().unwrap();
        assert_eq!(judge(&called, &Wants::default(), &caller).unwrap().nat, Nat::None);
    }

    #[test]
    fn kernels() {
        let table = [("6.12.48-cloud-amd64", Some([6, 12])), ("7.0", Some([7, 0])), ("7", None), ("", None)];
        for (text, wanted) in table {
            assert_eq!(kernel(text), wanted, "{text}");
        }
    }
}
