//! Packets that are for this host although their addresses are not: rules that look marked packets up in a table which has everything
//! be local.
//!
//! Marks and tables are another number for each run, so that who cleans up behind one does not take those of the next.

use std::io;

use millrace_kernel::netlink::{
    CREATE, RTA_OIF, RTM_GETROUTE, RTM_NEWROUTE, attribute, attribute_of, change, dump,
};
use nix::libc;

use super::{LOOPBACK, Run};

// linux/rtnetlink.h, linux/fib_rules.h
const RTM_DELROUTE: u16 = 25;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;
/// struct rtmsg, and struct fib_rule_hdr
const HEAD: usize = 12;
const RTN_LOCAL: u8 = 2;
const RT_SCOPE_HOST: u8 = 254;
const RTA_TABLE: u16 = 15;
const FR_ACT_TO_TBL: u8 = 1;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_PROTOCOL: u16 = 21;

/// By which rules and routes are known to be a gateway's: nobody else has this number.
pub const PROTOCOL: u8 = 91;
/// Before those that operators and other programs usually have, behind that for this host's addresses.
const PRIORITY: u32 = 91;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    fn number(self) -> u8 {
        match self {
            Self::V4 => libc::AF_INET as u8,
            Self::V6 => libc::AF_INET6 as u8,
        }
    }
}

/// Packets of these interfaces that have the run's mark are this host's, and those on loopback that have the other one.
pub(super) fn add(run: Run, families: &[Family], interfaces: &[String]) -> io::Result<()> {
    let loopback = nix::net::if_::if_nametoindex(LOOPBACK)?;
    for family in families {
        exists(change(RTM_NEWROUTE, CREATE, &route(*family, run, loopback)))?;
        for interface in interfaces {
            exists(change(RTM_NEWRULE, CREATE, &rule(*family, run, (interface, run.mark()))))?;
        }
        exists(change(RTM_NEWRULE, CREATE, &rule(*family, run, (LOOPBACK, run.mark_again()))))?;
    }
    Ok(())
}

/// Rules and routes of these runs. Returns how many there were.
pub(super) fn remove(whose: impl Fn(Run) -> bool) -> io::Result<usize> {
    let all = all()?;
    let theirs: Vec<_> = all.iter().filter(|made| whose(made.run)).collect();
    theirs.iter().try_for_each(|made| gone(change(made.removal, 0, &made.body)))?;
    Ok(theirs.len())
}

/// Those of which there are rules or routes.
pub(super) fn runs() -> io::Result<Vec<Run>> {
    Ok(all()?.into_iter().map(|made| made.run).collect())
}

/// A rule, or a route.
struct Made {
    run: Run,
    /// The message that takes it back, whose body is that which made it.
    removal: u16,
    body: Vec<u8>,
}

/// Of all gateways, rules before routes.
fn all() -> io::Result<Vec<Made>> {
    let mut all = Vec::new();
    for family in [Family::V4, Family::V6] {
        let head = [&[family.number()][..], &[0; HEAD - 1]].concat();
        for (get, new, removal, protocol) in [
            (RTM_GETRULE, RTM_NEWRULE, RTM_DELRULE, FRA_PROTOCOL),
            (RTM_GETROUTE, RTM_NEWROUTE, RTM_DELROUTE, 0),
        ] {
            dump(get, &head, new, |body| {
                let run = whose(body, family, protocol);
                all.extend(run.map(|run| Made { run, removal, body: body.to_vec() }));
            })?;
        }
    }
    Ok(all)
}

/// If it is a gateway's. `protocol`: the attribute that says so; 0: its head does.
fn whose(body: &[u8], family: Family, protocol: u16) -> Option<Run> {
    let attributes = body.get(HEAD..)?;
    let number = match protocol {
        0 => *body.get(5)?,
        kind => *attribute(attributes, kind)?.first()?,
    };
    let table = u32::from_ne_bytes(*attribute(attributes, RTA_TABLE)?.first_chunk()?);
    Run::of_table(table).filter(|_| number == PROTOCOL && body.first() == Some(&family.number()))
}

fn exists(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
}

/// Somebody else was faster.
fn gone(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Ok(()),
        _ => Err(error),
    })
}

fn route(family: Family, run: Run, loopback: u32) -> Vec<u8> {
    let mut body = vec![family.number(), 0, 0, 0, 0, PROTOCOL, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0];
    body.extend(attribute_of(RTA_TABLE, &run.table().to_ne_bytes()));
    body.extend(attribute_of(RTA_OIF, &loopback.to_ne_bytes()));
    body
}

fn rule(family: Family, run: Run, (interface, mark): (&str, u32)) -> Vec<u8> {
    let mut body = vec![family.number(), 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0];
    let name = [interface.as_bytes(), &[0]].concat();
    body.extend(attribute_of(FRA_IIFNAME, &name));
    body.extend(attribute_of(FRA_PRIORITY, &PRIORITY.to_ne_bytes()));
    body.extend(attribute_of(FRA_FWMARK, &mark.to_ne_bytes()));
    body.extend(attribute_of(FRA_FWMASK, &u32::MAX.to_ne_bytes()));
    body.extend(attribute_of(FRA_TABLE, &run.table().to_ne_bytes()));
    body.extend(attribute_of(FRA_PROTOCOL, &[PROTOCOL]));
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_knows_its_own() {
        let run = Run(7);
        let rule = rule(Family::V4, run, ("lan0", run.mark()));
        let route = route(Family::V6, run, 1);
        for (body, family, protocol) in [(rule, Family::V4, FRA_PROTOCOL), (route, Family::V6, 0)] {
            assert_eq!(whose(&body, family, protocol), Some(run));
            for cut in 0..body.len() {
                // What is cut off may be behind all that is looked at.
                assert!(whose(&body[..cut], family, protocol).is_none_or(|it| it == run), "{cut}");
            }
            // Of somebody else, or in another table.
            let mut others = body.clone();
            *others.iter_mut().rfind(|byte| **byte == PROTOCOL).unwrap() += 1;
            assert!(protocol == 0 || whose(&others, family, protocol).is_none());
            let table = run.table().to_ne_bytes();
            let at = body.windows(4).rposition(|it| it == table).unwrap();
            let mut others = body.clone();
            others[at..at + 4].copy_from_slice(&254_u32.to_ne_bytes());
            assert!(whose(&others, family, protocol).is_none());
        }
    }
}
