//! Routing for a gateway: marked packets are delivered to this host although they are addressed to another host. A
//! routing rule directs these packets to a table whose only route is local.
//!
//! Packet marks and table numbers differ for each daemon process. Removing the leftovers of one process thus does not
//! affect processes that live.

use std::io;

use millrace_kernel::netlink::{
    CREATE, RTA_OIF, RTM_GETROUTE, RTM_NEWROUTE, attribute, attribute_of, change, dump,
};
use nix::libc;

use super::{GatewayRun, LOOPBACK};

// Constants of linux/rtnetlink.h and linux/fib_rules.h.
const RTM_DELROUTE: u16 = 25;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;
/// Bytes of `struct rtmsg` and of `struct fib_rule_hdr`, which are equally long.
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

/// Routing protocol number of the gateway's rules and routes. No other known program uses it.
pub const PROTOCOL: u8 = 91;
/// Priority of the rules: after the kernel's rule for local addresses (0), and before those of operators.
const PRIORITY: u32 = 91;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RouteFamily {
    V4,
    V6,
}

impl RouteFamily {
    fn number(self) -> u8 {
        match self {
            Self::V4 => libc::AF_INET as u8,
            Self::V6 => libc::AF_INET6 as u8,
        }
    }
}

/// Adds rules and routes that deliver marked packets locally: packets from these interfaces with the mark
/// [`GatewayRun::mark`], and packets on loopback with [`GatewayRun::mark_again`].
pub(super) fn add(run: GatewayRun, families: &[RouteFamily], interfaces: &[String]) -> io::Result<()> {
    let loopback = nix::net::if_::if_nametoindex(LOOPBACK)?;
    for family in families {
        exists(change(RTM_NEWROUTE, CREATE, &route(*family, run, loopback)))?;
        for interface in interfaces {
            exists(change(RTM_NEWRULE, CREATE, &rule(*family, run, interface, run.mark())))?;
        }
        exists(change(RTM_NEWRULE, CREATE, &rule(*family, run, LOOPBACK, run.mark_again())))?;
    }
    Ok(())
}

/// Removes the rules and routes of all daemon processes for which `whose` returns true. Returns how many were removed.
pub(super) fn remove(whose: impl Fn(GatewayRun) -> bool) -> io::Result<usize> {
    let all = all()?;
    let theirs: Vec<_> = all.iter().filter(|made| whose(made.run)).collect();
    theirs.iter().try_for_each(|made| ignore_missing(change(made.removal, 0, &made.body)))?;
    Ok(theirs.len())
}

/// Returns the numbers of the daemon processes whose rules or routes exist in this network namespace.
pub(super) fn runs() -> io::Result<Vec<GatewayRun>> {
    Ok(all()?.into_iter().map(|made| made.run).collect())
}

/// A rule or a route of a gateway, as the kernel lists it.
struct MadeRoute {
    run: GatewayRun,
    /// Type of the netlink message that removes this rule or route. That message has the same body (`body`) as the
    /// message in which the kernel listed the rule or route.
    removal: u16,
    body: Vec<u8>,
}

/// Returns the gateway's rules and routes of all daemon processes. The list begins with the rules. If they are removed
/// in this order, no rule refers to an empty table meanwhile.
fn all() -> io::Result<Vec<MadeRoute>> {
    let mut all = Vec::new();
    for family in [RouteFamily::V4, RouteFamily::V6] {
        let head = [&[family.number()][..], &[0; HEAD - 1]].concat();
        for (get, new, removal, protocol) in [
            (RTM_GETRULE, RTM_NEWRULE, RTM_DELRULE, FRA_PROTOCOL),
            (RTM_GETROUTE, RTM_NEWROUTE, RTM_DELROUTE, 0),
        ] {
            dump(get, &head, new, |body| {
                let run = whose(body, family, protocol);
                all.extend(run.map(|run| MadeRoute { run, removal, body: body.to_vec() }));
            })?;
        }
    }
    Ok(all)
}

/// Returns the number of the daemon process that added a rule or route; `None` if no gateway did. `protocol` is the
/// type of the netlink attribute that has the routing protocol number; 0: the number is in the message's header.
fn whose(body: &[u8], family: RouteFamily, protocol: u16) -> Option<GatewayRun> {
    let attributes = body.get(HEAD..)?;
    let number = match protocol {
        // The header's field `rtm_protocol` in `struct rtmsg`.
        0 => *body.get(5)?,
        kind => *attribute(attributes, kind)?.first()?,
    };
    let table = u32::from_ne_bytes(*attribute(attributes, RTA_TABLE)?.first_chunk()?);
    GatewayRun::from_table(table).filter(|_| number == PROTOCOL && body.first() == Some(&family.number()))
}

fn exists(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    })
}

/// Treats a rule or route that is already gone as removed.
fn ignore_missing(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Ok(()),
        _ => Err(error),
    })
}

fn route(family: RouteFamily, run: GatewayRun, loopback: u32) -> Vec<u8> {
    // struct rtmsg: family, prefix lengths, tos, table (0: see the attribute), protocol, scope, type, flags.
    let mut body = vec![family.number(), 0, 0, 0, 0, PROTOCOL, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0];
    body.extend(attribute_of(RTA_TABLE, &run.table().to_ne_bytes()));
    body.extend(attribute_of(RTA_OIF, &loopback.to_ne_bytes()));
    body
}

fn rule(family: RouteFamily, run: GatewayRun, interface: &str, mark: u32) -> Vec<u8> {
    // struct fib_rule_hdr: family, prefix lengths, tos, table (0: see the attribute), reserved, action, flags.
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
    fn gateway_recognises_only_its_own_routing_rules_and_routes() {
        let run = GatewayRun(7);
        let rule = rule(RouteFamily::V4, run, "lan0", run.mark());
        let route = route(RouteFamily::V6, run, 1);
        for (body, family, protocol) in [(rule, RouteFamily::V4, FRA_PROTOCOL), (route, RouteFamily::V6, 0)] {
            assert_eq!(whose(&body, family, protocol), Some(run));
            for cut in 0..body.len() {
                // A message is recognised even if bytes behind the needed attributes are cut off.
                assert!(whose(&body[..cut], family, protocol).is_none_or(|it| it == run), "{cut}");
            }
            // A rule or route with another protocol number or another table is not recognised.
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
