//! What connections are for: what the operator says of them, and what is known besides.

use std::{
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use millrace_graft_proto::select::{
    kind::{Expected, Kind, Kinds, Question, Source},
    profile::Profile,
};
use serde::Deserialize;

use super::{Cgroup, Port, Rule, Select, Settings, Side, Who};

/// Entries of what the operator says.
const PURPOSES_MAX: usize = 64;
const SIZE_MAX_KIB: u32 = 1 << 30;

/// What certain connections are for, as the operator says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purpose {
    pub profile: Profile,
    pub who: Who,
    /// None: all.
    pub ports: Vec<RangeInclusive<u16>>,
    /// That is expected of one.
    pub size_kib: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Raw {
    name: Profile,
    command: Option<String>,
    cgroup: Option<PathBuf>,
    #[serde(default)]
    port: Vec<Port>,
    size_kib: Option<u32>,
}

/// A profile, or `learned`.
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
    pub fn profile(self) -> Option<Profile> {
        Some(match self {
            Self::Time => Profile::Time,
            Self::TimeAndLoss => Profile::TimeAndLoss,
            Self::Loss => Profile::Loss,
            Self::Insensitive => Profile::Insensitive,
            Self::Learned => return None,
        })
    }
}

pub(super) fn all(raw: Vec<Raw>) -> Result<Vec<Purpose>, String> {
    if raw.len() > PURPOSES_MAX {
        return Err(format!("there are {} of [[profile]]: there is room for {PURPOSES_MAX}", raw.len()));
    }
    raw.into_iter().map(|raw| raw.checked().map_err(|error| format!("profile: {error}"))).collect()
}

impl Raw {
    fn checked(self) -> Result<Purpose, String> {
        if self.size_kib.is_some_and(|kib| !(1..=SIZE_MAX_KIB).contains(&kib)) {
            return Err(format!("size-kib is from 1 to {SIZE_MAX_KIB}"));
        }
        let ports: Option<Vec<_>> = self.port.iter().map(Port::range).collect();
        let ports = ports.ok_or("port is 1 to 65535, or a range such as \"8000-8100\"")?;
        let who = Who::checked(self.command, self.cgroup)?;
        Ok(Purpose { profile: self.name, who, ports, size_kib: self.size_kib })
    }
}

impl Purpose {
    fn covers(&self, ports: &RangeInclusive<u16>) -> bool {
        let has = |own: &RangeInclusive<u16>| own.contains(ports.start()) && own.contains(ports.end());
        self.ports.is_empty() || self.ports.iter().any(has)
    }

    /// `command`, `cgroup`: that are known of the connections.
    fn is_for(&self, command: Option<&str>, cgroup: Option<&Path>) -> bool {
        let Who { command: wanted, cgroup: above } = &self.who;
        let is_below = |above: &Cgroup| cgroup.is_some_and(|cgroup| cgroup.starts_with(above.path()));
        wanted.as_deref().is_none_or(|wanted| command == Some(wanted)) && above.as_ref().is_none_or(is_below)
    }

    fn expected(&self, known: Expected) -> Expected {
        let words = match self.who.words() {
            who if who.is_empty() => "a [[profile]] of the settings".to_owned(),
            who => format!("the [[profile]] of {who}"),
        };
        let size_kib = self.size_kib.or(known.size_kib);
        Expected { profile: self.profile, size_kib, source: Source::Configured, sure: 1.0, words }
    }
}

impl Settings {
    /// What connections of a rule are for, before they begin.
    pub fn expected_of(&self, rule: &Rule, kinds: &Kinds) -> Expected {
        let known = kinds.expect(&Question {
            is_client: rule.side == Side::Client,
            ports: rule.ports.clone(),
            command: rule.who.command.clone(),
            cgroup: rule.who.caller().cgroup,
        });
        let who = (rule.who.command.as_deref(), rule.who.cgroup.as_ref().map(Cgroup::path));
        selected(rule.select, self.configured(who, &rule.ports, known))
    }

    /// What one connection is for that is carried, from or to this peer.
    pub fn expected_with(&self, kind: &Kind, peer: IpAddr, kinds: &Kinds) -> Expected {
        let side = if kind.is_client { Side::Client } else { Side::Server };
        let command = Some(kind.command.as_str()).filter(|name| !name.is_empty());
        let cgroup = Some(kind.cgroup).filter(|id| *id > 0);
        let rule = self.carried_by(side, (kind.port, peer), command, cgroup);
        selected(rule.and_then(|rule| rule.select), self.expected(kind, kinds))
    }

    /// What connections of a kind are for, whoever the peer is.
    pub fn expected(&self, kind: &Kind, kinds: &Kinds) -> Expected {
        let question = Question {
            is_client: kind.is_client,
            ports: vec![kind.port..=kind.port],
            command: Some(kind.command.clone()),
            cgroup: Some(kind.cgroup),
        };
        let known = kinds.expect(&question);
        let cgroup = self.cgroup_of(kind.cgroup).map(Cgroup::path);
        let command = Some(kind.command.as_str()).filter(|_| kind.is_client);
        self.configured((command, cgroup), &question.ports, known)
    }

    /// What the first `[[profile]]` says that fits, and what is known without one.
    fn configured(
        &self,
        (command, cgroup): (Option<&str>, Option<&Path>),
        ports: &[RangeInclusive<u16>],
        known: Expected,
    ) -> Expected {
        let fits = |purpose: &&Purpose| {
            purpose.is_for(command, cgroup) && ports.iter().all(|ports| purpose.covers(ports))
        };
        match self.purposes.iter().find(fits) {
            Some(purpose) => purpose.expected(known),
            None => known,
        }
    }
}

/// What a rule says of its connections comes before what is known of them otherwise.
fn selected(select: Option<Select>, expected: Expected) -> Expected {
    match select {
        Some(Select { profile: Some(profile), size_kib }) => Expected {
            profile,
            size_kib: size_kib.or(expected.size_kib),
            source: Source::Configured,
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

    fn kind(port: u16, command: &str) -> Kind {
        Kind { is_client: true, port, command: command.to_owned(), cgroup: 0 }
    }

    #[test]
    fn the_first_that_fits_counts() {
        let settings = Settings::parse(RULES).expect("settings");
        let kinds = Kinds::default();
        let of = |rule: usize| settings.expected_of(&settings.rules[rule], &kinds);
        let copy = of(0);
        assert_eq!(
            (copy.profile, copy.size_kib, copy.source),
            (Profile::Insensitive, Some(102_400), Source::Configured)
        );
        assert_eq!(copy.words, "the [[profile]] of command rsync");
        assert_eq!((of(1).profile, of(2).profile), (Profile::Time, Profile::Loss));
        assert_eq!(of(3).source, Source::Default, "a part of the ports is not enough");
        assert_eq!(settings.expected(&kind(7100, "rsync"), &kinds).profile, Profile::Insensitive);
        assert_eq!(settings.expected(&kind(8050, "curl"), &kinds).profile, Profile::Loss);
        assert_eq!(settings.expected(&kind(22, "ssh"), &kinds).source, Source::Port);
        // Of a server's client no command is known, whatever is in its place.
        let server = Kind { is_client: false, ..kind(7100, "rsync") };
        assert_eq!(settings.expected(&server, &kinds).source, Source::Default);
    }

    #[test]
    fn what_the_rule_of_a_carried_connection_says_comes_first() {
        let mut settings = Settings::parse(RULES).expect("settings");
        let kinds = Kinds::default();
        let of = |settings: &Settings, command: &str| {
            settings.expected_with(&kind(7100, command), IpAddr::from([192, 0, 2, 1]), &kinds)
        };
        assert_eq!(of(&settings, "rsync").profile, Profile::Insensitive);
        let rule = &mut settings.rules[0];
        rule.tier = Tier::Carried;
        rule.select = Some(Select { profile: Some(Profile::Time), size_kib: None });
        let carried = of(&settings, "rsync");
        assert_eq!((carried.profile, carried.size_kib), (Profile::Time, Some(102_400)));
        assert_eq!((carried.source, carried.words.as_str()), (Source::Configured, "select of the rule"));
        assert_eq!(of(&settings, "curl").source, Source::Default, "the rule is another's");
    }

    #[test]
    fn what_is_wrong_is_said() {
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
