//! Purposes of connections (traffic profile and expected size): those that the settings set, and those that are
//! learned.

use std::{
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use millrace_graft_proto::select::{
    kind::{ExpectationSource, Expected, Kinds, Question, TrafficClass},
    profile::TrafficProfile,
};
use serde::Deserialize;

use super::{CgroupSetting, PortSetting, ProcessCondition, RuleSetting, Select, Settings, SideSetting};

/// Limit of `[[profile]]` entries.
const PURPOSES_MAX: usize = 64;
const SIZE_MAX_KIB: u32 = 1 << 30;

/// An entry `[[profile]]` of the settings, which sets the purpose of the connections that match it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PurposeSettings {
    /// The traffic profile, which states what delays matter to the application.
    pub profile: TrafficProfile,
    /// Condition on the process that connects.
    pub process: ProcessCondition,
    /// Ports of the servers, or an empty list for all ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Expected size of a connection in KiB.
    pub size_kib: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawPurpose {
    /// Name of one of the four traffic profiles, which state what delays matter to the application.
    name: TrafficProfile,
    /// Name of the thread that connects, as in `/proc/PID/comm`. It only matches clients on this host.
    command: Option<String>,
    /// Cgroup of the connecting process, as in a rule. The profile applies to a rule if the rule's cgroup is this one
    /// or below it.
    cgroup: Option<PathBuf>,
    /// Server ports, as in a rule, or all ports if left out. The profile applies to a rule if this list contains all of
    /// the rule's ports.
    #[serde(default)]
    port: Vec<PortSetting>,
    /// Expected size of a connection in KiB. If left out, the size that was learned from past connections is used.
    size_kib: Option<u32>,
}

/// Value of `select`: the name of a traffic profile, or `learned`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RawSelect {
    Time,
    TimeAndLoss,
    Loss,
    Insensitive,
    Learned,
}

impl RawSelect {
    pub fn profile(self) -> Option<TrafficProfile> {
        Some(match self {
            Self::Time => TrafficProfile::Time,
            Self::TimeAndLoss => TrafficProfile::TimeAndLoss,
            Self::Loss => TrafficProfile::Loss,
            Self::Insensitive => TrafficProfile::Insensitive,
            Self::Learned => return None,
        })
    }
}

pub(super) fn all(raw: Vec<RawPurpose>) -> Result<Vec<PurposeSettings>, String> {
    if raw.len() > PURPOSES_MAX {
        return Err(format!("there are {} of [[profile]]: there is room for {PURPOSES_MAX}", raw.len()));
    }
    raw.into_iter().map(|raw| raw.checked().map_err(|error| format!("profile: {error}"))).collect()
}

impl RawPurpose {
    fn checked(self) -> Result<PurposeSettings, String> {
        if self.size_kib.is_some_and(|kib| !(1..=SIZE_MAX_KIB).contains(&kib)) {
            return Err(format!("size-kib is from 1 to {SIZE_MAX_KIB}"));
        }
        let ports: Option<Vec<_>> = self.port.iter().map(PortSetting::range).collect();
        let ports = ports.ok_or("port is 1 to 65535, or a range such as \"8000-8100\"")?;
        let process = ProcessCondition::checked(self.command, self.cgroup)?;
        Ok(PurposeSettings { profile: self.name, process, ports, size_kib: self.size_kib })
    }
}

impl PurposeSettings {
    fn covers(&self, ports: &RangeInclusive<u16>) -> bool {
        let has = |own: &RangeInclusive<u16>| own.contains(ports.start()) && own.contains(ports.end());
        self.ports.is_empty() || self.ports.iter().any(has)
    }

    /// Reports whether this `[[profile]]` applies to a connection. `command` and `cgroup` are those of the application,
    /// if they are known.
    fn is_for(&self, command: Option<&str>, cgroup: Option<&Path>) -> bool {
        let ProcessCondition { command: wanted, cgroup: above } = &self.process;
        let is_below = |above: &CgroupSetting| cgroup.is_some_and(|cgroup| cgroup.starts_with(above.path()));
        wanted.as_deref().is_none_or(|wanted| command == Some(wanted)) && above.as_ref().is_none_or(is_below)
    }

    fn expected(&self, known: Expected) -> Expected {
        let words = match self.process.words() {
            process if process.is_empty() => "a [[profile]] of the settings".to_owned(),
            process => format!("the [[profile]] of {process}"),
        };
        let size_kib = self.size_kib.or(known.size_kib);
        Expected { profile: self.profile, size_kib, source: ExpectationSource::Configured, sure: 1.0, words }
    }
}

impl Settings {
    /// Returns the predicted purpose (traffic profile and size) of a rule's connections.
    pub fn expected_of(&self, rule: &RuleSetting, kinds: &Kinds) -> Expected {
        let known = kinds.expect(&Question {
            is_client: rule.side == SideSetting::Client,
            ports: rule.ports.clone(),
            command: rule.process.command.clone(),
            cgroup: rule.process.caller().cgroup,
        });
        let cgroup = rule.process.cgroup.as_ref().map(CgroupSetting::path);
        selected(rule.select, self.configured(rule.process.command.as_deref(), cgroup, &rule.ports, known))
    }

    /// Returns the predicted purpose (traffic profile and size) of a tunnelled connection with this peer.
    pub fn expected_with(&self, kind: &TrafficClass, peer: IpAddr, kinds: &Kinds) -> Expected {
        let side = if kind.is_client { SideSetting::Client } else { SideSetting::Server };
        let command = Some(kind.command.as_str()).filter(|name| !name.is_empty());
        let cgroup = Some(kind.cgroup).filter(|id| *id > 0);
        let rule = self.carried_by(side, kind.port, peer, command, cgroup);
        selected(rule.and_then(|rule| rule.select), self.expected(kind, kinds))
    }

    /// Returns the predicted purpose of connections with any peer, for a traffic class: role of this host, port,
    /// command and cgroup.
    pub fn expected(&self, kind: &TrafficClass, kinds: &Kinds) -> Expected {
        let question = Question {
            is_client: kind.is_client,
            ports: vec![kind.port..=kind.port],
            command: Some(kind.command.clone()),
            cgroup: Some(kind.cgroup),
        };
        let known = kinds.expect(&question);
        let cgroup = self.cgroup_of(kind.cgroup).map(CgroupSetting::path);
        // The command is known only for clients on this host.
        let command = Some(kind.command.as_str()).filter(|_| kind.is_client);
        self.configured(command, cgroup, &question.ports, known)
    }

    /// Returns the purpose of the first `[[profile]]` that applies, or else the learned purpose.
    fn configured(
        &self,
        command: Option<&str>,
        cgroup: Option<&Path>,
        ports: &[RangeInclusive<u16>],
        known: Expected,
    ) -> Expected {
        let fits = |purpose: &&PurposeSettings| {
            purpose.is_for(command, cgroup) && ports.iter().all(|ports| purpose.covers(ports))
        };
        match self.purposes.iter().find(fits) {
            Some(purpose) => purpose.expected(known),
            None => known,
        }
    }
}

/// Applies the rule's own `select`, which takes precedence over the learned purpose.
fn selected(select: Option<Select>, expected: Expected) -> Expected {
    match select {
        Some(Select { profile: Some(profile), size_kib }) => Expected {
            profile,
            size_kib: size_kib.or(expected.size_kib),
            source: ExpectationSource::Configured,
            sure: 1.0,
            words: "select of the rule".to_owned(),
        },
        Some(Select { profile: None, size_kib: Some(kib) }) => Expected { size_kib: Some(kib), ..expected },
        _ => expected,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tier;
    use super::*;

    const RULES: &str = r#"
        [[profile]]
        name = "insensitive"
        command = "rsync"
        size-kib = 102400
        [[profile]]
        name = "time"
        cgroup = "/sys/fs/cgroup/shells.slice"
        [[profile]]
        name = "loss"
        port = [443, "8000-8100"]
        [[rule]]
        name = "copy"
        side = "client"
        port = 7100
        command = "rsync"
        [[rule]]
        name = "shell"
        side = "client"
        port = 7100
        cgroup = "/sys/fs/cgroup/shells.slice/one"
        [[rule]]
        name = "web"
        side = "server"
        port = [443, "8000-8010"]
        [[rule]]
        name = "both"
        side = "client"
        port = [443, 7100]
    "#;

    fn kind(port: u16, command: &str) -> TrafficClass {
        TrafficClass { is_client: true, port, command: command.to_owned(), cgroup: 0 }
    }

    #[test]
    fn first_matching_traffic_profile_setting_applies() {
        let settings = Settings::parse(RULES).expect("settings");
        let kinds = Kinds::default();
        let of = |rule: usize| settings.expected_of(&settings.rules[rule], &kinds);
        let copy = of(0);
        assert_eq!(
            (copy.profile, copy.size_kib, copy.source),
            (TrafficProfile::Insensitive, Some(102_400), ExpectationSource::Configured)
        );
        assert_eq!(copy.words, "the [[profile]] of command rsync");
        assert_eq!((of(1).profile, of(2).profile), (TrafficProfile::Time, TrafficProfile::Loss));
        assert_eq!(of(3).source, ExpectationSource::Default, "a part of the ports is not enough");
        assert_eq!(settings.expected(&kind(7100, "rsync"), &kinds).profile, TrafficProfile::Insensitive);
        assert_eq!(settings.expected(&kind(8050, "curl"), &kinds).profile, TrafficProfile::Loss);
        assert_eq!(settings.expected(&kind(22, "ssh"), &kinds).source, ExpectationSource::Port);
        // The command of a server's client is unknown, so a profile with a command never matches it.
        let server = TrafficClass { is_client: false, ..kind(7100, "rsync") };
        assert_eq!(settings.expected(&server, &kinds).source, ExpectationSource::Default);
    }

    #[test]
    fn rule_precedes_traffic_profile_settings_for_tunnelled_connections() {
        let mut settings = Settings::parse(RULES).expect("settings");
        let kinds = Kinds::default();
        let of = |settings: &Settings, command: &str| {
            settings.expected_with(&kind(7100, command), IpAddr::from([192, 0, 2, 1]), &kinds)
        };
        assert_eq!(of(&settings, "rsync").profile, TrafficProfile::Insensitive);
        let rule = &mut settings.rules[0];
        rule.tier = Tier::Carried;
        rule.select = Some(Select { profile: Some(TrafficProfile::Time), size_kib: None });
        let carried = of(&settings, "rsync");
        assert_eq!((carried.profile, carried.size_kib), (TrafficProfile::Time, Some(102_400)));
        assert_eq!(
            (carried.source, carried.words.as_str()),
            (ExpectationSource::Configured, "select of the rule")
        );
        assert_eq!(of(&settings, "curl").source, ExpectationSource::Default, "the rule is another's");
    }

    #[test]
    fn invalid_traffic_profile_settings_are_refused() {
        let table = [
            ("[[profile]]\nname = \"fast\"\n".to_owned(), "not \"fast\""),
            ("[[profile]]\nname = \"loss\"\nport = 0\n".into(), "profile: port is 1 to 65535"),
            ("[[profile]]\nname = \"loss\"\nsize-kib = 0\n".into(), "profile: size-kib is from 1"),
            (
                "[[profile]]\nname = \"loss\"\ncommand = \"much-too-long-a-name\"\n".into(),
                "profile: command is 1 to 15",
            ),
            ("[[profile]]\nname = \"loss\"\n".repeat(65), "there are 65 of [[profile]]"),
            (
                "[classify]\nndpi = true\n".into(),
                "[classify] left Millrace: say what connections are for with [[profile]]",
            ),
        ];
        for (text, wanted) in table {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
