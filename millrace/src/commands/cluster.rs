//! `millrace cluster`: shows the other relays of a running relay's cluster, and the routes to namespaces.

use anyhow::{Context as _, bail};
use millrace_daemon::render::{
    Fit::{self, Name, Text, Whole},
    line, print, table, width,
};
use millrace_moq::Namespace;
use millrace_relay_daemon::{
    status::{
        ClusterStatus, NamespaceLookupStatus, RegisteredRelay, RouteStatus, RoutedNamespace, RoutesStatus,
        Status, TriedRelay,
    },
    text::{found, looked_up},
};

use super::status;

#[derive(Debug, clap::Args)]
pub struct ClusterArgs {
    #[command(subcommand)]
    verb: ClusterVerb,
}

#[derive(Debug, clap::Subcommand)]
enum ClusterVerb {
    /// Show the relays of the cluster that the relay has sessions with
    Status(status::AskedRelay),
    /// Show the routes to namespaces
    Routes {
        /// Show only namespaces that begin with this one
        #[arg(value_name = "NAMESPACE")]
        prefix: Option<Namespace>,
        #[command(flatten)]
        asked: status::AskedRelay,
        /// Print the routes as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the relay's route to a namespace, its cost, and why the other routes are not used
    Why {
        /// Namespace whose routes are explained
        namespace: Namespace,
        #[command(flatten)]
        asked: status::AskedRelay,
    },
}

pub fn run(args: ClusterArgs) -> anyhow::Result<()> {
    match args.verb {
        ClusterVerb::Status(asked) => print(&render_status(&asked.ask()?, width())?),
        ClusterVerb::Routes { prefix, asked, json } => {
            let routes = ask(&asked, &prefix.unwrap_or_default())?;
            match json {
                true => print(&(serde_json::to_string_pretty(&routes)? + "\n")),
                false => print(&render_routes(&routes, width())),
            }
        }
        ClusterVerb::Why { namespace, asked } => {
            let status = asked.ask()?;
            let cluster = status.cluster.as_ref().context(NO_CLUSTER)?;
            let lookup =
                ask(&asked, &namespace)?.lookup.as_ref().map(|lookup| render_lookup(lookup, width()));
            let lookup = lookup.unwrap_or_default();
            // An announced namespace covers all namespaces that begin with it. The longest announced prefix applies.
            let mut prefixes: Vec<_> = namespace.prefixes().collect();
            prefixes.reverse();
            for prefix in prefixes {
                let found = ask(&asked, &prefix)?.namespaces.into_iter();
                let exact = prefix.typed().to_string();
                if let Some(routed) = found.into_iter().find(|routed| routed.namespace == exact) {
                    return print(&(render_why(cluster, &namespace, &routed, width()) + &lookup));
                }
            }
            if !lookup.is_empty() {
                return print(&lookup);
            }
            bail!("no relay of the cluster announces {}, and nobody publishes it here", namespace.typed());
        }
    }
}

const NO_CLUSTER: &str = "the relay is in no cluster: see cluster and cluster-peer in its settings";

fn ask(asked: &status::AskedRelay, prefix: &Namespace) -> anyhow::Result<RoutesStatus> {
    let query = url::form_urlencoded::Serializer::new(String::new())
        .append_pair("prefix", &prefix.typed().to_string())
        .finish();
    let path = if prefix.is_empty() { "/routes".to_owned() } else { format!("/routes?{query}") };
    let (code, body) = asked.fetch(&path)?;
    match code {
        200 => serde_json::from_str(&body).context("the answer has no routes"),
        404 => bail!(NO_CLUSTER),
        code => bail!("{path} answered {code}: {}", body.trim_end()),
    }
}

fn render_status(status: &Status, width: usize) -> anyhow::Result<String> {
    let cluster = status.cluster.as_ref().context(NO_CLUSTER)?;
    let mut out = String::new();
    line(
        &mut out,
        width,
        &format!(
            "hop {}: {} routes to {} namespaces, {} of them received from other relays",
            cluster.hop, cluster.routes, cluster.namespaces, cluster.carried
        ),
    );
    let totals = &status.totals;
    line(
        &mut out,
        width,
        &format!(
            "{} tracks moved to another relay, {} loops refused, {} announcements not allowed or too many",
            totals.reroutes, totals.routes_looped, totals.routes_refused
        ),
    );
    if let Some(discovery) = &cluster.discovery {
        line(&mut out, width, &found(discovery));
        discovery.lookup.iter().for_each(|lookup| line(&mut out, width, &looked_up(lookup, totals)));
    }
    if !cluster.peers.is_empty() {
        let rows = cluster.peers.iter().map(|peer| {
            let session = peer.session.map_or("-".to_owned(), |session| session.to_string());
            vec![peer.host.clone(), session, peer.reason.clone()]
        });
        table(&mut out, width, &[("PEER", Name), ("SESSION", Whole), ("WHY NOT", Text)], rows);
    }
    if !cluster.links.is_empty() {
        const HEAD: [(&str, Fit); 5] =
            [("SESSION", Whole), ("HOP", Whole), ("COST", Whole), ("ROUTES", Whole), ("STATE", Whole)];
        let rows = cluster.links.iter().map(|link| {
            let state = if link.suspect { "stands back" } else { "answers" };
            let numbers = [link.session, link.hop, link.cost, link.routes].map(|number| number.to_string());
            numbers.into_iter().chain([state.to_owned()]).collect()
        });
        table(&mut out, width, &HEAD, rows);
    }
    Ok(out)
}

const ROUTES: [(&str, Fit); 5] =
    [("NAMESPACE", Name), ("SESSION", Whole), ("COST", Whole), ("STATE", Whole), ("PATH", Text)];

fn render_routes(routes: &RoutesStatus, width: usize) -> String {
    let mut out = String::new();
    let rows = routes.namespaces.iter().flat_map(|routed| {
        routed.routes.iter().enumerate().map(|(place, route)| {
            vec![
                routed.namespace.clone(),
                route.session.to_string(),
                route.cost.to_string(),
                state(place, route).to_owned(),
                path(route),
            ]
        })
    });
    table(&mut out, width, &ROUTES, rows);
    if routes.truncated {
        line(&mut out, width, "more namespaces are not shown: give the beginning of one as NAMESPACE");
    }
    out.trim_start().to_owned()
}

/// Returns the state of a route in one or two words, as the table shows it. `place` is the route's rank among the
/// routes to the namespace.
fn state(place: usize, route: &RouteStatus) -> &'static str {
    match (route.local, route.carried, route.suspect, place) {
        (true, _, _, _) => "published here",
        (_, true, _, _) => "in use",
        (_, _, true, _) => "stands back",
        (_, _, _, 0) => "preferred",
        _ => "standby",
    }
}

/// Formats the hop IDs of a route, from the publisher to this relay.
fn path(route: &RouteStatus) -> String {
    let hops: Vec<_> = route.path.iter().map(u64::to_string).collect();
    hops.join(" > ")
}

fn render_why(cluster: &ClusterStatus, asked: &Namespace, routed: &RoutedNamespace, width: usize) -> String {
    let mut out = String::new();
    let typed = asked.typed().to_string();
    if typed != routed.namespace {
        line(&mut out, width, &format!("{typed} is part of {}, which is announced", routed.namespace));
    }
    let mut say = |text: String| line(&mut out, width, &text);
    for (place, route) in routed.routes.iter().enumerate() {
        let host = cluster.peers.iter().find(|peer| peer.session == Some(route.session));
        let from = host.map_or_else(String::new, |peer| format!(" with {}", peer.host));
        say(format!("session {}{from}: {}, cost {}", route.session, state(place, route), route.cost));
        say(format!("  path {} > {} (this relay)", path(route), cluster.hop));
        if let Some(first) = routed.routes.first().filter(|_| place > 0) {
            say(format!("  {}", why_not(first, route)));
        }
    }
    out
}

/// Describes what the discovery store says about a namespace, and the attempts to get it.
fn render_lookup(lookup: &NamespaceLookupStatus, width: usize) -> String {
    let mut out = String::new();
    let mut say = |text: String| line(&mut out, width, &text);
    match (lookup.known, lookup.registered.is_empty()) {
        (false, _) => say("the store's answer is not in memory: it is asked when a viewer asks".to_owned()),
        (true, true) => say("the store has no other relay that has registered it".to_owned()),
        (true, false) => {}
    }
    for RegisteredRelay { host, namespace, usable } in &lookup.registered {
        let state = if *usable { "" } else { ", by another run than the present one: not used" };
        say(format!("the store has {namespace} at {host}{state}"));
    }
    for TriedRelay { host, failure } in &lookup.tried {
        let outcome = if failure.is_empty() { "announces it" } else { failure };
        say(format!("tried {} s ago: {host}: {outcome}", lookup.tried_s));
    }
    out
}

/// Returns the reason why the relay ranks the route `other` behind the route `first`.
fn why_not(first: &RouteStatus, other: &RouteStatus) -> String {
    // The match arms are in the order in which the relay compares properties of routes. Hop ID 0 means that a relay has
    // no identity.
    let unnamed = |route: &RouteStatus| route.path.contains(&0);
    match () {
        () if other.suspect && !first.suspect => "its relay does not answer, or is shutting down".to_owned(),
        () if first.local && !other.local => "the first route's publisher is at this relay".to_owned(),
        () if first.carried && !other.carried => "tracks already arrive over the first route".to_owned(),
        () if unnamed(other) && !unnamed(first) => "a hop on its path has no identity".to_owned(),
        () if other.cost > first.cost => format!("it costs {} more", other.cost - first.cost),
        () if other.path.len() > first.path.len() => {
            format!("its path has {} hops more", other.path.len() - first.path.len())
        }
        () => "both are equally good: the hash of namespace and path decides".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_why_says_what_the_store_has_and_what_came_of_it() {
        let registered =
            |host: &str, usable| RegisteredRelay { host: host.into(), namespace: "live".into(), usable };
        let tried = TriedRelay { host: "a:4443".into(), failure: "no answer".into() };
        let lookup = NamespaceLookupStatus {
            known: true,
            registered: vec![registered("a:4443", true), registered("b:4443", false)],
            tried: vec![tried],
            tried_s: 12,
        };
        let text = render_lookup(&lookup, 120);
        for part in [
            "the store has live at a:4443\n",
            "live at b:4443, by another run than the present one: not used",
            "tried 12 s ago: a:4443: no answer",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let absent = NamespaceLookupStatus { known: true, ..NamespaceLookupStatus::default() };
        assert_eq!(render_lookup(&absent, 120), "the store has no other relay that has registered it\n");
        let unknown = render_lookup(&NamespaceLookupStatus::default(), 120);
        assert!(unknown.contains("not in memory"), "{unknown}");
    }

    #[test]
    fn cluster_why_names_the_reason_of_each_standby_route() {
        let route = |session, path: &[u64], cost| RouteStatus {
            session,
            path: path.to_vec(),
            cost,
            ..RouteStatus::default()
        };
        let first = route(1, &[9, 2], 1);
        let longer = route(3, &[9, 4, 3], 1);
        for (other, reason) in [
            (route(2, &[9, 3], 4), "costs 3 more"),
            (route(2, &[9, 0, 3], 1), "no identity"),
            (longer.clone(), "1 hops more"),
            (route(2, &[9, 5], 1), "hash"),
            (RouteStatus { suspect: true, ..first.clone() }, "does not answer"),
        ] {
            assert!(why_not(&first, &other).contains(reason), "{reason}: {}", why_not(&first, &other));
        }
        let cluster = ClusterStatus { hop: 7, ..ClusterStatus::default() };
        let routed = RoutedNamespace { namespace: "live".into(), routes: vec![first, longer] };
        let text = render_why(&cluster, &Namespace::from_path("live/cam").unwrap(), &routed, 120);
        for part in ["live/cam is part of live", "session 1: preferred, cost 1", "path 9 > 4 > 3 > 7"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
