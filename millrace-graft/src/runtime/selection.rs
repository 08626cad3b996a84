//! Rules that have a model choose: each path that is known gets a place of its own, in front of the rule's.

use std::{collections::BTreeMap, net::IpAddr};

use millrace_bpf::graft::covers;
use millrace_proto::graft::select::{features::Feature, model::Model};

use crate::{Rule, Settings, paths::Path, status::Chosen};

/// What was chosen, by the index of the rule and the peer. A peer is in it for no rule but those that it fits, and steers nothing else.
pub type Selection = BTreeMap<(usize, IpAddr), Chosen>;

/// For so many places as there is room, the paths first that were used last. `can`: whether TCP has a congestion control.
pub fn choose(settings: &Settings, paths: &[Path], room: usize, can: impl Fn(&str) -> bool) -> Selection {
    let Some(model) = &settings.model else { return Selection::new() };
    let mut latest: Vec<&Path> = paths.iter().collect();
    latest.sort_by_key(|path| path.idle_s);
    let (mut selection, mut left) = (Selection::new(), room);
    for path in latest {
        for (index, rule) in settings.rules.iter().enumerate() {
            let is_for = rule.peers.iter().any(|peer| covers(*peer, path.peer));
            let chosen = is_for.then(|| of(model, rule, path, &can)).flatten();
            let Some(chosen) = chosen.filter(|_| left >= rule.ports.len()) else { continue };
            left -= rule.ports.len();
            selection.insert((index, path.peer), chosen);
        }
    }
    selection
}

fn of(model: &Model, rule: &Rule, path: &Path, can: impl Fn(&str) -> bool) -> Option<Chosen> {
    let select = rule.select?;
    let size = select.size_kib.map(f64::from);
    let features =
        path.features().for_profile(select.profile).with(Feature::Size, size).carrying(false, false);
    let decision = model.decide(&features, can);
    let rank = decision.rank?;
    Some(Chosen {
        rule: rule.name.clone(),
        congestion: rank.arm.clone(),
        right: rank.right,
        way: decision.words.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::Monitor;

    const MODEL: &str = r#"{"version":1,"about":"a test","arms":["bbr","cubic"],"tree":{"split":{"by":"rtt","at":50,"unknown":"below",
        "below":{"leaf":{"number":0,"examples":9,"ranking":[{"arm":"cubic","right":1,"utility":1},{"arm":"bbr","right":0,"utility":0}]}},
        "above":{"leaf":{"number":1,"examples":9,"ranking":[{"arm":"bbr","right":1,"utility":1},{"arm":"cubic","right":0,"utility":0}]}}}}}"#;

    fn settings() -> Settings {
        let rule = |name: &str, peer: &str, how: &str| {
            format!(
                "[[rule]]\nname = \"{name}\"\nside = \"client\"\nport = [80, 443]\nagree = false\npeer = \"{peer}\"\n{how}\n"
            )
        };
        let text = rule("near", "10.0.0.0/8", "select = \"loss\"")
            + &rule("other", "0.0.0.0/0", "congestion = \"reno\"");
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("model.json"), MODEL).unwrap();
        let file = directory.path().join("graft.toml");
        std::fs::write(&file, format!("model = \"model.json\"\n{text}")).unwrap();
        Settings::read(&file).expect("settings")
    }

    fn path(peer: &str, rtt_min_us: u32, idle_s: u64) -> Path {
        let mut monitor = Monitor::new(crate::settings::default_classes());
        let report = millrace_proto::graft::measure::Report { answered: 1, rtt_min_us, ..Default::default() };
        monitor.note_probe(peer.parse().unwrap(), report, 1);
        Path { idle_s, ..monitor.paths().remove(0) }
    }

    #[test]
    fn each_path_gets_what_its_own_figures_say() {
        let paths =
            [path("10.0.0.1", 10_000, 0), path("10.0.0.2", 100_000, 0), path("192.0.2.1", 100_000, 0)];
        let chosen = choose(&settings(), &paths, 64, |_| true);
        let told: Vec<_> = chosen
            .iter()
            .map(|((rule, peer), it)| (*rule, peer.to_string(), it.congestion.as_str()))
            .collect();
        assert_eq!(told, [(0, "10.0.0.1".to_owned(), "cubic"), (0, "10.0.0.2".to_owned(), "bbr")]);
        assert_eq!(chosen.values().nth(1).unwrap().way, ["rtt is 100 ms: more than 50 ms"]);
        let without = choose(&settings(), &paths, 64, |control| control == "cubic");
        assert!(without.values().all(|it| it.congestion == "cubic"), "what TCP lacks is not chosen");
    }

    #[test]
    fn room_is_for_those_that_were_used_last() {
        let paths = [path("10.0.0.1", 1, 9), path("10.0.0.2", 1, 0), path("10.0.0.3", 1, 3)];
        let chosen = choose(&settings(), &paths, 5, |_| true);
        let peers: Vec<_> = chosen.keys().map(|(_, peer)| peer.to_string()).collect();
        assert_eq!(peers, ["10.0.0.2", "10.0.0.3"], "two ports each");
        assert!(choose(&Settings::default(), &paths, 64, |_| true).is_empty());
    }
}
